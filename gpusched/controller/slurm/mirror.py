"""Mirrors Slurm's jobs as records of the store: new jobs, changes, attempts that began and ended.

`mirrored` makes the record, `step_of` the change that it is; `following` calls both for each job that Slurm changed.
Slurm's state is authoritative: a mirrored job may go from any state to any other. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from gpusched.controller.slurm.requests import SlurmContext, request_of, user_nodelist
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, ENDED, Allocation, Ending, JobRecord, JobState, NodeAllocation
from gpusched.model.slurm import LEASE, SlurmFacts, SlurmJob, is_held_by_slurm, is_held_in_reservation

FORGOTTEN = "SlurmForgot"
"""`JobRecord.reason` of a job whose end state is unknown even to Slurm's accounting."""

UNACCOUNTED = "AccountingDown"
"""`JobRecord.reason` of a job that Slurm no longer lists while its accounting does not answer how it ended."""

COMPLETING_S = 60.0
"""Assumed duration of a job's last processes and its epilog, by which waiting times are estimated."""

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
"""Prefixes of Slurm's reasons that keep a job from starting now, whatever nodes are free."""

_HELD_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class MirrorContext(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which jobs are mirrored, besides themselves.

    Attributes:
        site: The inventory, and Slurm's partitions and nodes.
        positions: Slurm's job id -> node -> gres.conf positions (IDX) of its GPUs.
        standing: Slurm's job id -> priority without what mode advise adds; a missing job: no advice was given.
        devices: Node -> NVML index of the GPU at each position; a missing node: the position is the index.
        now: Unix seconds.
    """

    site: SlurmContext
    positions: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    standing: Mapping[str, int] = {}
    devices: Mapping[str, tuple[int, ...]] = {}
    now: float


class MirrorResult(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one job.

    Attributes:
        before: Previous record; None: a new job.
        job: Its new record.
        events: To record with it.
        began: Whether its current attempt started to run, or its start time changed.
        ended: (attempt, Unix seconds, state) of the attempt that ended; PENDING: it was requeued. None: none ended.
    """

    before: JobRecord | None
    job: JobRecord
    events: tuple[Event, ...] = ()
    began: bool = False
    ended: tuple[int, float, JobState] | None = None


def is_pinned(job: SlurmJob) -> bool:
    """Return whether a pending job is pinned: in the lease, all its nodes chosen by us, and nothing bars its start.

    A pinned job that ran and was requeued keeps reservation and nodes, but waits for its begin time.
    """
    asked = job.state == "PENDING" and job.reservation == LEASE and len(job.req_nodes) >= max(1, job.nodes)
    return asked and not job.reason.startswith(NOT_YET) and not is_held_by_slurm(job)


def state_of(job: SlurmJob) -> JobState:
    """Return our state; an unknown one counts as pending while the job has no nodes, otherwise as running."""
    if job.state == "DEADLINE" and not job.node_names:  # it never ran, so it has no TIMEOUT
        return JobState.CANCELLED
    if is_pinned(job):
        return JobState.STARTING
    return _STATES.get(job.state, JobState.RUNNING if job.node_names else JobState.PENDING)


def is_same(job: SlurmJob, stored: JobRecord) -> bool:
    """Return whether a stored job is this one, perhaps requeued; if not, Slurm has reused the id."""
    facts = stored.slurm
    if facts is None or job.uid != stored.uid:
        return False
    # Slurm sets the submit time anew when it requeues a job.
    return job.submit_time == facts.submit_time or (
        job.restarts > facts.restarts and job.submit_time > facts.submit_time
    )


def holds_nodes(job: SlurmJob, site: SlurmContext) -> bool:
    """Return whether a job of a partition not in the inventory holds a node of the inventory."""
    return any(site.inventory.node(name) is not None for name in job.node_names)


class _NodeLists(NamedTuple):
    """Slurm's one node list of a job, taken apart: what its user requested, what we wrote into it, and when."""

    by_user: tuple[str, ...]
    pinned: tuple[str, ...]
    pinned_at: float | None


def mirrored(job: SlurmJob, stored: JobRecord | None, store_id: str, context: MirrorContext) -> JobRecord:
    """Return the job to store: Slurm's facts, plus what only the store has.

    Args:
        job: As Slurm has it.
        stored: The store's record of the same job (`is_same`); None: it is new.
        store_id: Its id in the store.
        context: See there.
    """
    state, facts = state_of(job), stored.slurm if stored is not None else None
    node_lists = _node_lists(job, facts, state, context.now)
    # Slurm also names a start time of pending jobs: an estimate.
    started = job.start_time is not None and (
        state in ACTIVE - {JobState.STARTING} or (state in ENDED and bool(job.node_names))
    )
    slurm = _facts_of(job, facts, node_lists, started, context)
    spec = request_of(job, context.site, node_lists.by_user)
    changes: dict[str, Any] = {
        "spec": stored.spec if stored is not None and stored.spec == spec else spec,  # equal ones share memory
        "state": state,
        "eligible_time": job.eligible_time if (job.eligible_time or 0.0) > job.submit_time else None,
        "start_time": job.start_time if started else None,
        "end_time": (job.end_time or context.now) if state in ENDED else None,
        "exit_code": job.exit_code if state in ENDED else None,
        "attempt": job.restarts + (started or state is JobState.STARTING),  # 0: not started yet
        "held_by": _held_by(job) if _is_pending(state) else "",
        "ending": _ending(job, context.now) if state is JobState.COMPLETING else None,
        "slurm": slurm,
    }
    if stored is None or stored.state is not state or stored.reason == UNACCOUNTED:
        # Within a state, reason and message are those of our decisions, which must stay.
        changes |= {"reason": "" if _is_pending(state) else slurm.reason, "message": ""}
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
    return msgspec.structs.replace(found, allocation=_allocation(job, found, stored, context))


def _node_lists(job: SlurmJob, facts: SlurmFacts | None, state: JobState, now: float) -> _NodeLists:
    by_user = user_nodelist(job, facts.nodelist if facts is not None else job.req_nodes)
    pinned = job.req_nodes if state in ACTIVE and job.reservation == LEASE else ()
    # The list is still the one that we wrote.
    unchanged = facts is not None and bool(pinned or facts.pinned) and set(job.req_nodes) == set(facts.pinned)
    if facts is not None and unchanged and set(facts.pinned) != set(facts.nodelist):
        # Slurm leaves our nodes to the job even when the lease has ended, and its reservation is cleared.
        by_user, pinned = facts.nodelist, job.req_nodes
    since = facts.pinned_at if facts is not None and unchanged else now
    return _NodeLists(by_user, pinned, since if pinned else None)


def _held_by(job: SlurmJob) -> str:
    """Return who holds a pending job: "user" or "admin"; "": neither.

    A hold by Slurm because of our lease is none of these: it is undone (`slurm.lease.undo`).
    """
    held = job.priority == 0 or job.reason.startswith("JobHeld") or job.state in _HELD_STATES
    if not held or is_held_by_slurm(job):
        return ""
    return "admin" if job.reason == "JobHeldAdmin" else "user"


def _facts_of(
    job: SlurmJob, before: SlurmFacts | None, node_lists: _NodeLists, started: bool, context: MirrorContext
) -> SlurmFacts:
    # Slurm may show an unmet dependency only after its next look at the job.
    reason = "Dependency" if job.dependency and job.reason in ("", "None", "Priority") else job.reason
    # In the lease; or taken out of it by Slurm and held, which we must undo.
    leased = job.reservation == LEASE or (before is not None and before.leased and is_held_in_reservation(job))
    # Pinned jobs have no GPUs yet: `guesses` chooses some for the plan.
    positions = {node: tuple(at) for node, at in context.positions.get(job.id, {}).items()} if started else {}
    if not positions and started and before is not None and before.restarts == job.restarts:
        positions = before.gpus  # keep them: Slurm no longer names the GPUs of an ended job
    return SlurmFacts(
        state=job.state,
        reason="" if reason == "None" else reason,
        account=job.account,
        qos=job.qos,
        partitions=job.partitions,
        priority=job.priority,
        site_factor=job.site_factor,
        standing=context.standing.get(job.id, job.priority),
        restarts=job.restarts,
        requeue=job.requeue,
        reservation=job.reservation,
        leased=leased and _is_pending(state_of(job)),
        nodelist=node_lists.by_user,
        pinned=node_lists.pinned,
        pinned_at=node_lists.pinned_at,
        gpus=positions,
        submit_time=job.submit_time,
    )


def _is_pending(state: JobState) -> bool:
    return state in (JobState.PENDING, JobState.STARTING)


def _ending(job: SlurmJob, now: float) -> Ending:
    """Return an ending for estimates of waiting times; its outcome is assumed until Slurm reports the real one."""
    return Ending(outcome=JobState.COMPLETED, reason="", kill_at=(job.end_time or now) + COMPLETING_S)


def _allocation(job: SlurmJob, found: JobRecord, stored: JobRecord, context: MirrorContext) -> Allocation | None:
    """Return what the job holds, or held last; GPUs that Slurm does not name are chosen in `guesses`."""
    if found.state is JobState.PENDING:
        return None
    facts, spec = found.slurm, found.spec
    assert facts is not None
    nodes = facts.pinned if found.state is JobState.STARTING else job.node_names if found.start_time is not None else ()
    if not nodes:
        return None
    # In the same attempt, also if it was only pinned before, the job keeps its GPUs.
    same_attempt = found.attempt == stored.attempt
    before = {p.node: p.gpus for p in stored.allocation.parts} if same_attempt and stored.allocation else {}

    def gpus(node: str) -> tuple[int, ...]:
        if node in facts.gpus:
            return _nvml_indices(facts.gpus[node], context.devices.get(node))
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


def _nvml_indices(positions: Iterable[int], devices: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return NVML indices of the GPUs at these positions, ascending; an unknown position is its own index."""
    known = devices or ()
    return tuple(sorted(known[at] if at < len(known) else at for at in positions))


def step_of(stored: JobRecord | None, job: JobRecord, now: float) -> MirrorResult | None:
    """Return the change of a job; None: no change."""
    if stored == job:
        return None
    ended = _ended_attempt(stored, job, now)
    return MirrorResult(
        before=stored,
        job=job,
        events=tuple(_events(stored, job, now, ended)),
        began=job.start_time is not None
        and (stored is None or (stored.attempt, stored.start_time) != (job.attempt, job.start_time)),
        ended=ended,
    )


def ended_in_accounting(stored: JobRecord, state: str, start: float | None, end: float) -> MirrorResult:
    """Return the end, by Slurm's accounting, of a job purged by slurmctld; ``state``: Slurm's name for it."""
    outcome = _STATES.get(state, JobState.FAILED)
    outcome = outcome if outcome in ENDED else JobState.FAILED
    if start is None and stored.state is not JobState.STARTING:
        start = stored.start_time
    facts = stored.slurm and msgspec.structs.replace(stored.slurm, state=state, reason="", pinned=(), pinned_at=None)
    attempt, allocation = stored.attempt, None
    if start is not None:  # it ran, perhaps between two readings: then its nodes are unknown
        attempt, allocation = max(attempt, 1), stored.allocation or Allocation(stored.id, ())
    job = msgspec.structs.replace(
        stored, state=outcome, reason="", message="", start_time=start, end_time=end, ending=None, held_by="",
        attempt=attempt, slurm=facts, allocation=allocation,
    )  # fmt: skip
    step = step_of(stored, job, end)
    assert step is not None
    return step


def ends_unaccounted(stored: JobRecord, now: float) -> MirrorResult | None:
    """Return that a job that Slurm no longer has waits for its accounting to answer how it ended; None: no change."""
    if stored.reason == UNACCOUNTED:
        return None
    job = msgspec.structs.replace(
        stored, state=JobState.COMPLETING, reason=UNACCOUNTED, held_by="",
        message="Slurm no longer lists it, and slurmdbd, which knows how it ended, does not answer",
        ending=Ending(outcome=JobState.COMPLETED, reason="", kill_at=now),
    )  # fmt: skip
    return step_of(stored, job, now)


def ended_unknown(stored: JobRecord, now: float) -> MirrorResult:
    """Return the end of a job that Slurm no longer has, in an unknown state."""
    message = "Slurm no longer knows it, and its accounting has no end state"
    facts = stored.slurm and msgspec.structs.replace(stored.slurm, pinned=(), pinned_at=None)
    job = msgspec.structs.replace(
        stored, state=JobState.CANCELLED, reason=FORGOTTEN, message=message, end_time=now, ending=None, held_by="",
        slurm=facts, allocation=stored.allocation if stored.start_time is not None else None,
    )  # fmt: skip
    step = step_of(stored, job, now)
    assert step is not None
    return step


def _ended_attempt(stored: JobRecord | None, job: JobRecord, now: float) -> tuple[int, float, JobState] | None:
    """Return the attempt that this change ended, as `MirrorResult.ended`; None: none."""
    running = stored if stored is not None and stored.start_time is not None and stored.state in ACTIVE else None
    if job.state in ENDED and job.start_time is not None:  # the job's last attempt
        assert job.end_time is not None
        same = stored is not None and (stored.state, stored.attempt) == (job.state, job.attempt)
        return None if same else (job.attempt, job.end_time, job.state)
    if running is not None and (job.start_time is None or job.attempt != running.attempt):  # an earlier attempt
        assert running.start_time is not None
        assert job.slurm is not None
        requeued_at = job.slurm.submit_time  # Slurm sets the submit time at a requeue
        end = requeued_at if running.start_time <= requeued_at <= now else now
        requeued = job.state not in ENDED or (running.slurm is not None and job.slurm.restarts > running.slurm.restarts)
        return running.attempt, end, JobState.PENDING if requeued else job.state
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
    if (stored.held_by if stored is not None else "") != job.held_by and _is_pending(job.state):
        yield fact("held" if job.held_by else "released", now, by=job.held_by)
    nodes = [part.node for part in job.allocation.parts] if job.allocation is not None else []
    if job.state is JobState.STARTING and was is not JobState.STARTING:
        yield fact("starting", now, nodes=nodes)
    if job.state is JobState.PENDING and was is not JobState.PENDING:
        yield fact("requeued", ended[1] if ended is not None else now)
    ran_before = stored is not None and stored.start_time is not None and stored.attempt == job.attempt
    if job.start_time is not None and not ran_before:
        yield fact("running", job.start_time, nodes=nodes)
    if job.state is JobState.COMPLETING and was is not JobState.COMPLETING:
        yield fact("ending", now)
    if job.state in ENDED and was is not job.state:
        yield fact("ended", job.end_time or now, exit_code=job.exit_code)
