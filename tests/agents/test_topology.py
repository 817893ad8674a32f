"""``gpusched reproduce topology``: the setting, its rows, and errors of bad input."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import topology_bound
from benchmarks.topology import clos
from gpusched.agents.topology.reproduce import TopologyRow, row_of, settings_of
from gpusched.agents.topology.workloads import draw, load_scenario, settings
from gpusched.sched.topology.tree import links_of, new_use
from gpusched.sim.network import read_pairs
from tests.agents import inside
from tests.traces.samples import real

SETTINGS, POLICIES = settings(), load_scenario().policies
RULES = [name for name, rival in POLICIES.items() if not rival.schedulers]
HEADER = "model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio\n"
CLUSTER = "r1: {nodes: 'a-[1-4]', uplink: 100G, parent: top}\nr2: {nodes: 'b-[1-4]', uplink: 100G, parent: top}\n"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return inside.run("reproduce", "topology", *words, cwd=cwd)


def test_jobs_offer_the_load_in_the_shares_of_their_mix():
    trace, kind = draw(SETTINGS["16x4"], 0.9, 3)
    offered = (trace.gpus * trace.duration).sum() / (64 * (trace.submit[-1] - trace.submit[0]))
    assert offered == pytest.approx(0.9, rel=0.01)
    assert len(trace) == 3200
    assert np.bincount(trace.gpus)[[1, 2, 4, 8, 16]] / 3200 == pytest.approx([0.55, 0.15, 0.15, 0.1, 0.05], abs=0.03)
    assert set(kind) == set(range(6))


def test_a_row_a_run_and_waiting_pays_where_uplinks_are_narrow():
    rows = {name: row_of(SETTINGS["16x4-racks"], 0.9, 1, name) for name in RULES}
    jct = {name: row.mean_jct_h for name, row in rows.items()}
    assert jct["contention"] < jct["rack-wait"] < jct["rack"] < jct["random"]
    assert jct["ideal"] <= min(jct.values())
    assert rows["ideal"].mean_slowdown == pytest.approx(1.0)
    assert {row.knows for name, row in rows.items() if name != "contention"} == {"nothing"}


def test_no_policy_passes_the_bound_and_free_links_and_one_node_are_worth_what_they_are():
    found = topology_bound.figures(200, ("16x4-racks", 0.9, 1))
    assert all(found["bound"] < hours for name, hours in found.items() if name != "bound")
    assert found["capacity"] <= found["ideal"] < found["contention"]
    changes = topology_bound.rules([found, {name: 2 * hours for name, hours in found.items()}])
    better = min(found["contention"], found["untrained"])
    assert changes["hours"] == [better, 2 * better]
    assert changes["ideal"] == pytest.approx([found["ideal"] / better - 1] * 2)
    assert changes["any order"] == pytest.approx([found["bound"] / better - 1] * 2)


def test_hindsight_is_no_worse_than_where_its_search_begins_and_no_better_than_the_bound():
    cell = ("16x4-racks-large", 1.1, 1)
    reference, least = topology_bound.improved(30, 300, cell)
    rules = topology_bound.figures(300, cell)
    assert reference == pytest.approx(min(rules["contention"], rules["untrained"]))
    assert rules["bound"] < least < rules["untrained"], "some of 30 changes to few jobs helps"


def test_contention_does_no_harm_on_a_dgx():
    for load in (0.7, 0.9):
        rack, contention = (
            np.mean([row_of(SETTINGS["8x8-dgx"], load, seed, name).mean_jct_h for seed in range(5, 8)])
            for name in ("rack", "contention")
        )
        assert contention <= 1.02 * rack


def test_contention_with_a_table_of_pairs_is_a_fifth_below_the_best_blind_rule():
    pairs = real("../profiles/contention/deepshare_pairs.csv")
    for setting in settings_of(None, str(pairs)):
        rows = {name: row_of(setting, 0.9, 1, name, 800) for name in RULES}
        blind = min(rows[name].mean_jct_h for name in RULES if name not in ("contention", "ideal"))
        assert rows["contention"].mean_jct_h < 0.8 * blind
    table = read_pairs(pairs)
    here = table.names.index("MobileNetV3/2/2"), table.names.index("MobileNetV3/4/2")
    assert (len(table.names), table.ratio[here]) == (30, 0.931)


def test_a_cluster_from_a_file_as_json(tmp_path):
    (tmp_path / "ours.yaml").write_text(CLUSTER)
    words = ("--topology", "ours.yaml", "--load", "0.9", "--seed", "7", "--policy", "rack", "--policy", "ideal")
    done = run(*words, "--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [list(row) for row in rows] == [list(TopologyRow.__struct_fields__)] * 2
    assert [(r["topology"], r["load"], r["seed"], r["policy"], r["jobs"]) for r in rows] == [
        ("ours", 0.9, 7, "rack", 300), ("ours", 0.9, 7, "ideal", 300),
    ]  # fmt: skip
    screen = run("--topology", "16x4", "--load", "0.9", "--quick", cwd=tmp_path)
    shown = list(POLICIES)
    assert [line.split()[3] for line in screen.stdout.splitlines()[1 : len(shown) + 1]] == shown


def test_a_clos_of_three_tiers_and_hundreds_of_hosts(tmp_path):
    (tmp_path / "clos.yaml").write_text(clos(847))
    done = run("--topology", "clos.yaml", "--load", "1.1", "--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(done.stdout)}
    assert list(POLICIES) == list(rows)
    assert rows["ideal"]["mean_slowdown"] == pytest.approx(1.0)
    assert rows["random"]["mean_slowdown"] > rows["best-fit"]["mean_slowdown"] >= rows["contention"]["mean_slowdown"]
    (setting,) = settings_of(str(tmp_path / "clos.yaml"), None)
    assert (len(setting.pool), setting.pool.total_gpus) == (847, 6776)


def test_every_tier_costs_a_job_that_goes_over_it(tmp_path):
    """Two hosts in one rack, in two racks of a pod, in two pods; and one whose own way up is narrower than all."""
    (tmp_path / "tiers.yaml").write_text(
        "spine: {}\np1: {uplink: 25G, parent: spine}\np2: {uplink: 25G, parent: spine}\n"
        "r1: {nodes: [a, b], uplink: 50G, parent: p1}\nr2: {nodes: [c], uplink: 50G, parent: p1}\n"
        "r3: {nodes: [d], uplink: 50G, parent: p2}\nown: {nodes: [e], uplink: 10G, parent: r1}\n"
    )
    (setting,) = settings_of(str(tmp_path / "tiers.yaml"), None, None, "100G")
    tree, room = setting.tree, new_use(setting.tree)

    def slowest(*hosts: str) -> float:
        rows = np.array([setting.pool.names.index(host) for host in hosts], np.int64)
        count = links_of(tree, rows, len(rows), 1, room)
        return max(tree.weight[room.link[:count]])

    assert [slowest("a", "b"), slowest("a", "c"), slowest("a", "d"), slowest("a", "e")] == [1.0, 2.0, 4.0, 10.0]


def test_node_resources_come_from_options_or_an_inventory(tmp_path):
    ours = tmp_path / "ours.yaml"
    ours.write_text(CLUSTER)
    (setting,) = settings_of(str(ours), None, 4, "2x200G")
    assert (setting.pool.gpus.tolist(), setting.machine) == ([4] * 8, "aws")
    assert setting.tree.weight[8:16].tolist() == [0.25] * 8
    assert len(draw(setting, 0.9, 1)[0]) == 50 * 32
    site = tmp_path / "inventory.yaml"
    site.write_text(
        "topology: {r1: {nodes: [a]}, r2: {nodes: [b]}}\ndefaults: {runtime: process, cores: 8, memory: 8G}\n"
        "partitions:\n  p: {nodes: [{name: a, gpus: 8}, {name: b, gpus: 6}, {name: c, gpus: 4}, {name: d, gpus: 0}],"
        " flavors: {one: {gpus: 1, cores: 1, memory: 1G, time: 1h}}}\n"
    )
    (setting,) = settings_of(str(site), None)
    assert (setting.pool.names, setting.pool.gpus.tolist(), setting.machine) == (("a", "b", "c"), [8, 6, 4], "rtx")
    assert setting.tree.rack.tolist() == [0, 1, -1]
    assert len(draw(setting, 0.9, 1)[0]) == 50 * 18
