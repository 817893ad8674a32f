"""From Slurm's jobs to ours: what is new, what has changed, which attempts began and ended.

Nothing here asks anybody. Slurm's word counts, so that a mirrored job may go from any state to any other; only what has
changed is given back, as with thousands of waiting jobs all else costs too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpusched.controller.slurm.requests import SlurmContext, request_of, user_nodelist
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, ENDED, Allocation, Ending, JobRecord, JobState, NodeAllocation
from gpusched.model.slurm import LEASE, SlurmFacts, SlurmJob, is_held_by_slurm, is_held_in_reservation

FORGOTTEN = "SlurmForgot"
"""`JobRecord.reason` of a job of which Slurm, asked for it, does not know how it ended."""

COMPLETING_S = 60.0  # so long the last processes and the epilog of a job are expected to take at the most

_STATES = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "CONFIGURING": JobState.RUNNING,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,  # it keeps its GPUs
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "COMPLETING": JobState.COMPLETING,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "NODE_FAIL": JobState.NODE_FAIL,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "LAUNCH_FAILED": JobState.NODE_FAIL,
    "RECONFIG_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
}
NOT_YET = ("JobHeld", "BeginTime", "Dependency")
"""Beginnings of Slurm's reasons by which a job itself does not start now."""

_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class MirrorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs are mirrored by, besides themselves.

    Attributes:
        positions: Slurm's job id -> node -> positions in gres.conf (IDX) of the GPUs that it has.
        standing: Slurm's job id -> its priority without our advice, of jobs that have some.
        devices: Node -> NVML index of the GPU at each position; a node that is not there: the position itself.
        now: Unix seconds.
    """

    site: SlurmContext
    positions: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    standing: Mapping[str, int] = {}
    devices: Mapping[str, tuple[int, ...]] = {}
    now: float


class MirrorResult(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one job.

    Attributes:
        before: As it was; None: it is new.
        began: Its present attempt has begun to run (or its start is known better).
        ended: The attempt that is over, when, and how: PENDING, where the job waits again.
    """

    before: JobRecord | None
    job: JobRecord
    events: tuple[Event, ...] = ()
    began: bool = False
    ended: tuple[int, float, JobState] | None = None


def is_pinned(job: SlurmJob) -> bool:
    """Whether a job that waits was asked to start on nodes for all of it, and may: one that was requeued keeps them."""
    asked = job.state == "PENDING" and job.reservation == LEASE and len(job.req_nodes) >= max(1, job.nodes)
    return asked and not job.reason.startswith(NOT_YET) and not is_held_by_slurm(job)


def state_of(job: SlurmJob) -> JobState:
    """The state in our words; one that is not known counts as waiting while it has no nodes, else as running."""
    if job.state == "DEADLINE" and not job.node_names:
        return JobState.CANCELLED
    if is_pinned(job):
        return JobState.STARTING
    return _STATES.get(job.state, JobState.RUNNING if job.node_names else JobState.PENDING)


def is_same(job: SlurmJob, stored: JobRecord) -> bool:
    """Whether a stored job of this id is this one, requeued perhaps; else Slurm has used the id again."""
    facts = stored.slurm
    if facts is None or job.uid != stored.uid:
        return False
    return job.submit_time == facts.submit_time or (
        job.restarts > facts.restarts and job.submit_time > facts.submit_time
    )


def holds_nodes(job: SlurmJob, site: SlurmContext) -> bool:
    """Whether a job of a partition that the inventory does not know has a node that it knows."""
    return any(site.inventory.node(name) is not None for name in job.node_names)


def mirrored(job: SlurmJob, stored: JobRecord | None, store_id: str, world: MirrorContext) -> JobRecord:
    """The job as the store is to hold it: Slurm's facts over what the store has beside them."""
    state, facts = state_of(job), stored.slurm if stored is not None else None
    named = user_nodelist(job, facts.nodelist if facts is not None else job.req_nodes)
    pinned = job.req_nodes if state in ACTIVE and job.reservation == LEASE else ()
    known = facts is not None and bool(pinned or facts.pinned) and set(job.req_nodes) == set(facts.pinned)
    if facts is not None and known and set(facts.pinned) != set(facts.nodelist):
        named, pinned = facts.nodelist, job.req_nodes  # Slurm leaves them to it, also when the lease is over
    since = facts.pinned_at if facts is not None and known else world.now
    held = job.priority == 0 or job.reason.startswith("JobHeld") or job.state in _HELD
    held = held and not is_held_by_slurm(job)
    leased = job.reservation == LEASE or (facts is not None and facts.leased and is_held_in_reservation(job))
    started = job.start_time is not None and (
        state in ACTIVE - {JobState.STARTING} or (state in ENDED and bool(job.node_names))
    )
    reason = "Dependency" if job.dependency and job.reason in ("", "None", "Priority") else job.reason
    positions = {node: tuple(at) for node, at in world.positions.get(job.id, {}).items()} if started else {}
    if not positions and started and facts is not None and facts.restarts == job.restarts:
        positions = facts.gpus  # it keeps them; of one that has ended Slurm does not say them any more
    spec = request_of(job, world.site, named)
    changes: dict[str, Any] = {
        "spec": stored.spec if stored is not None and stored.spec == spec else spec,
        "state": state,
        "eligible_time": job.eligible_time if (job.eligible_time or 0.0) > job.submit_time else None,
        "start_time": job.start_time if started else None,
        "end_time": (job.end_time or world.now) if state in ENDED else None,
        "exit_code": job.exit_code if state in ENDED else None,
        "attempt": job.restarts + (started or state is JobState.STARTING),
        "held_by": ("admin" if job.reason == "JobHeldAdmin" else "user") if _waits(state) and held else "",
        "ending": _ending(job, world.now) if state is JobState.COMPLETING else None,
        "slurm": SlurmFacts(
            state=job.state,
            reason="" if reason == "None" else reason,
            account=job.account,
            qos=job.qos,
            partitions=job.partitions,
            priority=job.priority,
            site_factor=job.site_factor,
            standing=world.standing.get(job.id, job.priority),
            restarts=job.restarts,
            requeue=job.requeue,
            reservation=job.reservation,
            leased=leased and _waits(state),
            nodelist=named,
            pinned=pinned,
            pinned_at=since if pinned else None,
            gpus=positions,
            submit_time=job.submit_time,
        ),
    }
    if stored is None or stored.state is not state:
        changes |= {"reason": "" if _waits(state) or reason == "None" else reason, "message": ""}
    if state is JobState.PENDING:
        changes |= {"policy": None, "policy_version": None}
    if stored is None:
        stored = JobRecord(
            id=store_id,
            array_id=job.array_id or None,
            array_index=job.array_index,
            user=job.user,
            uid=job.uid,
            spec=spec,
            state=state,
            submit_time=job.submit_time,
        )
    found = msgspec.structs.replace(stored, **changes)
    return msgspec.structs.replace(found, allocation=_allocation(job, found, stored, world))


def _waits(state: JobState) -> bool:
    return state in (JobState.PENDING, JobState.STARTING)


def _ending(job: SlurmJob, now: float) -> Ending:
    """By it what waits for its nodes can be told when; how it ends Slurm says when it has."""
    return Ending(outcome=JobState.COMPLETED, reason="", kill_at=(job.end_time or now) + COMPLETING_S)


def _allocation(job: SlurmJob, found: JobRecord, stored: JobRecord, world: MirrorContext) -> Allocation | None:
    """What the job holds, or held last; GPUs that Slurm does not name are chosen later (see `guesses`)."""
    if found.state is JobState.PENDING:
        return None
    facts, spec = found.slurm, found.spec
    assert facts is not None
    nodes = facts.pinned if found.state is JobState.STARTING else job.node_names if found.start_time is not None else ()
    if not nodes:
        return None
    before = {p.node: p.gpus for p in stored.allocation.parts} if _keeps(found, stored) and stored.allocation else {}

    def gpus(node: str) -> tuple[int, ...]:
        if node in facts.gpus:
            return indices(facts.gpus[node], world.devices.get(node))
        return () if facts.gpus or found.state in ENDED else before.get(node, ())

    return Allocation(
        found.id,
        tuple(
            NodeAllocation(
                rank=rank, node=node, gpus=gpus(node), cores=spec.cores_per_node, memory_mib=spec.memory_mib_per_node
            )
            for rank, node in enumerate(nodes)
        ),
    )


def _keeps(found: JobRecord, stored: JobRecord) -> bool:
    """Whether a job has what it had: it is in the same attempt, or was pinned to go into it."""
    return found.attempt == stored.attempt


def indices(positions: Iterable[int], devices: tuple[int, ...] | None) -> tuple[int, ...]:
    """NVML indices of the GPUs at these positions, ascending; a position that is not known is its own index."""
    known = devices or ()
    return tuple(sorted(known[at] if at < len(known) else at for at in positions))


def step_of(stored: JobRecord | None, job: JobRecord, now: float) -> MirrorResult | None:
    """What changes with a job; None: nothing does."""
    if stored == job:
        return None
    ended = _over(stored, job, now)
    return MirrorResult(
        before=stored,
        job=job,
        events=tuple(_events(stored, job, now, ended)),
        began=job.start_time is not None
        and (stored is None or (stored.attempt, stored.start_time) != (job.attempt, job.start_time)),
        ended=ended,
    )


def told_ended(stored: JobRecord, state: str, start: float | None, end: float) -> MirrorResult:
    """A job that slurmctld has forgotten, as Slurm's accounting says that it ended: Slurm's word for the state."""
    outcome = _STATES.get(state, JobState.FAILED)
    outcome = outcome if outcome in ENDED else JobState.FAILED
    start = start if start is not None else stored.start_time if stored.state is not JobState.STARTING else None
    facts = stored.slurm and msgspec.structs.replace(stored.slurm, state=state, reason="", pinned=(), pinned_at=None)
    attempt = max(stored.attempt, 1) if start is not None else stored.attempt
    job = msgspec.structs.replace(
        stored, state=outcome, reason="", message="", start_time=start, end_time=end, ending=None, held_by="",
        attempt=attempt, slurm=facts,
        allocation=stored.allocation if start is not None and stored.allocation else Allocation(stored.id, ())
        if start is not None else None,
    )  # fmt: skip
    step = step_of(stored, job, end)
    assert step is not None
    return step


def forgotten(stored: JobRecord, now: float) -> MirrorResult:
    """A job that Slurm has no more, and does not know how it ended."""
    message = "Slurm no longer knows it, and its accounting has no end state"
    facts = stored.slurm and msgspec.structs.replace(stored.slurm, pinned=(), pinned_at=None)
    job = msgspec.structs.replace(
        stored, state=JobState.CANCELLED, reason=FORGOTTEN, message=message, end_time=now, ending=None, held_by="",
        slurm=facts, allocation=stored.allocation if stored.start_time is not None else None,
    )  # fmt: skip
    step = step_of(stored, job, now)
    assert step is not None
    return step


def _over(stored: JobRecord | None, job: JobRecord, now: float) -> tuple[int, float, JobState] | None:
    """The attempt that is over by this change, when, and how."""
    was = stored if stored is not None and stored.start_time is not None and stored.state in ACTIVE else None
    if job.state in ENDED and job.start_time is not None:
        assert job.end_time is not None
        same = stored is not None and (stored.state, stored.attempt) == (job.state, job.attempt)
        return None if same else (job.attempt, job.end_time, job.state)
    if was is not None and (job.start_time is None or job.attempt != was.attempt):
        assert was.start_time is not None
        assert job.slurm is not None
        asked = job.slurm.submit_time  # Slurm dates a requeue so
        end = asked if was.start_time <= asked <= now else now
        requeued = job.state not in ENDED or (was.slurm is not None and job.slurm.restarts > was.slurm.restarts)
        return was.attempt, end, JobState.PENDING if requeued else job.state
    return None


def _events(
    stored: JobRecord | None, job: JobRecord, now: float, ended: tuple[int, float, JobState] | None
) -> Iterable[Event]:
    was = stored.state if stored is not None else JobState.PENDING

    def fact(kind: str, time: float, **more: Any) -> Event:
        data = {"from": was, "to": job.state, "reason": job.reason, "attempt": job.attempt} | more
        return Event(time=time, kind=kind, job_id=job.id, user=job.user, data=data)

    if stored is None:
        yield Event(time=job.submit_time, kind="submitted", job_id=job.id, user=job.user)
    if (stored.held_by if stored is not None else "") != job.held_by and _waits(job.state):
        yield fact("held" if job.held_by else "released", now, by=job.held_by)
    where = [part.node for part in job.allocation.parts] if job.allocation is not None else []
    if job.state is JobState.STARTING and was is not JobState.STARTING:
        yield fact("starting", now, nodes=where)
    if job.state is JobState.PENDING and was is not JobState.PENDING:
        yield fact("requeued", ended[1] if ended is not None else now)
    ran_before = stored is not None and stored.start_time is not None and stored.attempt == job.attempt
    if job.start_time is not None and not ran_before:
        yield fact("running", job.start_time, nodes=where)
    if job.state is JobState.COMPLETING and was is not JobState.COMPLETING:
        yield fact("ending", now)
    if job.state in ENDED and was is not job.state:
        yield fact("ended", job.end_time or now, exit_code=job.exit_code)
