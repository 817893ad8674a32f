"""Kill the controller at any moment and start it again: nothing is lost, nothing runs twice."""

from __future__ import annotations

import random
import time

import pytest

from gpusched.model.jobs import ENDED, JobState
from tests.e2e.conftest import WAIT, Cluster
from tests.e2e.failing import Traces
from tests.testbed import wait_until


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("seed", [1])
def test_killed_at_many_moments_every_job_runs_exactly_once(stopped: Cluster, seed: int) -> None:
    """Eight short jobs (gangs, an array, a failing one), and a controller that dies 8 times while they go by.

    Processes, whose start depends on the launcher alone; containers: `test_killed_in_each_state`.
    """
    moments = random.Random(seed)
    stopped.write_inventory()
    stopped.start_controller()
    traces = Traces(stopped)
    jobs: dict[str, tuple[JobState, int]] = {}
    for number in range(2):
        jobs[traces.submit("sleep 0.5", "--gpus", str(1 + number % 2))] = (JobState.COMPLETED, 1)
    jobs[traces.submit("sleep 0.5", "-F", "f-A100")] = (JobState.COMPLETED, 2)
    jobs[traces.submit("sleep 0.3", "-p", "V100", "-N", "2", "--gpus", "4")] = (JobState.COMPLETED, 2)
    jobs[traces.submit("exit 3", "-p", "V100", "--gpus", "1")] = (JobState.FAILED, 1)
    array = traces.submit("sleep 0.2", "-p", "V100", "--gpus", "2", "--array", "0-2")
    for _ in range(8):
        time.sleep(moments.uniform(0.05, 1.2))  # the moment of death is what is drawn
        stopped.kill_controller()
        stopped.start_controller(nodes=False)
    for job, (state, ranks) in jobs.items():
        ended = stopped.wait_state(job, timeout=60)
        assert ended.state == state, (ended, stopped.events(job))
        assert ended.attempt == 1
        assert len(traces.starts(job)) == ranks, traces.lines
    for index in range(3):
        assert stopped.wait_state(f"{array}_{index}", timeout=60).state == JobState.COMPLETED
    assert len(traces.starts(array)) == 3
    assert set(traces.counted().values()) == {1}
    stopped.wait_clean()


@pytest.mark.one_partition
def test_killed_in_each_state(cluster: Cluster) -> None:
    """One job that sees five controllers: each that was killed left it in another state."""
    traces = Traces(cluster)
    job = traces.until("go", "--gpus", "1")
    for before, later in (("", ()), ("STARTING", ("RUNNING",)), ("RUNNING", ()), ("COMPLETING", ENDED)):
        if before == "COMPLETING":
            traces.let_go("go")
        states = (before, *later)
        wait_until(lambda states=states: not states[0] or cluster.state_of(job) in states, what=before)  # type: ignore[misc]
        cluster.kill_controller()
        cluster.start_controller(nodes=False)
    assert cluster.wait_state(job).state == JobState.COMPLETED
    assert traces.starts(job) == [[job, "0", "1", traces.starts(job)[0][3]]]
    cluster.wait_clean()


@pytest.mark.one_partition
def test_jobs_that_end_without_a_controller_are_found_and_their_output_collected(cluster: Cluster) -> None:
    traces = Traces(cluster)
    good, bad = traces.submit(f"{WAIT}; echo fine"), traces.submit(f"{WAIT}; echo bad; exit 7")
    for job in (good, bad):
        cluster.wait_state(job, "RUNNING")
    cluster.kill_controller()
    traces.let_go("go")
    asked = traces.submit("true")  # the queue takes submissions without a controller
    wait_until(lambda: cluster.containers() == [])
    before = time.time()
    cluster.start_controller()
    assert cluster.wait_state(good).state == JobState.COMPLETED
    ended = cluster.wait_state(bad)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 7)
    assert ended.end_time is not None
    assert ended.end_time < before, "the end is when it ended, not when it was found"
    assert cluster.wait_state(asked).state == JobState.COMPLETED
    cluster.wait_clean()
    assert cluster.logs(good) == "fine\n"
    assert cluster.logs(bad) == "bad\n"
    assert max(traces.counted().values()) == 1


@pytest.mark.one_partition
def test_sigterm_ends_it_cleanly_and_leaves_the_jobs_alone(cluster: Cluster) -> None:
    traces = Traces(cluster)
    job = traces.until("go")
    cluster.wait_state(job, "RUNNING")
    assert cluster.stop_controller() == 0
    assert len(cluster.containers()) == 1
    with cluster.reader() as reader:
        assert reader is not None
        assert reader.events(limit=1)[0].kind == "controller_stopped"
    cluster.start_controller()
    traces.let_go("go")
    assert cluster.wait_state(job).state == JobState.COMPLETED
    assert len(traces.lines) == 1


@pytest.mark.one_partition
def test_one_controller_at_a_time(cluster: Cluster) -> None:
    assert cluster.controller is not None
    for command in (("controller",), ("tick",)):
        second = cluster.cli(*command, check=False)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert f"pid {cluster.controller.pid}" in second.stderr
    job = cluster.submit("--gpus", "1")
    assert cluster.wait_state(job).state == JobState.COMPLETED


@pytest.mark.one_partition
def test_ticks_do_the_same_work(stopped: Cluster) -> None:
    """cron's way: every tick a new process; jobs go from one to the next."""
    stopped.cli("tick")
    traces = Traces(stopped)
    jobs = [traces.submit("true"), traces.submit("true", "-F", "f-A100"), traces.submit("exit 2")]
    for _ in range(12):
        stopped.cli("tick")
        if all(stopped.state_of(job) in ENDED for job in jobs):
            break
    assert [stopped.state_of(job) for job in jobs] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert set(traces.counted().values()) == {1}
    stopped.cli("tick")
    stopped.wait_clean()
