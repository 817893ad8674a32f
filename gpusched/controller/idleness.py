"""Jobs whose GPUs are all idle: their users are warned, then what the inventory's ``idle`` says is done, once. Pure.

The measure is that of usage reports (`gpusched.accounting.usage.utilization_between`). Only time that was measured can
be idle: a GPU whose utilization is unknown, and a node without a reading for some ticks, end the idle time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpusched.accounting.usage import own_utilization, utilization_between
from gpusched.cluster.base import NodeObservation
from gpusched.model.events import Event
from gpusched.model.idle import IDLE_POLICY, IdleAction, IdleRule, IdleRules, IdleState
from gpusched.model.jobs import Ending, JobRecord, JobSpec, JobState, NodeAllocation, Preemptions
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Inventory
from gpusched.model.units import format_duration
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import NodeRecord

REASON = "IdleLimit"
MAX_GAP_TICKS = 3
MIN_GAP_S = 10.0
"""A gap this short is bridged whatever the tick: a busy machine may be late."""

SharedGpus = Collection[tuple[str, int]]
"""Node and index of each GPU that two jobs hold."""


class IdleJudgement(msgspec.Struct):
    """The jobs that changed, and their events, to be recorded together."""

    changed: list[JobRecord] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)


def judge_idle(
    jobs: Sequence[JobRecord],
    before: Mapping[str, NodeRecord],
    observations: Mapping[str, NodeObservation],
    inventory: Inventory,
    now: float,
) -> IdleJudgement:
    """Judge the jobs by this cycle's ``observations`` and the nodes' records of ``before``, with their last readings.

    Args:
        jobs: Those that hold resources, as they are now.
        before: The nodes' records before this cycle.
        observations: Of this cycle, by node.
        inventory: For the rules.
        now: Unix seconds.
    """
    judgement, settings = IdleJudgement(), inventory.settings
    rules = {p.name: p.idle for p in inventory.partitions}
    judged = [job for job in jobs if job.state is JobState.RUNNING and (job.idle or rule_of(job, rules))]
    if not judged:
        return judgement
    shared = _shared(jobs)
    gap_s = max(MIN_GAP_S, MAX_GAP_TICKS * settings.tick_s)
    for job in judged:
        rule = rule_of(job, rules)
        below = _below(job, rules)
        found = is_all_idle(job, before, observations, shared, below, gap_s, now) if rule is not None else False
        changed, events = _judged(job, rule, found, below, settings.grace_s, now)
        if changed != job:
            judgement.changed.append(changed)
            judgement.events += events
    return judgement


def rule_of(job: JobRecord, rules: Mapping[str, IdleRules]) -> IdleRule | None:
    """Return the rule that applies to a job; None: none does."""
    spec, found = job.spec, rules.get(job.spec.partition)
    if found is None or not spec.gpus or job.slurm is not None:
        return None
    rule = found.jobs if spec.session is None else found.sessions
    if rule is None or found.is_exempt(user=job.user, group=spec.group, name=spec.name, partition=spec.partition):
        return None
    return rule


def signal_of_idle(spec: JobSpec) -> str:
    """Return the signal that the job is sent: the one it asked for before its limit, else USR1."""
    return spec.signal if spec.signal_before_s is not None else "USR1"


def _below(job: JobRecord, rules: Mapping[str, IdleRules]) -> float:
    found = rules.get(job.spec.partition, IdleRules())
    return found.below if job.spec.session is None else found.sessions_below


def _shared(jobs: Iterable[JobRecord]) -> SharedGpus:
    parts = [part for job in jobs if job.spec.share for part in (job.allocation.parts if job.allocation else ())]
    held = Counter((part.node, gpu) for part in parts for gpu in part.gpus)
    return {gpu for gpu, holders in held.items() if holders > 1}


def is_all_idle(
    job: JobRecord,
    before: Mapping[str, NodeRecord],
    observations: Mapping[str, NodeObservation],
    shared: SharedGpus,
    below: float,
    gap_s: float,
    now: float,
) -> bool | None:
    """Return whether all GPUs of a job were idle since their last readings.

    False: one was not, or is unknown, or was not read for longer than ``gap_s``. None: a node's reading is not here
    yet.
    """
    since = job.idle.since if job.idle is not None else now
    complete = True
    for part in job.allocation.parts if job.allocation else ():
        if not part.gpus:
            continue
        record, observation = before.get(part.node), observations.get(part.node)
        last = record.reading if record is not None else None
        if last is None:
            return False
        new = observation.result if observation is not None else None
        if not isinstance(new, NodeReading) or new.time <= last.time:
            if now - last.time > gap_s:
                return False
            complete = complete and last.time >= since
        elif new.time - last.time > gap_s or not _is_part_idle(job, part, last, new, shared, below):
            return False
    return True if complete else None


def _is_part_idle(
    job: JobRecord, part: NodeAllocation, last: NodeReading, new: NodeReading, shared: SharedGpus, below: float
) -> bool:
    earlier, later = ({gpu.index: gpu for gpu in reading.gpus} for reading in (last, new))
    span_s = new.time - last.time
    for index in part.gpus:
        gpu, was = later.get(index, Gpu(index=index)), earlier.get(index)
        use = utilization_between(was, gpu, span_s)
        if use is not None and use >= below and (part.node, index) in shared:
            use = own_utilization(was, gpu, span_s, job.id)  # it may all be the other job's
        if use is None or use >= below:
            return False
    return True


def _judged(
    job: JobRecord, rule: IdleRule | None, found: bool | None, below: float, grace_s: float, now: float
) -> tuple[JobRecord, list[Event]]:
    """Return the job after this cycle, with events."""
    idle = job.idle
    if rule is None or found is False:
        return _working(job, now)
    then = _possible(rule.then, job.spec)
    if idle is None:
        if found is None:
            return job, []
        at = now + rule.after_s if then != "warn" else None
        return msgspec.structs.replace(job, idle=IdleState(since=now, below=below, then=then, at=at)), []
    if idle.acted_at is not None:
        return job, []
    at = max(idle.since + rule.after_s, (idle.warned_at or 0.0) + rule.warn_before_s)  # the rule may have changed
    idle = msgspec.structs.replace(idle, then=then, below=below, at=None if then == "warn" else at)
    if found and idle.warned_at is None and now >= idle.since + rule.after_s - rule.warn_before_s:
        at = max(at, now + rule.warn_before_s)
        idle = msgspec.structs.replace(idle, warned_at=now, at=None if then == "warn" else at)
        data = _data(idle, now) | {"message": _warning(job, idle, now)}
        return msgspec.structs.replace(job, idle=idle), [_event("idle_warned", job, now, data)]
    if found and idle.warned_at is not None and idle.at is not None and now >= idle.at:
        return _act(msgspec.structs.replace(job, idle=idle), then, grace_s, now)
    return msgspec.structs.replace(job, idle=idle), []


def _working(job: JobRecord, now: float) -> tuple[JobRecord, list[Event]]:
    if job.idle is None:
        return job, []
    events = [_event("idle_ended", job, now, _data(job.idle, now))] if job.idle.warned_at is not None else []
    return msgspec.structs.replace(job, idle=None), events


def _possible(then: IdleAction, spec: JobSpec) -> IdleAction:
    """Return the action; a job that was submitted not to be requeued is cancelled instead."""
    return "cancel" if then == "requeue" and not spec.requeue else then


def _act(job: JobRecord, then: IdleAction, grace_s: float, now: float) -> tuple[JobRecord, list[Event]]:
    assert job.idle is not None
    idle = msgspec.structs.replace(job.idle, acted_at=now, at=None)
    message = f"{_held(job, idle, now)} (inventory: idle)"
    event = _event("idle_acted", job, now, _data(idle, now) | {"message": message})
    if then == "signal":
        return msgspec.structs.replace(job, idle=idle), [event]
    why: dict[str, Any] = {"reason": REASON, "message": message}
    kill_at = now + grace_s
    if then == "requeue":
        preemptions = (job.preemptions or Preemptions()).once_more(now, IDLE_POLICY, "", "")
        ending = Ending(outcome=JobState.PENDING, kill_at=kill_at, preemptions=preemptions, **why)
        kind, data = "preempted", {"policy": IDLE_POLICY, "count": preemptions.count}
    else:
        ending = Ending(outcome=JobState.CANCELLED, kill_at=kill_at, **why)
        kind, data = "ending", {"outcome": JobState.CANCELLED, "message": message}
    changed, ends = transition_to(
        job, JobState.COMPLETING, now, event=kind, data=data, ending=ending, idle=idle, **why
    )  # fmt: skip
    return changed, [event, ends]


def _event(kind: str, job: JobRecord, now: float, data: dict[str, Any]) -> Event:
    return Event(time=now, kind=kind, job_id=job.id, user=job.user, data={"attempt": job.attempt} | data)


def _data(idle: IdleState, now: float) -> dict[str, Any]:
    return {"idle_s": round(now - idle.since), "then": idle.then, "at": idle.at}


def _held(job: JobRecord, idle: IdleState, now: float) -> str:
    held = f"its {job.spec.gpus} GPUs have" if job.spec.gpus > 1 else "its GPU has"
    return f"{held} been below {100 * idle.below:.3g}% utilization for {format_duration(now - idle.since)}"


def _warning(job: JobRecord, idle: IdleState, now: float) -> str:
    done = {
        "signal": f"it is sent {signal_of_idle(job.spec)}",
        "requeue": "it is requeued",
        "cancel": "it is cancelled",
    }
    if idle.at is None:
        return _held(job, idle, now)
    return f"{_held(job, idle, now)}; unless used, {done[idle.then]} in {format_duration(idle.at - now)}"
