"""`placing` with EASY backfill: the first that cannot start has nodes reserved, by the limits of what runs.

Those behind it start where they fit now and end by then, or take what it leaves over, as `sched.backfill` says. A job
that waits for a rack has that reserved. By the model, one that could start and waits for a cheaper place has nodes from
when on it takes what is free. A job that is slowed down may outlast its limit, and counts as ending now: then others
get what the first leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import protect, reserve
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.state import RACK, Floats, Ints, Resources
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
    free_gpus,
    key_of,
    look_again,
    start,
    wait_on,
    ways_now,
)
from gpusched.sim.engine.state import CHANGED, DECIDE, ENDED, READY, Log, Passes, Sim, shape_request
from gpusched.sim.engine.static import note_release


class Easy(NamedTuple):
    """What is kept between decisions, beside `Placing` (whose ``held`` and ``tried`` mean nothing here).

    Attributes:
        first: ``int64[queues]``: the first job that cannot start, -1: none. shadow: ``float64[queues]``: when it can.
        moves: ``int64[1]``: 1: a job that outlasts a shadow has started, beside which other nodes may suit the first
            better.
        at: ``int64[classes]``: the job that is looked at.
        rests, rests_late: ``int64[classes]``: the pass in which no more of its jobs start, and none that outlast the
            shadow.
    """

    placing: Placing
    first: Ints
    shadow: Floats
    moves: Ints
    at: Ints
    rests: Ints
    rests_late: Ints


def with_backfill(of: Placing) -> Easy:
    """Before the first decision."""
    queues, classes = len(of.oldest), len(of.head)
    at, rests, rests_late = (np.full(classes, -1, np.int64) for _ in range(3))
    first, moves = np.full(queues, -1, np.int64), np.zeros(1, np.int64)
    return Easy(of, first, np.full(queues, np.inf), moves, at, rests, rests_late)


@jit
def decide_placed_easy(sim: Sim, log: Log, passes: Passes, easy: Easy) -> int:
    """Starts whoever may start."""
    of, order, now = easy.placing, easy.placing.order, sim.clock[0]
    behind = _only_behind(sim, easy, now)
    for i in range(sim.counter[READY]):
        append(sim, of, sim.ready[i])
    look_again(sim, of)
    order.size[0] = 0
    if behind:
        _gather_ready(sim, easy)
    else:
        passes.scratch.stamp[0] += 1
        easy.moves[0] = 0
        easy.first[:] = -1
        easy.shadow[:] = np.inf
        for c in range(of.head.size):
            if of.head[c] >= 0:
                easy.at[c] = of.head[c]
                push(order, key_of(sim, of, c, of.head[c]), c)
    free = free_gpus(sim) if order.size[0] > 0 else 0
    while order.size[0] > 0:
        c = pop(order)
        job, queue = easy.at[c], of.queue[c]
        if exceeds_limit(sim.ledger, job):  # so do all of its class
            continue
        guarded = easy.first[queue] >= 0
        late = guarded and now + sim.jobs[job]["expected"] > easy.shadow[queue]
        following = of.next[job]
        way, then = -1, now
        if of.size[c] <= free:
            way, then = _try(sim, passes, easy, c, job, now, late)
        else:
            easy.rests[c] = passes.scratch.stamp[0]
        if way >= 0 and then <= now:
            free -= of.size[c]
            _take_out(of, c, job)
            start(sim, log, passes, of, job, way)
            request = shape_request(sim.shapes, of.ways.shape[way])
            note_release(sim, passes, request, job, now + sim.jobs[job]["expected"], guarded, late)
            easy.moves[0] = max(easy.moves[0], int(late or of.rule == CHEAPEST))
        elif not guarded:
            shadow = _reserve(sim, passes, of, c, job, now, then)
            if shadow < np.inf:  # else it waits for nodes that are away, and blocks nobody
                easy.first[queue], easy.shadow[queue] = job, shadow
        following = _next(sim, passes, easy, c, following, now)
        if following >= 0:
            easy.at[c] = following
            push(order, key_of(sim, of, c, following), c)
    if of.rule == RACK_WAIT:
        _note_waits(sim, of, now)
    wait_on(sim, of)
    return DECIDE


run_placed_easy = looped(decide_placed_easy)


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
def _only_behind(sim: Sim, easy: Easy, now: float) -> bool:
    """Whether all that has happened since the last pass is that jobs came behind those that wait with a reservation.

    Then it holds as it was made, and no other job can start that could not start before.
    """
    of = easy.placing
    if sim.counter[ENDED] > 0 or sim.counter[CHANGED] != of.at[EVENTS] or of.wake[0] <= now or of.rule == ALIGNED:
        return False
    if easy.moves[0] != 0 or just_turned(sim.ledger):
        return False
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        queue = of.queue[of.of[job]]
        first = easy.first[queue]
        if first < 0 or easy.shadow[queue] <= now or sim.jobs[first]["rank"] > sim.jobs[job]["rank"]:
            return False
    return True


@jit
def _gather_ready(sim: Sim, easy: Easy) -> None:
    """Only those who have just come are looked at."""
    of = easy.placing
    for i in range(sim.counter[READY]):
        easy.at[of.of[sim.ready[i]]] = -1
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        c = of.of[job]
        if easy.at[c] < 0 or sim.jobs[job]["rank"] < sim.jobs[easy.at[c]]["rank"]:
            easy.at[c] = job
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        if easy.at[of.of[job]] == job:
            push(of.order, key_of(sim, of, of.of[job], job), of.of[job])


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
    sim: Sim, passes: Passes, easy: Easy, c: int, job: int, now: float, late: bool
) -> tuple[int, float]:  # fmt: skip
    """The way in which a job fits, with its nodes in ``sim.chosen``, -1: none; and until when it waits for less."""
    of, scratch = easy.placing, passes.scratch
    stamp = scratch.stamp[0]
    resources: Resources = scratch.late if late else sim.resources
    if of.rule == CHEAPEST:
        way, then = cheapest_way(sim, passes, of, resources, c, job, now)
        if way < 0 or then > now:  # none behind it of its class would start either
            if late:
                easy.rests_late[c] = stamp
            else:
                easy.rests[c] = stamp
        return way, then
    first, last = ways_now(sim, passes, of, c, job, now)
    if of.rule == DRAWN:
        way = drawn_way(sim, passes, of, resources, first, last)
        if way < 0 and late:
            easy.rests_late[c] = stamp
        elif way < 0:
            easy.rests[c] = stamp
        return way, now
    for way in range(first, last):
        shape = of.ways.shape[way]
        if scratch.failed[shape] == stamp or (late and scratch.failed_late[shape] == stamp):
            continue
        if choose(resources, passes.jobs.masks, shape_request(sim.shapes, shape), TRY[of.rule], scratch):
            return way, now
        if late:
            scratch.failed_late[shape] = stamp
        else:
            scratch.failed[shape] = stamp
    return -1, now


@jit
def _next(sim: Sim, passes: Passes, easy: Easy, c: int, job: int, now: float) -> int:
    """The first of a class from ``job`` on that may start in this pass; -1: none."""
    of, failed, failed_late = easy.placing, passes.scratch.failed, passes.scratch.failed_late
    stamp, queue = passes.scratch.stamp[0], of.queue[c]
    guarded = easy.first[queue] >= 0
    if easy.rests[c] == stamp or _all_failed(failed, of, c, stamp):
        return -1
    while job >= 0:
        late = guarded and now + sim.jobs[job]["expected"] > easy.shadow[queue]
        if not (late and easy.rests_late[c] == stamp):
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
