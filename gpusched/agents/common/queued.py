"""Replays in which an agent decides about each partition's queue: its live pass, called where something happened.

run = queued(decide)
run_of(world, run, agent)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from gpusched.compiled import inlined, jit, specialized
from gpusched.errors import GpuschedError
from gpusched.sched.agent import NO_NUMBER
from gpusched.sched.state import ClusterState, Ints, PassOutcome, new_outcome
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import apply_outcome, enter, state_of, waiting_in
from gpusched.sim.engine.state import DECIDE, ENDED, READY, EventLog, Passes, Sim

UNSOUND = 3  # beside OVER, DECIDE and GROW

Agent = TypeVar("Agent")
DecideQueue = Callable[[ClusterState, Passes, Ints, Agent], bool]
"""(state, passes, queue, agent): starts what is to start, as any pass does; False: its answer is no number."""
Note = Callable[[Sim, int, Agent], None]
"""(sim, job, agent): the job has just started, or just ended or been stopped."""


class AgentQueue(NamedTuple):
    """An agent, and the jobs that wait for it.

    Attributes:
        agent: What its pass goes by.
        waiting: ``int64[jobs]`` by rank; ``size[0]`` of them.
        outcome: Where the pass writes.
    """

    agent: Any
    waiting: Ints
    size: Ints
    outcome: PassOutcome


def queue_for(sim: Sim, agent: object) -> AgentQueue:
    """Return an empty queue."""
    jobs = len(sim.jobs)
    return AgentQueue(agent, np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), new_outcome(jobs, len(sim.held)))


@jit
def _nothing(sim: Sim, job: int, agent: Any) -> None:
    """Who remembers nothing."""


def queued(
    decide: DecideQueue[Agent], started: Note[Agent] = _nothing, ended: Note[Agent] = _nothing
) -> Callable[[Sim, EventLog, Passes, AgentQueue], int]:
    """Return what replays to the end (`looped`), or to UNSOUND, with these hooks compiled in."""
    hooks = dict[str, Callable[..., object]](_decide=decide, _started=started, _ended=ended)
    return looped(specialized(_decide_all, decide, **{name: inlined(hook) for name, hook in hooks.items()}))


def run_of(
    world: SimWorld, run: Callable[[Sim, EventLog, Passes, AgentQueue], int], agent: object
) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return an agent's replay of a world: see `sim.runs.Runner`. It raises `GpuschedError` where it ends UNSOUND."""
    sim, passes, queue = world.sim, world.passes, queue_for(world.sim, agent)

    def to_end(log: EventLog) -> int:
        code = run(sim, log, passes, queue)
        if code == UNSOUND:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return world, to_end


_decide: DecideQueue[Any] = cast(Any, None)  # these three are filled in
_started: Note[Any] = _nothing
_ended: Note[Any] = _nothing


def _decide_all(sim: Sim, log: EventLog, passes: Passes, of: AgentQueue) -> int:
    """Decide about every partition in which something happened."""
    for i in range(sim.counter[ENDED]):
        _ended(sim, sim.ended[i], of.agent)
    for i in range(sim.counter[READY]):
        enter(sim, of.waiting, of.size, sim.ready[i])
    for partition in range(sim.dirty.size):
        if not sim.dirty[partition]:
            continue
        sim.dirty[partition] = 0
        own = waiting_in(sim, of.waiting, of.size, partition)
        of.outcome.total[:] = 0
        if own.size > 0 and not _decide(state_of(sim, passes, of.outcome), passes, own, of.agent):
            return UNSOUND
        apply_outcome(sim, log, of.waiting, of.size, of.outcome)
        for i in range(of.outcome.total[0]):
            _started(sim, of.outcome.started[i], of.agent)
    return DECIDE
