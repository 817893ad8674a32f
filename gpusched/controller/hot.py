"""Hot resizing: ranks join and leave a job that goes on running. Pure.

A job's allocation is what its ranks hold: a rank that joins is in it from the intent on, one that leaves until it has
ended. Rank 0 (its node hosts the rendezvous) never leaves while the job runs; rank numbers are never used twice, so a
name still belongs to one container. After each change the job is left as it is until its ranks have formed their group.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.controller.escalating import TRIES_BEFORE_REMOVING, is_due, is_exhausted, stuck_event
from gpusched.controller.ranks import (
    RankStatus,
    ReconcileInput,
    ReconcileResult,
    is_idle,
    launch_timeout,
    operation_on,
    update,
)
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, NodeAllocation, Resizes
from gpusched.model.plan import Resize
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading
from gpusched.model.units import count_of
from gpusched.queue.store import RankRecord

FAILS_TOGETHER_S = 5.0
"""Ranks of a program that fails end within this time; one that ended alone is lost, and the others go on."""

_FORMED_AFTER_S = 30.0  # a job that does not report its nodes counts as formed after so long
_ENDED = ("gone", "exited", "failed", "lost", "absent")


def begin_hot_resize(
    job: JobRecord, action: Resize, ranks: list[RankRecord], policy: PolicySpec, grace_s: float, now: float
) -> tuple[JobRecord, tuple[NodeAllocation, ...], list[RankRecord], Event]:
    """Begin to grow or shrink a running job; ``ranks``: of its attempt.

    Returns:
        The job, the parts of ranks to be launched, the records of ranks that leave, and the event.
    """
    assert job.allocation is not None
    resizes, parts = job.resizes or Resizes(), job.allocation.parts
    first = max(resizes.next_rank, parts[-1].rank + 1)
    joins = tuple(msgspec.structs.replace(part, rank=first + at) for at, part in enumerate(action.joins))
    leaves = [] if joins else _last_ranks(job, ranks, action.gpus, now + grace_s)
    why = f"{action.why} (decided by {policy.name})"
    resizes = resizes.again(
        now, why=why, before=job.spec.gpus, start_timeout_s=policy.resize.start_timeout_s,
        next_rank=first + len(joins), formed_since=None,
    )  # fmt: skip
    data = {"gpus_from": job.spec.gpus, "gpus_to": action.gpus, "message": why, "hot": True}
    if joins:
        data["nodes"] = {part.node: list(part.gpus) for part in joins}
    changed = with_parts(job, (*parts, *joins))
    event = Event(time=now, kind="resizing", job_id=job.id, user=job.user, data=data)
    return msgspec.structs.replace(changed, resizes=resizes), joins, leaves, event


def with_parts(job: JobRecord, parts: tuple[NodeAllocation, ...]) -> JobRecord:
    """Return the job with another allocation, and the request that goes with it."""
    allocation = Allocation(job.id, parts)
    return msgspec.structs.replace(job, allocation=allocation, spec=job.spec.as_allocated(allocation))


def _last_ranks(job: JobRecord, ranks: list[RankRecord], gpus: int, leave_by: float) -> list[RankRecord]:
    """Return the ranks beyond so many GPUs, to leave."""
    assert job.spec.elastic is not None
    kept = max(1, gpus // job.spec.elastic.rank_gpus)
    members = sorted((rank for rank in ranks if not rank.hot), key=lambda rank: rank.rank)
    return [msgspec.structs.replace(rank, hot="leaves", leave_by=leave_by) for rank in members[kept:]]


def settle_ranks(step: ReconcileResult, ranks: list[RankStatus], inputs: ReconcileInput) -> list[RankStatus]:
    """Advance the ranks that join or leave, and let go of lost ones; return the others, by which the job is judged."""
    members = [s for s in ranks if not s.rank.hot]
    healthy = bool(members) and members[0].rank.rank == 0 and _is_healthy(members[0])
    changing = False
    for s in ranks:
        if s.rank.hot == "joins":
            changing |= _join(step, s, inputs)
        elif s.rank.hot == "leaves":
            changing |= _leave(step, s, inputs)
        elif s.rank.rank and healthy and (why := _lost(s)) and _may_shrink(step.job):
            members.remove(s)
            if s.rank.finished_at is None or inputs.now >= s.rank.finished_at + FAILS_TOGETHER_S:
                before = step.job.spec.gpus
                _drop(step, s, why, inputs)
                _unsettle(step, before, why)
    if not changing:
        _check_formed(step, members, inputs)
    return members


def _is_healthy(s: RankStatus) -> bool:
    return s.phase in ("running", "unknown") and s.rank.finished_at is None and not s.rebooted


def _lost(s: RankStatus) -> str:
    """Return why a rank is lost; "": it runs, or has finished its work."""
    if s.rank.finished_at is not None:
        return f"it exited with {s.rank.exit_code}" if s.rank.exit_code != 0 else ""
    if s.phase == "gone":
        return "its node is down"
    if s.rebooted and s.phase != "running":
        return "its node was rebooted"
    return f"its container is {s.phase}" if s.phase in ("absent", "lost", "failed") else ""


def _may_shrink(job: JobRecord) -> bool:
    """Return whether the job's least size allows one rank less."""
    elastic = job.spec.elastic
    assert elastic is not None
    return job.spec.gpus - elastic.rank_gpus >= elastic.sizes[0]


def _join(step: ReconcileResult, s: RankStatus, inputs: ReconcileInput) -> bool:
    """Advance a rank that joins; return whether it still does."""
    if s.phase == "running":
        update(step, s.rank, hot="")
        _note_change(step, s, "rank_joined", "", inputs)
        return False
    if s.phase == "unlaunched":
        step.to_launch += [s.rank] if is_idle(s, inputs) else []
    late = launch_timeout(s, inputs)
    if s.phase not in _ENDED and not late:
        return True
    size, finished = step.job.spec.gpus, s.phase == "exited" and s.rank.exit_code == 0
    error = " ".join((s.container.error or "").split()) if s.container is not None else ""
    _drop(step, s, f"it could not join: {late or error or _lost(s) or s.phase}", inputs, ended=not late)
    if s.phase != "gone" and not finished:
        resizes = step.job.resizes or Resizes()
        unusable = tuple(dict.fromkeys((*resizes.unusable, size)))
        step.job = msgspec.structs.replace(step.job, resizes=msgspec.structs.replace(resizes, unusable=unusable))
    return False


def _leave(step: ReconcileResult, s: RankStatus, inputs: ReconcileInput) -> bool:
    """Advance a rank that leaves; return whether it still does."""
    now = inputs.now
    if s.phase in _ENDED or s.phase == "unlaunched":
        _drop(step, s, "", inputs)
        return False
    if s.rank.stuck or (s.phase != "unknown" and is_exhausted(s.rank, now)):
        # Its record keeps its GPUs blocked until it is gone; the job need not wait for that.
        update(step, s.rank, stuck=True)
        step.events.append(stuck_event(s.rank, now))
        _drop(step, s, "", inputs, ended=False)
        return False
    if s.phase == "unknown" or not is_idle(s, inputs):
        return True
    if s.phase != "running" or s.rank.tries >= TRIES_BEFORE_REMOVING:
        step.operations += [operation_on("remove", s)] if is_due(s.rank, now) else []
    elif s.rank.signalled is None and not s.rank.trouble:
        # The grace counts from now, as the controller may have been down since the decision.
        update(step, s.rank, leave_by=now + inputs.settings.grace_s)
        step.operations.append(operation_on("signal", s, signal=step.job.spec.signal))
    elif now >= (s.rank.leave_by or now):
        step.operations += [operation_on("signal", s, signal="KILL")] if is_due(s.rank, now) else []
    return True


def _drop(step: ReconcileResult, s: RankStatus, why: str, inputs: ReconcileInput, ended: bool = True) -> None:
    """Go on without a rank: its part leaves the allocation; its record is a leftover until its node is clean."""
    job, rank = step.job, s.rank
    assert job.allocation is not None
    update(step, rank, hot="left", gone=ended)
    step.job = with_parts(job, tuple(part for part in job.allocation.parts if part.rank != rank.rank))
    step.span_from = inputs.now
    _note_change(step, s, "rank_left", why and f"continues without rank {rank.rank} on {rank.node}: {why}", inputs)


def _note_change(step: ReconcileResult, s: RankStatus, kind: str, message: str, inputs: ReconcileInput) -> None:
    """Record that a rank came or went: from now on its job's group is formed again."""
    job, resizes = step.job, step.job.resizes or Resizes()
    step.job = msgspec.structs.replace(job, resizes=msgspec.structs.replace(resizes, formed_since=inputs.now))
    data: dict[str, Any] = {"attempt": s.rank.attempt, "rank": s.rank.rank, "gpus": job.spec.gpus}
    data |= {"message": message} if message else {}
    event = Event(time=inputs.now, kind=kind, job_id=job.id, node=s.rank.node, user=job.user, data=data)
    step.events.append(event)


def _unsettle(step: ReconcileResult, before: int, why: str) -> None:
    """Note that the group must form again after a rank was lost, before the job is resized."""
    resizes = step.job.resizes or Resizes()
    before = resizes.before if resizes.before is not None else before
    changed = msgspec.structs.replace(resizes, before=before, why=f"a rank was lost: {why}")
    step.job = msgspec.structs.replace(step.job, resizes=changed)


def _check_formed(step: ReconcileResult, members: list[RankStatus], inputs: ReconcileInput) -> None:
    """Once all ranks of a change have come and gone, wait until the group is formed; else take the change back."""
    job, resizes = step.job, step.job.resizes
    if resizes is None or resizes.before is None:
        return
    since = inputs.now - (resizes.formed_since or inputs.now)
    nodes, paused_s = _reported(members, resizes, inputs)
    if nodes == job.spec.nodes or (nodes is None and since >= _FORMED_AFTER_S):
        _formed(step, paused_s, inputs.now)
    elif since >= resizes.start_timeout_s and resizes.before < job.spec.gpus:
        _take_back(step, members, inputs)


def no_group(job: JobRecord, now: float) -> str:
    """Return why a job is taken to hang after ranks left; "": it does not. Torch waits 30 minutes for a lost rank."""
    before, resizes = job.forming_from, job.resizes
    if resizes is None or before is None or before < job.spec.gpus:
        return ""
    since = now - (resizes.formed_since or now)
    return f"no step within {resizes.start_timeout_s:.0f} s" if since >= resizes.start_timeout_s else ""


def _reported(members: list[RankStatus], resizes: Resizes, inputs: ReconcileInput) -> tuple[int | None, float | None]:
    """Return the nodes of the group by rank 0's report, and the seconds without a step if it began to run since.

    These are no more than have passed: what others are asked to give up depends on what stops cost.
    """
    progress = members[0].container.progress if members and members[0].container is not None else None
    if progress is None or progress.nodes is None:
        return None, None
    found = inputs.observations[members[0].rank.node].result
    assert isinstance(found, NodeReading)
    began = found.time - progress.age_s - (progress.ran_s or 0.0)
    asked = resizes.times[-1] if resizes.times else members[0].rank.launched_at or inputs.now
    if progress.paused_s is None or began < asked:
        return int(progress.nodes), None
    return int(progress.nodes), min(progress.paused_s, max(0.0, inputs.now - asked))


def _formed(step: ReconcileResult, paused_s: float | None, now: float) -> None:
    job, resizes = step.job, step.job.resizes
    assert resizes is not None
    changed = msgspec.structs.replace(resizes, before=None, formed_since=None)
    if paused_s is not None:
        changed = msgspec.structs.replace(
            changed, costs_s=resizes.costs_s + paused_s, measured=resizes.measured + 1
        )  # fmt: skip
    step.job = msgspec.structs.replace(job, resizes=changed)
    data = {"gpus_from": resizes.before, "gpus_to": job.spec.gpus, "cost_s": paused_s}
    step.events.append(Event(time=now, kind="resized", job_id=job.id, user=job.user, data=data))


def _take_back(step: ReconcileResult, members: list[RankStatus], inputs: ReconcileInput) -> None:
    """Let the ranks leave with which no group came about; the size is not tried again."""
    job, resizes = step.job, step.job.resizes
    assert resizes is not None
    assert resizes.before is not None
    why = f"back to {count_of(resizes.before, 'GPU')}: no group of {count_of(job.spec.nodes, 'rank')} within "
    why += f"{resizes.start_timeout_s:.0f} s"
    by = inputs.now + inputs.settings.grace_s
    for rank in _last_ranks(job, [s.rank for s in members], resizes.before, by):
        update(step, rank, hot="leaves", leave_by=by)
    changed = msgspec.structs.replace(
        resizes, before=job.spec.gpus, unusable=(*resizes.unusable, job.spec.gpus), count=resizes.count + 1, why=why,
        formed_since=None,
    )  # fmt: skip
    step.job = msgspec.structs.replace(job, resizes=changed)
    data = {"gpus_from": job.spec.gpus, "gpus_to": resizes.before, "message": why, "hot": True}
    step.events.append(Event(time=inputs.now, kind="resizing", job_id=job.id, user=job.user, data=data))
