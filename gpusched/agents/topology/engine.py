"""Replays in which agents place jobs: one or several schedulers, each with a part of the nodes and a queue of its own.

A scheduler places a job on nodes of its own, lets it wait, or hands it to another one. All decide by the same weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.topology.network import SHAPES, Graph, TopologyWeights, new_graph, pass_messages
from gpusched.agents.topology.places import GOOD, MOST, best_place, worth_of_handing, worth_of_waiting
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.model.policy import PolicySpec
from gpusched.sched.heaps import pop, push
from gpusched.sched.state import Flags, Floats, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.ledger import exceeds_limit
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing import PlacementNetwork, PlacingState, append, holds, look_again, wait_on
from gpusched.sim.engine.state import DECIDE, READY, EventLog, Links, Passes, Sim
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job
from gpusched.sim.placed import with_ways
from gpusched.sim.policies import ReplayPolicy, policy_of_order
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from gpusched.traces.trace import Trace

_HAND = 1e-6  # of two places that are worth the same, its own scheduler's
# Who waits for a better place is looked at again after so long, or so much of its wait.
_LOOK_AGAIN_S, _LATER = 600.0, 0.1
_WAITS, _STARTS, _HANDED = 0, 1, 2


class Acting(NamedTuple):
    """What agents keep between decisions.

    Attributes:
        placing: Queues and ways; classes are one a kind of request and scheduler.
        agent: The weights. graph: See there.
        part: ``int64[classes]``: the scheduler.
        handed: ``float64[jobs]``: when a job was handed on last; -1: never.
        queued: ``uint8[classes]``: room.
    """

    placing: PlacingState
    agent: TopologyWeights
    graph: Graph
    part: Ints
    handed: Floats
    queued: Flags


@jit
def decide_agents(sim: Sim, log: EventLog, passes: Passes, acting: Acting) -> int:
    """Starts whoever may start, and hands on who does better elsewhere."""
    of, graph, now, order = acting.placing, acting.graph, sim.clock[0], acting.placing.order
    pace = sim.pace
    assert pace is not None
    links = pace.links
    assert links is not None
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        _count(acting, of.of[job], 1.0)
        append(sim, of, job)
    look_again(sim, of)
    order.size[0] = 0
    acting.queued[:] = 0
    for c in range(of.classes.size):
        if of.classes[c]["head"] >= 0 and of.classes[c]["tried"] == 0:
            _enqueue(sim, acting, c)
    if order.size[0] > 0:
        _see_waiting(sim, acting, now)
        pass_messages(acting.agent, links.tree, links.load, sim.resources, graph)
    while order.size[0] > 0:
        c = pop(order)
        acting.queued[c] = 0
        own = of.classes[c]
        job, queue = own["head"], of.queues[own["queue"]]
        rank = sim.jobs[job]["rank"]
        if rank > queue["held"]:
            continue
        if exceeds_limit(sim.ledger, job):
            own["tried"] = 1
            continue
        done, to = _act(sim, log, passes, acting, links, c, job, now)
        if done == _WAITS:
            own["tried"] = 1
            if holds(sim, of, c, job, now):
                queue["held"] = rank
            continue
        _count(acting, c, -1.0)
        own["head"] = of.next[job]
        if own["head"] >= 0:
            _enqueue(sim, acting, c)
        else:
            own["tail"] = -1
        if done == _HANDED:
            acting.handed[job] = now
            of.of[job] = to
            _count(acting, to, 1.0)
            append(sim, of, job)
            if of.classes[to]["head"] == job and acting.queued[to] == 0:
                _enqueue(sim, acting, to)
        if order.size[0] > 0:
            pass_messages(acting.agent, links.tree, links.load, sim.resources, graph)
    wait_on(sim, of)
    return DECIDE


run_agents = looped(decide_agents)


@jit
def _see_waiting(sim: Sim, acting: Acting, now: float) -> None:
    """Who waits most in each part."""
    of, graph = acting.placing, acting.graph
    graph.blocked[:] = 0.0
    graph.large[:] = 0
    for c in range(of.classes.size):
        own = of.classes[c]
        if own["head"] >= 0:
            part, aged = acting.part[c], min((now - sim.jobs[own["head"]]["submit"]) / of.wait_s, MOST)
            blocked = np.sqrt(aged) * own["gpus"] / max(graph.capacity[part], 1.0)
            if blocked > graph.blocked[part]:
                graph.blocked[part], graph.large[part] = blocked, own["gpus"]


@jit
def _enqueue(sim: Sim, acting: Acting, c: int) -> None:
    of = acting.placing
    push(of.order, float(sim.jobs[of.classes[c]["head"]]["rank"]), c)
    acting.queued[c] = 1


@jit
def _count(acting: Acting, c: int, sign: float) -> None:
    """A job of a class waits, or waits no more."""
    part = acting.part[c]
    acting.graph.waiting[part] += sign * acting.placing.classes[c]["gpus"] / max(acting.graph.capacity[part], 1.0)


@jit
def _act(
    sim: Sim, log: EventLog, passes: Passes, acting: Acting, links: Links, c: int, job: int, now: float
) -> tuple[int, int]:  # fmt: skip
    """What becomes of a job: it starts, waits, or is handed on, and to which class."""
    of, graph, agent, part = acting.placing, acting.graph, acting.agent, acting.part[c]
    waited = now - sim.jobs[job]["submit"]
    aged, size = min(waited / of.wait_s, MOST), of.classes[c]["gpus"]
    masks, resources, first = passes.jobs.masks, sim.resources, c - part
    best = best_place(
        agent, graph, part, links.tree, links.model, links.load, resources, masks, passes.requests, of.ways, c, aged,
        of.search,
    )  # fmt: skip
    waits = worth_of_waiting(agent, graph, part, size, aged, waited / of.patience_s, best)
    held = holds(sim, of, c, job, now)
    good = best.way >= 0 and best.value >= waits and best.rank >= -GOOD
    to, most, there = -1, -np.inf, -np.inf
    for other in range(graph.whole.shape[0] if acting.handed[job] != now and not good else 0):
        if other == part or of.ways.first[first + other] == of.ways.first[first + other + 1]:
            continue
        bid = best_place(
            agent, graph, other, links.tree, links.model, links.load, resources, masks, passes.requests, of.ways,
            first + other, aged, of.search,
        )  # fmt: skip
        hand = worth_of_handing(agent, graph, part, other, size, aged) - _HAND
        if bid.way >= 0 and bid.rank + hand > most:
            to, most, there = first + other, bid.rank + hand, bid.value + hand
    if to >= 0 and most > best.rank and (there >= waits or held):
        return _HANDED, to
    if best.way >= 0 and (best.value >= waits or held):
        if to >= 0:
            best = best_place(
                agent, graph, part, links.tree, links.model, links.load, resources, masks, passes.requests, of.ways, c,
                aged, of.search,
            )  # fmt: skip
        shape = of.ways.shape[best.way]
        sim.jobs[job]["shape"] = shape
        passes.jobs.shape[job] = shape
        parts = sim.shapes[shape]["parts"]
        sim.chosen[:parts] = of.search.best[:parts]
        start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, 0.0)
        return _STARTS, -1
    if best.way >= 0 or to >= 0:
        of.wake[0] = min(of.wake[0], now + max(_LOOK_AGAIN_S, _LATER * waited))
    return _WAITS, -1


def placed_by(placement: str, name: str = "") -> ReplayPolicy:
    """In order of submission, whoever fits goes, to where the placement says; called that, or ``name``."""
    return replace(policy_of_order("fifo+skip"), name=name or placement, placement=placement)


def replayed(
    trace: Trace, pool: Pool, network: PlacementNetwork, agent: TopologyWeights, parts: int, seed: int = 0
) -> ReplayResult:
    """A trace under ``parts`` schedulers with equal weights."""
    model = TrainedModel("topology", dict(zip(SHAPES, agent, strict=True)), {}, "", "<weights in memory>")
    spec = PolicySpec(name="agents", agent="topology", backfill="skip", schedulers=parts)
    policy = replace(placed_by("contention", "agents"), order="topology", model=model, spec=spec)
    return replay(trace, pool, policy, network=network, seed=seed)


def new_acting(world: SimWorld, agent: TopologyWeights, parts: int) -> tuple[SimWorld, Acting]:
    """The world with the ways in which its jobs may be laid out on ``parts`` of the nodes, and what agents keep."""
    by_rule, placing = with_ways(world._replace(policy=placed_by("contention")), parts)
    world = by_rule._replace(policy=world.policy)
    links = world.sim.pace.links if world.sim.pace is not None else None
    racks = world.passes.scratch.racks
    assert links is not None
    assert racks is not None
    nodes, total, classes = len(world.pool), world.pool.gpus.astype(np.int64), len(placing.classes)
    begins = [part * nodes // parts for part in range(parts)]
    part_of = np.searchsorted(begins, np.arange(nodes), side="right").astype(np.int64) - 1
    graph = new_graph(links.tree, racks["number"].copy(), total, part_of, parts)
    return world, Acting(
        placing, agent, graph, np.arange(classes, dtype=np.int64) % parts, np.full(len(world.trace), -1.0),
        np.zeros(classes, np.uint8),
    )  # fmt: skip
