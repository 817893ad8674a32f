"""Replays whose nodes another package's component chooses, by the live pass (`sched.placement`), run by Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpusched.compiled import in_python
from gpusched.errors import UsageError
from gpusched.sched.placement import NodeChooser, pass_by_component
from gpusched.sched.state import CONSERVATIVE
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.generic import SimQueue, decide_generic, dequeue_started, new_queue, ordered
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import start_granted, state_of
from gpusched.sim.engine.state import EventLog, Passes, Sim
from gpusched.sim.policies import PLACEMENTS


def is_by_component(world: SimWorld) -> bool:
    """Return whether another package's component chooses the nodes."""
    return world.rule not in PLACEMENTS


def component_run(world: SimWorld) -> Callable[[EventLog], int]:
    """Return the function that replays to the end.

    Raises:
        UsageError: The policy, or an option, has a placement of its own.
        ComponentError: The component cannot be imported; when it is called, that it failed.
    """
    sim, passes, queue = world.sim, world.passes, new_queue(world)
    itself = world.policy.kind in ("preemptive", "agent") or world.policy.chooses_sizes
    if itself or world.options.network is not None or queue.backfill == CONSERVATIVE:
        raise UsageError(f"{world.policy.name} cannot be combined with placement {world.rule}", "use another placement")
    gpu_type = np.array(world.pool.gpu_types)[world.pool.gpu_type]
    chooser = NodeChooser(world.rule, passes.usable, gpu_type, passes.rng, replays=True)

    def decide(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue, partition: int, backfill: int) -> None:
        """Run one partition's pass, as `generic` does."""
        waiting = ordered(sim, queue, partition)
        queue.outcome.total[:] = 0
        pass_by_component(state_of(sim, passes, queue.outcome), waiting, backfill, chooser)
        start_granted(sim, log, queue.outcome, None)
        dequeue_started(sim, queue, waiting)

    run = looped(in_python(decide_generic, _decide=decide), compiled=False)
    return lambda log: run(sim, log, passes, queue)
