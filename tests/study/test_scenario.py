"""``gpusched replay --scenario``: a file writes the request that the options write, and says what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import FileError, UsageError
from gpusched.model.topology import Topology
from gpusched.study.options import ReplayRequest
from gpusched.study.request import resolve
from gpusched.study.scenario import SHIPPED, load_scenario, with_options
from gpusched.traces import file as tracefile
from tests.sim.worlds import trace_of
from tests.study.place import ONE, Place, place

__all__ = ["place"]

JOBS = """\
workload:
  jobs: 40
  arrivals: {load: 0.9, gpus: 16}
  sizes: [{gpus: 1, share: 0.7}, {gpus: 8, share: 0.3}]
  run_time: {parts: [{median: 10m, sigma: 1.5}]}
"""
LOG = "traces: log.swf\nnodes: 1\ngpus_per_node: 8\npolicies: [fifo, fifo+easy]\n"


def _write(place: Place, text: str, name: str = "s.yaml") -> str:
    (place.folder / name).write_text(text)
    return name


def test_a_file_is_another_way_to_write_the_options(place: Place) -> None:
    (place.folder / "sub").mkdir()
    (place.folder / "sub/log.swf").write_text(place.trace.read_text())
    (place.folder / "sub/cost.csv").write_text("model,restart_s\nx,3\n")
    (place.folder / "out.csv").write_text("node,start,end\nn0000,50,70\n")
    _write(place, LOG + "about: by hand\noutages: ../out.csv\nrestart_costs: cost.csv\n", "sub/s.yaml")
    filed = place.rows("--scenario", "sub/s.yaml")
    costs = ("--restart-costs", "sub/cost.csv")
    said = place.rows(*ONE, "-P", "fifo", "-P", "fifo+easy", "--outages", "out.csv", *costs)
    clock = ("sim_seconds", "jobs_per_s", "notes")
    assert [{k: v for k, v in row.items() if k not in clock} for row in filed] == [
        {k: v for k, v in row.items() if k not in clock} for row in said
    ]
    assert set(filed[0]["notes"]) - set(said[0]["notes"]) == {"by hand"}


def test_options_take_precedence_with_a_note(place: Place) -> None:
    _write(place, LOG + "seeds: [3]\n")
    (row,) = place.rows("--scenario", "s.yaml", "-P", "sjf", "--seed", "5")
    assert (row["policy"], row["seed"], row["nodes"]) == ("sjf", 5, 1)
    assert not any("not as the scenario says" in note for note in row["notes"])
    (row,) = place.rows("--scenario", "s.yaml", "-P", "sjf", "--nodes", "2")
    assert (row["seed"], row["nodes"]) == (3, 2)
    assert "not as the scenario says: nodes" in row["notes"]


def test_a_workload_is_drawn_anew_for_each_seed_and_published_figures_stand_beside(place: Place) -> None:
    _write(place, JOBS + """\
node_list: [{count: 2, gpus: 8, gpu_type: A100, cores: 64, memory: 512G}]
policies: [fifo, fifo+easy]
seeds: [1, 2]
published: {fifo: {mean_jct_s: 1000, utilization: 0.5}}
""")  # fmt: skip
    rows = place.rows("--scenario", "s.yaml")
    named = [(row["policy"], row["seed"]) for row in rows]
    assert named == [("fifo", 1), ("fifo+easy", 1), ("fifo", 2), ("fifo+easy", 2)]
    fifo = [row for row in rows if row["policy"] == "fifo"]
    assert fifo[0]["mean_jct_s"] != fifo[1]["mean_jct_s"]
    assert fifo[0]["published"] == {"mean_jct_s": 1000, "utilization": 0.5}
    assert all(row["published"] == {} for row in rows if row["policy"] != "fifo")
    out, _ = place.run("--scenario", "s.yaml", "--seed", "1")
    change = fifo[0]["mean_jct_s"] / 1000 - 1
    assert f"Published of fifo: mean_jct_s 1000; here {fifo[0]['mean_jct_s']:.6g} ({change:+.1%})." in out


@pytest.mark.parametrize(("mig", "cut"), [("slices: [[3g.40gb, 2g.20gb], [1g.10gb]]", False), ("mig: on-demand", True)])
def test_nodes_of_a_scenario_have_slices_or_are_cut_on_demand(place: Place, mig: str, cut: bool) -> None:
    """Four hours of half a GPU: one after the other in the one there is, or at once in two GPUs that are cut."""
    trace = replace(trace_of([0] * 4, [3600] * 4, [1] * 4), profile=np.zeros(4, np.int64), profiles=("3g.40gb",))
    tracefile.write(place.folder / "t.gpusched.npz", trace)
    _write(place, f"traces: t.gpusched.npz\nnode_list: [{{gpus: 4, gpu_type: A100-80GB, {mig}}}]\npolicies: [fifo]\n")
    (row,) = place.rows("--scenario", "s.yaml")
    assert row["gpus"] == 4
    assert row["gpu_hours"] == 2.0
    assert row["makespan_s"] == (3630.0 if cut else 4 * 3600.0)
    assert any("times a GPU was cut" in note for note in row["notes"]) is cut


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("polices: [fifo]\n", "s.yaml:1: polices: found an unknown key, expected one of "),
        ("seeds: 3\n", "s.yaml:1: seeds: found 3, expected a list of seeds"),
        ("nodes: 0\n", "s.yaml:1: nodes: found 0, expected a whole number from 1 to 1000000"),
        ("node_list: []\n", "s.yaml:1: node_list: found a list, expected a file, or nodes such as"),
        ("node_list: [{cores: 1}]\n", "s.yaml:1: node_list[0].gpus: found nothing, expected how many GPUs"),
        ("node_list: [{gpus: 1, slices: [[3g.40gb, 4g.40gb, 1g.10gb]]}]\n",
         "s.yaml:1: node_list[0].slices[0]: found 3g.40gb, 4g.40gb, 1g.10gb, expected profiles that fit on one GPU"),
        ("node_list: [{gpus: 1, slices: [[], [7g.80gb]]}]\n", "node_list[0]: found of 2, expected slices of at most 1"),
        ("node_list: [{gpus: 1, gpu_type: V100, mig: on-demand}]\n", "found V100, expected a gpu_type that can be cut"),
        ("workload: none.yaml\n", "none.yaml: no such file or directory; expected a workload description"),
        ("policies: [fifo]\npublished: {sjf: {}}\n", "s.yaml:2: published: found the policy sjf, expected policies of"),
        ("policies: [fifo]\npublished: {fifo: {jct: 1}}\n", "s.yaml:2: published.fifo.jct: found an unknown key"),
        ("restart: soon\n", 's.yaml:1: restart: found "soon", expected a time'),
        (LOG + JOBS, "a scenario's workload is drawn; it cannot be combined with traces"),
    ],
)
def test_errors_of_a_scenario_are_one_line(place: Place, text: str, error: str) -> None:
    _write(place, text)
    out, err = place.run("--scenario", "s.yaml", code=2)
    assert out == ""
    assert err.startswith("gpusched: error: ")
    assert error in err
    assert err.count("\n") == 1


def test_every_option_of_a_replay_can_stand_in_a_file(tmp_path: Path) -> None:
    """All fields of a request but those that say how to carry it out."""
    with pytest.raises(UsageError, match="unknown key") as raised:
        load_scenario(_file(tmp_path, "x: 1\n"))
    offered = set(str(raised.value).partition("one of ")[2].split(", ")) | {"restart_s", "backfill_every_s"}
    assert set(ReplayRequest.__struct_fields__) - offered == {"workers", "backend"}


def _file(folder: Path, text: str) -> Path:
    (folder / "f.yaml").write_text(text)
    return folder / "f.yaml"


def test_a_topology_stands_in_the_file_and_names_the_nodes(tmp_path: Path) -> None:
    text = JOBS + "topology: {r1: {nodes: 'n[1-2]', uplink: 100G}}\npolicies: [rack-wait]\ngpus_per_node: 8\n"
    request = load_scenario(_file(tmp_path, text))
    assert isinstance(request.topology, Topology)
    (run,) = resolve(request)
    assert run.scenario.pool.names == ("n1", "n2")
    assert run.options.network is not None
    (run,) = resolve(with_options(request, ReplayRequest(policies=("fifo-skip",), placement="rack", seeds=(4,))))
    assert (run.policy.name, run.options.placement, run.options.seed) == ("fifo-skip", "rack", 4)


def test_those_that_come_along_are_found_by_name() -> None:
    request = load_scenario("rltune")
    assert request.nodes == 4
    assert request.workload is not None
    assert request.workload.jobs == 6000
    assert (SHIPPED / "rltune.yaml").is_file()


@pytest.mark.parametrize("name", [file.stem for file in SHIPPED.glob("*.yaml") if "\npaper:" in file.read_text()])
def test_a_papers_setting_is_replayed_or_names_its_command(name: str) -> None:
    if name == "rltune":
        assert load_scenario(name).policies
    else:
        with pytest.raises(FileError, match=f"a workload; this is for gpusched reproduce {name}"):
            load_scenario(name)
