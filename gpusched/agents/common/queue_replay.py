"""Replays in which an agent decides about each partition's queue, by its live pass, whenever something happens there.

An agent's module calls ``run = queue_runner(decide)`` once, which is compiled when it is first used, and
``prepare_replay(world, run, agent)`` for each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from gpusched.compiled import inlined, jit, specialized
from gpusched.errors import GpuschedError
from gpusched.sched.agent import NAN_OUTPUT
from gpusched.sched.state import PRIORITY, ClusterState, Ints, PassOutcome, new_outcome
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.estimates import Estimates, new_estimates, note_arrivals, note_begin, note_ends, renew_waiting
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import enter, remove_running, start_granted, state_of, waiting_in
from gpusched.sim.engine.share import note_unreached, pair_up, release_pairs_once
from gpusched.sim.engine.state import DECIDE, ENDED, READY, RUNNING, EventLog, Passes, Sim

INVALID_OUTPUT = 3
"""A replay ended since the agent's output is NaN; one more code beside OVER, DECIDE and GROW (`engine.state`)."""


class InvalidOutput(GpuschedError):
    """The output of a policy's agent is NaN."""

    def __init__(self, policy: str) -> None:
        super().__init__(f"{policy}: {NAN_OUTPUT}", "train it again")


Agent = TypeVar("Agent")
DecideQueue = Callable[[ClusterState, Passes, Ints, Agent, bool], tuple[Ints, bool]]
"""(state, passes, queue, agent, need_order): starts jobs of one partition; ``queue: int64[waiting]``, by rank.

It records them in ``state.outcome``, as any queue pass does, and returns the queue in the agent's order, if
``need_order``, and False if the agent's output is NaN.
"""
JobHook = Callable[[Sim, int, Agent], None]
"""(sim, job, agent): called after the job has started, or has ended or been preempted."""


class AgentQueue(NamedTuple):
    """An agent, and the jobs that wait for its decisions, of all partitions.

    Attributes:
        agent: Its weights and memory: the last argument of its pass and hooks.
        waiting: ``int64[jobs + 1]``, by rank; the first ``size[0]`` are valid.
        size: ``int64[1]``.
        outcome: Written by the pass, of one partition at a time.
        run_times: What run times are estimated by; None: the agent uses no estimates.
    """

    agent: Any
    waiting: Ints
    size: Ints
    outcome: PassOutcome
    run_times: Estimates | None = None


def new_queue(sim: Sim, agent: object, run_times: Estimates | None = None) -> AgentQueue:
    """Return an empty queue."""
    jobs, parts = len(sim.jobs), len(sim.held)
    return AgentQueue(agent, np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), new_outcome(jobs, parts), run_times)


@jit
def _no_op(sim: Sim, job: int, agent: Any) -> None:
    """Do nothing: the hook of an agent that keeps no state."""


def queue_runner(
    decide: DecideQueue[Agent], started: JobHook[Agent] = _no_op, ended: JobHook[Agent] = _no_op
) -> Callable[[Sim, EventLog, Passes, AgentQueue], int]:
    """Return what replays to the end (`looped`) or to INVALID_OUTPUT, with these functions compiled in."""
    # They are inlined, as a call costs more than many of them do. `decide` also says where the code is cached.
    hooks = dict[str, Callable[..., object]](_decide=decide, _started=started, _ended=ended)
    return looped(specialized(_decide_all, decide, **{name: inlined(hook) for name, hook in hooks.items()}))


def prepare_replay(
    world: SimWorld, run: Callable[[Sim, EventLog, Passes, AgentQueue], int], agent: object
) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return an agent's replay of a world: the world, and a `sim.replay.Runner`, which raises `InvalidOutput`.

    Args:
        world: What is replayed; it is changed.
        run: From `queue_runner`.
        agent: See `AgentQueue`.
    """
    run_times = new_estimates(world) if world.policy.uses_run_time_estimates else None
    sim, passes, queue = world.sim, world.passes, new_queue(world.sim, agent, run_times)

    def to_end(log: EventLog) -> int:
        code = run(sim, log, passes, queue)
        if code == INVALID_OUTPUT:
            raise InvalidOutput(world.policy.name)
        return code

    return world, to_end


# `queue_runner` compiles `_decide_all` with an agent's functions in place of these three.
_decide: DecideQueue[Any] = cast(Any, None)
_started: JobHook[Any] = _no_op
_ended: JobHook[Any] = _no_op


def _decide_all(sim: Sim, log: EventLog, passes: Passes, state: AgentQueue) -> int:
    """Decide about every partition in which something happened; called at each such instant by `looped`."""
    for i in range(sim.counter[ENDED]):
        _ended(sim, sim.ended[i], state.agent)
    note_ends(state.run_times, sim)
    note_arrivals(state.run_times, sim, passes)
    for i in range(sim.counter[READY]):
        enter(sim, state.waiting, state.size, sim.ready[i])
    renew_waiting(state.run_times, sim, passes, state.waiting[: state.size[0]])
    begun = 0
    for partition in range(sim.dirty.size):
        if not sim.dirty[partition]:
            continue
        sim.dirty[partition] = 0
        own = waiting_in(sim, state.waiting, state.size, partition)
        state.outcome.total[:] = 0  # forgets the starts of the partition before
        release_pairs_once(sim.pairs, sim, passes.releases)
        note_unreached(sim.pairs, state.outcome, own, PRIORITY)
        if own.size > 0:
            own, sound = _decide(state_of(sim, passes, state.outcome), passes, own, state.agent, sim.pairs is not None)
            if not sound:
                return INVALID_OUTPUT
        start_granted(sim, log, state.outcome, None)
        pair_up(sim.pairs, sim, log, passes, state.outcome, own, None)
        begun += state.outcome.total[0]
    if begun == 0:
        return DECIDE
    # only now: live, no partition's agent sees what starts in others at this decision
    for job in state.waiting[: state.size[0]]:
        if sim.state[job]["status"] == RUNNING:
            _started(sim, job, state.agent)
            note_begin(state.run_times, job)
    remove_running(sim, state.waiting, state.size)
    return DECIDE
