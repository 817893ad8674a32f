"""``gpusched reproduce topology``: the setting, its rows, and what is told of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.topology.reproduce import POLICIES, WEIGHTS, Row, learns, played, settings_of
from gpusched.agents.topology.workloads import SETTINGS, draw
from gpusched.sim.network import read_pairs
from tests.traces.samples import real

GPUSCHED = str(Path(sys.executable).parent / "gpusched")
RULES = [name for name, column in POLICIES.items() if not column.schedulers]
HEADER = "model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio\n"
CLUSTER = "r1: {nodes: 'a-[1-4]', uplink: 100G, parent: top}\nr2: {nodes: 'b-[1-4]', uplink: 100G, parent: top}\n"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpusched", "reproduce", "topology", *words], capture_output=True, text=True, cwd=cwd
    )


def test_jobs_offer_the_load_in_the_shares_of_their_mix():
    trace, kind = draw(SETTINGS["16x4"], 0.9, 3)
    offered = (trace.gpus * trace.duration).sum() / (64 * (trace.submit[-1] - trace.submit[0]))
    assert offered == pytest.approx(0.9, rel=0.01)
    assert len(trace) == 3200
    assert np.bincount(trace.gpus)[[1, 2, 4, 8, 16]] / 3200 == pytest.approx([0.55, 0.15, 0.15, 0.1, 0.05], abs=0.03)
    assert set(kind) == set(range(6))


def test_a_row_a_run_and_waiting_pays_where_uplinks_are_narrow():
    rows = {name: played(SETTINGS["16x4-racks"], 0.9, 1, name) for name in RULES}
    jct = {name: row.mean_jct_h for name, row in rows.items()}
    assert jct["contention"] < jct["rack-wait"] < jct["rack"] < jct["random"]
    assert jct["ideal"] <= min(jct.values())
    assert rows["ideal"].mean_slowdown == pytest.approx(1.0)
    assert {row.knows for name, row in rows.items() if name != "contention"} == {"nothing"}


def test_contention_does_no_harm_on_a_dgx():
    for load in (0.7, 0.9):
        rack, contention = (
            np.mean([played(SETTINGS["8x8-dgx"], load, seed, name).mean_jct_h for seed in range(5, 8)])
            for name in ("rack", "contention")
        )
        assert contention <= 1.02 * rack


def test_by_a_table_of_pairs_who_knows_it_is_a_fifth_below_the_best_blind_rule():
    pairs = real("../profiles/contention/deepshare_pairs.csv")
    for setting in settings_of(None, str(pairs)):
        rows = {name: played(setting, 0.9, 1, name, 800) for name in RULES}
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
    assert [list(row) for row in rows] == [list(Row.__struct_fields__)] * 2
    assert [(r["topology"], r["load"], r["seed"], r["policy"], r["jobs"]) for r in rows] == [
        ("ours", 0.9, 7, "rack", 300), ("ours", 0.9, 7, "ideal", 300),
    ]  # fmt: skip
    screen = run("--topology", "16x4", "--load", "0.9", "--quick", cwd=tmp_path)
    shown = [name for name in POLICIES if WEIGHTS.is_file() or not learns(name)]
    assert [line.split()[3] for line in screen.stdout.splitlines()[1 : len(shown) + 1]] == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "sjf"), "no policy of this setting is called 'sjf'; known: random, load-balancing"),
        (("--load", "0"), "--load 0 is no load"),
        (("--topology", "none.yaml"), "none.yaml"),
        (("--topology", "empty.yaml"), "empty: no switch has nodes"),
        (("--topology", "tiny.yaml", "--quick"), "no job of 16 GPUs"),
        (("--table", "none.csv"), "none.csv: found"),
        (("--table", "wrong.csv"), "wrong.csv:2: found"),
        (("--table", "half.csv"), "half.csv: found no ('b', 2, 2) beside ('a', 2, 2)"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path, words, said):
    (tmp_path / "empty.yaml").write_text("top: {}\n")
    (tmp_path / "tiny.yaml").write_text("top: {nodes: [a]}\n")
    (tmp_path / "wrong.csv").write_text(HEADER + "a,2,2,a,2,2,-1\n")
    (tmp_path / "half.csv").write_text(HEADER + "a,2,2,a,2,2,0.5\na,2,2,b,2,2,0.5\n")
    done = run(*words, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
