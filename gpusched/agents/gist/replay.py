"""The GIST agent in replays: the live pass, called at every instant at which something happened in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.live import NO_NUMBER
from gpusched.agents.gist.networks import Agent
from gpusched.compiled import jit
from gpusched.errors import GpuschedError
from gpusched.sched.state import EASY, Floats, Ints, Outcome, new_outcome
from gpusched.sim.engine.build import World
from gpusched.sim.engine.queue import begin_started, enter, leave_started, waiting_in
from gpusched.sim.engine.state import DECIDE, READY, Log, Passes, Sim
from gpusched.sim.engine.static import next_decision

UNSOUND = 3  # beside OVER, DECIDE and GROW


class Queue(NamedTuple):
    """The waiting jobs.

    Attributes:
        waiting: ``int64[jobs]`` in order of submission; ``size[0]`` of them.
        submit: ``float64[jobs]``. priority: ``int64[jobs]``: nobody has any in a replay.
        outcome: Where the pass writes.
    """

    waiting: Ints
    size: Ints
    submit: Floats
    priority: Ints
    outcome: Outcome


def new_queue(sim: Sim) -> Queue:
    """An empty queue."""
    jobs = len(sim.jobs)
    outcome = new_outcome(jobs, len(sim.held))
    submit = np.ascontiguousarray(sim.jobs["submit"])
    return Queue(np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), submit, np.zeros(jobs, np.int64), outcome)


def runner(world: World, prepared: Agent) -> Callable[[Log], int]:
    """The run of one replay: to its end, or to where the log needs more room.

    The function returned raises `GpuschedError` where a network's answer is no number.
    """
    sim, passes, queue = world.sim, world.passes, new_queue(world.sim)

    def run(log: Log) -> int:
        code = run_agent(sim, log, passes, queue, prepared)
        if code == UNSOUND:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return run


@jit
def run_agent(sim: Sim, log: Log, passes: Passes, queue: Queue, agent: Agent) -> int:
    """Replays to the end; OVER, GROW (call again), or UNSOUND."""
    while True:
        code = next_decision(sim, log, passes, EASY)
        if code != DECIDE:
            return code
        for i in range(sim.counter[READY]):
            enter(sim, queue.waiting, queue.size, sim.ready[i])
        for partition in range(sim.dirty.size):
            if sim.dirty[partition]:
                sim.dirty[partition] = 0
                own = waiting_in(sim, queue.waiting, queue.size, partition)
                sound = agent_pass(
                    sim.rooms, passes.usable, passes.releases, passes.requests, passes.jobs, own, queue.submit,
                    queue.priority, sim.clock[0], agent, False, passes.scratch, queue.outcome,
                )[3]  # fmt: skip
                if not sound:
                    return UNSOUND
                carry_out(sim, log, queue)


@jit
def carry_out(sim: Sim, log: Log, queue: Queue) -> None:
    """Starts in the engine's terms what the pass has decided, and takes it out of the queue."""
    outcome = queue.outcome
    if outcome.total[0] == 0:
        return
    begin_started(sim, log, outcome)
    outcome.total[:] = 0
    leave_started(sim, queue.waiting, queue.size)
