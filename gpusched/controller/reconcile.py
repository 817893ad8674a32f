"""What should be against what is: from one job, its ranks and what its nodes answered, to the next step. Pure.

Level-triggered: each call looks at the whole and names everything that should be done now; nothing depends on a message
having been seen before. An operation that is under way for a rank keeps that rank from being given another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpusched.cluster.base import Observation, Operation, RankKey
from gpusched.controller.escalating import TRIES_TO_REMOVE, gives_up, is_due, stuck_event
from gpusched.controller.fold import back_in_queue
from gpusched.controller.launchfaults import Failures, Fault, fault_of, is_jobs_fault
from gpusched.model.events import Event
from gpusched.model.jobs import Ending, Job, JobState, Preemptions, container_name
from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.model.resources import Settings
from gpusched.model.units import format_memory
from gpusched.queue.lifecycle import move
from gpusched.queue.store import NodeRecord, RankRecord


class ReconcileInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may know besides the job.

    Attributes:
        observations: News of this cycle by node; a node without any is not known better than before.
        dead: Nodes that have been down for so long that their jobs are given up.
        busy: Ranks with an operation under way.
        launch_errors: Launches that the node or we refused, with the reason.
        earlier: Nodes' records before this cycle, with their last readings.
        failed_launches: Of each node, those of late (see `launchfaults`).
    """

    now: float
    settings: Settings
    observations: Mapping[str, Observation]
    dead: frozenset[str]
    busy: frozenset[RankKey]
    launch_errors: Mapping[RankKey, str] = {}
    earlier: Mapping[str, NodeRecord] = {}
    failed_launches: Failures = {}


class Step(msgspec.Struct, kw_only=True):
    """What follows for one job.

    Attributes:
        job: Its new self.
        events: Facts to record.
        ranks: Rank records that changed, by rank.
        operations: Things to do on nodes.
        to_launch: Ranks whose launch has not arrived and is to be sent (again).
        launch_failed: (node, error) where it could not be launched, not plainly by its own fault.
        ended_attempt: (when, outcome) when the attempt is over and had begun to run.
    """

    job: Job
    events: list[Event] = msgspec.field(default_factory=list)
    ranks: dict[int, RankRecord] = msgspec.field(default_factory=dict)
    operations: list[Operation] = msgspec.field(default_factory=list)
    to_launch: list[RankRecord] = msgspec.field(default_factory=list)
    launch_failed: tuple[str, str] | None = None
    ended_attempt: tuple[float, JobState] | None = None


class Seen(msgspec.Struct, frozen=True):
    """One rank with what its node says of it.

    ``phase`` is a `ContainerReading` phase, ``absent`` (the node answered after the launch and has nothing),
    ``unlaunched``, ``gone`` (ended, or its node is given up) or ``unknown``.
    """

    rank: RankRecord
    phase: str
    container: ContainerReading | None = None
    rebooted: bool = False


def reconcile_job(job: Job, ranks: list[RankRecord], world: ReconcileInput) -> Step:
    """The next step of a job that holds resources.

    Args:
        job: STARTING, RUNNING or COMPLETING.
        ranks: The records of its current attempt, in order of rank.
        world: What is known.
    """
    step = Step(job=job)
    seen = [_look(rank, step, world) for rank in ranks]
    if step.job.state is JobState.STARTING:
        _starting(step, seen, world)
    if step.job.state is JobState.RUNNING:
        _running(step, seen, world)
    if step.job.state is JobState.COMPLETING:
        _completing(step, seen, world)
    return step


def container_of(rank: RankRecord, reading: NodeReading) -> ContainerReading | None:
    """What a reading says of a rank's container."""
    name = container_name(rank.job_id, rank.attempt, rank.rank)
    return next((c for c in reading.containers or () if c.name == name), None)


# -- looking -----------------------------------------------------------------------------------------------------


def _look(rank: RankRecord, step: Step, world: ReconcileInput) -> Seen:
    if rank.gone:
        return Seen(rank, "gone")
    if error := world.launch_errors.get(rank_key(rank)):
        name = container_name(rank.job_id, rank.attempt, rank.rank)
        return Seen(rank, "failed", ContainerReading(name=name, phase="failed", error=error))
    observation = world.observations.get(rank.node)
    reading = observation.whole if observation is not None else None
    if reading is None:
        if rank.node in world.dead:
            return Seen(_update(step, rank, gone=True), "gone")
        return Seen(rank, "unknown")
    container = container_of(rank, reading)
    if container is None:
        return Seen(rank, _absence(rank, observation, world))
    rebooted = rank.boot_id is not None and reading.boot_id is not None and rank.boot_id != reading.boot_id
    changes: dict[str, Any] = {}
    if rank.boot_id is None:
        changes["boot_id"] = reading.boot_id
    if rank.launched_at is None:
        changes["launched_at"] = reading.time
    if container.phase == "exited" and rank.finished_at is None:
        finished = _finished(rank, container, reading, world)
        changes |= {"exit_code": container.exit_code, "oom_killed": container.oom_killed, "finished_at": finished}
    return Seen(_update(step, rank, **changes) if changes else rank, container.phase, container, rebooted)


def _finished(rank: RankRecord, container: ContainerReading, reading: NodeReading, world: ReconcileInput) -> float:
    """When a rank ended: by its node's clock, but not before it was last seen to run, for that clock may be set."""
    if container.finished_at is None:
        return world.now
    record = world.earlier.get(rank.node)
    last = record.reading if record is not None else None
    before = container_of(rank, last) if last is not None else None
    ran_until = last.time if last is not None and before is not None and before.phase == "running" else 0.0
    return min(max(container.finished_at - (reading.clock_skew_s or 0.0), ran_until), world.now)


def _absence(rank: RankRecord, observation: Observation | None, world: ReconcileInput) -> str:
    assert observation is not None
    if rank_key(rank) in world.busy:
        return "unknown"  # the launch is on its way
    if rank.launched_at is None:
        return "unlaunched"
    return "absent" if observation.began > rank.launched_at else "unknown"


def _update(step: Step, rank: RankRecord, **changes: Any) -> RankRecord:
    changed = msgspec.structs.replace(rank, **changes)
    step.ranks[rank.rank] = changed
    return changed


def rank_key(rank: RankRecord) -> RankKey:
    """The key operations are known by."""
    return rank.job_id, rank.attempt, rank.rank


# -- STARTING ----------------------------------------------------------------------------------------------------


def _starting(step: Step, seen: list[Seen], world: ReconcileInput) -> None:
    phases = {s.phase for s in seen}
    for s in seen:
        if s.phase == "failed":
            _launch_failed(step, s, world)
            return
        if s.phase in ("lost", "absent"):
            why = "the launcher died" if s.phase == "lost" else "the node has nothing of the launch"
            _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node}: {why.removeprefix(f'{s.rank.node}: ')}", world)
            return
    if step.job.spec.nodes > len(seen) or "gone" in phases:
        dead = tuple(s.rank.node for s in seen if s.phase == "gone")
        message = f"node {', '.join(dead)} went down while starting"
        _end(step, JobState.NODE_FAIL, "NodeFail", message, world, grace=0, blame=dead)
    elif phases <= {"running", "exited"}:
        _began(step, seen, world)
    elif phases <= {"ready", "running", "exited"}:
        for s in seen:
            if s.phase == "ready" and gives_up(s.rank, world.now):
                reason = s.rank.trouble or "the node gave no reason"
                _node_fault(step, s, f"rank {s.rank.rank} on {s.rank.node} could not be started: {reason}", world)
                return
        ready = [s for s in seen if s.phase == "ready" and _idle(s, world) and is_due(s.rank, world.now)]
        step.operations += [_operation("start", s) for s in ready]
    else:
        step.to_launch += [s.rank for s in seen if s.phase == "unlaunched" and _idle(s, world)]


def _began(step: Step, seen: list[Seen], world: ReconcileInput) -> None:
    starts = []
    for s in seen:
        if s.rank.tries:
            _update(step, step.ranks.get(s.rank.rank, s.rank), tries=0, tried_at=None)
        starts.append(s.rank.intended_at or step.job.submit_time)  # a node's clock may be behind
        observation = world.observations[s.rank.node].result
        assert isinstance(observation, NodeReading)
        if s.container and s.container.ran_s is not None:
            starts.append(observation.time - s.container.ran_s)
        elif s.container and s.container.started_at is not None:
            starts.append(s.container.started_at - (observation.clock_skew_s or 0.0))
    start = min(max(starts), world.now)
    fields = {"start_time": start, "reason": "", "message": "", "unlaunched_on": ()}
    step.job, event = move(step.job, JobState.RUNNING, world.now, event="running", data={"start": start}, **fields)
    step.events.append(event)


def _launch_failed(step: Step, s: Seen, world: ReconcileInput) -> None:
    assert s.container is not None
    error = s.container.error or "the launcher gave no reason"
    message = f"rank {s.rank.rank} on {s.rank.node} could not be launched: {error}"
    fault = fault_of(error, step.job.spec)
    if fault in (Fault.NODE, Fault.OWN):
        step.launch_failed = (s.rank.node, error)
    if is_jobs_fault(fault, step.job, s.rank.node, world.failed_launches):
        if earlier := [n for n in dict.fromkeys(step.job.unlaunched_on) if n != s.rank.node]:
            message += f" (as on {', '.join(earlier)} before)"
        _end(step, JobState.FAILED, "LaunchFailed", message, world, grace=0, exit_code=s.container.exit_code)
        return
    if fault is not Fault.REGISTRY:
        step.job = msgspec.structs.replace(step.job, unlaunched_on=(*step.job.unlaunched_on, s.rank.node))
    _node_fault(step, s, message, world)


def _node_fault(step: Step, s: Seen, message: str, world: ReconcileInput) -> None:
    _end(step, JobState.NODE_FAIL, "NodeFail", message, world, grace=0, blame=(s.rank.node,))


# -- RUNNING -----------------------------------------------------------------------------------------------------


def _running(step: Step, seen: list[Seen], world: ReconcileInput) -> None:
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
    if bad:
        _failed(step, bad[0], world)
    elif len(finished) == len(seen):
        _end(step, JobState.COMPLETED, "", "", world, grace=0, exit_code=0)
    elif _ran_s(job, seen, world) >= job.spec.time_limit_s and any(s.phase == "running" for s in seen):
        # Only what is seen to run has run into it: a job on a node that cannot be asked may have ended in time.
        message = f"ran into its limit of {job.spec.time_limit_s} s"
        _end(step, JobState.TIMEOUT, "TimeLimit", message, world, grace=settings.grace_s)
    elif any(s.rank.rank == 0 for s in finished):
        # The gang ends as one: once rank 0 is done the others have the grace to follow.
        _end(step, JobState.COMPLETED, "", "", world, grace=settings.grace_s, exit_code=0)
    else:
        _warn_before_limit(step, seen, world)


def _ran_s(job: Job, seen: list[Seen], world: ReconcileInput) -> float:
    """Seconds that a job has run: by its nodes' own boot clocks, which nobody sets; by ours where they do not say."""
    ran = [s.container.ran_s for s in seen if s.phase == "running" and s.container and s.container.ran_s is not None]
    if ran:
        return min(ran)  # a gang runs once its last rank does
    return world.now - job.start_time if job.start_time is not None else 0.0


def _failed(step: Step, s: Seen, world: ReconcileInput) -> None:
    outcome, reason, message = _failure(step.job, s.rank)
    _end(step, outcome, reason, message, world, grace=world.settings.grace_s, exit_code=s.rank.exit_code)


def _failure(job: Job, rank: RankRecord) -> tuple[JobState, str, str]:
    """What becomes of a job by a rank that failed: its state, and why in a word and in a sentence."""
    where = f"rank {rank.rank} on {rank.node}"
    if rank.oom_killed:
        memory = format_memory(job.spec.memory_mib_per_node)
        message = f"{where} ran out of memory ({memory} asked for): the kernel ended a process of it"
        return JobState.OUT_OF_MEMORY, "OutOfMemory", message
    if rank.exit_code == 137 and rank.signalled not in ("KILL", "9"):
        # Only containers have a limit on memory whose crossing is known.
        also = "" if rank.runtime in ("podman", "docker") else ", by hand or for want of the node's memory"
        return JobState.FAILED, "NonZeroExitCode", f"{where} was killed by signal KILL from outside{also} (137)"
    code = rank.exit_code if rank.exit_code is not None else "an unknown code"
    return JobState.FAILED, "NonZeroExitCode", f"{where} exited with {code}"


def _warn_before_limit(step: Step, seen: list[Seen], world: ReconcileInput) -> None:
    spec = step.job.spec
    if spec.signal_before_s is None:
        return
    if _ran_s(step.job, seen, world) >= spec.time_limit_s - spec.signal_before_s:
        step.operations += [
            _operation("signal", s, signal=spec.signal)
            for s in seen
            if s.phase == "running" and s.rank.signalled is None and _idle(s, world)
        ]


def _end(
    step: Step,
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
    step.job, event = move(
        step.job,
        JobState.COMPLETING,
        world.now,
        event="ending",
        data={"outcome": outcome, "message": message},
        ending=ending,
        reason=reason,
        message=message,
        excluded_nodes=tuple(dict.fromkeys((*step.job.excluded_nodes, *blame))),
    )
    step.events.append(event)


# -- COMPLETING --------------------------------------------------------------------------------------------------


def _completing(step: Step, seen: list[Seen], world: ReconcileInput) -> None:
    ending = _own_end(step, seen, world) or _asked_late(step, seen, world) or step.job.ending
    assert ending is not None
    left = False
    for s in seen:
        if s.phase in ("gone", "exited", "failed", "lost", "absent"):
            if not s.rank.gone:
                _update(step, step.ranks.get(s.rank.rank, s.rank), gone=True)
        elif s.phase == "unlaunched":
            # Nothing was sent, or it is not known to have arrived; what turns up later is fenced as a stray.
            _update(step, s.rank, gone=True)
        elif s.rank.stuck or (s.phase != "unknown" and gives_up(s.rank, world.now)):
            # Its GPUs stay blocked by its record, until it is gone; the job need not wait for that.
            if not s.rank.stuck:
                _update(step, step.ranks.get(s.rank.rank, s.rank), stuck=True)
                step.events.append(stuck_event(s.rank, world.now))
        else:
            left = True
            if s.phase != "unknown" and _idle(s, world):
                _press(step, s, ending, world)
    if not left:
        _close(step, seen, ending, world)


def _own_end(step: Step, seen: list[Seen], world: ReconcileInput) -> Ending | None:
    """How a job ends that a policy meant to stop, and that had come to its own end before; None elsewhere.

    Only what ended before the decision, and was sent no signal, has ended by itself: many a job that is told to end
    saves its work and exits with 0.
    """
    ending = step.job.ending
    if ending is None or ending.preemptions is None:
        return None
    decided = ending.preemptions.times[-1]
    early = [
        s.rank for s in seen
        if s.rank.signalled is None and s.rank.finished_at is not None and s.rank.finished_at < decided
    ]  # fmt: skip
    rank = next((r for r in early if r.exit_code != 0), None) or next((r for r in early if r.rank == 0), None)
    if rank is None:
        return None
    outcome, reason, message = (JobState.COMPLETED, "", "") if rank.exit_code == 0 else _failure(step.job, rank)
    own = Ending(
        outcome=outcome, reason=reason, message=message, kill_at=ending.kill_at, exit_code=rank.exit_code
    )  # fmt: skip
    step.job = msgspec.structs.replace(step.job, ending=own, reason=reason, message=message)
    data = {"outcome": outcome, "message": message or "it had ended before it was to be stopped"}
    step.events.append(Event(time=world.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return own


def _asked_late(step: Step, seen: list[Seen], world: ReconcileInput) -> Ending | None:
    """A new grace for a job that is stopped for another and that nobody has asked to end: it is to save its work.

    The controller was down meanwhile, or the node could not be reached. None: it needs none.
    """
    ending = step.job.ending
    if ending is None or ending.preemptions is None or world.now < ending.kill_at:
        return None
    if not any(s.phase == "running" and s.rank.signalled is None and _idle(s, world) for s in seen):
        return None
    again = msgspec.structs.replace(ending, kill_at=world.now + world.settings.grace_s)
    step.job = msgspec.structs.replace(step.job, ending=again)
    data = {"outcome": ending.outcome, "message": f"{ending.message}; asked to end only now"}
    step.events.append(Event(time=world.now, kind="ending", job_id=step.job.id, user=step.job.user, data=data))
    return again


def _press(step: Step, s: Seen, ending: Ending, world: ReconcileInput) -> None:
    """Ask a rank to end, then make it."""
    if s.phase in ("preparing", "ready") or s.rank.tries >= TRIES_TO_REMOVE:
        if is_due(s.rank, world.now):
            # It has not begun, so there is no output; or it cannot be ended.
            step.operations.append(_operation("remove", s))
    elif world.now >= ending.kill_at:
        if is_due(s.rank, world.now):
            step.operations.append(_operation("signal", s, signal="KILL"))
    elif s.rank.signalled in (None, step.job.spec.signal if step.job.spec.signal_before_s is not None else None):
        polite = "TERM" if step.job.spec.signal_before_s is not None else step.job.spec.signal
        if ending.outcome is not JobState.COMPLETED:  # a gang whose rank 0 is done may finish by itself
            step.operations.append(_operation("signal", s, signal=polite))


def _close(step: Step, seen: list[Seen], ending: Ending, world: ReconcileInput) -> None:
    """All ranks are gone: the outcome becomes the job's state, or it goes back to the queue."""
    job, now = step.job, world.now
    finished = [s.rank.finished_at for s in seen if s.rank.finished_at is not None]
    end = max(finished) if finished and len(finished) == len(seen) else now
    if job.start_time is not None:
        end = min(max(end, job.start_time), now)
        step.ended_attempt = (end, ending.outcome if ending.preemptions is None else JobState.PREEMPTED)
    if ending.preemptions is not None:
        fields = back_in_queue(ending.message) | {"preemptions": _stopped(job, ending.preemptions, seen, end)}
        step.job, event = move(job, JobState.PENDING, now, event="requeued", data={"outcome": "PREEMPTED"}, **fields)
    elif ending.outcome is JobState.PENDING:
        fields = back_in_queue(ending.message)
        step.job, event = move(job, JobState.PENDING, now, event="requeued", retries=0, **fields)
    elif ending.outcome is JobState.NODE_FAIL and job.spec.requeue and job.retries < world.settings.max_retries:
        wait = retry_delay_s(job.retries)
        fields = back_in_queue(f"attempt {job.attempt} failed ({ending.message}); tried again after {wait} s")
        fields |= {"retries": job.retries + 1, "eligible_time": now + wait}
        step.job, event = move(job, JobState.PENDING, now, event="requeued", data={"outcome": "NODE_FAIL"}, **fields)
    else:
        codes = [s.rank.exit_code for s in seen if s.rank.exit_code]
        code = ending.exit_code if ending.exit_code is not None else next(iter(codes), None)
        if ending.outcome is JobState.COMPLETED and codes:
            # A rank failed while the gang was already on its way out after rank 0's success.
            code = codes[0] if any(s.rank.exit_code not in (None, 0, 137, 143) for s in seen) else 0
        outcome = JobState.FAILED if ending.outcome is JobState.COMPLETED and code else ending.outcome
        reason = "NonZeroExitCode" if outcome is not ending.outcome else ending.reason
        step.job, event = move(
            job,
            outcome,
            now,
            event="ended",
            data={"exit_code": code, "end": end, "message": ending.message},
            end_time=end,
            exit_code=code,
            ending=None,
            reason=reason,
        )
    step.events.append(event)


def _stopped(job: Job, preemptions: Preemptions, seen: list[Seen], end: float) -> Preemptions:
    """With what the stopped attempt ran; one that was lost with its node has saved nothing that one could count on."""
    if job.start_time is None or any(s.rank.finished_at is None for s in seen):
        return preemptions
    return preemptions.with_run(end - job.start_time, job.attempt > 1)


def retry_delay_s(retries: int) -> int:
    """Seconds before the next try after a node's failure: 10, 20, 40 ... 600, so that a bad hour burns few retries."""
    return int(min(600, 10 * 2**retries))


def _idle(s: Seen, world: ReconcileInput) -> bool:
    return rank_key(s.rank) not in world.busy


def _operation(verb: Literal["start", "signal", "remove"], s: Seen, signal: str | None = None) -> Operation:
    return Operation(verb=verb, node=s.rank.node, rank=s.rank, signal=signal)
