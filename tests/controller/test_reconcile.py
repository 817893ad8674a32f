"""One job, its ranks and what the nodes say: the next step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusched.controller.completing import retry_delay_s
from gpusched.controller.ranks import ReconcileResult
from gpusched.controller.reconcile import reconcile_job
from gpusched.model.idle import IdleState
from gpusched.model.jobs import Ending, JobRecord, JobState, Preemptions
from gpusched.model.readings import NodeReading
from gpusched.queue.store import FailedLaunch, NodeRecord
from tests.builders import spec
from tests.controller.reconciling import ID, NOW, SETTINGS, ending, job, ranks, says, silent, verbs, world

# -- STARTING


def test_a_launch_that_has_not_arrived_is_sent_again() -> None:
    record = ranks(launched_at=None)
    step = reconcile_job(job(JobState.STARTING), record, world(says(None)))
    assert step.to_launch == record
    assert step.job.state == JobState.STARTING


def test_nothing_is_sent_again_while_the_launch_is_on_its_way() -> None:
    step = reconcile_job(
        job(JobState.STARTING), ranks(launched_at=None), world(says(None), busy=frozenset({(ID, 1, 0)}))
    )
    assert (step.to_launch, step.operations, step.events) == ([], [], [])


def test_an_answer_from_before_the_launch_says_nothing() -> None:
    step = reconcile_job(job(JobState.STARTING), ranks(launched_at=NOW - 0.05), world(says(None)))
    assert (step.job.state, step.operations, step.to_launch) == (JobState.STARTING, [], [])


def test_a_job_that_meets_a_failed_check_waits_for_other_nodes() -> None:
    """None of its ranks is launched, and no try is counted."""
    record = ranks(3, launched_at=None)
    record[1:] = [msgspec.structs.replace(rank, check_error=f"check disk: {rank.node}") for rank in record[1:]]
    answers = [says(None, rank) for rank in range(3)]
    step = reconcile_job(job(JobState.STARTING, 3), record, world(*answers))
    assert (step.to_launch, step.operations, step.job.state, step.job.retries) == ([], [], JobState.PENDING, 0)
    assert step.job.message == "check disk: n1 on n1, n2"
    assert step.job.excluded_nodes == ("n1", "n2")
    event = next(event for event in step.events if event.kind == "ending")
    assert (event.data["outcome"], event.data["reason"]) == (JobState.PENDING, "CheckFailed")


def test_a_long_pull_is_waited_for() -> None:
    step = reconcile_job(job(JobState.STARTING), ranks(), world(says("preparing")))
    assert (step.job.state, step.operations) == (JobState.STARTING, [])


def test_a_start_that_takes_too_long_is_removed_and_only_then_tried_elsewhere() -> None:
    late = ranks(2, launched_at=NOW - SETTINGS.launch_timeout_s)
    step = reconcile_job(job(JobState.STARTING, 2), late, world(says("ready"), says("preparing", 1)))
    assert (step.job.state, ending(step).outcome, step.job.excluded_nodes) == (
        JobState.COMPLETING, JobState.NODE_FAIL, ("n1",),
    )  # fmt: skip
    assert step.launch_failed is None, "no evidence against its node"
    assert verbs(step) == [("remove", 0, None), ("remove", 1, None)]
    again = reconcile_job(step.job, late, world(says(None), says(None, 1)))
    assert (again.job.state, again.job.retries) == (JobState.PENDING, 1)
    assert "not ready within 2:00:00 (settings.launch_timeout)" in again.job.message


@pytest.mark.parametrize("phase", ["running", "exited"])
def test_it_runs_even_when_it_is_over_before_anyone_looks(phase: str) -> None:
    step = reconcile_job(job(JobState.STARTING), ranks(), world(says(phase, exit_code=0, started_at=NOW - 5)))
    assert step.events[0].kind == "running"
    assert step.job.start_time == NOW - 5
    if phase == "exited":
        assert step.job.state == JobState.COMPLETED


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_times_are_by_our_clock_whatever_the_nodes_says(skew: float) -> None:
    answer = says("exited", exit_code=0, skew=skew, started_at=NOW - 20 + skew, finished_at=NOW - 5 + skew)
    step = reconcile_job(job(JobState.STARTING), ranks(), world(answer))
    assert step.job.start_time == pytest.approx(NOW - 20, abs=1e-3)  # of 1.8e9: relatively all would be equal
    assert step.job.end_time == pytest.approx(NOW - 5, abs=1e-3)


def test_an_end_is_not_before_the_rank_was_last_seen_to_run_whatever_the_nodes_clock_was_set_to() -> None:
    earlier = says("running")["n0"].result
    assert isinstance(earlier, NodeReading)
    record = NodeRecord(name="n0", reading=msgspec.structs.replace(earlier, time=NOW - 4))
    ended = world(says("exited", exit_code=0, finished_at=NOW - 2, skew=900.0), earlier={"n0": record})
    assert reconcile_job(job(JobState.RUNNING), ranks(), ended).job.end_time == NOW - 4


@pytest.mark.parametrize(("ran_s", "state"), [(599.9, JobState.RUNNING), (600.0, JobState.COMPLETING)])
def test_the_limit_goes_by_what_the_node_says_that_it_has_run(ran_s: float, state: JobState) -> None:
    for start in (NOW - 1e6, NOW):
        running = job(JobState.RUNNING, start_time=start)
        assert reconcile_job(running, ranks(), world(says("running", ran_s=ran_s))).job.state is state


def test_a_gang_has_run_since_its_last_rank_does() -> None:
    running = job(JobState.RUNNING, nodes=2, start_time=NOW - 1e6)
    both = world(says("running", ran_s=700.0), says("running", 1, ran_s=599.0))
    assert reconcile_job(running, ranks(2), both).job.state is JobState.RUNNING


def test_the_signal_before_the_limit_goes_by_it_too() -> None:
    warned = job(JobState.RUNNING, spec=spec(signal_before_s=100, signal="USR1"), start_time=NOW - 1e6)
    assert verbs(reconcile_job(warned, ranks(), world(says("running", ran_s=499.0)))) == []
    assert verbs(reconcile_job(warned, ranks(), world(says("running", ran_s=500.0)))) == [("signal", 0, "USR1")]


def test_a_start_is_by_the_nodes_boot_clock_if_reported() -> None:
    answer = says("running", skew=900.0, started_at=NOW - 20, ran_s=5.0)  # its clock was set in between
    step = reconcile_job(job(JobState.STARTING), ranks(), world(answer))
    assert step.job.start_time == NOW - 5


@pytest.mark.parametrize("wrong", [-1e6, 1e6])
def test_times_stay_between_submission_and_now(wrong: float) -> None:
    answer = says("exited", exit_code=0, started_at=NOW + wrong, finished_at=NOW + wrong)
    step = reconcile_job(job(JobState.STARTING), ranks(), world(answer))
    assert step.job.start_time is not None
    assert step.job.end_time is not None
    assert step.job.submit_time <= step.job.start_time <= step.job.end_time <= NOW


def test_a_gang_starts_when_all_are_ready() -> None:
    starting = job(JobState.STARTING, nodes=2)
    half = reconcile_job(starting, ranks(2), world(says("ready"), says("preparing", 1)))
    assert half.operations == []
    whole = reconcile_job(starting, ranks(2), world(says("ready"), says("ready", 1)))
    assert verbs(whole) == [("start", 0, None), ("start", 1, None)]
    again = reconcile_job(starting, ranks(2), world(says("running"), says("ready", 1)))
    assert verbs(again) == [("start", 1, None)]


LAUNCH_ERRORS = [
    ('Error: short-name "nope" did not resolve', JobState.FAILED),
    ('exec: "nonsense": executable file not found in $PATH', JobState.FAILED),
    ("cannot write the output file /nowhere/x", JobState.PENDING),
    ("OCI runtime error: cannot allocate memory", JobState.PENDING),
]


@pytest.mark.parametrize(("error", "state"), LAUNCH_ERRORS)
def test_whose_fault_a_failed_launch_is(error: str, state: JobState) -> None:
    step = reconcile_job(job(JobState.STARTING), ranks(), world(says("failed", exit_code=125, error=error)))
    assert step.job.state == state
    assert error in step.job.message
    if state is JobState.FAILED:
        assert (step.job.exit_code, step.launch_failed) == (125, None)
    else:
        assert (step.job.excluded_nodes, step.job.unlaunched_on) == (("n0",), ("n0",))
        assert step.launch_failed is not None
        assert step.launch_failed[:2] == ("n0", error)
        assert step.job.eligible_time == NOW + 10


def test_a_launch_that_fails_over_the_jobs_own_words_twice_is_its_fault_and_says_where() -> None:
    again = job(JobState.STARTING, unlaunched_on=("n7",))
    answer = says("failed", exit_code=125, error="cannot write the output file /nowhere/x")
    step = reconcile_job(again, ranks(), world(answer))
    assert (step.job.state, step.job.reason) == (JobState.FAILED, "LaunchFailed")
    assert step.job.message.endswith("cannot write the output file /nowhere/x (as earlier on n7)")
    others = {"n0": (FailedLaunch(job="o", user="bob"),)}
    assert reconcile_job(again, ranks(), world(answer, failed_launches=others)).job.state == JobState.PENDING


def test_a_job_cancelled_during_its_pull_ends_without_waiting_for_it() -> None:
    cancelled = Ending(outcome=JobState.CANCELLED, reason="Cancelled", kill_at=NOW + 10)
    completing = job(JobState.COMPLETING, ending=cancelled, start_time=None)
    first = reconcile_job(completing, ranks(), world(says("preparing")))
    assert verbs(first) == [("remove", 0, None)]
    under_way = reconcile_job(completing, ranks(), world(says("preparing"), busy=frozenset({(ID, 1, 0)})))
    assert under_way.operations == []
    assert under_way.job.state == JobState.COMPLETING
    after = reconcile_job(completing, ranks(), world(says(None)))
    assert after.job.state == JobState.CANCELLED
    assert after.ended_attempt is None, "it never began"


# -- RUNNING


@pytest.mark.parametrize("code", [1, 137, 255, None])
def test_exit_codes(code: int | None) -> None:
    step = reconcile_job(job(JobState.RUNNING), ranks(), world(says("exited", exit_code=code)))
    assert (step.job.state, step.job.exit_code) == (JobState.FAILED, code)


@pytest.mark.parametrize("code", [137, 1])
def test_out_of_memory(code: int) -> None:
    big = job(JobState.RUNNING, spec=spec(memory_mib_per_node=524288))
    step = reconcile_job(big, ranks(), world(says("exited", exit_code=code, oom_killed=True)))
    assert (step.job.state, step.job.reason) == (JobState.OUT_OF_MEMORY, "OutOfMemory")
    assert "(512G requested)" in step.job.message


@pytest.mark.parametrize(
    ("runtime", "signalled", "said"),
    [
        ("podman", None, "rank 0 on n0 was killed by an external SIGKILL (137)"),
        ("process", None, "killed by an external SIGKILL, manually or because the node ran out of memory (137)"),
        ("docker", "KILL", "rank 0 on n0 exited with 137"),  # the signal that the job asked for, before its limit
    ],
)
def test_killed_is_not_out_of_memory(runtime: str, signalled: str | None, said: str) -> None:
    records = ranks(runtime=runtime, signalled=signalled)
    step = reconcile_job(job(JobState.RUNNING), records, world(says("exited", exit_code=137)))
    assert (step.job.state, step.job.reason) == (JobState.FAILED, "NonZeroExitCode")
    assert said in step.job.message


def test_a_container_that_was_lost_says_why() -> None:
    step = reconcile_job(job(JobState.RUNNING), ranks(), world(says("lost", error="its supervisor was killed")))
    assert step.job.state == JobState.PENDING
    assert "vanished: its supervisor was killed" in step.job.message


@pytest.mark.parametrize(("phase", "boot"), [(None, "b"), ("lost", "b"), ("lost", "other"), ("ready", "other")])
def test_a_container_that_vanished_is_the_nodes_fault(phase: str | None, boot: str) -> None:
    step = reconcile_job(job(JobState.RUNNING), ranks(), world(says(phase, boot=boot)))
    assert ("rebooted" in step.events[0].data["message"]) is (boot == "other" and phase is not None)
    if phase == "ready":  # it must not stay there
        assert step.job.state == JobState.COMPLETING
    else:
        assert step.job.state == JobState.PENDING
        assert step.job.retries == 1


def test_a_silent_node_changes_nothing_until_it_is_given_up() -> None:
    running = job(JobState.RUNNING)
    step = reconcile_job(running, ranks(), world(silent()))
    assert (step.job, step.operations, step.events) == (running, [], [])
    given_up = reconcile_job(running, ranks(), world(silent(), dead=frozenset({"n0"})))
    assert given_up.job.state == JobState.PENDING
    assert given_up.ended_attempt == (NOW, JobState.NODE_FAIL)
    assert given_up.ranks[0].gone


@pytest.mark.parametrize(
    ("retries", "requeue", "state"),
    [
        (0, True, JobState.PENDING),
        (1, True, JobState.PENDING),
        (2, True, JobState.NODE_FAIL),
        (0, False, JobState.NODE_FAIL),
    ],
)
def test_retries_are_counted(retries: int, requeue: bool, state: JobState) -> None:
    running = job(JobState.RUNNING, retries=retries, spec=spec(requeue=requeue))
    step = reconcile_job(running, ranks(), world(silent(), dead=frozenset({"n0"})))
    assert step.job.state == state
    if state is JobState.PENDING:
        assert step.job.eligible_time == NOW + retry_delay_s(retries)
    else:
        assert step.job.message == "node n0 is down"


def test_delays_grow_to_a_bound() -> None:
    assert [retry_delay_s(r) for r in (0, 1, 2, 5, 6, 60)] == [10, 20, 40, 320, 600, 600]


def test_the_time_limit() -> None:
    late = job(JobState.RUNNING, start_time=NOW - 601)
    step = reconcile_job(late, ranks(), world(says("running")))
    assert ending(step).outcome == JobState.TIMEOUT
    assert verbs(step) == [("signal", 0, "TERM")]
    in_time = reconcile_job(job(JobState.RUNNING, start_time=NOW - 599), ranks(), world(says("running")))
    assert in_time.job.state == JobState.RUNNING


def test_the_limit_says_nothing_about_a_job_that_cannot_be_seen() -> None:
    """It may have ended in time; judged when its node answers."""
    late = job(JobState.RUNNING, start_time=NOW - 601)
    assert reconcile_job(late, ranks(), world(silent())).job == late
    back = reconcile_job(late, ranks(), world(says("exited", exit_code=0, finished_at=NOW - 300)))
    assert (back.job.state, back.job.end_time) == (JobState.COMPLETED, NOW - 300)
    still = reconcile_job(late, ranks(), world(says("running")))
    assert ending(still).outcome == JobState.TIMEOUT
    gang = job(JobState.RUNNING, nodes=2, start_time=NOW - 601)
    seen = reconcile_job(gang, ranks(2), world(says("running"), silent(1)))
    assert ending(seen).outcome == JobState.TIMEOUT


def test_signal_before_the_limit_is_sent_once() -> None:
    warned = job(JobState.RUNNING, start_time=NOW - 580, spec=spec(signal="USR1", signal_before_s=30))
    assert verbs(reconcile_job(warned, ranks(), world(says("running")))) == [("signal", 0, "USR1")]
    assert verbs(reconcile_job(warned, ranks(warned_at=NOW - 9), world(says("running")))) == []
    assert verbs(reconcile_job(warned, ranks(signalled="USR1"), world(says("running")))) == []
    over = msgspec.structs.replace(warned, start_time=NOW - 601)
    assert verbs(reconcile_job(over, ranks(signalled="USR1"), world(says("running")))) == [("signal", 0, "TERM")]


def test_a_rank_that_is_warned_of_its_limit_is_signalled_as_idle_the_next_time() -> None:
    """One operation on a rank at a time: of two at once its node may carry out either first."""
    idle = IdleState(since=NOW - 900, below=0.05, then="signal", at=NOW - 1, warned_at=NOW - 300, acted_at=NOW - 1)
    asked = spec(nodes=2, signal_before_s=60, signal_batch=True, time_limit_s=120)
    record = job(JobState.RUNNING, 2, spec=asked, idle=idle)
    step = reconcile_job(record, ranks(2), world(says("running"), says("running", 1)))
    assert [(o.rank.rank, o.for_warning, o.for_idle) for o in step.operations] == [(0, True, False), (1, False, True)]


@pytest.mark.parametrize(
    ("warning", "signalled", "sent"),
    [("TERM", None, ["TERM"]), ("TERM", "TERM", []), ("USR1", "USR1", ["TERM"]), ("USR1", "TERM", [])],
)
def test_in_the_grace_term_is_sent_once_whatever_the_warning_was(
    warning: str, signalled: str | None, sent: list[str]
) -> None:
    end = Ending(outcome=JobState.CANCELLED, reason="x", kill_at=NOW + 5)
    cancelled = job(JobState.COMPLETING, ending=end, spec=spec(signal=warning, signal_before_s=30))
    step = reconcile_job(cancelled, ranks(signalled=signalled), world(says("running")))
    assert [signal for _, _, signal in verbs(step)] == sent


@pytest.mark.parametrize("warning", ["TERM", "USR1"])
def test_a_warned_job_still_gets_its_signal_to_end_once(warning: str) -> None:
    wanted = spec(signal=warning, signal_before_s=30)
    end = Ending(outcome=JobState.CANCELLED, reason="x", kill_at=NOW + 5)
    stop = Preemptions().once_more(NOW - 1, "stopper", "7", "other")
    for ends in (end, msgspec.structs.replace(end, outcome=JobState.PENDING, preemptions=stop)):
        cancelled = job(JobState.COMPLETING, ending=ends, spec=wanted)
        step = reconcile_job(cancelled, ranks(warned_at=NOW - 9), world(says("running")))
        assert verbs(step) == [("signal", 0, "TERM")]
        asked = ranks(warned_at=NOW - 9, signalled="TERM")
        assert verbs(reconcile_job(cancelled, asked, world(says("running")))) == []


def test_a_gpus_failure_ends_the_jobs_on_its_slices() -> None:
    sliced = job(JobState.RUNNING, spec=spec(profile="1g.10gb"))
    for gpu, state in ((0, JobState.RUNNING), (1, JobState.COMPLETING)):
        there = world(says("running"), failed_gpus={"n0": {gpu: "Xid 79"}})
        step = reconcile_job(sliced, ranks(gpus=(2004,)), there)
        assert step.job.state is state
    assert (ending(step).outcome, ending(step).message) == (JobState.NODE_FAIL, "GPU 1 of n0: Xid 79")


def test_a_rank_that_has_ended_may_vanish_while_the_others_go_on() -> None:
    gang = job(JobState.RUNNING, nodes=2)
    records = ranks(2)
    for code, state in ((0, JobState.RUNNING), (3, JobState.FAILED)):
        records[1] = msgspec.structs.replace(records[1], exit_code=code, finished_at=NOW - 9)
        step = reconcile_job(gang, records, world(says("running"), says(None, 1)))
        assert (step.job.ending.outcome if step.job.ending else step.job.state) is state


def test_a_signal_for_the_script_alone_is_sent_to_its_node_alone() -> None:
    wanted = spec(nodes=2, script="#!/bin/sh\n", signal="TERM", signal_before_s=30, signal_batch=True)
    warned = job(JobState.RUNNING, nodes=2, start_time=NOW - 580, spec=wanted)
    answers = world(says("running"), says("running", 1))
    assert verbs(reconcile_job(warned, ranks(2), answers)) == [("signal", 0, "TERM")]
    to_all = msgspec.structs.replace(warned, spec=msgspec.structs.replace(wanted, signal_batch=False))
    assert verbs(reconcile_job(to_all, ranks(2), answers)) == [("signal", 0, "TERM"), ("signal", 1, "TERM")]


def test_a_gang_ends_when_rank_0_is_done_and_the_others_may_follow() -> None:
    running = job(JobState.RUNNING, nodes=2)
    step = reconcile_job(running, ranks(2), world(says("exited", exit_code=0), says("running", 1)))
    assert (ending(step).outcome, verbs(step)) == (JobState.COMPLETED, [])
    assert ending(step).kill_at == NOW + 10
    alone = reconcile_job(running, ranks(2), world(says("running"), says("exited", 1, exit_code=0)))
    assert alone.job.state == JobState.RUNNING


def test_nodes_that_only_wait_for_a_scripts_steps_get_sigterm_when_it_has_ended() -> None:
    running = job(JobState.RUNNING, nodes=2, spec=spec(nodes=2, script="#!/bin/sh"))
    step = reconcile_job(running, ranks(2), world(says("exited", exit_code=0), says("running", 1)))
    assert (ending(step).outcome, verbs(step)) == (JobState.COMPLETED, [("signal", 1, "TERM")])


def test_a_gang_fails_as_one() -> None:
    running = job(JobState.RUNNING, nodes=2)
    step = reconcile_job(running, ranks(2), world(says("running"), says("exited", 1, exit_code=3)))
    assert (ending(step).outcome, ending(step).exit_code) == (JobState.FAILED, 3)
    assert verbs(step) == [("signal", 0, "TERM")]


# -- COMPLETING


def completing(outcome: JobState, nodes: int = 1, kill_at: float = NOW + 5, **more: Any) -> JobRecord:
    return job(JobState.COMPLETING, nodes, ending=Ending(outcome=outcome, reason="x", kill_at=kill_at, **more))


def test_first_asked_then_made() -> None:
    asked = reconcile_job(completing(JobState.CANCELLED), ranks(), world(says("running")))
    assert verbs(asked) == [("signal", 0, "TERM")]
    waiting = reconcile_job(completing(JobState.CANCELLED), ranks(signalled="TERM"), world(says("running")))
    assert verbs(waiting) == []
    made = reconcile_job(completing(JobState.CANCELLED, kill_at=NOW), ranks(signalled="TERM"), world(says("running")))
    assert verbs(made) == [("signal", 0, "KILL")]


def test_a_gangs_node_that_dies_while_it_completes() -> None:
    gang = completing(JobState.COMPLETED, nodes=2, exit_code=0)
    over = msgspec.structs.replace(ranks(2)[0], gone=True, exit_code=0, finished_at=NOW - 3)
    records = [over, ranks(2)[1]]
    waiting = reconcile_job(gang, records, world(says(None), silent(1)))
    assert (waiting.job.state, waiting.operations) == (JobState.COMPLETING, [])
    given_up = reconcile_job(gang, records, world(says(None), silent(1), dead=frozenset({"n1"})))
    assert (given_up.job.state, given_up.job.exit_code) == (JobState.COMPLETED, 0)
    assert given_up.job.end_time == NOW


def test_a_gang_member_killed_after_rank_0_succeeded_is_no_failure_but_its_own_error_is() -> None:
    gang = completing(JobState.COMPLETED, nodes=2, exit_code=0)
    records = [msgspec.structs.replace(r, gone=True, finished_at=NOW - 1, exit_code=0) for r in ranks(2)]
    for code, state in ((137, JobState.COMPLETED), (143, JobState.COMPLETED), (3, JobState.FAILED)):
        records[1] = msgspec.structs.replace(records[1], exit_code=code)
        assert reconcile_job(gang, records, world()).job.state == state
    records[0] = msgspec.structs.replace(records[0], exit_code=137)
    assert reconcile_job(gang, records, world()).job.exit_code == 3, "of the one that failed by itself"


def test_a_requeue_goes_back_to_the_queue_with_all_fields_cleared() -> None:
    step = reconcile_job(completing(JobState.PENDING), ranks(), world(says("exited", exit_code=143)))
    back = step.job
    assert (back.state, back.allocation, back.start_time, back.end_time, back.ending) == (JobState.PENDING, *[None] * 4)
    assert step.ended_attempt is not None
    assert step.ended_attempt[1] == JobState.PENDING


def test_unlaunched_is_over_at_once() -> None:
    step = reconcile_job(completing(JobState.CANCELLED), ranks(launched_at=None), world(says(None)))
    assert step.job.state == JobState.CANCELLED
    assert step.ranks[0].gone


def test_cancelled_on_a_silent_node_it_waits_until_the_node_answers_or_is_given_up() -> None:
    cancelled = completing(JobState.CANCELLED, kill_at=NOW - 100)
    assert reconcile_job(cancelled, ranks(), world(silent())).job == cancelled
    given_up = reconcile_job(cancelled, ranks(), world(silent(), dead=frozenset({"n0"})))
    assert given_up.job.state == JobState.CANCELLED


# -- borders


def test_answers_update_the_record_of_a_rank() -> None:
    step = reconcile_job(job(JobState.STARTING), ranks(boot_id=None, launched_at=None), world(says("preparing")))
    assert (step.ranks[0].boot_id, step.ranks[0].launched_at) == ("b", NOW)
    kept = reconcile_job(job(JobState.STARTING), ranks(), world(says("preparing", boot="other")))
    assert kept.ranks == {}
    over = reconcile_job(job(JobState.RUNNING), ranks(), world(says("exited", exit_code=3, oom_killed=True)))
    assert (over.ranks[0].exit_code, over.ranks[0].oom_killed, over.ranks[0].finished_at) == (3, True, NOW)
    known = ranks(finished_at=NOW - 9, exit_code=0)
    assert reconcile_job(job(JobState.RUNNING), known, world(says("exited", exit_code=3))).job.end_time == NOW - 9


def test_only_having_been_seen_to_run_holds_an_end_back() -> None:
    earlier = says("exited", exit_code=0)["n0"].result
    assert isinstance(earlier, NodeReading)
    record = NodeRecord(name="n0", reading=msgspec.structs.replace(earlier, time=NOW - 4))
    for known in (record, NodeRecord(name="n0"), NodeRecord(name="n0", reading=NodeReading(node="n0", time=NOW - 4))):
        ended = world(says("exited", exit_code=0, finished_at=NOW - 20), earlier={"n0": known})
        assert reconcile_job(job(JobState.RUNNING), ranks(), ended).job.end_time == NOW - 20


def test_a_launch_of_which_nothing_is_there_is_the_nodes_fault_once_it_was_asked_afterwards() -> None:
    for launched, state in ((NOW - 0.1, JobState.STARTING), (NOW - 0.2, JobState.PENDING)):
        step = reconcile_job(job(JobState.STARTING), ranks(launched_at=launched), world(says(None)))
        assert step.job.state is state
    assert step.job.excluded_nodes == ("n0",)
    assert "rank 0 on n0: the node has no trace of the launch" in step.job.message
    lost = reconcile_job(job(JobState.STARTING, excluded_nodes=("n5", "n0")), ranks(), world(says("lost")))
    assert "rank 0 on n0: the launcher died" in lost.job.message
    assert lost.job.excluded_nodes == ("n5", "n0")
    gang = reconcile_job(job(JobState.STARTING, 2), ranks(2), world(says("preparing"), says("lost", 1)))
    assert (ending(gang).kill_at, gang.job.excluded_nodes, verbs(gang)) == (NOW, ("n1",), [("remove", 0, None)])


def test_a_gang_of_which_a_node_dies_or_is_missing_does_not_start() -> None:
    gang = job(JobState.STARTING, 2)
    dead = reconcile_job(gang, ranks(2), world(says("ready"), silent(1), dead=frozenset({"n1"})))
    assert (ending(dead).message, ending(dead).kill_at) == ("node n1 went down while starting", NOW)
    assert dead.job.excluded_nodes == ("n1",)
    assert reconcile_job(gang, ranks(1), world(says("running"))).job.state is JobState.COMPLETING
    unknown = reconcile_job(gang, ranks(2), world(says("ready"), silent(1)))
    assert (unknown.job.state, unknown.operations, unknown.to_launch) == (JobState.STARTING, [], [])


def test_a_ready_rank_is_started_at_growing_pauses_and_given_up_after_five() -> None:
    starting = job(JobState.STARTING)
    for tries, tried_at, does in ((0, None, True), (1, NOW - 0.9, False), (1, NOW - 1, True), (4, NOW - 99, True)):
        step = reconcile_job(starting, ranks(tries=tries, tried_at=tried_at), world(says("ready")))
        assert verbs(step) == ([("start", 0, None)] if does else [])
    assert reconcile_job(starting, ranks(), world(says("ready"), busy=frozenset({(ID, 1, 0)}))).operations == []
    over = reconcile_job(starting, ranks(tries=5, tried_at=NOW - 99, trouble="no fork"), world(says("ready")))
    assert [e.data.get("message") for e in over.events] == ["rank 0 on n0 could not be started: no fork"]
    assert (verbs(over), over.ranks[0].tries) == ([("remove", 0, None)], 0), "it can be ended, as far as is known"
    silent_one = reconcile_job(starting, ranks(tries=5, tried_at=NOW - 99), world(says("ready")))
    assert silent_one.events[0].data["message"].endswith("could not be started: no reason given by the node")


def test_once_it_runs_tries_are_counted_anew_and_the_last_rank_says_when_it_began() -> None:
    gang = job(JobState.STARTING, 2, unlaunched_on=("n9",), reason="x", message="y")
    both = world(says("running", started_at=NOW - 30), says("running", 1, started_at=NOW - 20))
    step = reconcile_job(gang, ranks(2, tries=2, tried_at=NOW - 9, trouble="no fork"), both)
    assert (step.job.state, step.job.start_time) == (JobState.RUNNING, NOW - 20)
    assert (step.job.reason, step.job.message, step.job.unlaunched_on) == ("", "", ())
    assert [(r.tries, r.tried_at, r.trouble) for r in step.ranks.values()] == [(0, None, ""), (0, None, "")]
    behind = reconcile_job(gang, ranks(2, intended_at=NOW - 15), both)
    assert behind.job.start_time == NOW - 15, "not before it was meant to"
    assert reconcile_job(gang, ranks(2), both).ranks == {}


def test_a_job_that_runs_on_after_a_reboot_or_has_ended_before_it_is_not_lost() -> None:
    assert reconcile_job(job(JobState.RUNNING), ranks(), world(says("running", boot="c"))).job.state is JobState.RUNNING
    ended = reconcile_job(job(JobState.RUNNING), ranks(), world(says("exited", exit_code=0, boot="c")))
    assert ended.job.state is JobState.COMPLETED
    unknown = reconcile_job(job(JobState.RUNNING), ranks(boot_id=None), world(says("preparing", boot="c")))
    assert unknown.job.state is JobState.RUNNING


def test_only_nodes_whose_rank_had_not_ended_are_blamed() -> None:
    records = ranks(3)
    records[0] = msgspec.structs.replace(records[0], gone=True, exit_code=0, finished_at=NOW - 3)
    step = reconcile_job(
        job(JobState.RUNNING, 3), records, world(silent(1), says("running", 2), dead=frozenset({"n1"}))
    )
    assert (ending(step).message, ending(step).kill_at) == ("node n1 is down", NOW + 10)
    assert step.job.excluded_nodes == ("n1",)
    assert verbs(step) == [("signal", 2, "TERM")]


def test_of_several_failed_ranks_the_first_is_reported() -> None:
    gang = job(JobState.RUNNING, 3)
    answers = [says("running"), says("exited", 1, exit_code=4), says("exited", 2, exit_code=5)]
    step = reconcile_job(gang, ranks(3), world(*answers))
    assert (ending(step).exit_code, ending(step).message) == (4, "rank 1 on n1 exited with 4")
    assert ending(step).kill_at == NOW + 10
    unknown = reconcile_job(job(JobState.RUNNING), ranks(), world(says("exited")))
    assert unknown.job.message == "rank 0 on n0 exited with an unknown code"
    late = reconcile_job(job(JobState.RUNNING, start_time=NOW - 600), ranks(), world(says("running")))
    assert (ending(late).message, ending(late).kill_at) == ("exceeded its 600 s time limit", NOW + 10)


def test_how_one_that_does_not_end_is_pressed() -> None:
    cancelled = completing(JobState.CANCELLED, kill_at=NOW)
    for tries, tried_at, phase, does in (
        (0, None, "running", [("signal", 0, "KILL")]), (2, NOW - 1.9, "running", []),
        (2, NOW - 2, "running", [("signal", 0, "KILL")]), (3, NOW - 4, "running", [("remove", 0, None)]),
        (3, NOW - 3.9, "running", []), (0, None, "ready", [("remove", 0, None)]), (1, NOW - 0.5, "ready", []),
    ):  # fmt: skip
        step = reconcile_job(cancelled, ranks(tries=tries, tried_at=tried_at), world(says(phase)))
        assert verbs(step) == does, (tries, phase)
        assert step.job.state is JobState.COMPLETING
    busy = world(says("running"), busy=frozenset({(ID, 1, 0)}))
    assert reconcile_job(cancelled, ranks(), busy).operations == []
    before = completing(JobState.CANCELLED, kill_at=NOW + 0.1)
    assert verbs(reconcile_job(before, ranks(), world(says("running")))) == [("signal", 0, "TERM")]


def test_a_rank_that_cannot_be_ended_is_reported_and_its_job_does_not_wait() -> None:
    cancelled = completing(JobState.CANCELLED, kill_at=NOW - 99)
    step = reconcile_job(cancelled, ranks(tries=5, tried_at=NOW - 60), world(says("running")))
    assert (step.job.state, [e.kind for e in step.events]) == (JobState.CANCELLED, ["stuck", "ended"])
    assert (step.ranks[0].stuck, step.ranks[0].gone) == (True, False)
    again = reconcile_job(cancelled, ranks(tries=5, tried_at=NOW - 60, stuck=True), world(says("running")))
    assert ([e.kind for e in again.events], again.ranks) == (["ended"], {})
    unseen = reconcile_job(cancelled, ranks(tries=5, tried_at=NOW - 60), world(silent()))
    assert (unseen.job.state, unseen.events) == (JobState.COMPLETING, [])


def test_the_end_of_an_attempt_is_its_last_ranks_and_a_gang_that_was_lost_in_part_ends_now() -> None:
    def gang(*finished: float | None, start: float = NOW - 100) -> ReconcileResult:
        records = [
            msgspec.structs.replace(r, gone=True, exit_code=0, finished_at=at)
            for r, at in zip(ranks(2), finished, strict=True)
        ]
        ends = msgspec.structs.replace(completing(JobState.CANCELLED, 2, exit_code=7), start_time=start)
        return reconcile_job(ends, records, world())

    assert gang(NOW - 9, NOW - 3).ended_attempt == (NOW - 3, JobState.CANCELLED)
    assert gang(NOW - 9, NOW - 3).job.exit_code == 7
    assert gang(NOW - 9, None).ended_attempt == (NOW, JobState.CANCELLED)
    assert gang(NOW - 9, NOW - 8, start=NOW - 5).ended_attempt == (NOW - 5, JobState.CANCELLED)
    assert gang(NOW - 9, NOW + 8).job.end_time == NOW
