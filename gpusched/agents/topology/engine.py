"""Replays in which agents place jobs: one or several schedulers, each with a part of the nodes and a queue of its own.

A scheduler places a job on nodes of its own, lets it wait, or hands it to another one. All decide by the same weights.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from gpusched.agents.topology.network import (
    Agent,
    Graph,
    new_graph,
    pass_messages,
    value_of_handing,
    value_of_place,
    value_of_waiting,
)
from gpusched.compiled import jit
from gpusched.sched.fit import request_of
from gpusched.sched.heaps import pop, push
from gpusched.sched.place import choose
from gpusched.sched.state import BEST_FIT, Flags, Ints, Request, Resources
from gpusched.sched.topology.contention import LEFT_OVER, cost_of, left_over, pick, pick_across, set_keys
from gpusched.sim.engine.build import Options, World, log_of, result_of, world_of
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing import Network, Placing, append, holds, look_again, wait_on
from gpusched.sim.engine.state import DECIDE, GROW, READY, Links, Log, Passes, Sim, grown, shape_request
from gpusched.sim.engine.step import occupy
from gpusched.sim.placed import with_ways
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.result import Result
from gpusched.traces.trace import Trace

HARMLESS = 0.05  # what costs no more is taken at once
HANDS = 4  # a job is handed on at most so often
_FITS, _LESS = 0.05, 0.2  # the rule: a job that would wait goes to who has room for it, best to who has less waiting
_LOOK_AGAIN_S, _LATER = 600.0, 0.1  # or after so much of what it has waited
_MOST = 3.0
_WAITS, _STARTS, _HANDED = 0, 1, 2


class Acting(NamedTuple):
    """What agents keep between decisions.

    Attributes:
        placing: Queues and ways; classes are one a kind of request and scheduler.
        agent: The weights. graph: See there.
        part: ``int64[classes]``: the scheduler. base: ``int64[classes]``: the class's number but for the scheduler.
        capacity: ``float64[parts]``: GPUs. hands: ``int64[jobs]``: how often a job was handed on.
        queued: ``uint8[classes]``: room.
    """

    placing: Placing
    agent: Agent
    graph: Graph
    part: Ints
    capacity: Ints
    hands: Ints
    queued: Flags


class Choice(NamedTuple):
    """The best place found: its rank among places, its value against waiting, its way (-1: none), and what it costs."""

    rank: float
    value: float
    way: int
    own: float
    harm: float


@jit
def decide_agents(sim: Sim, log: Log, passes: Passes, acting: Acting) -> int:
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
    for c in range(of.head.size):
        if of.head[c] >= 0 and of.tried[c] == 0:
            _enqueue(sim, acting, c)
    if order.size[0] > 0:
        _see_waiting(sim, acting, now)
        pass_messages(acting.agent, links.tree, links.load, sim.resources, graph)
    while order.size[0] > 0:
        c = pop(order)
        acting.queued[c] = 0
        job = of.head[c]
        rank = sim.jobs[job]["rank"]
        if rank > of.held[of.queue[c]]:
            continue
        done, to = _act(sim, log, passes, acting, links, c, job, now)
        if done == _WAITS:
            of.tried[c] = 1
            if holds(sim, of, c, job, now):
                of.held[of.queue[c]] = rank
            continue
        _count(acting, c, -1.0)
        of.head[c] = of.next[job]
        if of.head[c] >= 0:
            _enqueue(sim, acting, c)
        else:
            of.tail[c] = -1
        if done == _HANDED:
            acting.hands[job] += 1
            of.of[job] = to
            _count(acting, to, 1.0)
            append(sim, of, job)
            if of.head[to] == job and acting.queued[to] == 0:
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
    for c in range(of.head.size):
        if of.head[c] >= 0:
            part, aged = acting.part[c], min((now - sim.jobs[of.head[c]]["submit"]) / of.wait_s, _MOST)
            blocked = np.sqrt(aged) * of.size[c] / max(acting.capacity[part], 1)
            if blocked > graph.blocked[part]:
                graph.blocked[part], graph.large[part] = blocked, of.size[c]


@jit
def _blocked(graph: Graph, part: int, gpus: int) -> float:
    """How much a larger job than this waits in a part."""
    return float(graph.blocked[part] if graph.large[part] > gpus else 0.0)


@jit
def _enqueue(sim: Sim, acting: Acting, c: int) -> None:
    of = acting.placing
    push(of.order, float(sim.jobs[of.head[c]]["rank"]), c)
    acting.queued[c] = 1


@jit
def _count(acting: Acting, c: int, sign: float) -> None:
    """A job of a class waits, or waits no more."""
    part = acting.part[c]
    acting.graph.waiting[part] += sign * acting.placing.size[c] / max(acting.capacity[part], 1)


@jit
def _act(
    sim: Sim, log: Log, passes: Passes, acting: Acting, links: Links, c: int, job: int, now: float
) -> tuple[int, int]:
    """What becomes of a job: it starts, waits, or is handed on, and to which class."""
    of, graph, agent, part = acting.placing, acting.graph, acting.agent, acting.part[c]
    waited = now - sim.jobs[job]["submit"]
    best = best_place(agent, graph, part, links, sim.resources, passes, of, c, min(waited / of.wait_s, _MOST))
    wait = graph.wait
    wait[0], wait[1] = 1.0, np.log2(max(of.size[c], 1)) / 4.0
    wait[2], wait[3] = min(waited / of.wait_s, _MOST), np.sqrt(min(waited / of.wait_s, _MOST))
    wait[4], wait[5] = min(best.own, _MOST), min(best.harm, _MOST)
    wait[6], wait[7] = min(graph.waiting[part], _MOST), 1.0 / (1.0 + best.own + best.harm)
    wait[8] = _blocked(graph, part, of.size[c])
    waits = -max(HARMLESS, np.sqrt(waited / of.patience_s)) + value_of_waiting(agent, graph, part)
    if best.way >= 0 and (best.value >= waits or holds(sim, of, c, job, now)):
        shape = of.ways.shape[best.way]
        sim.jobs[job]["shape"] = shape
        passes.jobs.shape[job] = shape
        parts = sim.shapes[shape]["parts"]
        sim.chosen[:parts] = of.search.best[:parts]
        occupy(sim, log, job, shape_request(sim.shapes, shape), 0.0)
        return _STARTS, -1
    to, most = -1, waits
    if acting.hands[job] < HANDS:
        parts, first = graph.whole.shape[0], c - part
        for other in range(parts):
            way = of.ways.first[first + other]
            if other == part or way == of.ways.first[first + other + 1]:
                continue
            request = shape_request(sim.shapes, of.ways.shape[way])
            if not choose(sim.resources, passes.jobs.masks, request, BEST_FIT, passes.scratch):
                continue
            hand, less = graph.hand, graph.waiting[part] - graph.waiting[other]
            hand[0], hand[1], hand[2], hand[3] = 1.0, wait[1], min(max(less, -_MOST), _MOST), wait[2]
            hand[4] = wait[8] - _blocked(graph, other, of.size[c])
            value = waits + _FITS + _LESS * hand[2] + value_of_handing(agent, graph, part, other)
            if value > most:
                to, most = first + other, value
    if to >= 0 and not holds(sim, of, c, job, now):
        return _HANDED, to
    if best.way >= 0:
        of.wake[0] = min(of.wake[0], now + max(_LOOK_AGAIN_S, _LATER * waited))
    return _WAITS, -1


@jit
def best_place(
    agent: Agent, graph: Graph, part: int, links: Links, resources: Resources, passes: Passes, of: Placing, c: int,
    waited: float,
) -> Choice:  # fmt: skip
    """The place that is worth most, its nodes in ``of.search.best``: of those that `contention.cheapest` looks at."""
    best, tree, search, ways = Choice(-np.inf, -np.inf, -1, _MOST, _MOST), links.tree, of.search, of.ways
    for way in range(ways.first[c], ways.first[c + 1]):
        request = request_of(passes.requests, ways.shape[way])
        fitting = set_keys(tree, links.model, links.load, resources, passes.jobs.masks, request, ways.kind[c], search)
        if fitting < request.parts:
            continue
        for switch in range(-1, tree.parent.size):
            if search.fits[switch] < request.parts:
                continue
            for tight in range(1 if request.parts == 1 and request.gpus == 1 else 0, 2):
                pick(tree, resources, request, search, switch, tight == 1)
                best = _better(agent, graph, part, links, resources, of, c, way, request, waited, best)
        if request.parts > 1 and tree.parent.size > 0:
            for quiet in range(2):
                pick_across(tree, links.load, resources, request, search, quiet == 1)
                best = _better(agent, graph, part, links, resources, of, c, way, request, waited, best)
    return best


@jit
def _better(
    agent: Agent, graph: Graph, part: int, links: Links, resources: Resources, of: Placing, c: int, way: int,
    request: Request, waited: float, best: Choice,
) -> Choice:  # fmt: skip
    """The better of ``best`` and the nodes in ``search.trial``."""
    search, place, racks = of.search, graph.place, 0
    nodes = search.trial
    own, harm = cost_of(links.tree, links.model, links.load, of.ways, c, nodes, request.parts, request.gpus, search)
    left = left_over(resources, request, nodes)
    for i in range(request.parts):
        new = 1
        for j in range(i):
            if graph.of[nodes[j]] == graph.of[nodes[i]]:
                new = 0
        racks += new
    place[0], place[1], place[2] = 1.0, np.log2(max(request.parts * request.gpus, 1)) / 4.0, request.parts / 8.0
    place[3], place[4], place[5] = racks / 4.0, min(own, _MOST), min(harm, _MOST)
    place[6], place[7], place[8] = min(of.ways.excess[way], _MOST), waited, min(left / LEFT_OVER, _MOST)
    place[9] = _blocked(graph, part, request.parts * request.gpus)
    value = value_of_place(agent, graph, part, nodes, request.parts) - own - harm
    if value - left <= best.rank:
        return best
    search.best[: request.parts] = nodes[: request.parts]
    return Choice(value - left, value, way, own, harm)


def placed_by(placement: str, name: str = "") -> ReplayPolicy:
    """In order of submission, whoever fits goes, to where the placement says; called that, or ``name``."""
    return ReplayPolicy(
        name=name or placement, order="fifo", knows="nothing", source="", backfill="skip", placement=placement
    )


def replayed(trace: Trace, pool: Pool, network: Network, agent: Agent, parts: int, seed: int = 0) -> Result:
    """A trace under ``parts`` schedulers with equal weights."""
    world, acting = begun(trace, pool, network, agent, parts, seed)
    log, begin = log_of(world), time.perf_counter()
    while run_agents(world.sim, log, world.passes, acting) == GROW:
        log = grown(log, world.sim)
    return result_of(world, log, time.perf_counter() - begin)


def begun(
    trace: Trace, pool: Pool, network: Network, agent: Agent, parts: int, seed: int = 0
) -> tuple[World, Acting]:  # fmt: skip
    """What `run_agents` replays: see `replayed`."""
    policy = placed_by("contention", "agents")
    world, placing = with_ways(world_of(trace, pool, policy, Options(network=network, seed=seed)), parts)
    links = world.sim.pace.links if world.sim.pace is not None else None
    racks = world.passes.scratch.racks
    assert links is not None
    assert racks is not None
    nodes, total, classes = len(pool), pool.gpus.astype(np.int64), len(placing.head)
    begins = [part * nodes // parts for part in range(parts)]
    part_of = np.searchsorted(begins, np.arange(nodes), side="right").astype(np.int64) - 1
    graph = new_graph(links.tree, racks["number"].copy(), total, part_of, parts)
    capacity = np.bincount(part_of, weights=total, minlength=parts).astype(np.int64)
    return world, Acting(
        placing, agent, graph, np.arange(classes, dtype=np.int64) % parts, capacity, np.zeros(len(trace), np.int64),
        np.zeros(classes, np.uint8),
    )  # fmt: skip
