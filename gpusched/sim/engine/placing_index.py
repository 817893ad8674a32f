"""`placing` with an index: at every instant the first job of each class is tried, in order, and started if it fits.

Where the first of a class does not start, none behind it of that class would. One that has been the first of all for
``hold_s`` and fits nowhere blocks all behind it, so that no job starves. With EASY backfill the first that cannot
start has nodes reserved instead, by the limits of what runs. Those behind it start where they fit now and end by then,
or take what it leaves over, as `sched.backfill` says. A job that waits for a rack has that reserved. By the model, one
that could start and waits for a cheaper place has nodes from when on it takes what is free. A job that is slowed down
may outlast its limit, and counts as ending now: then others get what the first leaves.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import note_release, protect, reserve
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.state import EASY, RACK, Ints, Resources
from gpusched.sim.engine.ledger import exceeds_limit, note_charged, usage_expired
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing import (
    ALIGNED,
    CHEAPEST,
    DRAWN,
    EVENTS,
    MOVES,
    RACK_WAIT,
    TRY,
    PlacingState,
    append,
    cheapest_way,
    drawn_way,
    end_pass,
    holds,
    recheck,
    update_ways,
    ways_now,
)
from gpusched.sim.engine.state import CHANGED, DECIDE, ENDED, READY, RUNS, EventLog, Passes, Sim, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job


@jit
def decide_placed(sim: Sim, log: EventLog, passes: Passes, of: PlacingState) -> int:
    """Start jobs where possible."""
    order, now, runs = of.order, sim.clock[0], sim.counter[RUNS]
    behind = _only_behind(sim, of, now)  # before `recheck`, which marks events as seen
    for i in range(sim.counter[READY]):
        append(sim, of, sim.ready[i])
    update_ways(sim, passes, of)
    recheck(sim, of)
    order.size[0] = 0
    if behind:
        _gather_ready(sim, of)
    else:
        passes.scratch.stamp[0] += 1
        _gather(sim, of)
    free = _free_gpus(sim) if order.size[0] > 0 else 0
    while order.size[0] > 0:
        c = pop(order)
        own = of.classes[c]
        job, queue = own["looked"], of.queues[own["queue"]]
        # the heap has one job of each class, so jobs are tried in rank order across classes
        rank = sim.jobs[job]["rank"]
        if rank > queue["held"]:
            continue
        if exceeds_limit(sim.ledger, job):  # so do all of its class
            own["tried"] = 1
            continue
        late = queue["first"] >= 0 and now + sim.jobs[job]["expected"] > queue["shadow"]
        following, way, then = of.next[job], -1, now
        # too few GPUs in all: no need to look at nodes, which is most of the time on a full cluster
        if own["gpus"] <= free:
            way, then = _try(sim, passes, of, c, job, now, late)
        else:
            own["rests"] = passes.scratch.stamp[0]
        if way >= 0 and then <= now:
            free -= own["gpus"]
            _remove_job(of, c, job)
            _start(sim, log, passes, of, c, job, way, now)
        elif of.backfill == EASY:
            if queue["first"] < 0:
                shadow = _reserve(sim, passes, of, c, job, now, then)
                if shadow < np.inf:  # else it waits for unavailable nodes, and blocks no job
                    queue["first"], queue["shadow"] = job, shadow
        else:
            following, own["tried"] = -1, 1
            if holds(sim, of, c, job, now):
                queue["held"] = rank
        if of.backfill == EASY:
            following = _next(sim, passes, of, c, following, now)
        if following >= 0:
            own["looked"] = following
            push(order, _key_of(sim, of, c, following), c)
    if of.rule == CHEAPEST and sim.counter[RUNS] != runs:
        of.classes["tried"][:] = 0  # a started job is a neighbour: another place may be cheapest
    if of.rule == RACK_WAIT and of.backfill == EASY:
        _note_waits(sim, of, now)
    end_pass(sim, of)
    return DECIDE


run_placed = looped(decide_placed)


@jit
def _gather(sim: Sim, of: PlacingState) -> None:
    """Queue the first job of each class if anything has changed for it; reset reservations."""
    of.at[MOVES] = 0
    for queue in range(of.queues.size):
        of.queues[queue]["first"], of.queues[queue]["shadow"] = -1, np.inf
    for c in range(of.classes.size):
        own = of.classes[c]
        if own["head"] >= 0 and own["tried"] == 0:
            own["looked"] = own["head"]
            push(of.order, _key_of(sim, of, c, own["head"]), c)


@jit
def _free_gpus(sim: Sim) -> int:
    """Return the free GPUs on all available nodes."""
    free = 0
    for node in range(sim.node.size):
        free += max(0, sim.resources.gpus[node])
    return free


@jit
def _key_of(sim: Sim, of: PlacingState, c: int, job: int) -> float:
    """Return the place of a class's job among those to be examined."""
    rank = sim.jobs[job]["rank"]
    return float(rank - of.classes[c]["gpus"] * sim.jobs.size if of.rule == ALIGNED else rank)


@jit
def _start(sim: Sim, log: EventLog, passes: Passes, of: PlacingState, c: int, job: int, way: int, now: float) -> None:
    """Start a job in this way on ``sim.chosen``."""
    shape, queue, end = of.ways.shape[way], of.queues[of.classes[c]["queue"]], now + sim.jobs[job]["expected"]
    sim.jobs[job]["shape"] = shape
    passes.jobs.shape[job] = shape
    start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
    if of.backfill == EASY:
        note_charged(sim.ledger, job)
        request, guarded, late = shape_request(sim.shapes, shape), queue["first"] >= 0, end > queue["shadow"]
        note_release(sim.resources, passes.releases, request, job, end, late, guarded, passes.scratch)
        of.at[MOVES] = max(of.at[MOVES], int(late or of.rule == CHEAPEST))


@jit
def _note_waits(sim: Sim, of: PlacingState, now: float) -> None:
    """Record when a job stops waiting for its rack: running jobs may have outlasted their limits by then."""
    for c in range(of.classes.size):
        job = of.classes[c]["head"]
        while job >= 0:
            until = sim.jobs[job]["submit"] + of.wait_s
            if until > now:
                of.wake[0] = min(of.wake[0], until)
            job = of.next[job]


@jit
def _only_behind(sim: Sim, of: PlacingState, now: float) -> bool:
    """Return whether, since the last pass, jobs only arrived behind those that wait with a reservation.

    Then it holds as it was made, and no other job can start that could not start before.
    """
    if of.backfill != EASY or of.rule == ALIGNED or of.at[MOVES] != 0 or of.wake[0] <= now:
        return False
    if sim.counter[ENDED] > 0 or sim.counter[CHANGED] != of.at[EVENTS] or usage_expired(sim.ledger):
        return False
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        queue = of.queues[of.classes[of.of[job]]["queue"]]
        first = queue["first"]
        if first < 0 or queue["shadow"] <= now or sim.jobs[first]["rank"] > sim.jobs[job]["rank"]:
            return False
    return True


@jit
def _gather_ready(sim: Sim, of: PlacingState) -> None:
    """Queue only the jobs that have just arrived."""
    for i in range(sim.counter[READY]):
        of.classes[of.of[sim.ready[i]]]["looked"] = -1
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        own = of.classes[of.of[job]]
        if own["looked"] < 0 or sim.jobs[job]["rank"] < sim.jobs[own["looked"]]["rank"]:
            own["looked"] = job
    for i in range(sim.counter[READY]):
        job, c = sim.ready[i], of.of[sim.ready[i]]
        if of.classes[c]["looked"] == job:
            push(of.order, _key_of(sim, of, c, job), c)


@jit
def _remove_job(of: PlacingState, c: int, job: int) -> None:
    """Remove a job from its class's queue."""
    before, at = -1, of.classes[c]["head"]
    while at != job:
        before, at = at, of.next[at]
    if before < 0:
        of.classes[c]["head"] = of.next[job]
    else:
        of.next[before] = of.next[job]
    if of.next[job] < 0:
        of.classes[c]["tail"] = before


@jit
def _try(
    sim: Sim, passes: Passes, of: PlacingState, c: int, job: int, now: float, late: bool
) -> tuple[int, float]:  # fmt: skip
    """Return the way in which a job fits, nodes in ``sim.chosen``, -1: none; and until when it waits for less."""
    scratch = passes.scratch
    stamp, resting = scratch.stamp[0], of.classes["rests_late"] if late else of.classes["rests"]
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
def _next(sim: Sim, passes: Passes, of: PlacingState, c: int, job: int, now: float) -> int:
    """Return the first job of a class from ``job`` on that may start in this pass; -1: none."""
    failed, failed_late = passes.scratch.failed, passes.scratch.failed_late
    stamp, queue = passes.scratch.stamp[0], of.classes[c]["queue"]
    guarded = of.queues[queue]["first"] >= 0
    if of.classes[c]["rests"] == stamp or _all_failed(failed, of, c, stamp):
        return -1
    while job >= 0:
        late = guarded and now + sim.jobs[job]["expected"] > of.queues[queue]["shadow"]
        if not (late and of.classes[c]["rests_late"] == stamp):
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
def _all_failed(failed: Ints, of: PlacingState, c: int, stamp: int) -> bool:
    """Return whether none of a class's ways fits any more in this pass."""
    for way in range(of.ways.first[c], of.ways.first[c + 1]):
        if failed[of.ways.shape[way]] != stamp:
            return False
    return True


@jit
def _reserve(sim: Sim, passes: Passes, of: PlacingState, c: int, job: int, now: float, then: float) -> float:
    """Return when the first job not started can start, by limits of running jobs; keep its nodes for it.

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
def _reserve_way(sim: Sim, passes: Passes, of: PlacingState, job: int, way: int, rule: int, begin: float) -> float:
    """Return when it fits in this way, from ``begin`` on."""
    request = shape_request(sim.shapes, of.ways.shape[way])
    lasts = sim.jobs[job]["expected"]
    return reserve(sim.resources, passes.releases, passes.jobs.masks, request, rule, begin, lasts, passes.scratch)
