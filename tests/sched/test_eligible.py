"""Which jobs may start, be preempted or be resized, to the second and to the last time within an hour."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpusched.model.jobs import Elastic, JobState, Preemptions, Resizes
from gpusched.model.plan import ReasonCode
from gpusched.model.policy import PolicySpec, PreemptionSettings, Resizing
from gpusched.model.snapshot import RunningView
from gpusched.model.units import local_clock
from gpusched.sched.eligible import ineligible, may_resize, may_stop, out_of_reach
from tests.sched.reserved import reservation
from tests.sched.worlds import NOW, pending, running

HOUR = 3600
RULES = PreemptionSettings(min_run_s=600, per_hour=2)
RESIZING = Resizing(min_run_s=60, per_hour=2)
POLICIES = {"p": PolicySpec(name="t"), "q": PolicySpec(name="fast", place="fastest")}
OWN = reservation("own", ["n"], -60, 9000)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({}, None, ""),
        ({"held_by": "user"}, ReasonCode.JOB_HELD_USER, "held by its user"),
        ({"held_by": "admin", "partition": "x"}, ReasonCode.JOB_HELD_ADMIN, "held by an administrator"),
        ({"partition": "x", "barred": "no"}, ReasonCode.PARTITION_UNKNOWN, "there is no partition x"),
        ({"barred": "no", "unreserved": "gone"}, ReasonCode.NOT_ELIGIBLE, "Slurm does not allow it to start: no"),
        ({"unreserved": "gone", "dependency": "never"}, ReasonCode.RESERVATION, "gone"),
        ({"dependency": "never"}, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "its dependency can never be met"),
        ({"dependency": "never", "dependency_message": "7 failed"}, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "7 failed"),
        ({"dependency": "waiting", "eligible_time": NOW + 9}, ReasonCode.DEPENDENCY, "waits for another job"),
        ({"dependency": "waiting", "dependency_message": "of 7"}, ReasonCode.DEPENDENCY, "of 7"),
        ({"eligible_time": NOW}, None, ""),
        ({"eligible_time": NOW, "awaits": "a pause"}, None, ""),
        ({"eligible_time": NOW + 0.5, "awaits": "a pause"}, ReasonCode.REQ_NODE_NOT_AVAIL, "a pause"),
        ({"reserved": OWN, "limit": HOUR}, None, ""),
        ({"reserved": reservation("own", ["n"], 60, 9000)}, ReasonCode.RESERVATION,
         "waits for reservation own, which begins in 0:01:00"),
    ],
)  # fmt: skip
def test_the_first_that_keeps_a_job_from_starting(
    fields: dict[str, object], code: ReasonCode | None, message: str
) -> None:
    found = ineligible(pending("j", 1, **fields), NOW, POLICIES)  # type: ignore[arg-type]
    assert (found and found.code, found.message if found else "") == (code, message)


def test_a_job_says_when_its_begin_time_is() -> None:
    found = ineligible(pending("j", 1, eligible_time=NOW + 90000), NOW, POLICIES)
    assert found is not None
    assert (found.code, found.message) == (
        ReasonCode.BEGIN_TIME, f"not before {local_clock(NOW + 90000, NOW)} (begin time)",
    )  # fmt: skip


@pytest.mark.parametrize("partition", ["p", "q"])
@pytest.mark.parametrize(
    ("spread", "nodes", "most", "several"),
    [("rack", 1, None, False), ("rack", 2, None, True), ("rack", 1, 4, True), ("any", 2, 4, False), ("", 2, 4, False)],
)
def test_one_rack_is_for_jobs_of_several_nodes_and_policies_that_know_racks(
    partition: str, spread: str, nodes: int, most: int | None, several: bool
) -> None:
    job = pending("j", 2, nodes, partition=partition)
    job = replace(job, spec=replace(job.spec, max_spread=spread, max_nodes=most))
    expected = several and partition == "q"
    assert out_of_reach(job.spec, POLICIES[partition]) == expected
    found = ineligible(job, NOW, POLICIES)
    assert (found and found.message) == (
        "--max-spread rack needs a policy that knows racks; fast does not" if expected else None
    )


def ran(seconds: float, **changes: object) -> RunningView:
    spec = replace(pending("j", 1).spec, preemptible=True, elastic=Elastic(
        sizes=(1, 2), base_gpus=1, base_cores=1, base_memory_mib=1, cooldown_s=0,
    ))  # fmt: skip
    return replace(running("j", {"n": (0,)}, NOW + HOUR), **{"spec": spec, "start_time": NOW - seconds, **changes})


def stops(*seconds_ago: float) -> Preemptions:
    return Preemptions(count=len(seconds_ago), times=tuple(NOW - s for s in seconds_ago))


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (ran(600), None),
        (ran(599), "job j has run for less than 0:10:00"),
        (ran(900, state=JobState.STARTING), "job j is STARTING"),
        (ran(900, state=JobState.COMPLETING), "job j is COMPLETING"),
        (ran(900, spec=None), "job j is not preemptible (--preemptible)"),
        (ran(900, spec=pending("j", 1).spec), "job j is not preemptible (--preemptible)"),
        (ran(900, preemptions=stops(3599)), None),
        (ran(900, preemptions=stops(3599, 700)), "job j has been preempted 2 times within an hour"),
        (ran(900, preemptions=stops(3600, 700)), None),
        (ran(900, preemptions=stops(3700, 3599, 700)), "job j has been preempted 2 times within an hour"),
        (ran(900, preemptions=stops(3700, 3600, 700)), None),
    ],
)
def test_a_job_is_stopped_only_after_a_while_and_so_often_within_an_hour(job: RunningView, why: str | None) -> None:
    assert may_stop(job, RULES, NOW) == why
    assert may_stop(job, replace(RULES, per_hour=0), NOW) == (None if why and "within an hour" in why else why)


def resized(*seconds_ago: float, **more: object) -> Resizes:
    return Resizes(count=len(seconds_ago), times=tuple(NOW - s for s in seconds_ago), **more)  # type: ignore[arg-type]


def elastic(**changes: object) -> object:
    spec = ran(0).spec
    assert spec is not None
    assert spec.elastic is not None
    return replace(spec, elastic=replace(spec.elastic, **changes))


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (ran(60), None),
        (ran(59), "job j has run for less than 0:01:00"),
        (ran(899, spec=elastic(cooldown_s=900)), "job j has run for less than 0:15:00"),
        (ran(900, spec=elastic(cooldown_s=900)), None),
        (ran(900, spec=elastic(rank_gpus=1), resizes=resized(3700, 59)), "job j has run for less than 0:01:00"),
        (ran(900, spec=elastic(rank_gpus=1), resizes=resized(59)), "job j has run for less than 0:01:00"),
        (ran(900, spec=elastic(rank_gpus=1), resizes=resized(3700, 60)), None),
        (ran(59, spec=elastic(rank_gpus=1), resizes=resized(800)), "job j has run for less than 0:01:00"),
        (ran(900, resizes=resized(59)), None),  # a stop of the job: its attempt is younger then
        (ran(900, state=JobState.STARTING), "job j is STARTING"),
        (ran(900, spec=None), "job j is not resizable (--resizable)"),
        (ran(900, spec=pending("j", 1).spec), "job j is not resizable (--resizable)"),
        (ran(900, tied="n is reserved"), "job j might not restart in time: n is reserved"),
        (ran(900, resizes=resized(frozen="it failed")), "job j is no longer resized: it failed"),
        (ran(900, resizes=resized(before=0)), "job j has not restarted yet since it was resized"),
        (ran(900, spec=elastic(rank_gpus=1), resizes=resized(before=2)),
         "job j has not formed its new group yet since it was resized"),
        (ran(900, resizes=resized(3599, 700)), "job j has been resized 2 times within an hour"),
        (ran(900, resizes=resized(3600, 700)), None),
    ],
)  # fmt: skip
def test_a_job_is_resized_only_after_a_while_and_so_often_within_an_hour(job: RunningView, why: str | None) -> None:
    assert may_resize(job, RESIZING, NOW) == why
