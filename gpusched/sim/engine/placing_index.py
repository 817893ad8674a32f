"""`placing` with an index: at every instant the first of each class is looked at, in order, and whoever fits goes.

Where the first of a class does not start, none behind it of that class would. One that has been the first of all for
``hold_s`` and fits nowhere holds up all behind it, so that nobody starves. With EASY backfill the first that cannot
start has nodes reserved instead, by the limits of what runs. Those behind it start where they fit now and end by then,
or take what it leaves over, as `sched.backfill` says. A job that waits for a rack has that reserved. By the model, one
that could start and waits for a cheaper place has nodes from when on it takes what is free. A job that is slowed down
may outlast its limit, and counts as ending now: then others get what the first leaves.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import protect, reserve
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.state import EASY, RACK, Ints, Resources
from gpusched.sim.engine.ledger import exceeds_limit, just_turned
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing import (
    ALIGNED,
    CHEAPEST,
    DRAWN,
    EVENTS,
    RACK_WAIT,
    TRY,
    Placing,
    append,
    cheapest_way,
    drawn_way,
    holds,
    look_again,
    wait_on,
    ways_now,
)
from gpusched.sim.engine.state import CHANGED, DECIDE, ENDED, READY, RUNS, Log, Passes, Sim, shape_request
from gpusched.sim.engine.static import note_release
from gpusched.sim.engine.step import occupy


@jit
def decide_placed(sim: Sim, log: Log, passes: Passes, of: Placing) -> int:
    """Starts whoever may start."""
    order, now, runs = of.order, sim.clock[0], sim.counter[RUNS]
    behind = _only_behind(sim, of, now)
    for i in range(sim.counter[READY]):
        append(sim, of, sim.ready[i])
    look_again(sim, of)
    order.size[0] = 0
    if behind:
        _gather_ready(sim, of)
    else:
        _gather(sim, passes, of)
    free = _free_gpus(sim) if order.size[0] > 0 else 0
    while order.size[0] > 0:
        c = pop(order)
        job, queue = of.looked[c], of.queue[c]
        rank = sim.jobs[job]["rank"]
        if rank > of.held[queue]:
            continue
        if exceeds_limit(sim.ledger, job):  # so do all of its class
            of.tried[c] = 1
            continue
        guarded = of.first[queue] >= 0
        late = guarded and now + sim.jobs[job]["expected"] > of.shadow[queue]
        following, way, then = of.next[job], -1, now
        if of.size[c] <= free:
            way, then = _try(sim, passes, of, c, job, now, late)
        else:
            of.rests[c] = passes.scratch.stamp[0]
        if way >= 0 and then <= now:
            free -= of.size[c]
            _take_out(of, c, job)
            _start(sim, log, passes, of, c, job, way, now)
        elif of.backfill == EASY:
            if not guarded:
                shadow = _reserve(sim, passes, of, c, job, now, then)
                if shadow < np.inf:  # else it waits for nodes that are away, and blocks nobody
                    of.first[queue], of.shadow[queue] = job, shadow
        else:
            following, of.tried[c] = -1, 1
            if holds(sim, of, c, job, now):
                of.held[queue] = rank
        if of.backfill == EASY:
            following = _next(sim, passes, of, c, following, now)
        if following >= 0:
            of.looked[c] = following
            push(order, _key_of(sim, of, c, following), c)
    if of.rule == CHEAPEST and sim.counter[RUNS] != runs:
        of.tried[:] = 0  # whoever has started is a neighbour: another place may be the cheapest
    if of.rule == RACK_WAIT and of.backfill == EASY:
        _note_waits(sim, of, now)
    wait_on(sim, of)
    return DECIDE


run_placed = looped(decide_placed)


@jit
def _gather(sim: Sim, passes: Passes, of: Placing) -> None:
    """The first of each class is looked at, if anything has changed for it."""
    passes.scratch.stamp[0] += 1
    of.moves[0] = 0
    of.first[:] = -1
    of.shadow[:] = np.inf
    for c in range(of.head.size):
        if of.head[c] >= 0 and of.tried[c] == 0:
            of.looked[c] = of.head[c]
            push(of.order, _key_of(sim, of, c, of.head[c]), c)


@jit
def _free_gpus(sim: Sim) -> int:
    """On all nodes that are available."""
    free = 0
    for node in range(sim.node.size):
        free += max(0, sim.resources.gpus[node])
    return free


@jit
def _key_of(sim: Sim, of: Placing, c: int, job: int) -> float:
    """The place of a class's job among those that are looked at."""
    rank = sim.jobs[job]["rank"]
    return float(rank - of.size[c] * sim.jobs.size if of.rule == ALIGNED else rank)


@jit
def _start(sim: Sim, log: Log, passes: Passes, of: Placing, c: int, job: int, way: int, now: float) -> None:
    """Starts a job so on ``sim.chosen``."""
    shape, queue, end = of.ways.shape[way], of.queue[c], now + sim.jobs[job]["expected"]
    sim.jobs[job]["shape"] = shape
    passes.jobs.shape[job] = shape
    request = shape_request(sim.shapes, shape)
    occupy(sim, log, job, request, 0.0)
    if of.backfill == EASY:
        guarded = of.first[queue] >= 0
        late = guarded and end > of.shadow[queue]
        note_release(sim, passes, request, job, end, guarded, late)
        of.moves[0] = max(of.moves[0], int(late or of.rule == CHEAPEST))


@jit
def _note_waits(sim: Sim, of: Placing, now: float) -> None:
    """When a job waits no more for its rack all are looked at: what runs may have outlasted its limit meanwhile."""
    for c in range(of.head.size):
        job = of.head[c]
        while job >= 0:
            until = sim.jobs[job]["submit"] + of.wait_s
            if until > now:
                of.wake[0] = min(of.wake[0], until)
            job = of.next[job]


@jit
def _only_behind(sim: Sim, of: Placing, now: float) -> bool:
    """Whether all that has happened since the last pass is that jobs came behind those that wait with a reservation.

    Then it holds as it was made, and no other job can start that could not start before.
    """
    if of.backfill != EASY or of.rule == ALIGNED or of.moves[0] != 0 or of.wake[0] <= now:
        return False
    if sim.counter[ENDED] > 0 or sim.counter[CHANGED] != of.at[EVENTS] or just_turned(sim.ledger):
        return False
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        queue = of.queue[of.of[job]]
        first = of.first[queue]
        if first < 0 or of.shadow[queue] <= now or sim.jobs[first]["rank"] > sim.jobs[job]["rank"]:
            return False
    return True


@jit
def _gather_ready(sim: Sim, of: Placing) -> None:
    """Only those who have just come are looked at."""
    for i in range(sim.counter[READY]):
        of.looked[of.of[sim.ready[i]]] = -1
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        c = of.of[job]
        if of.looked[c] < 0 or sim.jobs[job]["rank"] < sim.jobs[of.looked[c]]["rank"]:
            of.looked[c] = job
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        if of.looked[of.of[job]] == job:
            push(of.order, _key_of(sim, of, of.of[job], job), of.of[job])


@jit
def _take_out(of: Placing, c: int, job: int) -> None:
    """A job of a class waits no more."""
    before, at = -1, of.head[c]
    while at != job:
        before, at = at, of.next[at]
    if before < 0:
        of.head[c] = of.next[job]
    else:
        of.next[before] = of.next[job]
    if of.next[job] < 0:
        of.tail[c] = before


@jit
def _try(
    sim: Sim, passes: Passes, of: Placing, c: int, job: int, now: float, late: bool
) -> tuple[int, float]:  # fmt: skip
    """The way in which a job fits, with its nodes in ``sim.chosen``, -1: none; and until when it waits for less."""
    scratch = passes.scratch
    stamp, resting = scratch.stamp[0], of.rests_late if late else of.rests
    failed = scratch.failed_late if late else scratch.failed
    resources: Resources = scratch.late if late else sim.resources
    if of.rule == CHEAPEST:
        way, then = cheapest_way(sim, passes, of, resources, c, job, now)
        if way < 0 or then > now:  # none behind it of its class would start either
            resting[c] = stamp
        return way, then
    first, last = ways_now(sim, passes, of, c, job, now)
    if of.rule == DRAWN:
        way = drawn_way(sim, passes, of, resources, first, last)
        if way < 0:
            resting[c] = stamp
        return way, now
    for way in range(first, last):
        shape = of.ways.shape[way]
        if scratch.failed[shape] == stamp or failed[shape] == stamp:
            continue
        if choose(resources, passes.jobs.masks, shape_request(sim.shapes, shape), TRY[of.rule], scratch):
            return way, now
        failed[shape] = stamp
    return -1, now


@jit
def _next(sim: Sim, passes: Passes, of: Placing, c: int, job: int, now: float) -> int:
    """The first of a class from ``job`` on that may start in this pass; -1: none."""
    failed, failed_late = passes.scratch.failed, passes.scratch.failed_late
    stamp, queue = passes.scratch.stamp[0], of.queue[c]
    guarded = of.first[queue] >= 0
    if of.rests[c] == stamp or _all_failed(failed, of, c, stamp):
        return -1
    while job >= 0:
        late = guarded and now + sim.jobs[job]["expected"] > of.shadow[queue]
        if not (late and of.rests_late[c] == stamp):
            if of.rule == CHEAPEST or of.rule == DRAWN:
                return job
            first, last = ways_now(sim, passes, of, c, job, now)
            for way in range(first, last):
                shape = of.ways.shape[way]
                if failed[shape] != stamp and not (late and failed_late[shape] == stamp):
                    return job
        job = of.next[job]
    return -1


@jit
def _all_failed(failed: Ints, of: Placing, c: int, stamp: int) -> bool:
    """Whether none of a class's ways fits any more in this pass."""
    for way in range(of.ways.first[c], of.ways.first[c + 1]):
        if failed[of.ways.shape[way]] != stamp:
            return False
    return True


@jit
def _reserve(sim: Sim, passes: Passes, of: Placing, c: int, job: int, now: float, then: float) -> float:
    """When the first job that does not start can, by the limits of what runs; keeps its nodes for it.

    ``then``: from when on it would take what is free.
    """
    rule = RACK if of.rule == CHEAPEST else TRY[of.rule]
    first, last = ways_now(sim, passes, of, c, job, now)
    best, chosen, tried = np.inf, first, -1
    for way in range(first, last):
        shadow = _reserve_way(sim, passes, of, job, way, rule, then)
        tried = way
        if shadow < best:
            best, chosen = shadow, way
    if chosen != tried:
        _reserve_way(sim, passes, of, job, chosen, rule, then)
    protect(sim.resources, shape_request(sim.shapes, of.ways.shape[chosen]), best < np.inf, passes.scratch)
    return best


@jit
def _reserve_way(sim: Sim, passes: Passes, of: Placing, job: int, way: int, rule: int, begin: float) -> float:
    """When it fits so, from ``begin`` on."""
    request = shape_request(sim.shapes, of.ways.shape[way])
    lasts = sim.jobs[job]["expected"]
    return reserve(sim.resources, passes.releases, passes.jobs.masks, request, rule, begin, lasts, passes.scratch)
