"""Readers of measured profiles: figures read by hand from the files, what lies between them, and bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import GpuschedError, UsageError
from gpusched.sim.outages import read_node_list
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import read_profiles, read_restarts
from gpusched.sim.profiles.dl2 import read_speeds
from gpusched.sim.rates import RateClass, Rates, alone_on, read_rates, table_of
from gpusched.sim.replay import replay
from gpusched.traces.load import load
from tests.traces.samples import real

RESNET = "ResNet-18 (batch size 16)"


def profiles_of(real_path: str):
    return real(f"../profiles/{real_path}")


def test_gavels_figures():
    profiles = read_profiles([profiles_of("gavel_throughputs.json.gz")])
    assert profiles.per_s(RESNET, "K80", 1) == 4.795294551566172
    assert profiles.per_s(RESNET, "Tesla V100-SXM2-32GB", 1) == 32.353384328946916
    assert profiles.per_s(RESNET, "v100", 2) == 100.14206200421837
    assert profiles.per_s(RESNET, "v100", 2, 2) == profiles.per_s(RESNET, "v100", 2, 5) == 35.33651986363828
    assert profiles.per_s(RESNET, "V100", 16) is None
    assert profiles.per_s("ResNet-50 (batch size 128)", "K80", 2) is None  # 0 in the file: it did not run
    beside = profiles.slowed(RESNET, "P100", 1, "ResNet-50 (batch size 16)")
    assert beside == 16.730906097669408 / 35.869203207990005
    assert profiles.slowed(RESNET, "P100", 2, RESNET) is None
    three = profiles.per_s(RESNET, "v100", 3)
    assert three == pytest.approx((100.14206200421837 + profiles.per_s(RESNET, "v100", 4)) / 2)


def test_sias_figures():
    profiles = read_profiles([profiles_of("placement")])
    assert profiles.per_s("bert (batch size 4)", "A100", 1) == pytest.approx(4 / 0.14855386316776276)
    assert profiles.per_s("bert (batch size 6)", "A100", 2, 2) == pytest.approx(12 / 0.1317991465330124)
    assert profiles.per_s("bert (batch size 4)", "NVIDIA GeForce RTX 2080 Ti", 1) == pytest.approx(4 / 0.2522909243)
    assert profiles.per_s("bert (batch size 11)", "T4", 2, 2) == pytest.approx(22 / 1.4583381712436676)
    assert profiles.per_s("bert (batch size 4)", "T4", 6, 6) == pytest.approx(24 / 1.4923269003629684)  # scalability
    five_s = (0.14855386316776276 + 0.15004055202007294) / 2
    assert profiles.per_s("bert (batch size 5)", "A100", 1) == pytest.approx(5 / five_s)
    assert profiles.per_s("bert (batch size 3)", "A100", 1) is None
    assert profiles.per_s("bert", "T4", 1) == profiles.per_s("bert (batch size 12)", "T4", 1)


def test_dl2s_figures_at_the_best_number_of_servers():
    profiles = read_profiles([profiles_of("dl2_speed.txt.gz")])
    speeds = read_speeds(profiles_of("dl2_speed.txt.gz"), 16)
    for model, table in speeds.items():
        for workers in (1, 2, 5, 16):
            assert profiles.per_s(model, "", workers) == pytest.approx(table[:, workers].max(), rel=1e-12)
    # The best sizes lie off the diagonal: one worker with 14 servers is faster than 16 with 16.
    assert round(profiles.per_s("VGG-16", "H100", 1, 1), 1) == 28.4
    assert round(profiles.per_s("vgg-16", "", 16), 1) == 12.9
    assert profiles.per_s("vgg-19", "", 1) is None
    # Servers take cores: 2 for the worker, 2 for each server.
    few = profiles.share_of("vgg-16", 1, 8, None)
    assert few == pytest.approx(speeds["vgg-16"][1:4, 1].max() / speeds["vgg-16"][:, 1].max())
    one = profiles.share_of("vgg-16", 1, 2, None)
    assert one == pytest.approx(speeds["vgg-16"][1, 1] / speeds["vgg-16"][:, 1].max())
    assert profiles.share_of("vgg-16", 1, None, None) == profiles.share_of("vgg-16", 1, 400, None) == 1.0


def test_synergys_figures():
    profiles = read_profiles([profiles_of("synergy_sensitivity.json")])
    gb = 1000**3 / 2**20
    assert profiles.share_of("alexnet", 1, 3, 62.5 * gb) == 1.0
    assert profiles.share_of("alexnet", 1, 12, 125 * gb) == pytest.approx(2.94)
    assert profiles.share_of("alexnet", 1, 12, 62.5 * gb) == pytest.approx(2.0)
    # Bilinear: half way between 9 and 12 cores, and between 62.5 and 125 GB.
    assert profiles.share_of("alexnet", 1, 10.5, 93.75 * gb) == pytest.approx((2 + 2 + 2 + 2.94) / 4)
    # 0.1 at 20.83 GB is no figure: as at the nearest; outside likewise; nothing said of an amount: plenty of it.
    assert profiles.share_of("alexnet", 1, 3, 20.83 * gb) == 1.0
    assert profiles.share_of("alexnet", 1, 100, 999 * gb) == profiles.share_of("alexnet", 1, None, None) == 2.94
    assert profiles.share_of("alexnet", 1, 0.5, None) == 0.3
    # Amounts are for each GPU; two GPUs have a table of their own, what that lacks is of one.
    assert profiles.share_of("alexnet", 2, 18, None) == 2.33
    assert profiles.share_of("alexnet", 2, 24, None) == 2.94
    assert profiles.share_of("alexnet", 8, 24, None) == 1.0
    assert profiles.share_of("m5", 1, 6, 125 * gb) == 2.0
    assert profiles.share_of("unheard of", 1, 1, 1) == 1.0
    assert "alexnet" in profiles.models


def test_a_folder_with_everything_in_it_is_read():
    profiles = read_profiles([profiles_of("restart_seconds.csv").parent])
    assert {"alexnet", "bert", "vgg-16", RESNET.lower()} <= set(profiles.models)
    # A model that two sources know: scaling from one, sensitivity from the other.
    assert profiles.per_s("bert", "A100", 8) > profiles.per_s("bert", "A100", 1)
    # DL2's servers are not looked for in Gavel's jobs.
    assert profiles.share_of("ResNet-50 (batch size 16)", 1, 2, None) == 1.0
    assert profiles.share_of("resnet-50", 1, 2, None) < 1.0


def test_restart_costs_by_model(tmp_path: Path):
    assert read_restarts(profiles_of("restart_seconds.csv"))["imagenet"] == 250.0
    for text, words in (
        ("model\nm\n", "no column restart_s"),
        ("model,restart_s\nm,soon\n", "costs.csv:2: restart_s: found 'soon', expected seconds, 0 or more"),
        ("model,restart_s\nm,1\nM,2\n", "costs.csv:3: model: found 'M', expected a model's name, once"),
        ("model,restart_s\n", "found no model"),
    ):
        (tmp_path / "costs.csv").write_text(text)
        with pytest.raises(GpuschedError) as caught:
            read_restarts(tmp_path / "costs.csv")
        assert words in caught.value.line()
    with pytest.raises(GpuschedError, match="No such file"):
        read_restarts(tmp_path / "away.csv")


def test_speeds_are_relative_to_what_was_recorded():
    rates = Rates(profiles=read_profiles([profiles_of("gavel_throughputs.json.gz")]))

    def speed(gpu_type: str, gpus: int, nodes: int = 1, on: str | None = None, before: int = 0) -> float | None:
        return alone_on(rates, RateClass(RESNET, gpus, nodes, on, before or gpus), gpu_type)

    assert speed("V100", 1) == 1.0
    assert speed("K80", 1) == pytest.approx(4.795294551566172 / 32.353384328946916)
    assert speed("V100", 1, on="K80") == pytest.approx(32.353384 / 4.7952945)
    assert speed("V100", 2, 2) == pytest.approx(35.33651988 / 100.142062)
    assert speed("V100", 2, before=1) == pytest.approx(100.142062 / 32.3533843)
    models = (RESNET, "ResNet-18 (batch size 256)", "unheard of")
    table = table_of(rates, [RateClass(name, 1, 1, None, 1) for name in models], ("V100", "H100"))
    assert table[0, 0, 2] == pytest.approx(24.45464779058787 / 32.353384328946916)
    assert table[0, 2, 0] == table[1, 0, 0] == 1.0
    assert speed("H100", 1) is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "a.json:1: found a JSON error"),
        ("a.json", "[]", "a.json: found nothing, expected Gavel's"),
        ("a.json", '{"v100": {"(1": {"null": 1}}}', "('model', GPUs)"),
        ("a.json", json.dumps({"v100": {"('m', 1)": {"null": "x"}}}), "found 'x', expected steps per second"),
        ("a.json", json.dumps({"v100": {"('m', 1)": {"null": 1, "('o', 1)": [1]}}}), "two numbers"),
        ("m-placements-dgx.csv", "local_bsz,step_time\n", "no column placement"),
        ("m-placements-dgx.csv", "local_bsz,step_time,placement\n4,0,1\n", ":2: step_time: found '0', expected"),
        ("m-placements-dgx.csv", "local_bsz,step_time,placement\n4,1,x\n", "placement: found 'x'"),
        ("m-scalability-dgx.csv", "local_bsz,step_time,num_nodes,num_replicas\n4,1,1\n", ":2: found 3 fields"),
        ("speed.txt", "('m', 's', 1, 1, 1, [1.0], [0])", "speed.txt:1: found"),
        ("speed.txt", "__import__('os').getcwd()", "expected (model, mode"),
        ("speed.txt", "\n", "found nothing, expected measured speeds"),
        ("speed.txt", "('m', 's', 1, 1, 1, [0.0], [0], [0])", "no speed above 0"),
        ("s.json", '{"alexnet_1": {"tput": [[1]]}}', "alexnet_1.tput"),
        ("s.json", json.dumps({"alexnet": {"tput": []}}), "found 'alexnet', expected Synergy's"),
        ("s.json", json.dumps({"a_1": {"tput": [[1, 1, 1, "x", 1]] * 9}}), "found 'x', expected a relative throughput"),
        ("s.json", json.dumps({"a_1": {"tput": [[0, 0.1, 0, 0]] * 9}}), "no value above 0.1"),
        ("notes.md", "x", "not recognized as a file of measurements"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path: Path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(GpuschedError) as caught:
        read_profiles([tmp_path / name])
    assert words in caught.value.line()
    assert "\n" not in caught.value.line()


def test_folders_missing_files_and_unknown_types(tmp_path: Path):
    with pytest.raises(UsageError, match="contains no file of measurements"):
        read_profiles([tmp_path])
    with pytest.raises(UsageError, match="no such file"):
        read_profiles([tmp_path / "away.json"])
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"v100": {"('m', 1)": {"null": 2}}}).encode()))
    assert read_profiles([tmp_path]).per_s("M", "V100", 1) == 2.0
    with pytest.raises(UsageError, match=r"no measurements on 'V10'.*V100"):
        read_rates([tmp_path], "V10")


def test_a_gavel_trace_runs_slower_on_k80_with_a_note():
    trace = load(real("gavel_msr_seed0_103959.trace.gz"))
    rates = read_rates([profiles_of("gavel_throughputs.json.gz")])
    fast = replay(trace, Pool.uniform(300, 8, gpu_type="V100"), "fifo", rates=rates)
    np.testing.assert_allclose(fast.end - fast.start, trace.duration, rtol=1e-9)
    slow = replay(trace, Pool.uniform(300, 8, gpu_type="K80"), "fifo", rates=rates)
    for job in range(0, len(trace), 97):
        gpus = int(trace.gpus[job])
        speed = alone_on(rates, RateClass(trace.models[trace.model[job]], gpus, 1, None, gpus), "K80") or 1.0
        assert slow.end[job] - slow.start[job] == pytest.approx(trace.duration[job] / speed)
    assert slow.notes[0] == "846 jobs run at measured speeds (gavel_throughputs.json.gz)"
    assert slow.notes[1].startswith("15 jobs run at their recorded speed")
    assert slow.notes[2] == "run times taken as recorded on V100 (846 jobs)"


def test_without_figures_nothing_changes():
    trace = load(real("gavel_msr_seed0_103959.trace.gz"))
    pool = Pool.of([NodeSpec(8, gpu_type="V100")] * 5)
    plain = replay(trace, pool, "fifo+easy")
    rates = read_rates([profiles_of("dl2_speed.txt.gz")])
    assert replay(trace, pool, "fifo+easy", rates=rates).events.tobytes() == plain.events.tobytes()


def test_openbs_nodes():
    pool = read_node_list(real("openb_node_list_gpu_node.csv.gz"))
    assert len(pool) == 1213
    assert pool.total_gpus == 6212
    assert (pool.names[0], pool.gpus[0], pool.cores[0], pool.memory_mib[0]) == ("openb-node-0000", 2, 64, 262144)
    assert pool.gpu_types[pool.gpu_type[0]] == "P100"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sn,gpu\n", "no column cpu_milli"),
        ("sn,cpu_milli,memory_mib,gpu,model\n", "no node"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,x,T4\n", ":2: gpu: found 'x'"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,1,T4\na,1,1,1,T4\n", ":3: sn: found 'a', expected a name"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,0,T4\n", "a node with GPUs or cores"),
    ],
)
def test_bad_node_lists(tmp_path: Path, text, words):
    path = tmp_path / "nodes.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_node_list(path)
    assert words in caught.value.line()
