"""The GIST agent in replays: the live pass, called at every instant at which something happened in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.live import NO_NUMBER
from gpusched.agents.gist.networks import Agent
from gpusched.compiled import jit
from gpusched.config.weights import Model
from gpusched.errors import GpuschedError
from gpusched.sched.state import Floats, Ints, Outcome, new_outcome
from gpusched.sim.engine.build import World
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import apply_outcome, enter, state_of, waiting_in
from gpusched.sim.engine.state import DECIDE, READY, Log, Passes, Sim

UNSOUND = 3  # beside OVER, DECIDE and GROW


class Queue(NamedTuple):
    """The waiting jobs.

    Attributes:
        waiting: ``int64[jobs]`` in order of submission; ``size[0]`` of them.
        submit: ``float64[jobs]``. priority: ``int64[jobs]``: nobody has any in a replay.
        outcome: Where the pass writes.
        agent: Who decides.
    """

    waiting: Ints
    size: Ints
    submit: Floats
    priority: Ints
    outcome: Outcome
    agent: Agent


def new_queue(sim: Sim, agent: Agent) -> Queue:
    """An empty queue."""
    jobs = len(sim.jobs)
    outcome = new_outcome(jobs, len(sim.held))
    submit = np.ascontiguousarray(sim.jobs["submit"])
    return Queue(np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), submit, np.zeros(jobs, np.int64), outcome, agent)


def maps(model: Model) -> bool:
    """It chooses servers itself."""
    return False


def runner(world: World, prepared: Agent) -> tuple[World, Callable[[Log], int]]:
    """The run of one replay: to its end, or to where the log needs more room.

    The function returned raises `GpuschedError` where a network's answer is no number.
    """
    sim, passes, queue = world.sim, world.passes, new_queue(world.sim, prepared)

    def run(log: Log) -> int:
        code = run_agent(sim, log, passes, queue)
        if code == UNSOUND:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return world, run


@jit
def decide_agent(sim: Sim, log: Log, passes: Passes, queue: Queue) -> int:
    """Every partition's pass in which something happened; UNSOUND: no number."""
    for i in range(sim.counter[READY]):
        enter(sim, queue.waiting, queue.size, sim.ready[i])
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            sim.dirty[partition] = 0
            own = waiting_in(sim, queue.waiting, queue.size, partition)
            queue.outcome.total[:] = 0
            state = state_of(sim, passes, queue.outcome)
            sound = agent_pass(state, passes.usable, own, queue.submit, queue.priority, queue.agent, False)[3]
            if not sound:
                return UNSOUND
            apply_outcome(sim, log, queue.waiting, queue.size, queue.outcome)
    return DECIDE


run_agent = looped(decide_agent)
