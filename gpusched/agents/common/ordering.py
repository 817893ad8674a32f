"""The smallest agent that orders queues: one function of weights and jobs; its policy's file places and backfills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import Context, Unusable
from gpusched.sched.order import Columns, Keys
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.stages import place_queue
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.mapped import StagedRun
from gpusched.sim.engine.state import EventLog
from gpusched.sim.knowledge import keys_of, ranks_by
from gpusched.sim.placed import is_staged, staged


class OrderingAgent:
    """The parts ``live`` and ``replay`` of an agent that orders queues; a subclass says by what.

    In replays a job is asked about once, at the beginning: what it is ordered by is its own, not what else waits.
    """

    def columns(self, prepared: Any, keys: Keys) -> Columns:
        """Return the jobs' sort keys, as orders do (`sched.order`); `Unusable`: it cannot decide now."""
        raise NotImplementedError

    def prepare(self, model: TrainedModel) -> Any:
        """Return the weights as `columns` takes them. ValueError: they have the wrong shape."""
        return model.arrays

    def decide_queue(self, prepared: Any, context: Context) -> tuple[list[int], QueueBlock]:
        """Order one partition's queue, and place it by the policy's file."""
        queue = context.waiting.ordered_by(context.partition, partial(self._numbers, prepared))
        return queue.tolist(), place_queue(context, queue)

    def maps(self, model: TrainedModel) -> bool:
        """Return True: any placement goes with it."""
        return True

    def runner(self, world: SimWorld, prepared: Any) -> tuple[SimWorld, Callable[[EventLog], int]]:
        """Return the world with jobs ranked, and what replays it: the same passes as live."""
        keys = keys_of(world.trace, world.knowledge.expected)
        world.sim.jobs["rank"] = ranks_by(self._numbers(prepared, keys), keys)
        if is_staged(world):
            world, walk = staged(world)
            return world, StagedRun(world, walk)
        sim, passes, queue = world.sim, world.passes, new_queue(world)
        return world, lambda log: run_generic(sim, log, passes, queue)

    def _numbers(self, prepared: Any, keys: Keys) -> Columns:
        columns = [np.asarray(column, np.float64) for column in self.columns(prepared, keys)]
        if any(column.shape != keys.submit.shape or not np.isfinite(column).all() for column in columns):
            raise Unusable("it did not return one number for each job")
        return columns
