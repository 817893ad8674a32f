"""Jobs that a policy preempts: nothing is lost, nothing runs twice, and the record says what happened to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings

from gpusched.controller.cycle import Cycle
from gpusched.controller.deciding import Decision
from gpusched.controller.reconcile import reconcile_job
from gpusched.model.commands import Cancel, Requeue
from gpusched.model.jobs import Ending, JobRecord, JobState, Preemptions
from gpusched.model.plan import Plan, Preempt
from gpusched.model.policy import PolicySpec, PreemptionSettings
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.queue.snapshots import recently_finished
from gpusched.sched.decide import decide
from gpusched.sched.eligible import may_stop
from tests.builders import spec
from tests.controller.crash_orders import CrashOrders
from tests.controller.imagined import GPUS, inventory
from tests.controller.reconciling import ID, NOW, ending, ranks, says, verbs
from tests.controller.reconciling import job as job_in
from tests.controller.reconciling import world as sees
from tests.controller.site import ImaginedSite

RULES = PreemptionSettings(min_run_s=5.0, per_hour=2, restart_s=0.0)
POLICIES = {"p": PolicySpec(name="stopper", version="7", backfill="easy", place="best-fit", preempt=RULES)}


class Stopper:
    """Decides as EASY does, and stops whatever may be stopped for the first job that still waits."""

    def refresh(self, *_: object) -> None:
        pass

    def decide(self, snapshot: Snapshot, digests: Mapping[str, str]) -> Decision:
        plan = decide(snapshot)
        rest = [j.id for j in snapshot.pending if j.id in plan.reasons]
        stops = [
            Preempt(job.id, rest[0]) for job in snapshot.running if rest and may_stop(job, RULES, snapshot.now) is None
        ]
        actions = (*stops, *plan.actions)
        return Decision(msgspec.structs.replace(plan, actions=actions), dict(snapshot.policies))


class Site(ImaginedSite):
    """One whose policy stops jobs."""

    policies = POLICIES

    def begin(self, declared: Inventory) -> None:
        super().begin(declared)
        self.cycle._decider = self.cycle._planner._decider = Stopper()  # type: ignore[assignment]

    def submit(self, **more: Any) -> str:
        return self.submit_spec(spec(**more))

    def kinds(self, job_id: str) -> list[str]:
        return [e.kind for e in self.store.events(job_id=job_id)]

    def end(self, job_id: str, code: int = 0) -> None:
        for _, box in self.world.running():
            if box.name.startswith(f"gpusched-{job_id}-"):
                self.world.end(box, code)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


def filled(site: Site) -> list[str]:
    """Three jobs that fill the cluster and may be stopped, running for longer than the minimum."""
    jobs = [site.submit(gpus_per_node=GPUS, preemptible=True) for _ in range(3)]
    site.turn(3)
    assert {str(site.job(j).state) for j in jobs} == {"RUNNING"}
    site.turn(1, 10)
    return jobs


def test_a_job_is_stopped_waits_and_runs_again(site: Site) -> None:
    first, *others = filled(site)
    for job in others:
        site.store.put_jobs([msgspec.structs.replace(j := site.job(job), spec=spec_without(j))])
    before = site.job(first)
    new = site.submit(gpus_per_node=GPUS, priority=1)
    site.turn()
    stopping = site.job(first)
    assert stopping.state == JobState.COMPLETING
    assert stopping.message == f"preempted by stopper for job {new}"
    assert site.job(new).state == JobState.PENDING
    assert stopping.preemptions is None, "not yet stopped"
    site.turn()
    assert site.job(new).state == JobState.PENDING, "its nodes are given away once it is gone, not before"
    site.turn(2)
    waiting = site.job(first)
    assert waiting.state == JobState.PENDING
    kept = (waiting.submit_time, waiting.priority, waiting.spec, waiting.attempt)
    assert kept == (before.submit_time, before.priority, before.spec, 1)
    found = waiting.preemptions
    assert found is not None
    assert (found.count, found.policy, found.policy_version, found.for_job) == (1, "stopper", "7", new)
    (run,) = (r for r in site.store.runs(0, site.world.now) if r.job_id == first)
    assert run.outcome == "PREEMPTED"
    assert run.end_time is not None
    assert found.kept_s == run.end_time - run.start_time > 10
    assert found.kept_restarts == 0
    assert site.store.preempted_pending() == 1
    site.turn(2)
    assert site.job(new).state == JobState.RUNNING
    site.end(new)
    site.turn(4)
    again = site.job(first)
    assert (again.state, again.attempt, again.preemptions) == (JobState.RUNNING, 2, found)
    site.end(first)
    site.turn(3)
    assert site.job(first).state == JobState.COMPLETED
    assert [k for k in site.kinds(first) if k in ("running", "preempted", "requeued", "ended")] == [
        "running", "preempted", "requeued", "running", "ended",
    ]  # fmt: skip
    done = {f.submit_time: f for f in recently_finished(site.store, {"p": PolicySpec(name="x", agent="rltune")})}
    assert done[before.submit_time].preemptions == found
    assert done[before.submit_time].attempt == 2


def spec_without(job: JobRecord) -> Any:
    return msgspec.structs.replace(job.spec, preemptible=False)


def test_a_nonpreemptible_job_is_not_stopped_by_any_policy(site: Site) -> None:
    site.cycle._decider.decide = lambda snapshot, digests: Decision(  # type: ignore[method-assign]
        Plan(actions=tuple(Preempt(j.id) for j in snapshot.running)), dict(snapshot.policies)
    )
    site.store.put_jobs(
        [job_in(JobState.RUNNING, id="solid", submit_time=0.0, start_time=site.world.now - 1e6)]
    )  # fmt: skip
    site.submit()
    site.turn()
    assert site.job("solid").state != JobState.COMPLETING or site.job("solid").reason != "Preempted"
    refused = [e.data["why"] for e in site.store.events() if e.kind == "plan_rejected"]
    assert all("is not preemptible" in why or "is not running" in why for why in refused)


def test_no_more_often_than_the_rules_say(site: Site) -> None:
    (job, *_) = filled(site)
    site.submit(gpus_per_node=GPUS, nodes=2)
    for _ in range(40):
        site.turn(1, 5)
    preempted = [e.time for e in site.store.events(job_id=job) if e.kind == "preempted"]
    assert 1 <= len(preempted) <= 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cycles", [0, 1, 2, 3])
def test_a_controller_that_dies_at_any_moment_of_it(site: Site, cycles: int, late: bool) -> None:
    jobs = filled(site)
    new = site.submit(gpus_per_node=GPUS)
    site.turn(cycles, heard=True)
    site.turn(1, heard=False)
    site.cluster.crash(late)
    site.begin(inventory())
    site.turn(8)
    for _ in range(12):
        site.turn(2)
        for _, box in site.world.running():
            site.world.end(box, 0)
    site.turn(4)
    for job in (*jobs, new):
        assert site.job(job).state == JobState.COMPLETED, site.job(job)
    assert len(site.world.starts) == len(set(site.world.starts))
    assert site.store.ranks() == []


def test_cancelled_while_it_is_stopped_it_is_cancelled(site: Site) -> None:
    job, *_ = filled(site)
    site.submit(gpus_per_node=GPUS)
    site.turn()
    assert site.job(job).reason == "Preempted"
    site.inbox.deliver(Cancel(time=site.world.now, job_ids=(job,)))
    site.turn(4)
    assert site.job(job).state == JobState.CANCELLED
    assert site.job(job).preemptions is None


def test_queued_anew_after_its_end_it_begins_from_the_beginning(site: Site) -> None:
    job, *_ = filled(site)
    new = site.submit(gpus_per_node=GPUS)
    site.turn(6)
    site.inbox.deliver(Cancel(time=site.world.now, job_ids=(job, new)))
    site.turn(4)
    assert site.job(job).preemptions is not None
    site.inbox.deliver(Requeue(time=site.world.now, job_ids=(job,)))
    site.turn()
    assert site.job(job).preemptions is None


# -- one step


def stopping(decided: float = NOW - 5, nodes: int = 1, **more: Any) -> JobRecord:
    made = Preemptions().once_more(decided, "stopper", "7", "other")
    how = Ending(
        outcome=JobState.PENDING, reason="Preempted", message="stopped", kill_at=decided + 10, preemptions=made
    )
    return job_in(JobState.COMPLETING, nodes, ending=how, **more)


def test_it_is_asked_to_end_then_made_to() -> None:
    step = reconcile_job(stopping(), ranks(), sees(says("running")))
    assert verbs(step) == [("signal", 0, "TERM")]
    step = reconcile_job(stopping(NOW - 11), ranks(signalled="TERM"), sees(says("running")))
    assert verbs(step) == [("signal", 0, "KILL")]


def test_no_job_is_killed_without_a_signal_first() -> None:
    """The controller was down for longer than the grace: the job is still to save its work."""
    step = reconcile_job(stopping(NOW - 900), ranks(), sees(says("running")))
    assert verbs(step) == [("signal", 0, "TERM")]
    assert ending(step).kill_at == NOW + 10
    assert [e.kind for e in step.events] == ["ending"]
    cancelled = Ending(outcome=JobState.CANCELLED, reason="x", kill_at=NOW - 890)
    step = reconcile_job(job_in(JobState.COMPLETING, ending=cancelled), ranks(), sees(says("running")))
    assert verbs(step) == [("signal", 0, "KILL")], "one that is cancelled is"
    step = reconcile_job(stopping(NOW - 11), ranks(trouble="no space left on device"), sees(says("running")))
    assert verbs(step) == [("signal", 0, "KILL")], "so is one that its node could not signal, else it would go on"


@pytest.mark.parametrize("code", [0, 1, 143])
def test_after_a_signal_every_exit_is_a_stop(code: int) -> None:
    """Many a job saves its work and exits with 0."""
    done = says("exited", exit_code=code, finished_at=NOW - 2)
    step = reconcile_job(stopping(), ranks(signalled="TERM"), sees(done))
    assert step.job.state == JobState.PENDING
    assert step.ended_attempt == (NOW - 2, JobState.PREEMPTED)
    assert step.job.preemptions is not None
    assert step.job.preemptions.kept_s == 98.0
    assert step.job.id == ID
    unsignalled = reconcile_job(stopping(), ranks(), sees(done))
    assert unsignalled.job.state == JobState.PENDING, "a crash may have lost the note of the signal"


@pytest.mark.parametrize(("code", "state"), [(0, JobState.COMPLETED), (3, JobState.FAILED)])
def test_a_job_that_ended_before_the_decision_has_ended(code: int, state: JobState) -> None:
    step = reconcile_job(stopping(), ranks(), sees(says("exited", exit_code=code, finished_at=NOW - 6)))
    assert step.job.state == state
    assert step.job.exit_code == code
    assert step.job.preemptions is None
    assert step.ended_attempt == (NOW - 6, state)


def test_a_gang_whose_rank_had_failed_before_fails() -> None:
    answers = says("exited", exit_code=9, finished_at=NOW - 6), says("running", 1)
    step = reconcile_job(stopping(nodes=2), ranks(2), sees(*answers))
    assert ending(step).outcome == JobState.FAILED
    assert "rank 0" in ending(step).message
    answers = says("exited", exit_code=0, finished_at=NOW - 6), says("exited", 1, exit_code=9, finished_at=NOW - 6)
    step = reconcile_job(stopping(nodes=2), ranks(2), sees(*answers))
    assert (step.job.state, step.job.exit_code) == (JobState.FAILED, 9), "not by the first to end, which did well"


def test_an_attempt_lost_with_its_node_has_saved_nothing() -> None:
    earlier = Preemptions(count=1, times=(NOW - 900,), kept_s=500.0)
    how = Ending(outcome=JobState.PENDING, reason="Preempted", kill_at=NOW, preemptions=earlier)
    gone = job_in(JobState.COMPLETING, ending=how)
    step = reconcile_job(gone, ranks(), sees({}, dead=frozenset({"n0"})))
    assert step.job.state == JobState.PENDING
    assert step.job.preemptions == earlier


def test_how_much_was_had_and_how_often() -> None:
    found = Preemptions().once_more(10.0, "a", "1", "x").with_run(100.0, False)
    found = found.once_more(2000.0, "b", "2", "y").with_run(50.0, True)
    assert (found.count, found.kept_s, found.policy, found.for_job) == (2, 150.0, "b", "y")
    assert found.had_s(0.0) == 150.0
    assert found.had_s(30.0) == 120.0, "the first run did not begin with loading anything"
    assert found.too_soon(2000.0, 2)
    assert not found.too_soon(3610.0, 2)
    assert found.too_soon(3610.0, 1)
    assert not found.too_soon(2000.0, 0)
    assert found.once_more(9000.0, "b", "2", "y").times == (9000.0,)


# -- any order of crashes


class PreemptOrders(CrashOrders):
    """`CrashOrders` with a policy that stops all that it may."""

    preemptible = True

    def _start_controller(self) -> None:
        super()._start_controller()
        self.cycle = Cycle(self.store, self.state, inventory(), POLICIES, self.cluster, clock=lambda: self.world.now)
        self.cycle._decider = self.cycle._planner._decider = Stopper()  # type: ignore[assignment]

    def _cycle(self, fates: list[str], seconds: int) -> None:
        super()._cycle(fates, seconds)
        stopped = [e.job_id for e in self.store.events(limit=100_000) if e.kind == "preempted"]
        self.disturbed.update(job for job in stopped if job is not None)


TestPreemptOrders = PreemptOrders.TestCase
TestPreemptOrders.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
