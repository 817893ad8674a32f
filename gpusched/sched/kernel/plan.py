"""Conservative backfill: every pending job has a reservation on concrete nodes; none delays an earlier one.

Mu'alem and Feitelson, IEEE TPDS 12(6), 2001. The plan is made anew, in order of the queue, at every decision, so that
an early end is used at once; jobs ahead in the queue are never planned later than with the jobs behind them left out.
Until a job has to wait, what is free only grows, and no plan is needed. It begins with the first job that waits: for
each node a list of what is free from when on. Of a job with looser requests, the one that begins first is planned, of
several at once the tightest.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.fit import entry, request_of, with_mask
from gpusched.sched.place import choose
from gpusched.sched.releases import settle
from gpusched.sched.reservations.calendar import concerns, open_times
from gpusched.sched.state import (
    BACKFILL,
    FIRST_FIT,
    PRIORITY,
    STARTED,
    BackfillPlan,
    Calendar,
    ClusterState,
    Flags,
    PlacementRequest,
    Resources,
)


@jit
def is_begun(plan: BackfillPlan | None, state: ClusterState) -> bool:
    """Return whether any job waits in this pass."""
    return False if plan is None else bool(plan.used[1] == state.scratch.stamp[0])


@jit
def planned(plan: BackfillPlan | None, state: ClusterState, job: int, first: bool, rule: int) -> tuple[int, int]:
    """Place a job in a begun plan (`queue_pass.Place`), and start it if its planned time is now.

    If it is the head, `hold_planned` gives it its place. Why it does not start: BACKFILL (it fits now, but an earlier
    job has the resources reserved), PRIORITY.
    """
    shape = state.jobs.shape[job]
    if plan is None:
        return PRIORITY, shape
    begin, given = _plan_job(plan, state, job, rule, state.now if first else np.inf)
    if begin == state.now:
        return STARTED, given
    while shape >= 0:
        if _fits_now(state, shape):
            return BACKFILL, given
        shape = entry(state.requests.looser, shape, -1)
    return PRIORITY, given


@jit
def hold_planned(plan: BackfillPlan | None, state: ClusterState, job: int, rule: int) -> float:
    """Plan the first waiting job, or one that waits for a reservation (`queue_pass.Hold`); return its begin."""
    if plan is None:
        return np.inf
    shape = state.jobs.shape[job]
    if not is_begun(plan, state):
        request = request_of(state.requests, shape)
        _lay_out(plan, state, request.lo, request.hi)
        _chain_entries(plan, state.scratch.calendar)
        plan.used[1] = state.scratch.stamp[0]
    while shape >= 0:  # that it does not fit is no answer for others with this request: each has its own place
        state.scratch.failed[shape] = 0
        shape = entry(state.requests.looser, shape, -1)
    return _plan_job(plan, state, job, rule, np.inf)[0]


@jit
def _fits_now(state: ClusterState, shape: int) -> bool:
    """Return whether a request fits with nothing planned; if not, it will not fit later in this pass."""
    scratch = state.scratch
    if scratch.failed_late[shape] == scratch.stamp[0]:
        return False
    if choose(state.resources, state.jobs.masks, request_of(state.requests, shape), FIRST_FIT, scratch):
        return True
    scratch.failed_late[shape] = scratch.stamp[0]
    return False


@jit
def _lay_out(plan: BackfillPlan, state: ClusterState, lo: int, hi: int) -> None:
    """Set what nodes have free from now on, by the expected ends of running jobs (overdue: soon, not now)."""
    releases, points, nodes, now = state.releases, plan.points, plan.nodes, state.now
    settle(releases)
    for node in range(lo, hi):
        point = points[node]
        point["time"], point["next"] = now, -1
        point["gpus"], point["cores"] = state.resources.gpus[node], state.resources.cores[node]
        point["memory"] = state.resources.memory[node]
        nodes[node]["last"] = node
    plan.used[0] = nodes.size
    soon = np.nextafter(now, np.inf)
    for i in range(releases.used[0]):
        slot = releases.order[i]
        node = releases.node[slot]
        if node < lo or node >= hi or state.resources.gpus[node] < 0:
            continue
        at, end = nodes[node]["last"], max(releases.end[slot], soon)
        if points[at]["time"] < end:
            at = nodes[node]["last"] = _insert_after(plan, at, end)
        points[at]["gpus"] += releases.gpus[slot]
        points[at]["cores"] += releases.cores[slot]
        points[at]["memory"] += releases.memory[slot]


@jit
def _insert_after(plan: BackfillPlan, at: int, time: float) -> int:
    """Insert a point after ``at`` with the same free resources; return its index."""
    points, new = plan.points, plan.used[0]
    plan.used[0] += 1
    points[new]["time"], points[new]["next"] = time, points[at]["next"]
    points[new]["gpus"], points[new]["cores"] = points[at]["gpus"], points[at]["cores"]
    points[new]["memory"] = points[at]["memory"]
    points[at]["next"] = new
    return int(new)


@jit
def _chain_entries(plan: BackfillPlan, calendar: Calendar | None) -> None:
    """Link each node's calendar entries into a list."""
    if calendar is None:
        return
    for node in range(plan.nodes.size):
        plan.nodes[node]["entry"] = -1
    for e in range(calendar.node.size):
        node = calendar.node[e]
        plan.follows[e] = plan.nodes[node]["entry"]
        plan.nodes[node]["entry"] = e


@jit
def _plan_job(plan: BackfillPlan, state: ClusterState, job: int, rule: int, latest: float) -> tuple[float, int]:
    """Return when a job can begin, and with which request; ``scratch.chosen``: its nodes.

    They are taken off the plan if it begins at ``latest`` or before.
    """
    lasts, best, given, last = state.jobs.limit[job], np.inf, state.jobs.shape[job], -1
    shape = given
    while shape >= 0 and best > state.now:
        begin, last = _earliest(plan, state, shape, lasts, rule), shape
        if begin < best:
            best, given = begin, shape
        shape = entry(state.requests.looser, shape, -1)
    if best < np.inf and best <= latest:
        request = request_of(state.requests, given)
        if given != last:
            _earliest(plan, state, given, lasts, rule)
        for part in range(request.parts):
            _take(plan, state.scratch.chosen[part], request, best, best + lasts)
    return best, given


@jit
def _earliest(plan: BackfillPlan, state: ClusterState, shape: int, lasts: float, rule: int) -> float:
    """Return when a request first fits for so long; ``scratch.chosen``: its nodes, by least free until then."""
    scratch, nodes, known, stamp = state.scratch, plan.nodes, plan.shapes[shape], state.scratch.stamp[0]
    asked, first = request_of(state.requests, shape), state.now
    if known["stamp"] == stamp and lasts >= known["at_least"]:
        first = known["not_before"]  # one like it, no longer than it, found nothing sooner in a plan that was less full
    lo, hi, parts, row = asked.lo, asked.hi, asked.parts, asked.mask
    request = with_mask(asked, -1)  # whether a node will do is in its ``begin``
    opens, closes = open_times(scratch.calendar, row)
    first, found = max(first, opens), False
    for node in range(lo, hi):
        nodes[node]["begin"] = -np.inf
    # each round moves `first` to the time when enough nodes could have begun; the answer is a time at which all of them
    # begin at once, so a round that had to move is repeated from there (a single part needs no other node)
    while not found:
        soonest = _soonest(plan, state, request, row, first, lasts)
        if soonest == np.inf or soonest + lasts > closes:
            first = np.inf
            break
        found, after = soonest == first or parts == 1, np.inf
        first = soonest
        for node in range(lo, hi if found else lo):
            if nodes[node]["begin"] != first:
                scratch.future.gpus[node] = -1
                after = min(after, nodes[node]["begin"])
        if found and not choose(scratch.future, state.jobs.masks, request, rule, scratch):  # not in one rack
            found, first = False, after
            for node in range(lo, hi):
                nodes[node]["begin"] = -np.inf
    known["stamp"], known["not_before"], known["at_least"] = stamp, first, lasts
    return float(first)


@jit
def _soonest(
    plan: BackfillPlan, state: ClusterState, request: PlacementRequest, row: int, first: float, lasts: float
) -> float:
    """Return when as many nodes as the request has parts can each have begun one, from ``first`` on.

    Each node's ``begin`` is the first such time of its own; ``scratch.future``: the least that it has while it lasts.
    """
    nodes, parts, count, last = plan.nodes, request.parts, 0, np.inf
    for node in range(request.lo, request.hi):
        begin = nodes[node]["begin"]
        if begin < first:
            # of a single part what begins later than another node's does not matter
            begin = _begin_on(plan, state, request, row, node, first, lasts, last if parts == 1 else np.inf)
            nodes[node]["begin"] = begin
        if begin < last:
            # insertion into the `parts` smallest begins: the last of them is when enough nodes are there
            at = count if count < parts else parts - 1
            while at > 0 and nodes[at - 1]["nearest"] > begin:
                nodes[at]["nearest"] = nodes[at - 1]["nearest"]
                at -= 1
            nodes[at]["nearest"] = begin
            count = min(count + 1, parts)
            if count == parts:
                last = nodes[parts - 1]["nearest"]
    return float(last)


@jit
def _begin_on(
    plan: BackfillPlan,
    state: ClusterState,
    request: PlacementRequest,
    row: int,
    node: int,
    first: float,
    lasts: float,
    latest: float,
) -> float:
    """Return when a node can begin a part, from ``first`` on; infinite: never, or later than ``latest``."""
    begin = first
    while begin < np.inf:
        begin = _free_from(plan, state.scratch.future, request, node, begin, lasts, latest)
        after = _unreserved_from(state.scratch.calendar, plan, state.jobs.masks, row, node, begin, lasts, state.now)
        if after == begin:
            break
        begin = after
    return begin


@jit
def _free_from(
    plan: BackfillPlan,
    least: Resources,
    request: PlacementRequest,
    node: int,
    first: float,
    lasts: float,
    latest: float,
) -> float:
    """Return from when a node has enough for so long; ``least``: its minimum meanwhile."""
    points, at, begin = plan.points, node, np.inf
    gpus, cores, memory = 0, 0, 0
    while at >= 0:
        point = points[at]
        after = point["next"]
        until = points[after]["time"] if after >= 0 else np.inf
        if until > first:
            if point["gpus"] < request.gpus or point["cores"] < request.cores or point["memory"] < request.memory:
                begin = np.inf
            elif begin == np.inf:
                begin = max(first, point["time"])
                gpus, cores, memory = point["gpus"], point["cores"], point["memory"]
            else:
                gpus, cores = min(gpus, point["gpus"]), min(cores, point["cores"])
                memory = min(memory, point["memory"])
            if begin < np.inf and until >= begin + lasts:
                break
            if begin == np.inf and until > latest:
                break
        at = after
    least.gpus[node], least.cores[node], least.memory[node] = gpus, cores, memory
    return float(begin)


@jit
def _unreserved_from(
    calendar: Calendar | None,
    plan: BackfillPlan,
    masks: Flags,
    row: int,
    node: int,
    first: float,
    lasts: float,
    now: float,
) -> float:
    """Return from when, at ``first`` or later, jobs of a mask row may use a node for so long; infinite: never."""
    if row < 0 or first == np.inf:
        return first
    if calendar is None or calendar.base.size == 0:
        return first if masks[row, node] != 0 else np.inf
    if masks[calendar.base[row], node] == 0:
        return np.inf
    begin, e = first, plan.nodes[node]["entry"]
    while e >= 0:
        if begin < calendar.end[e] and calendar.begin[e] < begin + lasts and concerns(calendar, e, row):
            begin, e = calendar.end[e], plan.nodes[node]["entry"]
        else:
            e = plan.follows[e]
    # now the row itself decides: its limit may be a little longer
    return float(np.nextafter(now, np.inf) if begin == now and masks[row, node] == 0 else begin)


@jit
def _take(plan: BackfillPlan, node: int, request: PlacementRequest, begin: float, end: float) -> None:
    """Take one part off a node from ``begin`` to ``end``."""
    points, at = plan.points, node
    if end <= begin:
        return
    while points[at]["next"] >= 0 and points[points[at]["next"]]["time"] <= begin:
        at = points[at]["next"]
    if points[at]["time"] < begin:
        at = _insert_after(plan, at, begin)
    until = -np.inf
    while until < end:
        after = points[at]["next"]
        until = points[after]["time"] if after >= 0 else np.inf
        if until > end:
            _insert_after(plan, at, end)
            until = end
        points[at]["gpus"] -= request.gpus
        points[at]["cores"] -= request.cores
        points[at]["memory"] -= request.memory
        at = after
