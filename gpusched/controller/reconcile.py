"""What should be against what is: from one job, its ranks and what its nodes answered, to the next step. Pure.

Level-triggered: each call looks at the whole and names everything that should be done now; nothing depends on a message
having been seen before. An operation that is under way for a rank keeps that rank from being given another.
"""

from __future__ import annotations

import msgspec

from gpusched.controller import attendance
from gpusched.controller.completing import complete, failure_of
from gpusched.controller.escalating import gives_up, is_due
from gpusched.controller.launchfaults import Fault, fault_of, is_jobs_fault
from gpusched.controller.ranks import (
    RankStatus,
    ReconcileInput,
    ReconcileResult,
    is_idle,
    operation_on,
    rank_status,
    update,
)
from gpusched.controller.resizing import look_after_resize
from gpusched.model.jobs import Ending, JobRecord, JobState
from gpusched.model.readings import NodeReading
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import RankRecord


def reconcile_job(job: JobRecord, ranks: list[RankRecord], world: ReconcileInput) -> ReconcileResult:
    """The next step of a job that holds resources; ``ranks``: of its current attempt, in order."""
    step = ReconcileResult(job=job)
    seen = [rank_status(rank, step, world) for rank in ranks]
    if step.job.state is JobState.STARTING:
        _starting(step, seen, world)
    if step.job.state is JobState.RUNNING:
        _running(step, seen, world)
    if step.job.state is JobState.COMPLETING:
        complete(step, seen, world)
    return step


def _starting(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> None:
    phases = {s.phase for s in seen}
    for s in seen:
        if s.phase == "failed":
            _launch_failed(step, s, world)
            return
        if s.phase in ("lost", "absent"):
            why = "the launcher died" if s.phase == "lost" else "the node has no trace of the launch"
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node}: {why.removeprefix(f'{s.rank.node}: ')}", world)
            return
    if step.job.spec.nodes > len(seen) or "gone" in phases:
        dead = tuple(s.rank.node for s in seen if s.phase == "gone")
        message = f"node {', '.join(dead)} went down while starting"
        _end(step, JobState.NODE_FAIL, "NodeFail", message, world, grace=0, blame=dead)
    elif phases <= {"running", "exited"}:
        _began(step, seen, world)
    elif phases <= {"ready", "running", "exited"} and attendance.is_awaited(step.job, seen):
        if message := attendance.given_up(step.job, seen, world):
            _end(step, JobState.TIMEOUT, attendance.REASON, message, world, grace=0)
    elif phases <= {"ready", "running", "exited"}:
        for s in seen:
            if s.phase == "ready" and gives_up(s.rank, world.now):
                reason = s.rank.trouble or "no reason given by the node"
                _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} could not be started: {reason}", world)
                return
        ready = [s for s in seen if s.phase == "ready" and is_idle(s, world) and is_due(s.rank, world.now)]
        step.operations += [operation_on("start", s) for s in ready]
    else:
        step.to_launch += [s.rank for s in seen if s.phase == "unlaunched" and is_idle(s, world)]


def _began(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> None:
    starts = []
    for s in seen:
        if s.rank.tries:
            update(step, s.rank, tries=0, tried_at=None)
        starts.append(s.rank.intended_at or step.job.submit_time)  # a node's clock may be behind
        observation = world.observations[s.rank.node].result
        assert isinstance(observation, NodeReading)
        if s.container and s.container.ran_s is not None:
            starts.append(observation.time - s.container.ran_s)
        elif s.container and s.container.started_at is not None:
            starts.append(s.container.started_at - (observation.clock_skew_s or 0.0))
    start = min(max(starts), world.now)
    fields = {"start_time": start, "reason": "", "message": "", "unlaunched_on": ()}
    step.job, event = transition_to(
        step.job, JobState.RUNNING, world.now, event="running", data={"start": start}, **fields
    )
    step.began = step.job
    step.events.append(event)


def _launch_failed(step: ReconcileResult, s: RankStatus, world: ReconcileInput) -> None:
    assert s.container is not None
    error = s.container.error or "no reason given by the launcher"
    message = f"rank {s.rank.rank} on {s.rank.node} could not be launched: {error}"
    fault = fault_of(error, step.job.spec)
    if fault in (Fault.NODE, Fault.OWN):
        step.launch_failed = (s.rank.node, error, fault)
    if is_jobs_fault(fault, step.job, s.rank.node, world.failed_launches):
        if earlier := [n for n in dict.fromkeys(step.job.unlaunched_on) if n != s.rank.node]:
            message += f" (as earlier on {', '.join(earlier)})"
        _end(step, JobState.FAILED, "LaunchFailed", message, world, grace=0, exit_code=s.container.exit_code)
        return
    if fault is not Fault.REGISTRY:
        step.job = msgspec.structs.replace(step.job, unlaunched_on=(*step.job.unlaunched_on, s.rank.node))
    _node_fault(step, s, message, world)


def _node_fault(step: ReconcileResult, s: RankStatus, message: str, world: ReconcileInput) -> None:
    _end(step, JobState.NODE_FAIL, "NodeFail", message, world, grace=0, blame=(s.rank.node,))


def _running(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> None:
    job, settings = step.job, world.settings
    for s in seen:
        if s.phase in ("absent", "lost", "ready", "failed") or (s.rebooted and s.phase not in ("exited", "running")):
            error = s.container.error if s.container is not None else None
            why = "the node was rebooted" if s.rebooted else error or f"its container is {s.phase}"
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} vanished: {why}", world)
            return
    if gone := [s for s in seen if s.phase == "gone" and s.rank.finished_at is None]:
        nodes = tuple(s.rank.node for s in gone)
        message = f"node {', '.join(nodes)} is down"
        _end(step, JobState.NODE_FAIL, "NodeFail", message, world, grace=settings.grace_s, blame=nodes)
        return
    finished = [s for s in seen if s.rank.finished_at is not None]
    bad = [s for s in finished if s.rank.exit_code != 0]
    if look_after_resize(step, seen, failure_of(job, bad[0].rank)[2] if bad else "", world):
        return
    if bad:
        outcome, reason, message = failure_of(job, bad[0].rank)
        _end(step, outcome, reason, message, world, grace=settings.grace_s, exit_code=bad[0].rank.exit_code)
    elif len(finished) == len(seen):
        _end(step, JobState.COMPLETED, "", "", world, grace=0, exit_code=0)
    elif _ran_s(job, seen, world) >= job.limit_s and any(s.phase == "running" for s in seen):
        # Only what is seen to run has run into it: a job on a node that cannot be asked may have ended in time.
        message = f"exceeded its {job.spec.time_limit_s} s time limit"
        _end(step, JobState.TIMEOUT, "TimeLimit", message, world, grace=settings.grace_s)
    elif message := attendance.given_up(job, seen, world):
        _end(step, JobState.TIMEOUT, attendance.REASON, message, world, grace=settings.grace_s)
    elif any(s.rank.rank == 0 for s in finished):
        # The gang ends as one: once rank 0 is done the others have the grace to follow.
        _end(step, JobState.COMPLETED, "", "", world, grace=settings.grace_s, exit_code=0)
    else:
        _warn_before_limit(step, seen, world)


def _ran_s(job: JobRecord, seen: list[RankStatus], world: ReconcileInput) -> float:
    """Seconds that a job has run: by its nodes' own boot clocks, which nobody sets; by ours where they do not say."""
    ran = [s.container.ran_s for s in seen if s.phase == "running" and s.container and s.container.ran_s is not None]
    if ran:
        return min(ran)  # a gang runs once its last rank does
    return world.now - job.start_time if job.start_time is not None else 0.0


def _warn_before_limit(step: ReconcileResult, seen: list[RankStatus], world: ReconcileInput) -> None:
    spec = step.job.spec
    if spec.signal_before_s is not None and _ran_s(step.job, seen, world) >= step.job.limit_s - spec.signal_before_s:
        step.operations += [
            operation_on("signal", s, signal=spec.signal)
            for s in seen
            if s.phase == "running" and s.rank.signalled is None and is_idle(s, world)
        ]


def _end(
    step: ReconcileResult,
    outcome: JobState,
    reason: str,
    message: str,
    world: ReconcileInput,
    *,
    grace: float,
    exit_code: int | None = None,
    blame: tuple[str, ...] = (),
) -> None:
    ending = Ending(outcome=outcome, reason=reason, message=message, kill_at=world.now + grace, exit_code=exit_code)
    excluded = tuple(dict.fromkeys((*step.job.excluded_nodes, *blame)))
    fields = {"ending": ending, "reason": reason, "message": message, "excluded_nodes": excluded}
    data = {"outcome": outcome, "message": message}
    step.job, event = transition_to(step.job, JobState.COMPLETING, world.now, event="ending", data=data, **fields)
    step.events.append(event)
