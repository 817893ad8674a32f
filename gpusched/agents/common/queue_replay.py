"""Replays in which an agent decides about each partition's queue: its live pass, run after every event there.

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

INVALID_OUTPUT = 3  # beside OVER, DECIDE and GROW

Agent = TypeVar("Agent")
DecideQueue = Callable[[ClusterState, Passes, Ints, Agent], bool]
"""(state, passes, queue, agent): starts jobs, as any queue pass does; False: the agent's output is NaN."""
JobHook = Callable[[Sim, int, Agent], None]
"""(sim, job, agent): called after the job has started, or has ended or been preempted."""


class AgentQueue(NamedTuple):
    """An agent, and the jobs that wait for its decisions.

    Attributes:
        agent: The argument of its pass.
        waiting: ``int64[jobs]`` by rank; the first ``size[0]`` are valid.
        outcome: Written by the pass.
    """

    agent: Any
    waiting: Ints
    size: Ints
    outcome: PassOutcome


def new_queue(sim: Sim, agent: object) -> AgentQueue:
    """Return an empty queue."""
    jobs = len(sim.jobs)
    return AgentQueue(agent, np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), new_outcome(jobs, len(sim.held)))


@jit
def _no_op(sim: Sim, job: int, agent: Any) -> None:
    """Do nothing: the hook of an agent that keeps no state."""


def queue_runner(
    decide: DecideQueue[Agent], started: JobHook[Agent] = _no_op, ended: JobHook[Agent] = _no_op
) -> Callable[[Sim, EventLog, Passes, AgentQueue], int]:
    """Return the function that replays to the end (`looped`), or to INVALID_OUTPUT, with these hooks compiled in."""
    hooks = dict[str, Callable[..., object]](_decide=decide, _started=started, _ended=ended)
    return looped(specialized(_decide_all, decide, **{name: inlined(hook) for name, hook in hooks.items()}))


def prepare_replay(
    world: SimWorld, run: Callable[[Sim, EventLog, Passes, AgentQueue], int], agent: object
) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return an agent's replay of a world, a `sim.runs.Runner`; it raises `GpuschedError` at INVALID_OUTPUT."""
    sim, passes, queue = world.sim, world.passes, new_queue(world.sim, agent)

    def to_end(log: EventLog) -> int:
        code = run(sim, log, passes, queue)
        if code == INVALID_OUTPUT:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return world, to_end


_decide: DecideQueue[Any] = cast(Any, None)  # these three are replaced at compile time
_started: JobHook[Any] = _no_op
_ended: JobHook[Any] = _no_op


def _decide_all(sim: Sim, log: EventLog, passes: Passes, state: AgentQueue) -> int:
    """Decide about every partition in which an event occurred."""
    for i in range(sim.counter[ENDED]):
        _ended(sim, sim.ended[i], state.agent)
    for i in range(sim.counter[READY]):
        enter(sim, state.waiting, state.size, sim.ready[i])
    for partition in range(sim.dirty.size):
        if not sim.dirty[partition]:
            continue
        sim.dirty[partition] = 0
        own = waiting_in(sim, state.waiting, state.size, partition)
        state.outcome.total[:] = 0
        if own.size > 0 and not _decide(state_of(sim, passes, state.outcome), passes, own, state.agent):
            return INVALID_OUTPUT
        apply_outcome(sim, log, state.waiting, state.size, state.outcome)
        for i in range(state.outcome.total[0]):
            _started(sim, state.outcome.started[i], state.agent)
    return DECIDE
