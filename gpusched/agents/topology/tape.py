"""What a replay records of its decisions for training by gradient, and by how much it lets jobs deviate.

Without a tape (live, and in all other replays) nothing of this is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.agents.topology.network import (
    ON,
    PLACE,
    RACK,
    SERVER,
    WAIT,
    WHOLE,
    Graph,
    TopologyWeights,
    link_inputs,
    rack_inputs,
    server_inputs,
    value_of_place,
    value_of_waiting,
    whole_inputs,
)
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints, Resources
from gpusched.sched.topology.load import Load

Inputs = npt.NDArray[np.float32]
_MOST_BYTES = 24 << 20
_FIRST_S = 600.0


class Tape(NamedTuple):
    """Decisions of one scheduler, ``used[0]`` rows, and the inputs of the current pass.

    Attributes:
        noise: ``float64[jobs]``: what a job's worth of waiting is off by. again: ``float64[jobs]``: how long it has
            waited when it is recorded next: its first decision, and when it has waited twice as long as at the last.
        now_server, now_on, now_rack, now_whole: Inputs of the last `hear`.
        job: ``int64[rows]``. server, on, rack, whole, place, wait: Inputs of a row; ``on[rows, nodes, 2, most, ON]``:
            0 where there is no job. picked: ``[rows, nodes]``: the part of the job on each node.
        out: ``[rows, 2]``: what the network said of the place, and of waiting.
        share: ``[racks, nodes]``: a node's part of its rack's GPUs. weight: ``[racks]``: a rack's, of the part's.
    """

    noise: Floats
    again: Floats
    now_server: Floats
    now_on: Floats
    now_rack: Floats
    now_whole: Floats
    used: Ints
    job: Ints
    server: Inputs
    on: Inputs
    rack: Inputs
    whole: Inputs
    place: Inputs
    wait: Inputs
    picked: Inputs
    out: Inputs
    share: Floats
    weight: Floats


def new_tape(graph: Graph, noise: Floats) -> Tape:
    """Return an empty tape for the first scheduler of a graph, which has all nodes that it records."""
    nodes, racks, most = len(graph.of), len(graph.has), int(graph.total.max(initial=1.0))
    rows = max(1, min(4 * len(noise), _MOST_BYTES // (4 * ON * nodes * 2 * most)))
    share = np.zeros((racks, nodes))
    share[graph.of, np.arange(nodes)] = graph.total / np.maximum(graph.has[graph.of], 1.0)
    weight = np.where(graph.part == 0, graph.has, 0.0)

    def inputs(*shape: int) -> Inputs:
        return np.zeros((rows, *shape), np.float32)

    return Tape(
        noise=noise, again=np.zeros(len(noise)), now_server=np.zeros((nodes, SERVER)),
        now_on=np.zeros((nodes, 2, most, ON)), now_rack=np.zeros((racks, RACK)), now_whole=np.zeros(WHOLE),
        used=np.zeros(1, np.int64), job=np.zeros(rows, np.int64), server=inputs(nodes, SERVER),
        on=inputs(nodes, 2, most, ON), rack=inputs(racks, RACK), whole=inputs(WHOLE), place=inputs(PLACE),
        wait=inputs(WAIT), picked=inputs(nodes), out=inputs(2), share=share, weight=weight / max(weight.sum(), 1.0),
    )  # fmt: skip


@jit
def noise_of(tape: Tape | None, job: int) -> float:
    """Return what a job's worth of waiting is off by."""
    return 0.0 if tape is None else float(tape.noise[job])


@jit
def hear(tape: Tape | None, load: Load, resources: Resources, graph: Graph) -> None:
    """Keep the inputs of a pass, as `network.pass_messages` has them."""
    if tape is None:
        return
    nodes, most, free, has = graph.of.size, tape.now_on.shape[2], 0.0, 0.0
    tape.now_on[:] = 0.0
    for node in range(nodes):
        server_inputs(load, resources, graph, node, tape.now_server[node])
        for side in range(2):
            at, number = load.on[side * nodes + node], 0
            while at >= 0 and number < most:
                own = tape.now_on[node, side, number]
                own[0] = 1.0
                own[1], own[2], own[3] = link_inputs(load, at, max(graph.total[node], 1.0))
                at, number = load.uses[at]["next"], number + 1
    for rack in range(graph.has.size):
        rack_inputs(load, graph, rack, tape.now_rack[rack])
        if graph.part[rack] == 0:
            free += graph.free[rack]
            has += graph.has[rack]
    whole_inputs(graph, 0, free / max(has, 1.0), tape.now_whole)


@jit
def record(
    tape: Tape | None, agent: TopologyWeights, graph: Graph, job: int, waited: float, nodes: Ints, parts: int
) -> None:
    """Add the decision between the best place, on ``nodes[:parts]``, and waiting; its inputs are in ``graph``."""
    if tape is None:
        return
    row = tape.used[0]
    if row >= tape.job.size or waited < tape.again[job]:
        return
    tape.again[job] = max(2.0 * waited, _FIRST_S)
    tape.used[0] += 1
    tape.job[row] = job
    tape.server[row], tape.on[row], tape.rack[row] = tape.now_server, tape.now_on, tape.now_rack
    tape.whole[row], tape.place[row], tape.wait[row] = tape.now_whole, graph.best, graph.wait[:WAIT]
    for i in range(parts):
        tape.picked[row, nodes[i]] = 1.0 / parts
    graph.place[:PLACE] = graph.best
    tape.out[row, 0] = value_of_place(agent, graph, 0, nodes, parts)
    tape.out[row, 1] = value_of_waiting(agent, graph, 0)
