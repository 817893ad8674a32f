"""`gpusched replay --resizable --profiles`: speeds by size, cores and memory, and restart costs, from written files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpusched.cli import main as cli
from tests.study.place import Place
from tests.traces.samples import real

ONE = "1 0 -1 100 {0} -1 -1 {0} 900 -1 1 1 1 -1 1 -1 -1 -1\n"  # one job of so many GPUs for 100 s
TWO = """1 0 -1 4000 4 -1 -1 4 9000 -1 1 1 1 -1 1 -1 -1 -1
2 0 -1 800 4 -1 -1 4 9000 -1 1 1 1 -1 1 -1 -1 -1
"""
INVENTORY = """\
defaults: {runtime: process}
partitions:
  A: {defaults: {gpus: 8, cores: 96, memory: 500G}, nodes: [n1]}
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def elastic(place: Place, log: str, *words: str, sizes: str = "1-8") -> dict[str, Any]:
    """The replay of a log under a policy that gives a job that is alone all that it may have."""
    place.trace.write_text(log)
    (row,) = place.rows("log.swf", "-P", "elastic", "--resizable", sizes, *words)
    return row


def test_by_gpus_and_nodes(place: Place) -> None:
    profile = place.folder / "bert-placements-dgx.csv"
    profile.write_text("local_bsz,step_time,sync_time,placement\n8,1,0,2\n8,2,0,8\n8,4,0,44\n8,1,0,1\n")
    words = ("--profiles", profile.name, "--gpu-type", "A100")
    # 8 GPUs do 4 times the samples of 2 in a step that takes twice as long; over two nodes, four times as long.
    near = elastic(place, ONE.format(2), "-N", "1", *words)
    assert near["mean_jct_s"] == 50.0
    assert elastic(place, ONE.format(2), "-N", "2", "--gpus-per-node", "4", *words)["mean_jct_s"] == 100.0
    assert "the trace has no models: each job got one of 1 measured ones at random (seed 0)" in near["notes"]
    assert "speeds at other sizes: 3 measured" in near["notes"]


def test_by_workers_and_servers(place: Place) -> None:
    rows = [(1, 1, 10), (2, 1, 20), (1, 2, 50), (2, 2, 30)]  # servers, workers, steps/s
    lines = [repr(("m", "sync", 32, s, w, [v / w] * w, [0] * s, [0] * w)) for s, w, v in rows]
    (place.folder / "my_speed.txt").write_text("\n".join(lines))
    # The best sizes lie off the diagonal, on which two workers would be three times as fast as one.
    row = elastic(place, ONE.format(1), "-N", "1", "--profiles", "my_speed.txt", sizes="1-2")
    assert row["mean_jct_s"] == pytest.approx(100 * 20 / 50)
    # Of 6 cores two workers leave room for one server, one worker for two.
    (place.folder / "inventory.yaml").write_text(INVENTORY.replace("gpus: 8, cores: 96", "gpus: 2, cores: 12"))
    words = ("--inventory", "inventory.yaml", "--profiles", "my_speed.txt", "--cpus", "2-8")
    assert elastic(place, ONE.format(1), *words, sizes="1-2")["mean_jct_s"] == pytest.approx(100 * 20 / 50)
    (place.folder / "my_speed.txt").write_text("\n".join(reversed(lines)).replace("[25.0, 25.0]", "[5.0, 5.0]"))
    assert elastic(place, ONE.format(1), *words, sizes="1-2")["mean_jct_s"] == pytest.approx(100 * 20 / 30)
    tight = (*words[:-1], "2-6")
    assert elastic(place, ONE.format(1), *tight, sizes="1-2")["mean_jct_s"] == pytest.approx(100 * 20 / 10)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 12 cores and 62.5 GB for the one GPU, as recorded; 8 GPUs have 8 times all.
        ((), 100 / 8),
        # 24 cores for 8 GPUs are 3 for each: half as fast as with 12.
        (("--cpus", "2-24"), 100 / 8 * 2),
        # 8 cores are fewer than one job of one GPU was recorded with: it keeps its own 12, which is 1.5 for each of 8.
        (("--cpus", "2-8"), 100 / 8 * (2.0 / 0.48)),
        # 125 GB are 15.6 for each of 8 GPUs, and nothing was measured below 62.5; 12 cores do 2 there.
        (("--mem", "1G-125G"), 100 / 8),
    ],
)
def test_by_cores_and_memory(place: Place, options: tuple[str, ...], expected: float) -> None:
    tput = [[0.1, v, v, v, v] for v in (0.3, 0.66, 1, 1.25, 1.53, 1.75, 2, 2, 2)]
    (place.folder / "sensitivity.json").write_text(json.dumps({"models/alexnet_1": {"tput": tput}}))
    (place.folder / "inventory.yaml").write_text(INVENTORY)
    row = elastic(place, ONE.format(1), "--inventory", "inventory.yaml", "--profiles", "sensitivity.json", *options)
    assert row["mean_jct_s"] == pytest.approx(expected)
    assert any("Synergy's 0 and 0.1 count as not measured" in note for note in row["notes"])


def test_restarts_cost_what_they_do_for_the_model(place: Place) -> None:
    (place.folder / "bert-placements-dgx.csv").write_text(
        "local_bsz,step_time,sync_time,placement\n8,1,0,1\n8,1,0,4\n8,1,0,8\n"
    )
    (place.folder / "costs.csv").write_text("model,restart_s\nbert,120\nncf,15\n")
    words = ("-N", "1", "--profiles", "bert-placements-dgx.csv", "--restart", "30s")
    # The first has made 800 of 4000 s when the second ends; it goes on on eight GPUs, after its restart.
    other = elastic(place, TWO, *words)
    own = elastic(place, TWO, *words, "--restart-costs", "costs.csv")
    assert (other["makespan_s"], own["makespan_s"]) == (800 + 30 + 1600, 800 + 120 + 1600)
    assert "restarts of 2 jobs cost as measured for their models" in own["notes"]
    # Policies that stop jobs for others pay the same.
    srtf = place.rows("log.swf", "-N", "1", "--gpus-per-node", "4", "-P", "srtf", "--restart-costs", "costs.csv")[0]
    assert "restarts of 0 jobs cost as measured for their models; 2 others cost 0 s" in srtf["notes"]


def test_each_seed_draws_models_of_its_own(place: Place) -> None:
    speeds = [("a", 1, 1, 10), ("a", 1, 2, 20), ("b", 1, 1, 10), ("b", 1, 2, 12.5)]
    lines = [repr((m, "sync", 32, s, w, [v / w] * w, [0] * s, [0] * w)) for m, s, w, v in speeds]
    (place.folder / "my_speed.txt").write_text("\n".join(lines))
    place.trace.write_text(ONE.format(1))
    seeds = [word for seed in range(6) for word in ("--seed", str(seed))]
    words = ("log.swf", "-N", "1", "-P", "easy", "-P", "elastic", "--resizable", "1-2", "--profiles", "my_speed.txt")
    rows = place.rows(*words, *seeds)
    assert {row["mean_jct_s"] for row in rows if row["policy"] == "easy"} == {100.0}
    assert {row["mean_jct_s"] for row in rows if row["policy"] == "elastic"} == {50.0, 80.0}
    again = place.rows(*words, "--seed", "3")
    assert [row["mean_jct_s"] for row in again] == [row["mean_jct_s"] for row in rows if row["seed"] == 3]
    assert all(f"(seed {row['seed']})" in " ".join(row["notes"]) for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--resizable", "1-8", "--cpus", "12-2"), "--cpus: found '12-2', expected a range of CPU cores such as 2-12"),
        (("--resizable", "1-8", "--cpus", "8"), "--cpus: found '8', expected a range of CPU cores such as 2-12"),
        (
            ("--resizable", "1-8", "--mem", "1-lots"),
            "--mem: found '1-lots', expected a range of memory such as 16G-64G",
        ),
        (("--cpus", "2-12"), "--cpus and --mem are ranges of jobs that are resized; add --resizable 1-8"),
        (("--restart-costs", "away.csv"), "away.csv: No such file or directory"),
        (("--restart-costs", "log.swf"), "no column model, restart_s"),
    ],
)
def test_wrong_requests_are_one_line(
    place: Place, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    assert cli.run(["replay", "log.swf", "-N", "1", "-P", "elastic", *words]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_on_the_measured_profiles_themselves(place: Place) -> None:
    folder = real("../profiles/restart_seconds.csv")
    (place.folder / "inventory.yaml").write_text(INVENTORY.replace("500G", "500G, gpu_type: A100"))
    row = elastic(
        place, TWO, "--inventory", "inventory.yaml", "--profiles", str(folder.parent), "--restart-costs", str(folder),
        "--cpus", "2-48",
    )  # fmt: skip
    notes = " ".join(row["notes"])
    assert "the trace has no models: each job got one of 2 measured ones" in notes
    assert "speeds at other sizes: " in notes
