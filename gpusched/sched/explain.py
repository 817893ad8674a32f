"""Why a job waits and what would help: for people, in plain Python, from any snapshot (also from the store)."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpusched.model.plan import LIMITS, Reason, ReasonCode
from gpusched.model.policy import MAPPED
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.advice import next_steps
from gpusched.sched.eligible import ARRAY_FULL, ineligible
from gpusched.sched.limits import Rooms
from gpusched.sched.reservations.rules import reserved_text
from gpusched.sched.tally import (
    NodeCount,
    asks_of,
    barred,
    counts_of,
    covers,
    earliest,
    fits,
    need,
    open_to,
    plain_order,
    queue_of,
    racks_of,
    shortfall_of,
    shut,
    waits_for_end,
)
from gpusched.sched.text import (
    ALLOWED,
    CORES,
    DELAYS_SOME,
    ELSEWHERE,
    GPUS,
    HELD_BACK,
    MEMORY,
    before_it,
    keeps_room,
    not_available,
    scattered,
    shortage,
    starts_in,
    would_delay,
)
from gpusched.sched.topology.spread import Ask, better_text, gives_up, splits, waits_text

Dimension = Literal["", "barred", "unavailable", "gpus", "cores", "memory"]


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job's partition: whether it could give one of the job's parts now, and if not, what is short."""

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
        beside: Of a job that a limit holds: which limits hold it besides, and who goes first once they do not; or "".
    """

    job_id: str
    reason: Reason
    nodes: tuple[NodeVerdict, ...] = ()
    position: int | None = None
    queue_length: int = 0
    next_steps: tuple[str, ...] = ()
    racks: int | None = None
    beside: str = ""


def explain(snapshot: Snapshot, job_id: str) -> Explanation:
    """Why the pending job ``job_id`` is not started on this snapshot.

    The code is the one `decide` gives where its plan starts nothing more. One difference: under EASY, a job that fits
    and outlasts the head's wait is called BACKFILL without asking whether the head would leave it room; under
    conservative backfill, any that fits and is not the first.

    Raises:
        KeyError: The job is not pending in this snapshot.
    """
    job = next((j for j in snapshot.pending if j.id == job_id), None)
    if job is None:
        raise KeyError(job_id)
    counts = counts_of(snapshot)
    own = [c for c in counts.values() if c.node.partition == job.spec.partition]
    queue = queue_of(snapshot, job.spec.partition, own)
    at = next((i for i, j in enumerate(queue) if j.id == job_id), None)
    place = None if at is None else sum(1 + j.behind for j in queue[:at])
    reason = _reason(snapshot, job, counts, queue, place)
    better = reason.code is ReasonCode.POLICY and waits_for_better(snapshot, job) is not None
    waits = better or _waits_for_rack(snapshot, job, own) is not None
    steps = ["accept what is free (--wait-for-placement 0) now"] if better else []
    return Explanation(
        job_id=job_id,
        reason=reason,
        nodes=tuple(_verdict(job, count, snapshot.now) for count in own),
        position=None if place is None else place + 1,
        queue_length=sum(1 + j.behind for j in queue),
        next_steps=(*steps, *next_steps(snapshot, job, reason.code, counts, queue)),
        racks=_racks_now(job, own) if waits else None,
        beside=_beside_limit(snapshot, job, queue) if reason.code in LIMITS else "",
    )


def _beside_limit(snapshot: Snapshot, job: PendingView, queue: list[PendingView]) -> str:
    """What besides the limit named keeps the job, so that nobody takes the time when that frees for its start."""
    rooms = Rooms(snapshot)
    exceeded = rooms.exceeded(job)
    named = 0 if rooms.full(job) == ARRAY_FULL else 1
    others = [rooms.reason(at, job).message for at in exceeded[named:]]
    before = _before(snapshot, job)
    same = {other.id for other in before if not set(exceeded).isdisjoint(other.bounds)}
    may_run = {other.id for other in queue}
    under = sum(1 + other.behind for other in before if other.id in same)
    free = sum(1 + other.behind for other in before if other.id in may_run - same)
    words = [f"{count_of(under, 'pending job')} under the same limit"] if under else []
    words += [count_of(free, "other" if under else "pending job")] if free else []
    first = f"{' and '.join(words)} {'goes' if under + free == 1 else 'go'} first"
    return "; ".join([*others, first] if words else others)


def _before(snapshot: Snapshot, job: PendingView) -> list[PendingView]:
    """Who is asked before the job: in its partition by its order, elsewhere who is more urgent or has waited longer."""
    own = plain_order(snapshot, job.spec.partition)
    own = own[: next((i for i, other in enumerate(own) if other.id == job.id), len(own))]
    rank = (-job.priority, job.submit_time)
    return own + [
        other
        for other in snapshot.pending
        if other.spec.partition != job.spec.partition
        and (-other.priority, other.submit_time) < rank
        and ineligible(other, snapshot.now, snapshot.policies) is None
    ]


def _waits_for_rack(snapshot: Snapshot, job: PendingView, nodes: list[NodeCount]) -> float | None:
    """Until when it waits for better nodes than there are now; None: it does not."""
    policy = snapshot.policies.get(job.spec.partition)
    if policy is None:
        return None
    return gives_up(job, policy, lambda at: asks_of(snapshot, job, nodes, at), snapshot.now)


def _racks_now(job: PendingView, nodes: list[NodeCount]) -> int | None:
    """On how many racks it could start now."""
    found = (racks_of(job, nodes, lambda count: count.free, ask) for ask in splits(job.spec))
    return next((racks for racks in found if racks is not None), None)


def waits_for_better(snapshot: Snapshot, job: PendingView) -> tuple[Reason, float] | None:
    """Why, and until when, a job that fits waits for a better place, were it alone; None: it would start."""
    if snapshot.policies[job.spec.partition].place != "contention" or not snapshot.beliefs:
        return None
    from gpusched.sched.arrays import node_arrays_of, waiting_of
    from gpusched.sched.state import new_scratch
    from gpusched.sched.topology.live import costs_of
    from gpusched.sched.topology.queue import waits_now

    alone = replace(snapshot, pending=(job,))
    world = node_arrays_of(alone)
    waiting = waiting_of([job], world, {}, alone)
    costs = costs_of(alone, world, waiting, new_scratch(len(world.nodes), 0, world.rack))
    if costs is None:
        return None
    until = waits_now(costs, world.resources, waiting.requests, waiting.jobs, alone.now).get(0)
    if until is None:
        return None
    own, harm = costs.told[0].tolist()
    return Reason(code=ReasonCode.POLICY, message=better_text(own, harm, until, alone.now)), until


def _verdict(job: PendingView, count: NodeCount, now: float) -> NodeVerdict:
    node, needs, free, total = count.node, need(job.spec), count.free, count.total
    dimension: Dimension
    if text := shut(job, node, now):
        dimension = "barred"
    elif not node.available:
        why = node.unavailable_reason
        dimension, text = "unavailable", f"not available ({why})" if why else "not available"
    elif covers(free, needs):
        dimension, text = "", f"fits: {free[0]} of {total[0]} GPUs and {free[1]} of {total[1]} cores free"
    else:
        dimension, text = shortfall_of(count, needs)
    return NodeVerdict(node=node.name, fits=not dimension, dimension=dimension, text=text)


def _reason(
    snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount], queue: list[PendingView], place: int | None
) -> Reason:
    if why := ineligible(job, snapshot.now, snapshot.policies):
        return why
    nodes = [c for c in counts.values() if c.node.partition == job.spec.partition]
    asked = asks_of(snapshot, job, nodes)
    if not fits(job, nodes, lambda c: c.total, asked):
        return Reason(code=ReasonCode.BAD_CONSTRAINTS, message=_short(job, nodes, asked[0], "needs", "there"))
    if not fits(job, nodes, lambda c: c.usable, asked):
        short = _short(job, nodes, asked[0], "needs", "usable")
        message = f"{short}; not available: {not_available(c.node for c in nodes)}"
        return Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=message)
    own = open_to(job, nodes, snapshot.now)
    asked = asks_of(snapshot, job, own)
    if not fits(job, own, lambda c: c.usable, asked):
        found = {one.name: one for c in nodes for one in c.node.reservations}
        ones = sorted(found.values(), key=lambda one: (one.begin, one.name))
        return Reason(
            code=ReasonCode.REQ_NODE_NOT_AVAIL,
            message=reserved_text(ones, job.spec.reservation, job.limit_s, snapshot.now),
        )
    nodes = own
    if place is None:
        return Rooms(snapshot).full(job) or ARRAY_FULL
    if fits(job, nodes, lambda c: c.free, asked):
        return _fits_now(snapshot, job, counts, queue, place)
    skips = snapshot.policies[job.spec.partition].backfill == "skip"
    if place and not skips:
        return Reason(code=ReasonCode.PRIORITY, message=before_it(place))
    by_limits = earliest(snapshot, job, counts) if not skips else None
    when = starts_in(by_limits[0] - snapshot.now) if by_limits else ""
    policy = snapshot.policies[job.spec.partition]
    if (until := _waits_for_rack(snapshot, job, nodes)) is not None:
        message = waits_text(until, snapshot.now, policy, job, _racks_now(job, nodes))
        return Reason(code=ReasonCode.RESOURCES, message=message + when)
    return Reason(code=ReasonCode.RESOURCES, message=_short(job, nodes, asked[0], "waits for", "free") + when)


def _fits_now(
    snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount], queue: list[PendingView], place: int
) -> Reason:
    policy = snapshot.policies[job.spec.partition]
    if policy.traits.holds_back:
        return HELD_BACK
    if place and policy.backfill == "none":
        return Reason(code=ReasonCode.PRIORITY, message=before_it(place))
    first = waits_for_end(snapshot, job.spec.partition, counts.values()) if policy.backfill != "skip" else None
    if first is not None and (then := earliest(snapshot, first, counts)) is not None:
        ordered = [other.id for other in plain_order(snapshot, job.spec.partition)]
        wait = then[0] - snapshot.now
        if job.limit_s > wait and ordered.index(first.id) < ordered.index(job.id):
            return Reason(code=ReasonCode.BACKFILL, message=would_delay(first.id, wait))
    if place and policy.backfill == "conservative":
        return Reason(code=ReasonCode.BACKFILL, message=DELAYS_SOME)
    if place and policy.backfill == "easy":
        if by_limits := earliest(snapshot, queue[0], counts):
            wait = by_limits[0] - snapshot.now
            if job.spec.time_limit_s > wait:
                return Reason(code=ReasonCode.BACKFILL, message=would_delay(queue[0].id, wait))
        elif (waits := waits_for_better(snapshot, queue[0])) and job.spec.time_limit_s > waits[1] - snapshot.now:
            return Reason(code=ReasonCode.BACKFILL, message=keeps_room(queue[0].id))
    if (why := waits_for_better(snapshot, job)) is not None:
        return why[0]
    if policy.place in MAPPED:
        return ELSEWHERE
    return Reason(code=ReasonCode.POLICY, message="fits now; the next cycle can start it")


def _short(job: PendingView, nodes: list[NodeCount], ask: Ask, verb: str, word: str) -> str:
    """The sentence with figures, on what nodes have in all (``there``), when well (``usable``) or now (``free``)."""
    needs = ask.needs
    has = [(c, c.total if word == "there" else c.usable if word == "usable" else c.free) for c in nodes]
    having = [(c, h) for c, h in has if not barred(job, c.node) and h[0] >= 0]
    dimension, nearest, most = ALLOWED, "", 0
    for following in (GPUS, CORES, MEMORY):
        if len(having) < ask.parts:
            break
        dimension = following
        best, figures = max(having, key=lambda ch: ch[1][dimension - 1])
        nearest, most = best.node.name, figures[dimension - 1]
        having = [(c, h) for c, h in having if h[dimension - 1] >= needs[dimension - 1]]
    if ask.one_rack and len(having) >= ask.parts:
        return scattered(verb, word, ask.parts, needs, max(Counter(c.rack for c, _ in having).values()))
    return shortage(verb, word, dimension, ask.parts, needs, len(having), nearest, most)
