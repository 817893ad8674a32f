"""DL2's public setting: figures of an independent implementation, and what holds of every size that is given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.dl2.observed import kinds_of
from gpusched.agents.dl2.slots import SlotJobs, fastest_alone, jobs_of, simulate
from gpusched.agents.dl2.workloads import dl2, draw
from gpusched.sim.profiles.dl2 import read_speeds
from gpusched.sim.rounds import RoundsResult
from tests.agents.dl2_worlds import assert_within, rule, run, workload
from tests.traces.samples import real

RULES = [name for name, rival in dl2().policies.items() if not rival.stage]


def played(name: str, jobs: SlotJobs) -> RoundsResult:
    return simulate(jobs, rule(name, jobs))


def test_the_figures_of_an_independent_implementation(tmp_path: Path) -> None:
    path = real("dl2_workloads.json.gz")
    done = run("--workloads", str(path), "--json", *(f"--policy={name}" for name in RULES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {(row["setting"], row["seed"], row["policy"]): row for row in json.loads(done.stdout)}
    truth = json.loads(gzip.decompress(path.read_bytes()))
    assert len(rows) == len(truth) * len(RULES) == 21 * 4
    for one in truth:
        mine = {policy: rows[one["setting"], one["seed"], policy] for policy in RULES}
        mean = one["mean_jct_slots"]
        for policy in ("drf", "optimus"):
            assert mine[policy]["mean_jct_slots"] == pytest.approx(mean[policy], abs=1e-6, rel=0)
        for row in mine.values():
            assert row["nodes"] == one["nodes"]
            assert row["bound_slots"] == pytest.approx(mean["bound"], abs=1e-6, rel=0)
            assert row["makespan_slots"] > row["mean_jct_slots"] >= row["bound_slots"] - 1e-9
        # Another greedy of the same description: equal but for ties, and for where it places.
        assert mine["greedy-gain"]["mean_jct_slots"] == pytest.approx(mean["greedy"], rel=0.005)


def test_the_speeds_that_come_along_are_the_published_ones() -> None:
    ours, theirs = (read_speeds(path, 16) for path in (None, real("../profiles/dl2_speed.txt.gz")))
    assert list(ours) == list(theirs)
    for model in ours:  # Python 3.12 and later sum floats more exactly
        np.testing.assert_allclose(ours[model], theirs[model], rtol=1e-12)


def test_speeds_go_through_what_was_measured() -> None:
    speeds = read_speeds(None, 16)
    assert len(speeds) == 8
    vgg = speeds["vgg-16"]
    assert vgg[14, 1] == pytest.approx(28.435, abs=1e-9)
    assert vgg[16, 16] == pytest.approx(12.93249, abs=1e-5)
    assert np.unravel_index(vgg.argmax(), vgg.shape) == (14, 1)
    assert not vgg[0].any()
    assert not vgg[:, 0].any()


@pytest.mark.parametrize("name", RULES)
def test_no_slot_gives_more_than_there_is(name: str) -> None:
    speeds = read_speeds(None, 16)
    for seed in range(3):
        jobs = jobs_of(draw("12 nodes", seed), speeds)
        assert_within(jobs, rule(name, jobs))


def test_a_job_ends_at_the_fraction_it_needs_and_holds_its_slot_to_the_end() -> None:
    two, speed = workload((0, 10.0), (0, 3.0), nodes=1)  # one bundle of both fits beside another, of four slots each
    jobs = jobs_of(two, speed)
    result = played("drf", jobs)
    # One worker each; in slots 0 to 2 both, then the first alone with two: 3 + 7 / 2.
    assert result.jct.tolist() == [6.5, 3.0]
    assert result.makespan == 6.5
    late, speed = workload((2, 1.5), nodes=1)
    assert played("drf", jobs_of(late, speed)).jct.tolist() == [0.75]
    assert fastest_alone(jobs_of(late, speed)).tolist() == [0.75]  # three workers and a server: too many GPUs


def test_a_frontier_is_faster_with_every_step_and_nothing_beside_it_is_better() -> None:
    jobs = jobs_of(draw("24 nodes", 0), read_speeds(None, 16))
    kinds = kinds_of(jobs.rate, jobs.need)
    for kind, front in enumerate(kinds.front):
        at = kind, *front[: kinds.points[kind]].T
        need, rate = jobs.need[at].max(1), kinds.relative[at]
        assert rate[0] > 0
        assert rate[-1] == 1
        assert (np.diff(need) > 0).all()
        assert (np.diff(rate) > 0).all()
        for servers in range(1, 17):
            for workers in range(1, 17):
                best = rate[need <= jobs.need[kind, servers, workers].max()].max(initial=0.0)
                assert jobs.rate[kind, servers, workers] / kinds.best[kind] <= best + 1e-12


def test_own_workloads_are_those_of_their_seed() -> None:
    first, again, other = draw("96 nodes", 1), draw("96 nodes", 1), draw("96 nodes", 2)
    assert first == again
    assert first.jobs != other.jobs
    arrivals = np.bincount([job.arrival_slot for job in first.jobs])
    assert len(first.jobs) == 60
    assert set(arrivals[:-1].tolist()) == {2, 3}


def test_the_table_is_for_people(tmp_path: Path) -> None:
    done = run("--seed", "3", *(f"--policy={name}" for name in RULES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = ("96", "24", "12", "500")
    rows = [line.split()[:3] for line in done.stdout.splitlines()[1 : 1 + 4 * len(RULES)]]
    assert rows == [[nodes, "nodes", policy] for nodes in settings for policy in RULES]
    assert "The others are rules" in " ".join(done.stdout.split())
