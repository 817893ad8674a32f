"""Replays in which placement matters: jobs with several possible layouts, which may wait for a better one.

Jobs of one class ask for the same, are of one kind and take as much of the same limits; they wait in their order.
`placing_index` decides by them, `placing_walk` by the whole queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.heaps import Heap
from gpusched.sched.place import choose, draw_fitting, next_random
from gpusched.sched.state import BEST_FIT, FIRST_FIT, OK, RACK, RESERVED, SPREAD, Floats, Ints, Records, Resources
from gpusched.sched.topology.contention import JobLayouts, PlacementSearch, cheapest, set_excess
from gpusched.sched.topology.queue import HARMLESS, HOLD_S, PATIENCE_S, WAIT_S, is_waiting, waits_until
from gpusched.sched.topology.slowdown import SlowdownModel
from gpusched.sched.topology.tree import NetworkTree
from gpusched.sim.engine.ledger import exceeds_limit, usage_expired
from gpusched.sim.engine.state import CHANGED, ENDED, Passes, Sim, shape_request

if TYPE_CHECKING:
    from gpusched.sched.topology.live import SlowdownTable

DRAWN, BALANCED, ALIGNED, FEWEST, ONE_RACK, RACK_WAIT, CHEAPEST, FIRST, SPREAD_OUT = range(9)
TRY = (FIRST_FIT, SPREAD, SPREAD, BEST_FIT, RACK, RACK, BEST_FIT, FIRST_FIT, SPREAD)
# positions in Placing.at: node events so far; 1: a job that outlasts a shadow has started, beside which other nodes may
# suit the first better
EVENTS, MOVES = 0, 1
# Jobs that are alike. queue: the partition they wait in, gpus: of each, head and tail: the first and last that
# waits (-1: none), tried: the head has been looked at and nothing has changed for it since (but under EASY), looked:
# the job that is looked at, rests and rests_late: the pass in which no more of them start, and none that end late.
CLASS = np.dtype([(n, np.int64) for n in ("queue", "gpus", "head", "tail", "tried", "looked", "rests", "rests_late")])
# A partition. held: place in the order of the job that holds up those behind it, oldest: of the first of all that wait,
# since when it is that; under EASY first: the first job that cannot start (-1: none), shadow: when it can.
QUEUE = np.dtype(
    [("held", np.int64), ("oldest", np.int64), ("since", np.float64), ("first", np.int64), ("shadow", np.float64)]
)


class LearnedClasses(NamedTuple):
    """The job classes of a trace, for sizes at which its jobs did not run.

    Attributes:
        table: What is known of them. names: Theirs. of: ``int64[jobs]``: index into these.
    """

    table: SlowdownTable
    names: tuple[str, ...]
    of: Ints


class PlacementNetwork(NamedTuple):
    """The links in a replay, and how long jobs wait for a better place.

    Attributes:
        tree: Of the pool's nodes. model: Of kinds of jobs. kind: ``int64[jobs]``: row of ``model.kinds``.
        wait_s, patience_s, hold_s: See `PlacingState`.
        sure: What of the model counts for waiting (`sched.topology.queue.Costs`); None: all of it.
        learned: Classes of which the kind depends on the size; None: a job's kind is the same at all sizes.
        keeps_nodes: Jobs keep their numbers of nodes, as live where nothing is known of what places cost.
    """

    tree: NetworkTree
    model: SlowdownModel
    kind: Ints
    wait_s: float = WAIT_S
    patience_s: float = PATIENCE_S
    hold_s: float = HOLD_S
    sure: SlowdownModel | None = None
    learned: LearnedClasses | None = None
    keeps_nodes: bool = False


class PlacingState(NamedTuple):
    """State kept between decisions.

    Attributes:
        rule: DRAWN: a way and nodes are drawn; BALANCED: the most nodes, those with the most free GPUs; ALIGNED: the
            largest job first, on the nodes with the most free GPUs; FEWEST: the fewest nodes, best fit; FIRST: these,
            first fit; SPREAD_OUT: these, those with the most free GPUs; ONE_RACK: the fewest nodes, in one rack if it
            fits; RACK_WAIT: the same, and waits for its first way; CHEAPEST: by the model, see
            `sched.topology.contention`, and waits where that costs less than it does.
        wait_s: RACK_WAIT: a job waits for its first way no longer. most_wait_s: CHEAPEST: nor for a cheaper place.
        patience_s: CHEAPEST: a place that makes a job twice as long is taken after it has waited so long; one that
            costs half of that after a quarter of the time; any by the first of all after ``hold_s``.
        hold_s: With SKIP a job that has been the first of all for so long and fits nowhere blocks all behind it.
        ways: The ways of each class in the rule's order. of: ``int64[jobs]``: class. next: ``int64[jobs]``: the next of
            its class that waits, -1: none.
        classes: ``CLASS[classes]``. queues: ``QUEUE[queues]``, of every partition.
        wake: ``float64[1]``: when to look again. at: ``int64[2]``: see EVENTS, MOVES.
        order: Work space, classes in order. fits: ``int64[ways]``: work space.
        backfill: SKIP or EASY; NONE and CONSERVATIVE where the queue is walked.
        usable: ``int64[nodes]``: GPUs of the nodes that are well, by which ``ways`` are now.
        early: ``int64[jobs, n]``: classes that a job may have while it waits for one rack by itself, each of one way
            (-1: none); without jobs where no job says how its nodes are spread.
    """

    rule: int
    wait_s: float
    most_wait_s: float
    patience_s: float
    hold_s: float
    ways: JobLayouts
    of: Ints
    next: Ints
    classes: Records
    queues: Records
    wake: Floats
    at: Ints
    order: Heap
    fits: Ints
    search: PlacementSearch
    backfill: int
    usable: Ints
    early: Ints


@jit
def update_ways(sim: Sim, passes: Passes, of: PlacingState) -> bool:
    """Update what is best for jobs after nodes have come or gone, as live; return whether any has. Before `recheck`."""
    if of.rule != CHEAPEST or sim.counter[CHANGED] == of.at[EVENTS] or np.all(of.usable == passes.usable.gpus):
        return False
    of.usable[:] = passes.usable.gpus
    links = sim.links
    assert links is not None
    set_excess(
        links.tree, links.model, of.ways, passes.usable, passes.jobs.masks, passes.requests, passes.scratch, of.search
    )
    return True


@jit
def recheck(sim: Sim, of: PlacingState) -> None:
    """Mark all for reconsideration if anything changed for those examined before, or it is time."""
    changed = sim.counter[ENDED] > 0 or sim.counter[CHANGED] != of.at[EVENTS] or usage_expired(sim.ledger)
    if changed or of.wake[0] <= sim.clock[0]:
        of.classes["tried"][:] = 0
        of.queues["held"][:] = sim.jobs.size
        of.wake[0] = np.inf
    of.at[EVENTS] = sim.counter[CHANGED]
    _note_oldest(sim, of, sim.clock[0])  # a job that was cut waits again, ahead of others


@jit
def end_pass(sim: Sim, of: PlacingState) -> None:
    """Record which job is the oldest, and when to look again: no other job starts now."""
    _note_oldest(sim, of, sim.clock[0])
    sim.clock[1] = of.wake[0]
    sim.dirty[:] = 0


@jit
def holds(sim: Sim, of: PlacingState, c: int, job: int, now: float) -> bool:
    """Return whether a job has been the oldest for so long that it must start before those behind it."""
    queue = of.classes[c]["queue"]
    return bool(sim.jobs[job]["rank"] == of.queues[queue]["oldest"] and now >= of.queues[queue]["since"] + of.hold_s)


@jit
def _note_oldest(sim: Sim, of: PlacingState, now: float) -> None:
    """Record which job is the oldest from now on."""
    for q in range(of.queues.size):
        queue, oldest = of.queues[q], sim.jobs.size
        for c in range(of.classes.size):
            head = of.classes[c]["head"]
            if head >= 0 and of.classes[c]["queue"] == q and not exceeds_limit(sim.ledger, head):
                oldest = min(oldest, sim.jobs[head]["rank"])
        if oldest != queue["oldest"]:
            queue["oldest"], queue["since"] = oldest, now
        if oldest < sim.jobs.size and now < queue["since"] + of.hold_s:
            of.wake[0] = min(of.wake[0], queue["since"] + of.hold_s)


@jit
def append(sim: Sim, of: PlacingState, job: int) -> None:
    """Insert a job into the queue at its place by rank, also when it waits again."""
    own, rank, following = of.classes[of.of[job]], sim.jobs[job]["rank"], of.next
    following[job] = -1
    if own["head"] < 0 or sim.jobs[own["head"]]["rank"] > rank:
        following[job] = own["head"]
        own["head"], own["tried"] = job, 0
    else:
        before = own["tail"]
        if sim.jobs[before]["rank"] > rank:
            before = own["head"]
            while following[before] >= 0 and sim.jobs[following[before]]["rank"] < rank:
                before = following[before]
        following[job] = following[before]
        following[before] = job
    if following[job] < 0:
        own["tail"] = job


@jit
def ways_now(sim: Sim, passes: Passes, of: PlacingState, c: int, job: int, now: float) -> tuple[int, int]:
    """Return the range of ways that a job accepts now; record when it accepts more."""
    first, last = of.ways.first[c], of.ways.first[c + 1]
    until = sim.jobs[job]["submit"] + of.wait_s
    if of.rule != RACK_WAIT or now >= until:
        return first, last
    of.wake[0] = min(of.wake[0], until)
    for way in range(first, last):  # for the first that the nodes which are not away could give it
        if is_possible(passes, of.ways.shape[way]):
            return way, way + 1
    return first, min(first + 1, last)


@jit
def is_possible(passes: Passes, shape: int) -> bool:
    """Return whether the nodes that are well could give a request, now or when reservations are over."""
    feasibility = passes.jobs.feasibility[shape]
    return bool(feasibility == OK or feasibility == RESERVED)


@jit
def drawn_way(sim: Sim, passes: Passes, of: PlacingState, resources: Resources, first: int, last: int) -> int:
    """Draw one of the ways that fit, uniformly, and nodes that fit."""
    count = 0
    for way in range(first, last):
        request = shape_request(sim.shapes, of.ways.shape[way])
        if choose(resources, passes.jobs.masks, request, FIRST_FIT, passes.scratch):
            of.fits[count] = way
            count += 1
    if count == 0:
        return -1
    way = of.fits[next_random(passes.rng, count)]
    draw_fitting(
        resources, passes.jobs.masks, shape_request(sim.shapes, of.ways.shape[way]), passes.rng, passes.scratch
    )
    return int(way)


@jit
def cheapest_way(
    sim: Sim, passes: Passes, of: PlacingState, resources: Resources, c: int, job: int, now: float
) -> tuple[int, float]:
    """Return the cheapest way that fits (-1: none), nodes in ``sim.chosen``; and until when it waits for less.

    That is noted. As long as it is worth it, and not later than now where it starts.
    """
    links = sim.links
    assert links is not None
    cost, way = np.inf, -1
    for tight in (1.0, 0.0):  # as live: before it waits breaking up nodes counts for nothing
        of.search.tight[0] = tight
        cost, way = cheapest(
            links.tree, links.model, links.load, resources, passes.jobs.masks, passes.requests, of.ways, c, of.search
        )
        if way < 0 or cost <= HARMLESS:
            break
    of.search.tight[0] = 1.0
    if way < 0:
        return -1, now
    parts = sim.shapes[of.ways.shape[way]]["parts"]
    sim.chosen[:parts] = of.search.best[:parts]
    then = waits_until(sim.jobs[job]["submit"], cost, of.patience_s, of.most_wait_s)
    if is_waiting(cost, then, now) and not holds(sim, of, c, job, now):
        of.wake[0] = min(of.wake[0], then)
        return way, then
    return way, now
