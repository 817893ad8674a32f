"""Nodes are kept for the first job of a queue that cannot start before a reservation is over, so that it does start.

However much were free, it would have to wait: so it neither blocks the queue nor takes the head's place, whose
reservation others behind need (a job with a long limit before a maintenance would switch backfill's protection off for
days). But who is behind it may not be in its way when its time has come: to these, the place that it gets by the limits
of what runs is reserved, too. Under conservative backfill every such job has a place in the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, Waiting
from gpusched.sched.backfill import reserve_any
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose
from gpusched.sched.reservations.calendar import KEPT
from gpusched.sched.state import BACKFILL, FIRST_FIT, OK, RESERVED, Calendar, Ints, Releases, Requests, Scratch
from gpusched.sched.text import would_delay

_BEHIND, _LATE = 1, 2  # would end before the job's time; would not


class Kept(NamedTuple):
    """``rows``: of nodes kept for a job from ``begin`` to ``end``; ``behind``: who is behind it."""

    job: int
    rows: Ints
    begin: float
    end: float
    behind: Ints


def kept_clear(
    snapshot: Snapshot, world: NodeArrays, waiting: Waiting, releases: Releases, scratch: Scratch,
    reasons: dict[str, Reason],
) -> tuple[Waiting, list[Kept]]:  # fmt: skip
    """The jobs with what is kept for others in their masks, and that; as given, where nobody waits for such an end.

    ``reasons`` gets those of jobs that nothing but that holds back. ``scratch`` fits the jobs as given, and their
    feasibility is set.
    """
    waits = waiting.jobs.feasibility[waiting.jobs.shape] == RESERVED
    found: list[Kept] = []
    if not waits.any():
        return waiting, found
    for name, policy in snapshot.policies.items():
        own, ordering = waiting.queues.get(name, []), policy.agent is not None and policy.traits.orders
        if own and waits[own].any() and (ordering or policy.backfill in ("none", "easy")):
            queue = waiting.ordered(name, "fifo" if ordering else policy.order)
            kept = _first(waiting, queue, waits, world, releases, scratch)
            if kept is not None:
                found.append(kept)
    for kept in found:
        waiting = _behind(waiting, kept, world, snapshot.now, scratch, reasons)
    return waiting, found


def _first(
    waiting: Waiting, queue: Ints, waits: np.ndarray, world: NodeArrays, releases: Releases, scratch: Scratch
) -> Kept | None:
    """The first of a partition's queue that waits for the end of a reservation and gets a place, with that."""
    jobs, now = waiting.jobs, world.reserved.now
    for at in np.flatnonzero(waits[queue]).tolist():
        job = int(queue[at])
        if exceeds(jobs.links, jobs.room, jobs.account, job):
            continue
        limit = waiting.views[job].limit_s
        begin, given = reserve_any(
            world.resources, releases, jobs.masks, waiting.requests, jobs.shape[job], FIRST_FIT, now, limit, scratch
        )
        if begin < np.inf:
            rows = scratch.chosen[: waiting.requests.parts[given]].copy()
            return Kept(job, rows, float(begin), float(begin) + limit, queue[at + 1 :])
    return None


def _behind(
    waiting: Waiting, kept: Kept, world: NodeArrays, now: float, scratch: Scratch, reasons: dict[str, Reason]
) -> Waiting:
    """Those behind a job with masks of their own, which know what is kept."""
    jobs, requests, calendar = waiting.jobs, waiting.requests, waiting.calendar
    late = now + jobs.limit[kept.behind] > kept.begin
    kind = np.zeros(len(jobs.shape), np.int64)
    kind[kept.behind] = np.where(late, _LATE, _BEHIND)
    # every request, and what is behind it, twice more: shape s is s + kind * shapes from here on
    count, rows = len(requests.lo), len(jobs.masks)
    wide = Requests(*(None if column is None else np.tile(column, 3) for column in requests))  # type: ignore[arg-type]
    again = np.repeat(np.arange(3), count)
    wide.mask[:] += again * rows
    if wide.looser is not None:
        wide.looser[:] = np.where(wide.looser >= 0, wide.looser + again * count, -1)
    masks = np.tile(jobs.masks, (3, 1))
    masks[2 * rows :, kept.rows] = 0
    feasibility = np.tile(jobs.feasibility, 3)
    calendar = _with(calendar, kept, rows)
    wider = waiting._replace(
        jobs=jobs._replace(shape=jobs.shape + kind * count, masks=masks, feasibility=feasibility),
        requests=wide,
        calendar=calendar,
    )
    _set_late(wider, world, scratch, count)
    why = Reason(code=ReasonCode.BACKFILL, message=would_delay(waiting.views[kept.job].id, kept.begin - now))
    for job in np.flatnonzero(wider.jobs.feasibility[wider.jobs.shape] == BACKFILL).tolist():
        reasons.setdefault(waiting.views[job].id, why)
    return wider


def _set_late(waiting: Waiting, world: NodeArrays, scratch: Scratch, count: int) -> None:
    """Of the requests of jobs that would be in the way then, what is possible on what is not kept, were it empty."""
    jobs, requests = waiting.jobs, waiting.requests
    used = np.unique(jobs.shape)
    chains = {int(shape) for shape in used if shape >= 2 * count}
    for shape in sorted(chains):
        at, possible = shape, False
        while at >= 0 and not possible and jobs.feasibility[shape] == OK:
            possible = bool(choose(world.usable, jobs.masks, request_of(requests, at), FIRST_FIT, scratch))
            at = -1 if requests.looser is None else int(requests.looser[at])
        if jobs.feasibility[shape] == OK and not possible:
            jobs.feasibility[shape] = BACKFILL


def _with(calendar: Calendar, kept: Kept, rows: int) -> Calendar:
    """The calendar of masks three times as long, of which the last two thirds know what is kept."""
    size, more = len(calendar.base), len(kept.rows)
    node = np.concatenate((calendar.node, kept.rows))
    number = np.concatenate((calendar.number, np.full(more, KEPT)))
    begin = np.concatenate((calendar.begin, np.full(more, kept.begin)))
    end = np.concatenate((calendar.end, np.full(more, kept.end)))
    order = np.argsort(begin, kind="stable")
    base, own = np.arange(3 * rows), np.full(3 * rows, -1)
    limit, guarded = np.zeros(3 * rows), np.zeros(3 * rows, np.int64)
    for part in range(3):
        here = slice(part * rows, part * rows + size)
        base[here], own[here], limit[here] = calendar.base, calendar.own, calendar.limit
        guarded[here] = calendar.guarded | (part > 0)
    return calendar._replace(
        node=node[order], number=number[order], begin=begin[order], end=end[order],
        by_end=np.argsort(end[order], kind="stable"), base=base, own=own, limit=limit, guarded=guarded,
    )  # fmt: skip
