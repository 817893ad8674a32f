"""Why a job is pending and what would help, from any snapshot (also a stored one), as the passes answer."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.slices import compute_units
from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.advice import next_steps
from gpusched.sched.alone import SingleJobView
from gpusched.sched.decide import JobAnswer, ask
from gpusched.sched.eligible import ineligible
from gpusched.sched.slicenames import base_of
from gpusched.sched.slices.split import split
from gpusched.sched.tally import Amounts, closed_reason, covers, need, shortfall_of, total_of
from gpusched.sched.text import ELSEWHERE, HELD_BACK, jobs_ahead

Dimension = Literal["", "barred", "unavailable", "gpus", "cores", "memory"]


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job's partition: whether it could host one of the job's parts now, else what is short."""

    node: str
    fits: bool
    dimension: Dimension = ""
    text: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one pending job waits.

    Attributes:
        reason: The dominant one, as `decide` would give it.
        nodes: A verdict for every node of its partition.
        position: 1 for the first of its partition's queue; None where it is not in it (held, dependent, impossible).
        queue_length: How many jobs of the partition may start and could run.
        next_steps: What would help, most useful first.
        racks: On how many racks it could start now, where it waits for one, or for a better place.
        beside: Of a job that a limit holds: the other limits that hold it, and how many jobs are ahead of it; or "".
        head: The job that it must not delay: its partition's first job that blocks others, or the one that waits for
            the end of a reservation; "": none.
        head_at: When that can start at the latest, by limits, Unix seconds; infinite: not by these.
        sharing: With which jobs it may share GPUs, or why with none; "": it does not ask to.
    """

    job_id: str
    reason: Reason
    nodes: tuple[NodeVerdict, ...] = ()
    position: int | None = None
    queue_length: int = 0
    next_steps: tuple[str, ...] = ()
    racks: int | None = None
    beside: str = ""
    head: str = ""
    head_at: float = math.inf
    sharing: str = ""


def explain(snapshot: Snapshot, job_id: str) -> Explanation:
    """Return why the pending job ``job_id`` does not start on this snapshot, by the passes (`decide.ask`).

    Agents are not asked: of one that may keep a job waiting that fits, it is said that it does.

    Raises:
        KeyError: The job is not pending in this snapshot.
    """
    job = next((j for j in snapshot.pending if j.id == job_id), None)
    if job is None:
        raise KeyError(job_id)
    before, snapshot = snapshot, split(snapshot)
    job = next(j for j in snapshot.pending if j.id == job_id)
    alone = SingleJobView(snapshot)
    own = ((node, free) for node, free in alone.nodes("free") if node.partition == job.spec.partition)
    answer = _without_draws(snapshot, job, ask(snapshot, job_id, job.spec.partition))
    at = next((i for i, j in enumerate(answer.queue) if j.id == job_id), None)
    place = 0 if at is None else sum(1 + j.behind for j in answer.queue[:at])
    reason = ineligible(job, snapshot.now, snapshot.policies) or answer.reason or _FITS
    if at is not None:
        reason = _undecided(snapshot, job, place, reason)
    steps = ["accept what is free (--placement-wait 0) now"] if answer.better else []
    head, head_at = answer.head or (None, math.inf)
    return Explanation(
        job_id=job_id,
        reason=reason,
        nodes=tuple(_by_slices(_verdict(job, node, free, snapshot.now), job, before) for node, free in own),
        position=None if at is None else place + 1,
        queue_length=sum(1 + j.behind for j in answer.queue),
        next_steps=(*steps, *next_steps(alone, job, reason.code, answer)),
        racks=answer.racks,
        beside=_beside_limit(snapshot, job, answer),
        head=head.id if head is not None else "",
        head_at=head_at,
        sharing=answer.sharing,
    )


def _by_slices(verdict: NodeVerdict, job: PendingView, snapshot: Snapshot) -> NodeVerdict:
    """Return the verdict with the node's own name; of slices that a cut on demand could make, say what that takes.

    ``snapshot``: before it was split.
    """
    name, profile = base_of(verdict.node), job.spec.profile
    node = next((one for one in snapshot.nodes if one.name == name), None)
    if not profile or verdict.dimension != "gpus" or node is None or not node.cuttable:
        return replace(verdict, node=name)
    held = {gpu for one in snapshot.running for p in one.allocation.parts if p.node == name for gpu in p.gpus}
    free = sum(one.number not in node.blocked and one.number not in held for one in node.slices)
    there = f"{free} of {count_of(len(node.slices), 'slice')} free; " if node.slices else ""
    units = compute_units(profile) or 1
    needs = f"a {profile} needs {units} next to each other" if units > 1 else f"there is no {profile} free"
    return replace(verdict, node=name, text=f"{there}{needs}, and a GPU is cut anew only when nothing runs on it")


def _without_draws(snapshot: Snapshot, job: PendingView, answer: JobAnswer) -> JobAnswer:
    """Return the answer with the limits that hold the job whatever the naive placement draws for others."""
    drawn = {name for name, policy in snapshot.policies.items() if policy.place == "naive"}
    if not answer.exceeded or not drawn:
        return answer
    others = tuple(one for one in snapshot.pending if one.id == job.id or one.spec.partition not in drawn)
    found = ask(replace(snapshot, pending=others), job.id, job.spec.partition)
    counted = {one.id for one in answer.queue} | ({job.id} if not found.exceeded else set())
    queue = [one for one in answer.ordered if one.id in counted]
    return answer._replace(reason=found.reason, exceeded=found.exceeded, queue=queue)


_FITS = Reason(code=ReasonCode.POLICY, message="fits now; the next cycle can start it")


def _undecided(snapshot: Snapshot, job: PendingView, place: int, reason: Reason) -> Reason:
    """Return the reason where an agent, a solver or a draw decides too; ``place``: number of jobs ahead."""
    policy = snapshot.policies[job.spec.partition]
    if policy.place == "milp" and reason is _FITS:
        return ELSEWHERE
    if not policy.traits.holds_back and policy.place != "naive":
        return reason
    alone = ask(replace(snapshot, pending=(job,)), job.id, job.spec.partition).reason
    if policy.traits.holds_back:
        return HELD_BACK if alone is None else reason
    if place and (policy.backfill == "none" or (policy.backfill == "easy" and alone is not None)):
        return Reason(code=ReasonCode.PRIORITY, message=jobs_ahead(place))
    return alone or (reason if reason.code is ReasonCode.BACKFILL else _FITS)  # other jobs' draws are unknown


def _beside_limit(snapshot: Snapshot, job: PendingView, answer: JobAnswer) -> str:
    """Return what else keeps the job pending, so that the time its limit frees is not taken for its start."""
    if not answer.exceeded:
        return ""
    others = [reason.message for _, reason in answer.exceeded[1:]]
    exceeded = {bound for bound, _ in answer.exceeded}
    before = _before(snapshot, job, answer.ordered)
    same = {other.id for other in before if not exceeded.isdisjoint(other.bounds)}
    may_run = {other.id for other in answer.queue}
    under = sum(1 + other.behind for other in before if other.id in same)
    free = sum(1 + other.behind for other in before if other.id in may_run - same)
    words = [f"{count_of(under, 'pending job')} under the same limit"] if under else []
    words += [count_of(free, "other" if under else "pending job")] if free else []
    first = f"{' and '.join(words)} {'goes' if under + free == 1 else 'go'} first"
    return "; ".join([*others, first] if words else others)


def _before(snapshot: Snapshot, job: PendingView, ordered: list[PendingView]) -> list[PendingView]:
    """Return the jobs ahead: in its partition by order, elsewhere by urgency or waiting time."""
    own = ordered[: next((i for i, other in enumerate(ordered) if other.id == job.id), len(ordered))]
    rank = (-job.priority, job.submit_time)
    return own + [
        other
        for other in snapshot.pending
        if other.spec.partition != job.spec.partition
        and (-other.priority, other.submit_time) < rank
        and ineligible(other, snapshot.now, snapshot.policies) is None
    ]


def _verdict(job: PendingView, node: NodeView, free: Amounts, now: float) -> NodeVerdict:
    needs, total = need(job.spec), total_of(node)
    dimension: Dimension
    if text := closed_reason(job, node, now):
        dimension = "barred"
    elif not node.available:
        why = node.unavailable_reason
        dimension, text = "unavailable", f"not available ({why})" if why else "not available"
    elif covers(free, needs):
        what = "slices" if job.spec.profile else "GPUs"
        dimension, text = "", f"fits: {free[0]} of {total[0]} {what} and {free[1]} of {total[1]} cores free"
    else:
        dimension, text = shortfall_of(node, free, needs)
    return NodeVerdict(node=node.name, fits=not dimension, dimension=dimension, text=text)
