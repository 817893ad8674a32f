"""A graph network over a cluster: from the links inside servers up to racks and the whole, and down to a choice.

What runs on a server's bus and NIC is summed up there, servers in their racks, racks in the part of the cluster that a
scheduler has. A place for a job is valued by its servers, their racks and the whole, beside what it costs by the model
of contention; so are waiting, and handing the job to another scheduler. All parts share the weights, whatever they hang
together like.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.vector import split_vector
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints, Resources
from gpusched.sched.topology.load import FULL_STEP, Load
from gpusched.sched.topology.tree import NetworkTree

WIDTH, HIDDEN = 4, 6
PLACE, WAIT, HAND = 10, 10, 5
"""Inputs of a place, of waiting, and of another scheduler, beside what the graph says."""
ON, SERVER, RACK, WHOLE = 4, 3, 3, 3  # inputs of a job on a link, of a server, of a rack, and of a part
SHAPES = {
    "on.bus": (ON, WIDTH), "on.nic": (ON, WIDTH),
    "server": (SERVER + 2 * WIDTH, WIDTH), "rack": (RACK + WIDTH, WIDTH), "whole": (WHOLE + WIDTH, WIDTH),
    "place.in": (PLACE + 3 * WIDTH, HIDDEN), "wait.in": (WAIT + WIDTH, HIDDEN), "hand.in": (HAND + 2 * WIDTH, HIDDEN),
    "place.skip": (PLACE,), "place.out": (HIDDEN,), "wait.skip": (WAIT,), "wait.out": (HIDDEN,),
    "hand.skip": (HAND,), "hand.out": (HIDDEN,),
}  # fmt: skip
"""Name -> shape of what is learned."""
IDLE, IDLE_WEIGHT = 9, -1.0
"""The input of waiting that says how many GPUs idle (`places.USUAL`), and its weight at the start, set by hand."""
_ZERO_AT_START = ("skip", "out")  # what is 0 at the start
_MAX_PRESSURE = 3.0


class TopologyWeights(NamedTuple):
    """The weights, by the names of `SHAPES`; float64."""

    on_bus: Floats
    on_nic: Floats
    server: Floats
    rack: Floats
    whole: Floats
    place_in: Floats
    wait_in: Floats
    hand_in: Floats
    place_skip: Floats
    place_out: Floats
    wait_skip: Floats
    wait_out: Floats
    hand_skip: Floats
    hand_out: Floats


def weights_from(numbers: Floats) -> TopologyWeights:
    """Return ``float64[numbers]`` as weights."""
    return TopologyWeights(*split_vector(numbers, SHAPES))


def untrained(seed: int) -> Floats:
    """Return the start, ``float64[numbers]``: random graph layers with zero output, so the rule alone decides."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, shape in SHAPES.items():
        drawn = rng.normal(0, 1 / np.sqrt(shape[0]), shape)
        parts.append(drawn.ravel() * (name.rpartition(".")[2] not in _ZERO_AT_START))
    return np.concatenate(parts)


def start(seed: int) -> Floats:
    """Return where training begins: `untrained`, but no job waits while many GPUs idle that pending jobs request."""
    numbers = untrained(seed)
    at = sum(int(np.prod(shape)) for shape in list(SHAPES.values())[: list(SHAPES).index("wait.skip")])
    numbers[at + IDLE] = IDLE_WEIGHT
    return numbers


class Graph(NamedTuple):
    """The graph's outputs, and work space.

    Attributes:
        server: ``float64[nodes, WIDTH]``. rack: ``float64[racks, WIDTH]``. whole: ``float64[parts, WIDTH]``.
        of: ``int64[nodes]``: a node's rack, as `Scratch.rack`. part: ``int64[racks]``: that the rack is in.
        node_part: ``int64[nodes]``: the part that a node is in. total: ``float64[nodes]``: GPUs.
        up: ``int64[racks]``: its way up, a link; -1: none.
        free, most, has: ``float64[racks]``: free GPUs, the most on one node, GPUs. capacity: ``float64[parts]``: GPUs.
        waiting: ``float64[parts]``: GPUs that jobs ask for that wait there, by those that the part has.
        idle: ``float64[parts]``: the share of its GPUs that are free.
        large: ``int64[parts]``: GPUs of the job that waits most there, by its size and age.
        blocked: ``float64[parts]``: how much it waits.
        place, wait, hand: Inputs. best: those of the best place so far.
    """

    server: Floats
    rack: Floats
    whole: Floats
    of: Ints
    part: Ints
    node_part: Ints
    total: Floats
    up: Ints
    free: Floats
    most: Floats
    has: Floats
    capacity: Floats
    waiting: Floats
    idle: Floats
    large: Ints
    blocked: Floats
    place: Floats
    best: Floats
    wait: Floats
    hand: Floats


def new_graph(tree: NetworkTree, racks: Ints, total: Ints, part: Ints, parts: int) -> Graph:
    """Build the graph of a cluster.

    Args:
        tree: Its links.
        racks: ``int64[nodes]``: as `Scratch.rack`.
        total: ``int64[nodes]``: GPUs.
        part: ``int64[nodes]``: the scheduler that has it; a rack's is that of its first node.
        parts: Schedulers.
    """
    count, nodes = int(racks.max(initial=-1)) + 1, len(racks)
    first = np.unique(racks, return_index=True)[1]
    up = np.where(tree.rack[first] >= 0, 2 * nodes + tree.rack[first], -1)
    return Graph(
        np.zeros((nodes, WIDTH)), np.zeros((count, WIDTH)), np.zeros((parts, WIDTH)), racks, part[first], part,
        total.astype(np.float64), up, np.zeros(count), np.zeros(count),
        np.bincount(racks, weights=total, minlength=count).astype(np.float64),
        np.bincount(part, weights=total, minlength=parts).astype(np.float64), np.zeros(parts), np.zeros(parts),
        np.zeros(parts, np.int64), np.zeros(parts), np.zeros(PLACE + 3 * WIDTH), np.zeros(PLACE),
        np.zeros(WAIT + WIDTH), np.zeros(HAND + 2 * WIDTH),
    )  # fmt: skip


@jit
def pass_messages(agent: TopologyWeights, tree: NetworkTree, load: Load, resources: Resources, graph: Graph) -> None:
    """Pass messages from the links inside servers to servers, racks and parts."""
    nodes = graph.of.size
    graph.free[:] = 0.0
    graph.most[:] = 0.0
    graph.rack[:] = 0.0
    graph.whole[:] = 0.0
    graph.idle[:] = 0.0
    inputs = np.zeros(SERVER + 2 * WIDTH)
    for node in range(nodes):
        rack, total = graph.of[node], max(graph.total[node], 1.0)
        free = max(0, resources.gpus[node])
        graph.free[rack] += free
        graph.idle[graph.node_part[node]] += free / max(graph.capacity[graph.node_part[node]], 1.0)
        graph.most[rack] = max(graph.most[rack], free / total)
        server_inputs(load, resources, graph, node, inputs)
        inputs[SERVER:] = 0.0
        _aggregate_link(agent.on_bus, load, node, total, inputs[SERVER : SERVER + WIDTH])
        _aggregate_link(agent.on_nic, load, nodes + node, total, inputs[SERVER + WIDTH :])
        for k in range(WIDTH):
            total_input = 0.0
            for i in range(inputs.size):
                total_input += agent.server[i, k] * inputs[i]
            graph.server[node, k] = max(total_input, 0.0)
            graph.rack[rack, k] += graph.server[node, k] * total / max(graph.has[rack], 1.0)
    _pass_to_parts(agent, load, graph)


@jit
def server_inputs(load: Load, resources: Resources, graph: Graph, node: int, inputs: Floats) -> None:
    """Set the inputs of a server."""
    inputs[0] = max(0, resources.gpus[node]) / max(graph.total[node], 1.0)
    inputs[1] = min(load.pressure[node] / FULL_STEP, _MAX_PRESSURE)
    inputs[2] = min(load.pressure[graph.of.size + node] / FULL_STEP, _MAX_PRESSURE)


@jit
def link_inputs(load: Load, at: int, total: float) -> tuple[float, float, float]:
    """Return the inputs of a job on a link of a server of so many GPUs, besides 1; ``at``: of ``Load.uses``."""
    use = load.uses[at]
    job = load.jobs[use["job"]]
    return use["part"] / FULL_STEP, min(job["gpus"] / total, _MAX_PRESSURE) / _MAX_PRESSURE, job["speed"]


@jit
def _aggregate_link(weights: Floats, load: Load, link: int, total: float, out: Floats) -> None:
    """Aggregate the jobs on a link into ``out``."""
    at = load.on[link]
    while at >= 0:
        part, share, speed = link_inputs(load, at, total)
        for k in range(out.size):
            out[k] += max(0.0, weights[0, k] + weights[1, k] * part + weights[2, k] * share + weights[3, k] * speed)
        at = load.uses[at]["next"]


@jit
def _pass_to_parts(agent: TopologyWeights, load: Load, graph: Graph) -> None:
    """Pass messages from racks, which hold the means of their servers, to parts."""
    racks, parts = graph.up.size, graph.whole.shape[0]
    free, has = np.zeros(parts), np.zeros(parts)
    for rack in range(racks):
        free[graph.part[rack]] += graph.free[rack]
        has[graph.part[rack]] += graph.has[rack]
    inputs = np.zeros(RACK + WIDTH)
    for rack in range(racks):
        rack_inputs(load, graph, rack, inputs)
        inputs[RACK:] = graph.rack[rack]
        part = graph.part[rack]
        for k in range(WIDTH):
            total_input = 0.0
            for i in range(inputs.size):
                total_input += agent.rack[i, k] * inputs[i]
            graph.rack[rack, k] = max(total_input, 0.0)
            graph.whole[part, k] += graph.rack[rack, k] * graph.has[rack] / max(has[part], 1.0)
    summed = np.zeros(WHOLE + WIDTH)
    for part in range(parts):
        whole_inputs(graph, part, free[part] / max(has[part], 1.0), summed)
        summed[WHOLE:] = graph.whole[part]
        for k in range(WIDTH):
            total_input = 0.0
            for i in range(summed.size):
                total_input += agent.whole[i, k] * summed[i]
            graph.whole[part, k] = max(total_input, 0.0)


@jit
def rack_inputs(load: Load, graph: Graph, rack: int, inputs: Floats) -> None:
    """Set the inputs of a rack."""
    inputs[0] = graph.free[rack] / max(graph.has[rack], 1.0)
    inputs[1] = graph.most[rack]
    inputs[2] = min(load.pressure[graph.up[rack]] / FULL_STEP, _MAX_PRESSURE) if graph.up[rack] >= 0 else 0.0


@jit
def whole_inputs(graph: Graph, part: int, free: float, inputs: Floats) -> None:
    """Set the inputs of a part of which this is free."""
    inputs[0], inputs[1], inputs[2] = free, min(graph.waiting[part], _MAX_PRESSURE), graph.blocked[part]


@jit
def start_in(graph: Graph, part: int, nodes: Ints, parts: int, gpus: int) -> None:
    """Start a job that waited in a part on nodes, with so many GPUs of each: less waits, and less is idle.

    What the layers say stays as it is until the next `pass_messages`.
    """
    graph.waiting[part] -= parts * gpus / max(graph.capacity[part], 1.0)
    for i in range(parts):
        of = graph.node_part[nodes[i]]
        graph.idle[of] -= gpus / max(graph.capacity[of], 1.0)


@jit
def value_of_place(agent: TopologyWeights, graph: Graph, part: int, nodes: Ints, parts: int) -> float:
    """Return a place's value on top of the rule; ``graph.place[:PLACE]`` holds the other inputs."""
    inputs = graph.place
    inputs[PLACE : PLACE + 2 * WIDTH] = 0.0
    for i in range(parts):
        for k in range(WIDTH):
            inputs[PLACE + k] += graph.server[nodes[i], k] / parts
            inputs[PLACE + WIDTH + k] += graph.rack[graph.of[nodes[i]], k] / parts
    inputs[PLACE + 2 * WIDTH :] = graph.whole[part]
    return _output(agent.place_in, agent.place_skip, agent.place_out, inputs)


@jit
def value_of_waiting(agent: TopologyWeights, graph: Graph, part: int) -> float:
    """Return the value of waiting on top of the rule; ``graph.wait[:WAIT]`` holds the other inputs."""
    graph.wait[WAIT:] = graph.whole[part]
    return _output(agent.wait_in, agent.wait_skip, agent.wait_out, graph.wait)


@jit
def value_of_handing(agent: TopologyWeights, graph: Graph, part: int, to: int) -> float:
    """Return the value of handing a job over on top of the rule; ``graph.hand[:HAND]`` holds the other inputs."""
    graph.hand[HAND : HAND + WIDTH] = graph.whole[part]
    graph.hand[HAND + WIDTH :] = graph.whole[to]
    return _output(agent.hand_in, agent.hand_skip, agent.hand_out, graph.hand)


@jit
def _output(into: Floats, skip: Floats, out: Floats, inputs: Floats) -> float:
    value = 0.0
    for i in range(skip.size):
        value += skip[i] * inputs[i]
    for k in range(out.size):
        total = 0.0
        for i in range(inputs.size):
            total += into[i, k] * inputs[i]
        value += out[k] * max(total, 0.0)
    return float(value)
