"""Readers of measured profiles: figures read by hand from the files, what lies between them, and bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import GpuschedError, UsageError
from gpusched.sim.nodelist import read_node_list
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import read_profiles
from gpusched.sim.rates import read_rates, speed_of
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


def test_dl2s_figures():
    profiles = read_profiles([profiles_of("dl2_speed.txt.gz")])
    assert profiles.per_s("resnet-50", "", 1) == profiles.per_s("ResNet-50", "H100", 1, 1) == 15.783
    assert profiles.per_s("resnet-50", "", 2) == pytest.approx(13.634 + 13.651)
    assert profiles.per_s("vgg-16", "", 1) is not None
    assert profiles.per_s("vgg-19", "", 1) is None


def test_speed_of_is_relative_to_what_was_recorded():
    profiles = read_profiles([profiles_of("gavel_throughputs.json.gz")])
    assert speed_of(profiles, RESNET, "V100", 1) == 1.0
    assert speed_of(profiles, RESNET, "K80", 1) == pytest.approx(4.795294551566172 / 32.353384328946916)
    assert speed_of(profiles, RESNET, "V100", 1, recorded_on="K80") == pytest.approx(32.353384 / 4.7952945)
    assert speed_of(profiles, RESNET, "V100", 2, 2) == pytest.approx(35.33651988 / 100.142062)
    assert speed_of(profiles, RESNET, "V100", 2, recorded_gpus=1) == pytest.approx(100.142062 / 32.3533843)
    beside = speed_of(profiles, RESNET, "V100", 1, 1, "ResNet-18 (batch size 256)")
    assert beside == pytest.approx(24.45464779058787 / 32.353384328946916)
    assert speed_of(profiles, "unheard of", "V100", 1) == 1.0
    assert speed_of(profiles, RESNET, "H100", 1) == 1.0


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
        ("speed.txt", "\n", "no speed with as many servers as workers"),
        ("notes.md", "x", "not known as a file of measurements"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path: Path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(GpuschedError) as caught:
        read_profiles([tmp_path / name])
    assert words in caught.value.line()
    assert "\n" not in caught.value.line()


def test_folders_missing_files_and_unknown_types(tmp_path: Path):
    with pytest.raises(UsageError, match="no file of measurements is in it"):
        read_profiles([tmp_path])
    with pytest.raises(UsageError, match="no such file"):
        read_profiles([tmp_path / "away.json"])
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"v100": {"('m', 1)": {"null": 2}}}).encode()))
    assert read_profiles([tmp_path]).per_s("M", "V100", 1) == 2.0
    with pytest.raises(UsageError, match=r"nothing was measured on 'V10'.*V100"):
        read_rates([tmp_path], "V10")


def test_a_gavel_trace_runs_slower_on_k80_and_says_so():
    trace = load(real("gavel_msr_seed0_103959.trace.gz"))
    rates = read_rates([profiles_of("gavel_throughputs.json.gz")])
    fast = replay(trace, Pool.uniform(300, 8, gpu_type="V100"), "fifo", rates=rates)
    np.testing.assert_allclose(fast.end - fast.start, trace.duration, rtol=1e-9)
    slow = replay(trace, Pool.uniform(300, 8, gpu_type="K80"), "fifo", rates=rates)
    for job in range(0, len(trace), 97):
        speed = speed_of(rates.profiles, trace.models[trace.model[job]], "K80", int(trace.gpus[job]))
        assert slow.end[job] - slow.start[job] == pytest.approx(trace.duration[job] / speed)
    assert slow.notes[0] == "846 jobs go at measured speeds (gavel_throughputs.json.gz)"
    assert slow.notes[1].startswith("15 jobs go at their recorded speed")
    assert slow.notes[2] == "run times count as recorded on V100 (846 jobs)"


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
