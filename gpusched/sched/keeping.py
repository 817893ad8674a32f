"""Nodes kept for the first job in a queue that must wait for the end of a reservation.

However much were free, it would have to wait: so it neither blocks the queue nor becomes the head. The head needs its
reservation (a job with a long limit before a maintenance would switch backfill's protection off for
days). But jobs behind it may not delay its start: for these, the place that it gets by the limits
of running jobs is reserved, too. Under conservative backfill every such job has a place in the plan.

In: the state of a pass, and a job that it comes to (`keep_nodes`). Out: rows of the masks without the nodes that are
kept, until the next instant (`calendar.turn_due`), and `Calendar.kept`, which forecasts use.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import reserve_any
from gpusched.sched.fit import entry, request_of
from gpusched.sched.place import choose
from gpusched.sched.reservations.calendar import too_late
from gpusched.sched.state import BACKFILL, EASY, FIRST_FIT, NONE, OK, Calendar, ClusterState


@jit
def reset_kept_nodes(calendar: Calendar | None) -> None:
    """Reset for another queue."""
    if calendar is not None:
        calendar.kept_times[:] = np.inf
        calendar.kept_for[1] = 0


@jit
def keeps_nodes(backfill: int) -> bool:
    """Return whether this backfill keeps nodes: SKIP keeps none, and CONSERVATIVE plans for every job."""
    return backfill == NONE or backfill == EASY


@jit
def keep_nodes(calendar: Calendar | None, state: ClusterState, job: int) -> None:
    """Keep a place for a job that waits for a reservation to end, unless an earlier job has one.

    Jobs behind it that would still run when it is to start find its nodes closed from now on, row by row of the masks:
    a job counts as lasting as long as the longest that shares its row. Those that could run nowhere else, whatever were
    free, are not tried (feasibility BACKFILL). A job that waits for its own reservation has its nodes by that.
    """
    if calendar is None or calendar.kept_times[0] < np.inf:
        return
    resources, releases, requests, jobs, scratch, _, now = state
    own = requests.mask[jobs.shape[job]]
    if calendar.own[own] >= 0:
        return
    feasibility, masks, limit = jobs.feasibility, jobs.masks, calendar.limit[own]
    begin, given = reserve_any(resources, releases, masks, requests, jobs.shape[job], FIRST_FIT, now, limit, scratch)
    if begin == np.inf:
        return
    calendar.kept_for[0], calendar.kept_for[1] = job, requests.parts[given]
    calendar.kept_times[0], calendar.kept_times[1] = begin, begin + limit
    for part in range(requests.parts[given]):
        calendar.kept[part] = scratch.chosen[part]
    for row in range(calendar.base.size):
        if now + calendar.limit[row] > begin:
            calendar.turns[row] = -np.inf  # due, so that they are opened again
            for part in range(calendar.kept_for[1]):
                masks[row, calendar.kept[part]] = 0
        else:
            calendar.turns[row] = min(calendar.turns[row], too_late(begin, calendar.limit[row], now))
    for shape in range(feasibility.size):
        if feasibility[shape] == OK and now + calendar.limit[requests.mask[shape]] > begin:
            feasibility[shape] = OK if _possible(calendar, state, shape) else BACKFILL


@jit
def _possible(calendar: Calendar, state: ClusterState, shape: int) -> bool:
    """Return whether a request, or a looser one, fits on empty nodes with the masks as they are."""
    at = shape
    while at >= 0:
        if choose(calendar.usable, state.jobs.masks, request_of(state.requests, at), FIRST_FIT, state.scratch):
            return True
        at = entry(state.requests.looser, at, -1)
    return False
