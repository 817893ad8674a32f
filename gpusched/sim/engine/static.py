"""The passes of `sched.backfill.schedule` for static orders, without walking the queue or all nodes.

They decide exactly as `schedule` does (a test compares every start and node): within a pass room only shrinks, so
once a shape does not fit no later job of it does, and it is enough to look at one job per shape at a time.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt, protect, refresh_late, reserve, take
from gpusched.sched.fit import stand
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.releases import add, drop_ended
from gpusched.sched.state import EASY, NONE, OK, RANDOM, STARTED, Request
from gpusched.sim.engine.nodeindex import enough, pick
from gpusched.sim.engine.state import CHANGED, DECIDE, DECISIONS, ENDED, READY, WAITING, Log, Passes, Sim, shape_request
from gpusched.sim.engine.step import advance, occupy
from gpusched.sim.engine.waitlist import Waitlist, following, set_leaf

_ANY = sys.float_info.max


class Standing(NamedTuple):
    """What a pass leaves: the first job that could not start (-1: none), whether it has a reservation, and when for."""

    head: int
    reserved: bool
    shadow: float


@jit
def run_strict(sim: Sim, log: Log, passes: Passes, waitlist: Waitlist, rule: int) -> int:
    """Replays to the end with one partition whose head blocks, without node events; OVER, or GROW (call again)."""
    heads, scratch, blocked = waitlist.heads, passes.scratch, -1
    indexed = sim.by_free.many.size > 0 and rule < RANDOM
    while True:
        code = advance(sim, log)
        if code != DECIDE:
            return code
        sim.counter[DECISIONS] += 1
        for i in range(sim.counter[READY]):
            push(heads, float(sim.jobs[sim.ready[i]]["rank"]), sim.ready[i])
        if sim.counter[ENDED] > 0:
            blocked = -1
        while heads.size[0] > 0 and heads.item[0] != blocked:
            job = heads.item[0]
            request = shape_request(sim.shapes, sim.jobs[job]["shape"])
            if indexed:
                fits = pick(sim.by_free, request, rule, sim.chosen)
            else:
                code = attempt(sim.rooms, passes.jobs.masks, request, 0, rule, False, passes.rng, scratch)
                fits = code == STARTED
            if not fits:
                blocked = job
                break
            pop(heads)
            occupy(sim, log, job, request, 0.0)


@jit
def next_decision(sim: Sim, log: Log, passes: Passes, backfill: int) -> int:
    """On to the next instant at which to decide (`advance`, with its answers), and the passes' arrays with it.

    What ended gives nothing back any more (kept for EASY only), and what nodes changed decides what can run.
    """
    changed = sim.counter[CHANGED]
    code = advance(sim, log)
    if code != DECIDE:
        return code
    sim.counter[DECISIONS] += 1
    if backfill == EASY:
        for i in range(sim.counter[ENDED]):
            job = sim.ended[i]
            drop_ended(passes.releases, sim.state[job]["start"] + sim.jobs[job]["expected"], job)
    if sim.counter[CHANGED] != changed:
        for node in range(sim.node.size):
            passes.usable.gpus[node] = sim.node[node]["total"] if sim.node[node]["up"] else -1
        jobs = passes.jobs
        stand(passes.total, passes.usable, jobs.masks, passes.requests, passes.scratch, jobs.standing)
    return code


@jit
def run_merged(sim: Sim, log: Log, passes: Passes, waitlist: Waitlist, rule: int, backfill: int) -> int:
    """Replays to the end: strict, skip or EASY, any number of partitions; OVER, or GROW (call again)."""
    queues, stood = sim.dirty.size, Standing(-1, False, -np.inf)
    while True:
        changed = sim.counter[CHANGED]
        code = next_decision(sim, log, passes, backfill)
        if code != DECIDE:
            return code
        for i in range(sim.counter[READY]):
            job = sim.ready[i]
            shape = sim.jobs[job]["shape"]
            set_leaf(waitlist, shape, job, sim.jobs[job]["expected"])
            waitlist.waiting[shape] += 1
        if queues == 1 and changed == sim.counter[CHANGED] and _only_behind(sim, stood):
            _gather_ready(sim, waitlist)
            stood = _decide(sim, log, passes, waitlist, stood, rule, backfill)
            continue
        for queue in range(queues):
            if sim.dirty[queue]:
                head = _gather(sim, passes, waitlist, queue)
                stood = _decide(sim, log, passes, waitlist, Standing(head, False, np.inf), rule, backfill)
                sim.dirty[queue] = 0


@jit
def _only_behind(sim: Sim, stood: Standing) -> bool:
    """Whether all that has happened since the last pass is that jobs arrived behind its head, which still waits.

    Then the reservation holds as it was made, and no other job can start that could not start before.
    """
    if stood.head < 0 or sim.counter[ENDED] > 0 or stood.shadow <= sim.clock[0]:
        return False
    rank = sim.jobs[stood.head]["rank"]
    for i in range(sim.counter[READY]):
        if sim.jobs[sim.ready[i]]["rank"] < rank:
            return False
    return True


@jit
def _gather_ready(sim: Sim, waitlist: Waitlist) -> None:
    """Puts what has arrived into ``waitlist.shapes``, where it may fit."""
    waitlist.shapes.size[0] = 0
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        shape = sim.jobs[job]["shape"]
        if sim.by_free.many.size and not enough(sim.by_free, sim.shapes[shape]["gpus"], sim.shapes[shape]["parts"]):
            continue
        push(waitlist.shapes, float(sim.jobs[job]["rank"]), shape)


@jit
def _decide(
    sim: Sim, log: Log, passes: Passes, waitlist: Waitlist, stood: Standing, rule: int, backfill: int
) -> Standing:
    """One pass over one partition's waiting jobs in ``waitlist.shapes``, the next of every shape at a time."""
    scratch, shapes, now = passes.scratch, waitlist.shapes, sim.clock[0]
    scratch.stamp[0] += 1
    stamp = scratch.stamp[0]
    head, reserved, shadow = stood.head, stood.reserved, stood.shadow
    seen = reserved
    while shapes.size[0] > 0:
        rank = int(shapes.key[0])
        shape = pop(shapes)
        job = waitlist.by_rank[rank]
        expected = sim.jobs[job]["expected"]
        if head >= 0 and sim.jobs[head]["rank"] < rank:
            seen = True
        if seen and backfill == NONE:
            break
        if sim.state[job]["status"] != WAITING or scratch.failed[shape] == stamp:
            continue
        if seen and backfill == EASY and not reserved:
            reserved = True
            request = shape_request(sim.shapes, sim.jobs[head]["shape"])
            shadow = reserve(sim.rooms, passes.releases, passes.jobs.masks, request, rule, now, scratch)
            protect(sim.rooms, request, shadow < np.inf, scratch)
        late = backfill == EASY and now + expected > shadow
        if late and scratch.failed_late[shape] == stamp:
            _next(sim, waitlist, shape, job, now, shadow)
            continue
        request = shape_request(sim.shapes, shape)
        if _try(sim, passes, request, shape, rule, late):
            waitlist.waiting[shape] -= 1
            set_leaf(waitlist, shape, job, np.inf)
            occupy(sim, log, job, request, 0.0)
            if backfill == EASY:
                _book(sim, passes, request, job, now + expected, reserved, late)
            _next(sim, waitlist, shape, job, now, _ANY)
            continue
        if not seen:
            head = job
            seen = True
        elif late and scratch.failed[shape] != stamp:
            _next(sim, waitlist, shape, job, now, shadow)
    return Standing(head, reserved, shadow)


@jit
def _gather(sim: Sim, passes: Passes, waitlist: Waitlist, queue: int) -> int:
    """Puts every shape's first job into ``waitlist.shapes`` if it may fit; the first of those that cannot, or -1."""
    shapes, head, least = waitlist.shapes, -1, sim.jobs.size
    shapes.size[0] = 0
    for i in range(waitlist.first[queue], waitlist.first[queue + 1]):
        shape = waitlist.order[i]
        if waitlist.waiting[shape] == 0 or passes.jobs.standing[shape] != OK:
            continue
        job = following(waitlist, shape, 0, 0.0, _ANY)
        rank = sim.jobs[job]["rank"]
        if sim.by_free.many.size and not enough(sim.by_free, sim.shapes[shape]["gpus"], sim.shapes[shape]["parts"]):
            if rank < least:
                head, least = job, rank
        else:
            push(shapes, float(rank), shape)
    return head


@jit
def _book(sim: Sim, passes: Passes, request: Request, job: int, end: float, guarded: bool, late: bool) -> None:
    """Notes what a started job will give back, and what late jobs may still take beside it."""
    for part in range(request.parts):
        node = sim.chosen[part]
        add(passes.releases, end, node, request, job)
        if guarded:
            if late:
                take(passes.scratch.spare, request, node)
            refresh_late(sim.rooms, passes.scratch, node)


@jit
def _try(sim: Sim, passes: Passes, request: Request, shape: int, rule: int, late: bool) -> bool:
    """`sched.backfill.attempt`, with the index where there is one; marks the shape as failed as it does."""
    scratch, masks = passes.scratch, passes.jobs.masks
    if sim.by_free.many.size == 0 or rule >= RANDOM:
        return attempt(sim.rooms, masks, request, shape, rule, late, passes.rng, scratch) == STARTED
    stamp = scratch.stamp[0]
    if late:
        if enough(sim.by_free, request.gpus, request.parts):
            if choose(scratch.late, masks, request, rule, scratch):
                return True
            scratch.failed_late[shape] = stamp
            if pick(sim.by_free, request, rule, sim.chosen):
                return False
    elif pick(sim.by_free, request, rule, sim.chosen):
        return True
    scratch.failed[shape] = stamp
    return False


@jit
def _next(sim: Sim, waitlist: Waitlist, shape: int, job: int, now: float, until: float) -> None:
    """Puts the shape's next job after ``job`` that would end by ``until`` into ``waitlist.shapes``."""
    next_job = following(waitlist, shape, waitlist.place[job] + 1, now, until)
    if next_job >= 0:
        push(waitlist.shapes, float(sim.jobs[next_job]["rank"]), shape)
