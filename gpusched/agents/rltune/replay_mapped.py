"""RLTune's order in replays whose jobs are placed by mapping: scored by the live passes, placed by the live mapping."""

from __future__ import annotations

import numpy as np

from gpusched.agents.rltune.decide import Field, ordered, scene_of
from gpusched.agents.rltune.history import FEATURES, note_start, note_stop
from gpusched.agents.rltune.live import NO_NUMBER, Prepared
from gpusched.agents.rltune.mapped import keep_of
from gpusched.agents.rltune.replay import book_of_trace
from gpusched.errors import GpuschedError
from gpusched.sched.mapping.queue import Keep
from gpusched.sched.state import Ints
from gpusched.sim.engine.build import World
from gpusched.sim.engine.generic import Queue
from gpusched.sim.engine.queue import waiting_in
from gpusched.sim.engine.state import DONE, ENDED


class ScoredOrder:
    """What orders the queue of one replay; see `engine_mapped.Ordering`."""

    def __init__(self, world: World, prepared: Prepared) -> None:
        self._world, self._prepared = world, prepared
        self._book = book_of_trace(world.trace, world.demand, len(world.pool.partitions), prepared.knows)
        self._ahead = np.zeros(len(world.sim.jobs) + 1, np.int64)
        self._seen = np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)

    def remember(self) -> None:
        """What ended at this instant."""
        sim = self._world.sim
        for job in sim.ended[: sim.counter[ENDED]].tolist():
            note_stop(self._book, job, float(sim.clock[0]), bool(sim.state[job]["status"] == DONE))

    def order(self, queue: Queue, partition: int) -> tuple[Ints, Keep | None]:
        """The partition's waiting jobs from first to last, and for whom nodes are held.

        Raises:
            GpuschedError: A score is no number.
        """
        world, prepared = self._world, self._prepared
        sim, passes, now = world.sim, world.passes, float(world.sim.clock[0])
        own: Ints = waiting_in(sim, queue.waiting, queue.size, partition)
        if not len(own):
            return own, None
        shapes = sim.shapes[sim.jobs["shape"][own]]
        scene = scene_of(sim.rooms, passes.total, int(shapes["lo"][0]), int(shapes["hi"][0]), len(own), now)
        if scene.free == 0.0 and shapes["gpus"].min() > 0:  # nobody can start
            return own[:0], None
        field = Field(sim.rooms, passes.usable, passes.requests, passes.jobs, passes.scratch)
        order, hold, sound = ordered(
            self._book, prepared.scorer, scene, field, passes.releases, own, self._ahead, self._seen
        )  # fmt: skip
        if not sound:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return order, keep_of(self._book, field, passes.releases, order, hold, prepared.backfill, now)

    def started(self, jobs: Ints) -> None:
        """These run from now on."""
        for job in jobs.tolist():
            note_start(self._book, job, float(self._world.sim.clock[0]))
