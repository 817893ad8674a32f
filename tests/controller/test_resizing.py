"""A job that is resized, step by step: asked, saved, gone, started at another size, come up or not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.ranks import ReconcileResult
from gpusched.controller.reconcile import reconcile_job
from gpusched.controller.resizing import NOT_SAVED, begin_resize
from gpusched.model.jobs import Elastic, Ending, JobRecord, JobState, Resizes, ResizeTo
from gpusched.model.plan import Resize
from gpusched.model.policy import PolicySpec, Resizing
from gpusched.model.readings import ProgressReading, SavedReading
from tests.builders import spec
from tests.controller.reconciling import NOW, job, ranks, says, verbs, world

SIZES = Elastic(sizes=(1, 2), base_gpus=1, base_cores=1, base_memory_mib=1024)
POLICY = PolicySpec(name="sized", resize=Resizing(start_timeout_s=50.0))
ASKED = NOW - 5.0


def elastic(state: JobState, **changes: Any) -> JobRecord:
    return job(state, **{"spec": msgspec.structs.replace(spec(), elastic=SIZES)} | changes)


def asked(kill_at: float = NOW + 5.0, **to: Any) -> JobRecord:
    """A job that was asked five seconds ago to go on with two GPUs."""
    resize = ResizeTo(gpus=2, asked_at=ASKED, **to)
    end = Ending(outcome=JobState.PENDING, reason="Resized", kill_at=kill_at, resize=resize)
    return elastic(JobState.COMPLETING, ending=end, resizes=Resizes(count=1, times=(ASKED,), before=1))


def saved(age_s: float) -> dict[str, Any]:
    return {"saved": SavedReading(step=7, age_s=age_s)}


def progress(step: float, age_s: float) -> dict[str, Any]:
    return {"progress": ProgressReading(step=step, of=10, age_s=age_s)}


def step_of(of: JobRecord, *answers: dict[str, NodeObservation], **record: Any) -> ReconcileResult:
    return reconcile_job(of, ranks(**record), world(*answers))


def test_it_is_asked_with_a_note_and_given_the_grace() -> None:
    running = elastic(JobState.RUNNING)
    ending, event = begin_resize(running, Resize(running.id, 2, "grows"), POLICY, 10.0, NOW)
    assert (ending.state, event.kind, event.data["gpus_from"], event.data["gpus_to"]) == (
        JobState.COMPLETING, "resizing", 1, 2,
    )  # fmt: skip
    assert ending.resizes == Resizes(
        count=1, times=(NOW,), before=1, why="grows (decided by sized)", start_timeout_s=50.0
    )
    assert ending.ending is not None
    assert ending.ending.kill_at == NOW + 10.0
    step = step_of(ending, says("running"))
    assert verbs(step) == [("signal", 0, "TERM")]
    assert msgspec.json.decode(step.operations[0].note or "") == {"from": 1, "to": 2, "deadline": NOW + 10.0}


def test_a_job_that_saved_is_killed_at_once_and_another_after_the_grace() -> None:
    assert verbs(step_of(asked(), says("running", **saved(6.0)), signalled="TERM")) == [], "saved before it was asked"
    step = step_of(asked(), says("running", **saved(4.0)), signalled="TERM")
    assert verbs(step) == [("signal", 0, "KILL")]
    assert [event.kind for event in step.events] == ["saved"], "so that it is kept"
    assert verbs(step_of(asked(kill_at=NOW), says("running"), signalled="TERM")) == [("signal", 0, "KILL")]


def test_once_gone_it_waits_for_its_start_at_the_other_size() -> None:
    step = step_of(asked(), says("exited", exit_code=3, finished_at=NOW - 1, **saved(2.0)), signalled="TERM")
    assert (step.job.state, step.job.allocation, step.job.ending) == (JobState.PENDING, None, None)
    assert step.job.resizes == Resizes(count=1, times=(ASKED,), before=1, resume_at=2, had_s=99.0)
    assert step.ended_attempt is not None
    assert step.worked_until == ASKED, "saving is no work"


@pytest.mark.parametrize(("kept", "lost"), [({}, 99.0), (saved(40.0), 39.0)])
def test_unsaved_work_is_counted_and_the_job_is_not_resized_again(kept: dict[str, Any], lost: float) -> None:
    step = step_of(asked(), says("exited", exit_code=0, finished_at=NOW - 1, **kept), signalled="TERM")
    assert step.job.resizes is not None
    assert (step.job.resizes.frozen, step.job.resizes.lost_s, step.job.resizes.resume_at) == (NOT_SAVED, lost, 2)
    assert step.worked_until == NOW - 1 - lost


def test_a_node_that_died_is_not_the_jobs_fault() -> None:
    step = reconcile_job(asked(), ranks(), world(dead=frozenset({"n0"})))
    assert step.job.state is JobState.PENDING
    assert step.job.resizes is not None
    assert step.job.resizes.frozen == ""


def test_a_resizing_job_that_made_its_last_step_is_completed() -> None:
    done = says("exited", exit_code=0, finished_at=NOW - 1, **progress(10, 2.0))
    assert step_of(asked(), done, signalled="TERM").job.state is JobState.COMPLETED
    failed = says("exited", exit_code=1, finished_at=NOW - 1, **progress(10, 2.0))
    assert step_of(asked(), failed, signalled="TERM").job.state is JobState.PENDING
    half = says("exited", exit_code=0, finished_at=NOW - 1, **progress(9, 2.0), **saved(2.0))
    assert step_of(asked(), half, signalled="TERM").job.state is JobState.PENDING


def test_a_job_that_ended_before_the_resize_has_ended() -> None:
    assert step_of(asked(), says("exited", exit_code=0, finished_at=ASKED - 1)).job.state is JobState.COMPLETED
    assert step_of(asked(), says("exited", exit_code=4, finished_at=ASKED - 1)).job.state is JobState.FAILED
    saves = says("exited", exit_code=0, finished_at=ASKED - 1, **saved(6.0))
    assert step_of(asked(), saves, signalled="TERM").job.state is JobState.PENDING, "it was sent a signal"


def test_saved_work_is_remembered_if_ranks_end_one_after_the_other() -> None:
    of = msgspec.structs.replace(asked(saved=True), spec=msgspec.structs.replace(spec(nodes=2), elastic=SIZES))
    of = msgspec.structs.replace(of, allocation=job(JobState.RUNNING, nodes=2).allocation)
    both = [r if r.rank else msgspec.structs.replace(r, gone=True, finished_at=NOW - 3, exit_code=0) for r in ranks(2)]
    step = reconcile_job(of, both, world(says(None), says("exited", 1, exit_code=0, finished_at=NOW - 1)))
    assert step.job.resizes is not None
    assert (step.job.state, step.job.resizes.frozen) == (JobState.PENDING, "")


def up(**changes: Any) -> JobRecord:
    """A job that runs at a new size since a hundred seconds."""
    resizes = Resizes(count=1, times=(NOW - 108.0,), before=2, start_timeout_s=101.0)
    return elastic(JobState.RUNNING, resizes=msgspec.structs.replace(resizes, **changes))


def test_it_has_come_up_once_it_makes_a_step_and_the_cost_is_known() -> None:
    assert step_of(up(), says("running", **progress(5, 101.0))).job == up(), "that was an earlier attempt's"
    step = step_of(up(), says("running", **progress(5, 1.0)))
    assert step.job.resizes is not None
    assert (step.job.resizes.before, step.job.resizes.cost_s) == (None, 8.0)
    assert [event.kind for event in step.events] == ["resized"]


def test_without_a_step_within_the_timeout_it_goes_back_once() -> None:
    step = step_of(up(start_timeout_s=100.0), says("running", **progress(5, 101.0)))
    assert step.job.resizes is not None
    assert (step.job.resizes.unusable, step.job.resizes.before, step.job.resizes.count) == ((1,), None, 2)
    assert step.job.ending is not None
    assert step.job.ending.resize == ResizeTo(gpus=2, asked_at=NOW, back=True)
    assert "no step within 100 s" in step.job.message
    gone = reconcile_job(step.job, ranks(signalled="TERM"), world(says("exited", exit_code=0, finished_at=NOW)))
    assert gone.job.resizes is not None
    assert (gone.job.state, gone.job.resizes.frozen, gone.job.resizes.resume_at) == (JobState.PENDING, "", 2)
    assert gone.worked_until == NOW - 100, "it did nothing there"


def test_a_failure_before_the_first_step_reverts_the_size_and_a_later_one_fails_the_job() -> None:
    back = step_of(up(), says("exited", exit_code=3, finished_at=NOW - 1, **progress(5, 101.0)))
    assert (back.job.state, back.began) == (JobState.PENDING, None)
    assert back.job.resizes is not None
    assert back.job.resizes.unusable == (1,)
    assert step_of(up(), says("exited", exit_code=3, finished_at=NOW, **progress(5, 1.0))).job.state is JobState.FAILED
    never = elastic(JobState.RUNNING, resizes=Resizes(count=1))
    assert step_of(never, says("exited", exit_code=3, finished_at=NOW)).job.state is JobState.FAILED


@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_hot_job_whose_rank_fails_goes_back_to_its_former_size_only_if_it_grew(before: int) -> None:
    """It has two GPUs: since it grew, before a rank leaves, and after one left."""
    grown = up(before=before)
    hot = msgspec.structs.replace(grown.spec, elastic=msgspec.structs.replace(SIZES, rank_gpus=1), gpus_per_node=2)
    step = step_of(msgspec.structs.replace(grown, spec=hot), says("exited", exit_code=3, finished_at=NOW))
    assert step.job.resizes is not None
    assert step.job.resizes.unusable == ((2,) if before == 1 else ())
    assert ("formed no new group" in step.job.message) == (before > 1)


def test_a_job_without_progress_counts_as_started_after_a_while() -> None:
    young = msgspec.structs.replace(up(), start_time=NOW - 30.0)
    assert step_of(young, says("running")).job == young
    step = step_of(msgspec.structs.replace(up(), start_time=NOW - 31.0), says("running"))
    assert step.job.resizes is not None
    assert step.job.resizes.before is None


def test_after_a_node_failed_there_is_nothing_to_go_back_to() -> None:
    step = step_of(up(), says(None))
    assert step.job.state is JobState.PENDING
    assert step.job.resizes is not None
    assert (step.job.resizes.before, step.job.resizes.measured) == (None, 0)


def test_a_start_and_an_end_in_one_look_leave_both_marks() -> None:
    starting = elastic(JobState.STARTING, resizes=Resizes(count=1, times=(NOW - 9.0,), before=2))
    step = step_of(starting, says("exited", exit_code=3, started_at=NOW - 2, finished_at=NOW - 1))
    assert step.job.state is JobState.PENDING
    assert step.began is not None
    assert step.began.allocation is not None
    assert step.ended_attempt is not None


def test_its_time_limit_bounds_what_it_runs_at_all_sizes_together() -> None:
    def ran(had_s: float, limit_s: int) -> JobRecord:
        found = msgspec.structs.replace(spec(time_limit_s=limit_s), elastic=SIZES)
        return elastic(JobState.RUNNING, spec=found, resizes=Resizes(count=1, had_s=had_s))

    assert step_of(ran(500.0, 601), says("running")).job.state is JobState.RUNNING
    step = step_of(ran(500.0, 600), says("running"))
    assert (step.job.state, step.job.reason) == (JobState.COMPLETING, "TimeLimit")
    assert ran(500.0, 601).limit_s == 101.0
    warned = msgspec.structs.replace(ran(500.0, 610).spec, signal_before_s=10, signal="USR1")
    soon = step_of(msgspec.structs.replace(ran(500.0, 610), spec=warned), says("running"))
    assert verbs(soon) == [("signal", 0, "USR1")]


def test_a_start_that_is_no_resize_has_the_whole_limit() -> None:
    running = elastic(JobState.RUNNING, resizes=Resizes(count=1, had_s=500.0))
    gone = reconcile_job(reconcile_job(running, ranks(), world(says(None))).job, ranks(gone=True), world())
    assert (gone.job.state, gone.job.resizes) == (JobState.PENDING, Resizes(count=1))
