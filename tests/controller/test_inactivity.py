"""Jobs that people work in: started by who attaches, ended when nobody has been for so long."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.ranks import ReconcileResult
from gpusched.controller.reconcile import reconcile_job
from gpusched.model.jobs import Ending, JobRecord, JobState
from tests.builders import spec
from tests.controller.reconciling import NOW, SETTINGS, job, ranks, says, silent, verbs, world

KEPT = 600


def session(state: JobState, nodes: int = 1, **changes: Any) -> JobRecord:
    return job(state, nodes, spec=spec(nodes=nodes, session=KEPT, pty=True, time_limit_s=86400), **changes)


def step(
    state: JobState, *answers: dict[str, NodeObservation], nodes: int = 1, launched_at: float = NOW - 200
) -> ReconcileResult:
    return reconcile_job(session(state, nodes), ranks(nodes, launched_at=launched_at), world(*answers))


def assert_given_up(found: ReconcileResult) -> None:
    ending = found.job.ending
    outcome, reason = (found.job.state, found.job.reason) if ending is None else (ending.outcome, ending.reason)
    assert (outcome, reason) == (JobState.TIMEOUT, "InactiveLimit")
    assert found.job.message == "nobody attached for 600 s (settings.session_keep)"


def test_a_ready_session_waits_for_the_first_client() -> None:
    found = step(JobState.STARTING, says("ready"))
    assert (found.job.state, verbs(found)) == (JobState.STARTING, [])
    # The others of its gang are made to wait with it, and started with it.
    both = says("ready"), says("ready", 1)
    assert verbs(step(JobState.STARTING, *both, nodes=2)) == []
    assert verbs(step(JobState.STARTING, says("running"), says("ready", 1), nodes=2)) == [("start", 1, None)]
    assert step(JobState.STARTING, says("running"), says("running", 1), nodes=2).job.state is JobState.RUNNING


@pytest.mark.parametrize(("ago", "ends"), [(KEPT - 1.0, False), (KEPT, True)])
def test_a_session_that_nobody_attached_to_ends_in_time(ago: float, ends: bool) -> None:
    found = step(JobState.STARTING, says("ready"), launched_at=NOW - ago)
    assert (found.job.state is not JobState.STARTING) is ends
    if ends:
        assert_given_up(found)
        assert verbs(found) == [("remove", 0, None)]
    # Somebody who waits for its start is there.
    assert step(JobState.STARTING, says("ready", attached_s=3.0), launched_at=NOW - 1e6).job.state is JobState.STARTING


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"attached_s": KEPT - 1.0, "ran_s": 8e4}, False),
        ({"attached_s": KEPT, "ran_s": KEPT + 1.0}, True),
        ({"ran_s": KEPT - 1.0}, False),
        ({"ran_s": KEPT}, True),
        ({"attached_s": 0.0}, False),
    ],
)
def test_inactivity_goes_by_the_attached_time_that_the_node_reports(more: dict[str, float], ends: bool) -> None:
    found = step(JobState.RUNNING, says("running", **more), launched_at=NOW - 100)
    assert (found.job.state is JobState.COMPLETING) is ends
    if ends:
        assert_given_up(found)
        assert found.job.ending is not None
        assert found.job.ending.kill_at == NOW + SETTINGS.grace_s


def test_a_node_that_does_not_answer_ends_no_session() -> None:
    for answer in ({}, silent()):
        assert step(JobState.RUNNING, answer, launched_at=NOW - 1e6).job.state is JobState.RUNNING


def test_attaching_to_the_first_rank_counts_for_all_ranks() -> None:
    found = step(JobState.RUNNING, says("running", attached_s=1.0), says("running", 1, ran_s=9e3), nodes=2)
    assert found.job.state is JobState.RUNNING
    found = step(JobState.RUNNING, {}, says("running", 1, ran_s=9e3), nodes=2)
    assert found.job.state is JobState.RUNNING, "nobody knows"


def test_other_jobs_need_no_attached_client() -> None:
    other = job(JobState.RUNNING, spec=spec(time_limit_s=86400))
    assert reconcile_job(other, ranks(), world(says("running", ran_s=9e3))).job.state is JobState.RUNNING
    ready = reconcile_job(job(JobState.STARTING), ranks(), world(says("ready")))
    assert verbs(ready) == [("start", 0, None)]


@pytest.mark.parametrize(("start_time", "state"), [(None, JobState.PENDING), (NOW - 50, JobState.NODE_FAIL)])
def test_it_is_tried_elsewhere_only_before_anybody_worked_in_it(start_time: float | None, state: JobState) -> None:
    ending = Ending(outcome=JobState.NODE_FAIL, reason="NodeFail", kill_at=NOW)
    failed = session(JobState.COMPLETING, ending=ending, start_time=start_time)
    assert reconcile_job(failed, ranks(gone=True), world()).job.state is state
