"""An agent's values of places for a job, of waiting for a better one, and of handing it over: rule and network."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.topology.network import (
    IDLE,
    Graph,
    TopologyWeights,
    value_of_handing,
    value_of_place,
    value_of_waiting,
)
from gpusched.compiled import jit
from gpusched.sched.fit import request_of
from gpusched.sched.state import Flags, PlacementRequest, Requests, Resources
from gpusched.sched.topology.contention import (
    LEFT_OVER,
    JobLayouts,
    PlacementSearch,
    cost_of,
    left_over,
    pick,
    pick_across,
    set_keys,
)
from gpusched.sched.topology.load import Load
from gpusched.sched.topology.queue import HARMLESS
from gpusched.sched.topology.slowdown import SlowdownModel
from gpusched.sched.topology.tree import NetworkTree

GOOD = 0.1
"""A job that its own scheduler offers a place of rank minus this, or better, asks no other scheduler."""
USUAL = 0.2
"""So many of the GPUs idle where no job waits for a better place, because they fit no pending job; only those beyond
count for the input `IDLE` of waiting."""
MAX_DAYS_WAITED = 3.0
"""No input of the network is larger."""


class PlaceChoice(NamedTuple):
    """The best place found: its rank among places, its value against waiting, its way (-1: none), and its costs."""

    rank: float
    value: float
    way: int
    own: float
    harm: float


@jit
def best_place(
    agent: TopologyWeights, graph: Graph, part: int, tree: NetworkTree, model: SlowdownModel, load: Load,
    resources: Resources, masks: Flags,
    requests: Requests, ways: JobLayouts, c: int, waited: float, search: PlacementSearch,
) -> PlaceChoice:  # fmt: skip
    """Return the most valuable place, nodes in ``search.best``, among the candidates of `contention.cheapest`.

    ``part`` is the scheduler that looks, ``c`` the job's class in ``ways``, on that scheduler's nodes; ``waited`` is no
    more than `MAX_DAYS_WAITED`.
    """
    best = PlaceChoice(-np.inf, -np.inf, -1, MAX_DAYS_WAITED, MAX_DAYS_WAITED)
    for way in range(ways.first[c], ways.first[c + 1]):
        request = request_of(requests, ways.shape[way])
        fitting = set_keys(tree, model, load, resources, masks, request, ways.kind[c], search)
        if fitting < request.parts:
            continue
        for switch in range(-1, tree.parent.size):
            if search.fits[switch] < request.parts or (switch < 0 and request.parts > 1 and request.spread != 0):
                continue
            for tight in range(1 if request.parts == 1 and request.gpus == 1 else 0, 2):
                pick(tree, resources, request, search, switch, tight == 1)
                best = _better(
                    agent, graph, part, tree, model, load, resources, ways, c, way, request, waited, search, best
                )
        if request.parts > 1 and tree.parent.size > 0 and request.spread == 0:
            for quiet in range(2):
                pick_across(tree, load, resources, request, search, quiet == 1)
                best = _better(
                    agent, graph, part, tree, model, load, resources, ways, c, way, request, waited, search, best
                )
    return best


@jit
def _better(
    agent: TopologyWeights, graph: Graph, part: int, tree: NetworkTree, model: SlowdownModel, load: Load,
    resources: Resources, ways: JobLayouts,
    c: int, way: int, request: PlacementRequest, waited: float, search: PlacementSearch, best: PlaceChoice,
) -> PlaceChoice:  # fmt: skip
    """Return the better of ``best`` and the nodes in ``search.trial``."""
    place, nodes, racks = graph.place, search.trial, 0
    own, harm = cost_of(tree, model, load, ways, c, nodes, request.parts, request.gpus, search)
    left = left_over(resources, request, nodes)
    for i in range(request.parts):
        new = 1
        for j in range(i):
            if graph.of[nodes[j]] == graph.of[nodes[i]]:
                new = 0
        racks += new
    place[0], place[1], place[2] = 1.0, _size(request.parts * request.gpus), request.parts / 8.0
    place[3], place[4], place[5] = racks / 4.0, min(own, MAX_DAYS_WAITED), min(harm, MAX_DAYS_WAITED)
    place[6], place[7], place[8] = (
        min(ways.excess[way], MAX_DAYS_WAITED),
        waited,
        min(left / LEFT_OVER, MAX_DAYS_WAITED),
    )
    place[9] = _blocked(graph, part, request.parts * request.gpus)
    value = value_of_place(agent, graph, part, nodes, request.parts) - own - harm
    rank = value - search.tight[0] * left
    if rank <= best.rank:
        return best
    search.best[: request.parts] = nodes[: request.parts]
    graph.best[:] = place[: graph.best.size]
    return PlaceChoice(rank, value, way, own, harm)


@jit
def worth_of_waiting(
    agent: TopologyWeights, graph: Graph, part: int, gpus: int, waited: float, patience: float, best: PlaceChoice
) -> float:
    """Return the value below which a place is refused for now; ``patience``: the part of it already waited."""
    wait = graph.wait
    wait[0], wait[1], wait[2], wait[3] = 1.0, _size(gpus), waited, np.sqrt(waited)
    wait[4], wait[5] = min(best.own, MAX_DAYS_WAITED), min(best.harm, MAX_DAYS_WAITED)
    wait[6], wait[7] = min(graph.waiting[part], MAX_DAYS_WAITED), 1.0 / (1.0 + best.own + best.harm)
    wait[8] = _blocked(graph, part, gpus)
    wait[IDLE] = max(0.0, min(graph.idle[part], graph.waiting[part]) - USUAL)
    return float(value_of_waiting(agent, graph, part) - max(HARMLESS, np.sqrt(patience)))


@jit
def worth_of_handing(agent: TopologyWeights, graph: Graph, part: int, to: int, gpus: int, waited: float) -> float:
    """Return the bonus of a place that another scheduler has."""
    hand, less = graph.hand, graph.waiting[part] - graph.waiting[to]
    hand[0], hand[1], hand[2], hand[3] = 1.0, _size(gpus), min(max(less, -MAX_DAYS_WAITED), MAX_DAYS_WAITED), waited
    hand[4] = _blocked(graph, part, gpus) - _blocked(graph, to, gpus)
    return value_of_handing(agent, graph, part, to)


@jit
def _size(gpus: int) -> float:
    return float(np.log2(max(gpus, 1)) / 4.0)


@jit
def _blocked(graph: Graph, part: int, gpus: int) -> float:
    """Return how much a larger job than this waits in a part."""
    return float(graph.blocked[part] if graph.large[part] > gpus else 0.0)
