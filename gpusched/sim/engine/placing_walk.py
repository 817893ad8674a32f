"""Replays with placement costs by the live controller's own passes, `sched.kernel`, over the whole queue.

What `placing_index` decides is held to this, start by start. A job's ways are a chain of
requests (`Requests.looser`), as live; one that waits for its rack asks for the first of them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.compiled import in_python, inlined, jit
from gpusched.sched.fit import set_feasibility_of
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.placement import NodeChooser, pass_by_component
from gpusched.sched.sorting import by_priority, stable_order
from gpusched.sched.state import LIMIT, POLICY, SKIP, ClusterState, Floats, Ints, PassOutcome
from gpusched.sched.topology.contention import set_excess, set_excess_of
from gpusched.sched.topology.queue import Costs, Priced, pass_by_cost, until_of
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.generic import (
    PLAIN,
    SimQueue,
    backfill_now,
    must_draw_again,
    note_start,
    ordered,
    update_queue,
    wake_to_backfill,
)
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.pace import set_class
from gpusched.sim.engine.placing import (
    ALIGNED,
    CHEAPEST,
    EVENTS,
    ONE_RACK,
    RACK_WAIT,
    PlacingState,
    end_pass,
    holds,
    is_possible,
    recheck,
    update_ways,
)
from gpusched.sim.engine.queue import remove_running, start_granted, state_of
from gpusched.sim.engine.share import note_unreached, pair_up, release_pairs_once
from gpusched.sim.engine.state import CHANGED, DECIDE, RUNNING, EventLog, Paired, Passes, Sim


class Walk(NamedTuple):
    """State kept between decisions.

    Attributes:
        placing: Rule, ways and classes. Of a class ``head`` is the first job that waits; its other lists stay empty.
        costs: Of the jobs, on the engine's own links.
        alone: ``int64[ways]``: the request of a way without the looser ones behind it.
        alone_s: ``float64[jobs]``: so long a job requests the first possible way alone. wait_s: ``float64[jobs]``: so
            long it waits for a cheaper place at most. usual: ``int64[jobs]``: its class after that.
        best: ``float64[classes]``: seconds of a step of each class where it is shortest on all nodes.
        queue: The waiting jobs, their users, and the order.
        waiting: ``int64[jobs]``: the queue's waiting jobs by rank; ``size[0]`` of them.
        outcome: Where the pass writes.
    """

    placing: PlacingState
    costs: Costs
    alone: Ints
    alone_s: Floats
    wait_s: Floats
    usual: Ints
    best: Floats
    queue: SimQueue
    waiting: Ints
    size: Ints
    outcome: PassOutcome


@jit
def decide_walk(sim: Sim, log: EventLog, passes: Passes, walk: Walk) -> int:
    """Run every partition's pass."""
    begin_walk(sim, passes, walk)
    backfill, draws = backfill_now(sim, walk.queue), True
    while draws:
        for queue in range(walk.placing.queues.size):
            waiting, held = queue_now(sim, passes, walk, queue)
            _pass(sim, log, passes, walk, waiting[: held + 1], SKIP)
            _pass(sim, log, passes, walk, jobs_behind(sim, walk, queue, waiting, held), backfill)
        draws = must_draw_again(sim, passes, walk.queue)
    _put_beside_all(sim.pairs, sim, log, passes, walk)
    end_walk(sim, walk)
    wake_to_backfill(sim, walk.queue)
    return DECIDE


@jit
def begin_walk(sim: Sim, passes: Passes, walk: Walk) -> None:
    """Add arrived jobs to the waiting ones, and update what is best for them."""
    update_queue(sim, passes, walk.queue)
    _set_heads(walk)
    update_costs(sim, passes, walk)
    recheck(sim, walk.placing)


@jit
def update_costs(sim: Sim, passes: Passes, walk: Walk) -> None:
    """Update what is best for jobs after nodes have come or gone."""
    if update_ways(sim, passes, walk.placing):
        costs = walk.costs
        set_excess(
            costs.tree, costs.sure, costs.sure_ways, passes.usable, passes.jobs.masks, passes.requests, passes.scratch,
            costs.search,
        )  # fmt: skip


@jit
def end_walk(sim: Sim, walk: Walk) -> int:
    """Remove started jobs from the waiting ones."""
    remove_running(sim, walk.waiting, walk.size)
    _set_heads(walk)
    end_pass(sim, walk.placing)
    return DECIDE


run_walk = looped(decide_walk)


@jit
def _set_heads(walk: Walk) -> None:
    """Set the first waiting job of each class."""
    of = walk.placing
    of.classes["head"][:] = -1
    for i in range(walk.size[0] - 1, -1, -1):
        of.classes[of.of[walk.waiting[i]]]["head"] = walk.waiting[i]


@jit
def queue_now(sim: Sim, passes: Passes, walk: Walk, queue: int) -> tuple[Ints, int]:
    """Return a partition's waiting jobs, and the place of the one that must start first (-1: none)."""
    of, now = walk.placing, sim.clock[0]
    release_pairs_once(sim.pairs, sim, passes.releases)
    waiting = _ordered(sim, walk, queue)
    note_unreached(sim.pairs, walk.outcome, waiting, LIMIT)  # behind one that holds up all
    held = -1
    for i in range(waiting.size):
        job = waiting[i]
        rank = sim.jobs[job]["rank"]
        first = holds(sim, of, of.of[job], job, now)
        walk.costs.wait_s[job] = 0.0 if first else walk.wait_s[job]
        passes.jobs.shape[job] = request_now(sim, passes, walk, job)
        if (first or rank == of.queues[queue]["held"]) and of.backfill == SKIP:
            held = i
    return waiting, held


@jit
def jobs_behind(sim: Sim, walk: Walk, queue: int, waiting: Ints, held: int) -> Ints:
    """Return the jobs behind the one that must start first; none without it if it was passed over too long."""
    of = walk.placing
    rest, count = waiting[held + 1 :], 0
    if held >= 0 and sim.state[waiting[held]]["status"] != RUNNING:
        if walk.queue.order != PLAIN:
            return rest[:0]
        of.queues[queue]["held"] = sim.jobs[waiting[held]]["rank"]
        for job in rest:
            if sim.jobs[job]["rank"] < of.queues[queue]["held"]:
                rest[count] = job
                count += 1
        rest = rest[:count]
    return rest


@jit
def _ordered(sim: Sim, walk: Walk, queue: int) -> Ints:
    """Return the partition's waiting jobs, first to last."""
    of, count, waiting = walk.placing, 0, ordered(sim, walk.queue, queue)
    if of.rule != ALIGNED and of.queues[queue]["held"] == sim.jobs.size:
        return waiting
    own, keys = np.empty(waiting.size, np.int64), np.empty(waiting.size, np.int64)
    for job in waiting:
        if sim.jobs[job]["rank"] <= of.queues[queue]["held"]:
            own[count], keys[count] = job, -of.classes[of.of[job]]["gpus"]
            count += 1
    own = own[:count]
    return own if of.rule != ALIGNED else by_priority(own[stable_order(keys[:count])], walk.queue.priority)


@jit
def request_now(sim: Sim, passes: Passes, walk: Walk, job: int) -> int:
    """Return the request of a job now; record when it requests more."""
    of = walk.placing
    if of.early.size > 0 and of.early[job, 0] >= 0:
        _set_class(walk, job, walk.usual[job])
    first, last = of.ways.first[of.of[job]], of.ways.first[of.of[job] + 1]
    until = sim.jobs[job]["submit"] + walk.alone_s[job]
    if sim.clock[0] < until:
        of.wake[0] = min(of.wake[0], until)
        for way in range(first, last):
            alone = walk.alone[way]
            if is_possible(passes, alone):
                if of.rule != RACK_WAIT and of.rule != ONE_RACK:
                    alone = _early_request(sim, passes, walk, job, alone)
                elif of.early.shape[0] > 0 and sim.shapes[alone]["parts"] > 1 and sim.shapes[alone]["spread"] == 0:
                    alone = -1  # no rack has so many nodes
                if alone >= 0:
                    return int(alone)
                break
    return int(of.ways.shape[first])


@jit
def _early_request(sim: Sim, passes: Passes, walk: Walk, job: int, like: int) -> int:
    """Return a job's request of as many nodes and GPUs in one rack, and set its class; -1: no rack has them."""
    of, parts, gpus = walk.placing, sim.shapes[like]["parts"], sim.shapes[like]["gpus"]
    for i in range(of.early.shape[1]):
        if of.early[job, i] >= 0:
            way = of.ways.first[of.early[job, i]]
            alone = sim.shapes[walk.alone[way]]
            alike = alone["parts"] == parts and alone["gpus"] == gpus and (parts > 1 or alone["spread"] == 0)
            if alike and is_possible(passes, walk.alone[way]):
                _set_class(walk, job, of.early[job, i])
                return int(of.ways.shape[way])
    return -1


@jit
def _set_class(walk: Walk, job: int, of: int) -> None:
    """Set the class of a waiting job, and what it is on links."""
    kind, own = walk.placing.ways.kind[of], walk.costs.load.jobs[job]
    walk.placing.of[job] = of
    if own["kind"] != kind:
        own["kind"], own["best"] = kind, walk.best[of]


@jit
def _pass(sim: Sim, log: EventLog, passes: Passes, walk: Walk, waiting: Ints, backfill: int) -> None:
    """Start these jobs where possible."""
    place(sim, passes, walk, waiting, backfill)
    begin(sim, log, passes, walk)


def walk_by_component(world: SimWorld, walk: Walk, chooser: NodeChooser) -> Callable[[EventLog], int]:
    """Return the function that replays to the end, run by Python: another package's component chooses the nodes."""
    sim, passes = world.sim, world.passes

    def place(sim: Sim, passes: Passes, walk: Walk, waiting: Ints, backfill: int) -> None:
        pass_by_component(state_now(sim, passes, walk), waiting, backfill, chooser)

    run = looped(in_python(decide_walk, _pass=in_python(_pass, place=place)), compiled=False)
    return lambda log: run(sim, log, passes, walk)


@jit
def place(sim: Sim, passes: Passes, walk: Walk, waiting: Ints, backfill: int) -> None:
    """Decide in ``walk.outcome`` which of these jobs start where, and when to look at the others again."""
    of, outcome, state = walk.placing, walk.outcome, state_now(sim, passes, walk)
    if of.rule != CHEAPEST:
        pass_by_rule(state, waiting, backfill, PlacementRule(walk.queue.rule, passes.rng))
    else:
        pass_by_cost(state, waiting, backfill, Priced(walk.costs, 0))
        for job in waiting:
            if outcome.code[job] == POLICY:
                cost = walk.costs.wait_cost[job, 0] + walk.costs.wait_cost[job, 1]
                of.wake[0] = min(of.wake[0], until_of(walk.costs, job, cost))


@inlined
@jit
def _put_beside_all(pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, walk: Walk) -> None:
    """Do so for each partition, once the passes of all are over."""
    if pairs is not None:
        for queue in range(walk.placing.queues.size):
            walk.outcome.total[:] = 0
            put_beside(sim, log, passes, walk, _ordered(sim, walk, queue))


@jit
def put_beside(sim: Sim, log: EventLog, passes: Passes, walk: Walk, waiting: Ints) -> None:
    """Start jobs beside running ones that the passes could not place, where they share GPUs."""
    outcome = walk.outcome
    before = outcome.total[0]
    pair_up(sim.pairs, sim, log, passes, outcome, waiting, None)
    for i in range(before, outcome.total[0]):
        note_start(sim, walk.queue, outcome.started[i])


@jit
def state_now(sim: Sim, passes: Passes, walk: Walk) -> ClusterState:
    """Return the state for one pass."""
    walk.outcome.total[:] = 0
    return state_of(sim, passes, walk.outcome)


@jit
def begin(sim: Sim, log: EventLog, passes: Passes, walk: Walk) -> None:
    """Start what a pass has decided."""
    outcome = walk.outcome
    for i in range(outcome.total[0]):
        job = outcome.started[i]
        passes.jobs.shape[job] = outcome.shape[job]
    start_granted(sim, log, outcome, None)
    for i in range(outcome.total[0]):
        note_start(sim, walk.queue, outcome.started[i])


# Of replays in which jobs are given sizes (`sized`); nothing where places cost nothing


@jit
def set_wake(walk: Walk | None, sim: Sim) -> None:
    """Set when to look again at the jobs that wait for a better place."""
    if walk is not None:
        sim.clock[1] = walk.placing.wake[0]


@jit
def begin_round(walk: Walk | None, sim: Sim, passes: Passes) -> None:
    """Update what is best for jobs; all partitions are decided anew."""
    if walk is None:
        return
    update_costs(sim, passes, walk)
    walk.placing.at[EVENTS], walk.placing.wake[0] = sim.counter[CHANGED], np.inf


@jit
def set_layouts(walk: Walk | None, sim: Sim, passes: Passes, job: int, gpus: int, shape: int) -> None:
    """Set the layouts of a waiting job at a size, by its request, and what it is on its links then."""
    if walk is None:
        return
    links = sim.links
    assert links is not None
    sizes = links.sizes
    assert sizes is not None
    of = set_class(sizes, links.load, job, gpus)
    if sizes.own.size > 0 and sizes.own[job] >= 0:
        early = walk.placing.early
        _set_own(sim, passes, walk, sizes.own[job], sizes.kind[of], shape)
        if early.size > 0 and early[job, 0] >= 0:
            _set_own(sim, passes, walk, early[job, 0], sizes.kind[of], shape)
        of = sizes.own[job]
    walk.placing.of[job] = walk.usual[job] = of


@jit
def _set_own(sim: Sim, passes: Passes, walk: Walk, of: int, kind: int, shape: int) -> None:
    """Set the layouts of a class whose request is a job's own."""
    costs, masks, requests, scratch = walk.costs, passes.jobs.masks, passes.requests, passes.scratch
    costs.ways.kind[of] = kind
    for way in range(costs.ways.first[of + 1] - 1, costs.ways.first[of] - 1, -1):  # looser ones first
        _copy_request(sim, passes, walk.alone[way], shape)
        _copy_request(sim, passes, costs.ways.shape[way], shape)
    search = costs.search
    set_excess_of(of, costs.tree, costs.model, costs.ways, passes.usable, masks, requests, scratch, search)
    set_excess_of(of, costs.tree, costs.sure, costs.sure_ways, passes.usable, masks, requests, scratch, search)


@jit
def _copy_request(sim: Sim, passes: Passes, way: int, shape: int) -> None:
    """Set a way of a request that has changed."""
    if way == shape:
        return
    requests, of = passes.requests, sim.shapes[shape]
    requests.parts[way] = sim.shapes[way]["parts"] = of["parts"]
    requests.gpus[way] = sim.shapes[way]["gpus"] = of["gpus"]
    requests.cores[way] = sim.shapes[way]["cores"] = of["cores"]
    requests.memory[way] = sim.shapes[way]["memory"] = of["memory"]
    set_feasibility_of(way, passes.total, passes.usable, requests, passes.jobs, passes.scratch)
