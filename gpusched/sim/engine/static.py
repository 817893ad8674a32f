"""The passes of `sched.kernel.by_rule` for static orders, without walking the queue or all nodes.

They decide exactly as the kernel's `queue_pass` does (a test compares every start and node). Within a pass free nodes
only shrink: once a shape does not fit no later job of it does, and it is enough to look at one job per shape at a time.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt, keep_request, note_release
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.state import EASY, FIRST_FIT, NONE, OK, RANDOM, STARTED, PlacementRequest, Records
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.nodeindex import can_fit, pick_nodes
from gpusched.sim.engine.state import CHANGED, DECIDE, ENDED, READY, WAITING, EventLog, Passes, Sim, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job
from gpusched.sim.engine.waitlist import Waitlist, following, set_leaf

_ANY = sys.float_info.max


# What the last pass left. head: the first job that could not start, -1: none. reserved: whether nodes are reserved for
# it, shadow: when it can start. changed: node events by then.
LAST = np.dtype([("head", np.int64), ("reserved", np.int64), ("shadow", np.float64), ("changed", np.int64)])


class Fixed(NamedTuple):
    """A static order. ``last``: ``LAST[1]``, ``head`` -1 before the first decision."""

    waitlist: Waitlist
    last: Records
    rule: int
    backfill: int


@jit
def decide_strict(sim: Sim, log: EventLog, passes: Passes, fixed: Fixed) -> int:
    """Decide for a single partition whose head blocks, without node events."""
    heads, last = fixed.waitlist.heads, fixed.last[0]
    for i in range(sim.counter[READY]):
        push(heads, float(sim.jobs[sim.ready[i]]["rank"]), sim.ready[i])
    if sim.counter[ENDED] > 0:
        last["head"] = -1
    blocked = last["head"]
    while heads.size[0] > 0 and heads.item[0] != blocked:
        job = heads.item[0]
        shape = sim.jobs[job]["shape"]
        request = shape_request(sim.shapes, shape)
        if _try(sim, passes, request, shape, fixed.rule, False):
            pop(heads)
            start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        else:
            blocked = job
    last["head"] = blocked
    return DECIDE


@jit
def decide_merged(sim: Sim, log: EventLog, passes: Passes, fixed: Fixed) -> int:
    """Decide with strict, skip or EASY backfill, for any number of partitions."""
    waitlist, last = fixed.waitlist, fixed.last[0]
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        shape = sim.jobs[job]["shape"]
        set_leaf(waitlist, shape, job, sim.jobs[job]["expected"])
        waitlist.waiting[shape] += 1
    same_nodes = last["changed"] == sim.counter[CHANGED]
    last["changed"] = sim.counter[CHANGED]
    if sim.dirty.size == 1 and same_nodes and _only_behind(sim, fixed.last):
        _gather_ready(sim, waitlist)
        _decide(sim, log, passes, fixed)
        return DECIDE
    for queue in range(sim.dirty.size):
        if sim.dirty[queue]:
            last["head"] = _gather(sim, passes, waitlist, queue)
            last["reserved"], last["shadow"] = 0, np.inf
            _decide(sim, log, passes, fixed)
            sim.dirty[queue] = 0
    return DECIDE


run_strict, run_merged = looped(decide_strict), looped(decide_merged)


@jit
def _only_behind(sim: Sim, last: Records) -> bool:
    """Return whether, since the last pass, jobs only arrived behind its head, which still waits.

    Then the reservation holds as it was made, and no other job can start that could not start before.
    """
    head = last[0]["head"]
    if head < 0 or sim.counter[ENDED] > 0 or last[0]["shadow"] <= sim.clock[0]:
        return False
    rank = sim.jobs[head]["rank"]
    for i in range(sim.counter[READY]):
        if sim.jobs[sim.ready[i]]["rank"] < rank:
            return False
    return True


@jit
def _gather_ready(sim: Sim, waitlist: Waitlist) -> None:
    """Put new jobs that may fit into ``waitlist.shapes``."""
    waitlist.shapes.size[0] = 0
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        shape = sim.jobs[job]["shape"]
        if sim.by_free.counts.size and not can_fit(sim.by_free, sim.shapes[shape]["gpus"], sim.shapes[shape]["parts"]):
            continue
        push(waitlist.shapes, float(sim.jobs[job]["rank"]), shape)


@jit
def _decide(sim: Sim, log: EventLog, passes: Passes, fixed: Fixed) -> None:
    """Run a pass over one partition's waiting jobs in ``waitlist.shapes``, the next of every shape at a time."""
    waitlist, last, rule, backfill = fixed.waitlist, fixed.last[0], fixed.rule, fixed.backfill
    scratch, shapes, now = passes.scratch, waitlist.shapes, sim.clock[0]
    scratch.stamp[0] += 1
    stamp = scratch.stamp[0]
    head, reserved, shadow = last["head"], last["reserved"] != 0, last["shadow"]
    seen, moves = reserved, False
    # The heap has one job of each shape, by rank; after a job its shape's next one takes its place.
    while shapes.size[0] > 0:
        rank = int(shapes.key[0])
        shape = pop(shapes)
        job = waitlist.by_rank[rank]
        expected = sim.jobs[job]["expected"]
        if head >= 0 and sim.jobs[head]["rank"] < rank:
            seen = True
        if seen and backfill == NONE:
            break
        # Free resources only shrink within a pass: once a shape has failed, so would all its later jobs.
        if sim.state[job]["status"] != WAITING or scratch.failed[shape] == stamp:
            continue
        # Reserve for the head only when a job behind it comes up: without one nothing needs the shadow time.
        if seen and backfill == EASY and not reserved:
            reserved = True
            request = shape_request(sim.shapes, sim.jobs[head]["shape"])
            lasts = sim.jobs[head]["expected"]
            shadow = keep_request(sim.resources, passes.releases, passes.jobs.masks, request, rule, now, lasts, scratch)
        late = backfill == EASY and now + expected > shadow
        # This shape does not fit beside the head for longer: only its jobs that end in time can still start.
        if late and scratch.failed_late[shape] == stamp:
            _next(sim, waitlist, shape, job, now, shadow)
            continue
        request = shape_request(sim.shapes, shape)
        if _try(sim, passes, request, shape, rule, late):
            waitlist.waiting[shape] -= 1
            set_leaf(waitlist, shape, job, np.inf)
            start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
            if backfill == EASY:
                note_release(sim.resources, passes.releases, request, job, now + expected, late, reserved, scratch)
                moves = moves or (late and rule != FIRST_FIT)
            _next(sim, waitlist, shape, job, now, _ANY)
            continue
        # The first job that does not fit is the head.
        if not seen:
            head = job
            seen = True
        elif late and scratch.failed[shape] != stamp:
            _next(sim, waitlist, shape, job, now, shadow)
    # Beside a job that outlasts the shadow other nodes may be the head's tightest: its reservation is then made again.
    last["head"], last["reserved"], last["shadow"] = head, reserved, -np.inf if moves else shadow


@jit
def _gather(sim: Sim, passes: Passes, waitlist: Waitlist, queue: int) -> int:
    """Put every shape's first job that may fit into ``waitlist.shapes``; return the first that cannot, or -1."""
    shapes, head, least = waitlist.shapes, -1, sim.jobs.size
    shapes.size[0] = 0
    for i in range(waitlist.first[queue], waitlist.first[queue + 1]):
        shape = waitlist.order[i]
        if waitlist.waiting[shape] == 0 or passes.jobs.feasibility[shape] != OK:
            continue
        job = following(waitlist, shape, 0, 0.0, _ANY)
        rank = sim.jobs[job]["rank"]
        if sim.by_free.counts.size and not can_fit(sim.by_free, sim.shapes[shape]["gpus"], sim.shapes[shape]["parts"]):
            if rank < least:
                head, least = job, rank
        else:
            push(shapes, float(rank), shape)
    return head


@jit
def _try(sim: Sim, passes: Passes, request: PlacementRequest, shape: int, rule: int, late: bool) -> bool:
    """Try to place a job as `sched.backfill.attempt`, by the index if there is one; mark failed shapes alike."""
    scratch, masks = passes.scratch, passes.jobs.masks
    if sim.by_free.counts.size == 0 or rule >= RANDOM:
        return attempt(sim.resources, masks, request, shape, rule, late, passes.rng, scratch) == STARTED
    stamp = scratch.stamp[0]
    if late:
        if can_fit(sim.by_free, request.gpus, request.parts):
            if choose(scratch.late, masks, request, rule, scratch):
                return True
            scratch.failed_late[shape] = stamp
            # It fits, but not beside the head: the shape's jobs that end by the shadow time may still start.
            if pick_nodes(sim.by_free, request, rule, sim.chosen):
                return False
    elif pick_nodes(sim.by_free, request, rule, sim.chosen):
        return True
    scratch.failed[shape] = stamp
    return False


@jit
def _next(sim: Sim, waitlist: Waitlist, shape: int, job: int, now: float, until: float) -> None:
    """Put the shape's next job after ``job`` that would end by ``until`` into ``waitlist.shapes``."""
    next_job = following(waitlist, shape, waitlist.place[job] + 1, now, until)
    if next_job >= 0:
        push(waitlist.shapes, float(sim.jobs[next_job]["rank"]), shape)
