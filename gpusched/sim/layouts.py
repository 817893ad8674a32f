"""Jobs' own requests (nodes, racks, waits) in replays under policies in Python, at any size.

Where no job changes size they are the chains of `placed.walked`, to which they are held.
"""

from __future__ import annotations

import numpy as np

from gpusched.sched.state import BAD_CONSTRAINTS, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.placing import is_possible
from gpusched.sim.engine.step import mark_never
from gpusched.sim.placed import one_rack_of, racks_in
from gpusched.sim.pool import most_nodes, node_counts
from gpusched.sim.resizing import ResizedShapes


class OwnLayouts:
    """The requests that each job accepts at its size.

    Attributes:
        wait_s: ``float64[jobs]``: so long after its submission a job accepts one rack only.
    """

    def __init__(self, world: SimWorld, sizes: ResizedShapes) -> None:
        trace, network, elastic = world.trace, world.options.network, world.options.elastic
        assert network is not None
        usual_s = network.wait_s if world.rule == "rack-wait" else 0.0
        own_s = np.full(len(trace), -1) if trace.placement_wait is None else trace.placement_wait
        self.wait_s = np.where(own_s >= 0, own_s, usual_s)
        self._widest_first = world.rule == "load-balancing"
        self._sizes, self._racked = sizes, bool(len(network.tree.parent))
        self._one_rack = one_rack_of(trace, network)
        self._rigid = np.ones(len(trace), np.bool_) if elastic is None else elastic.least >= elastic.most
        self._most: Ints = np.where(self._rigid, most_nodes(trace, keeps=True), 0)  # as in `placed.with_ways_at_sizes`
        self._chains: dict[tuple[int, int, int], list[int]] = {}

    def prepared(self, world: SimWorld) -> SimWorld:
        """Return the world in which requests may be bound to one rack; rigid jobs that no rack can hold never run."""
        passes, shape = world.passes, world.sim.jobs["shape"]
        requests = passes.requests._replace(spread=world.sim.shapes["spread"].copy())
        scratch = passes.scratch._replace(racks=racks_in(world))
        world = world._replace(passes=passes._replace(requests=requests, scratch=scratch))
        for job in np.flatnonzero(self._rigid & (shape >= 0)).tolist():
            world, chain = self._chain(world, job, int(shape[job]))
            if world.passes.jobs.feasibility[chain[0]] == BAD_CONSTRAINTS:
                world.sim.jobs["shape"][job] = -1
                if self._one_rack[job]:
                    world.demand.infeasible[job] = "no rack has so many large enough nodes"
        return world._replace(never=world.never + int(mark_never(world.sim)))

    def at(self, world: SimWorld, job: int, size: int, waits: bool = False) -> tuple[SimWorld, list[int]]:
        """Return the world with the requests that a job accepts, and these, first choice first.

        ``size``: its shape at its size; ``waits``: it still waits for one rack.
        """
        world, chain = self._chain(world, job, size)
        if not waits:
            return world, chain
        first = next((shape for shape in chain if is_possible(world.passes, shape)), -1)
        if first >= 0:
            parts = int(world.sim.shapes["parts"][first])
            world, alone = self._sizes.layout(world, size, parts, self._racked and parts > 1)
            if is_possible(world.passes, alone):
                return world, [alone]
        return world, chain

    def _chain(self, world: SimWorld, job: int, size: int) -> tuple[SimWorld, list[int]]:
        """Return those of all numbers of nodes that the cluster can provide; if none, the first."""
        key = size, int(self._most[job]), int(self._one_rack[job])
        if key not in self._chains:
            counts = [int(world.sim.shapes["parts"][size])]
            if self._most[job] > 0:
                demand = world.demand._replace(requests=world.passes.requests)
                counts = node_counts(world.pool, demand, size, int(self._most[job])) or counts
            found = list[int]()
            for count in counts[::-1] if self._widest_first else counts:
                world, shape = self._sizes.layout(world, size, count, bool(self._one_rack[job]) and count > 1)
                found.append(shape)
            feasibility = world.passes.jobs.feasibility
            self._chains[key] = [shape for shape in found if feasibility[shape] != BAD_CONSTRAINTS] or found[:1]
        return world, self._chains[key]
