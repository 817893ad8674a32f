"""The GIST agent in replays: the live pass, run at every instant with an event in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from gpusched.agents.common.queue_replay import prepare_replay, queue_runner
from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.networks import GistWeights
from gpusched.agents.gist.paper_pass import PaperWeights, check_size, check_whole, paper_pass
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.state import ClusterState, Floats, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.state import EventLog, Passes
from gpusched.sim.knowledge import explicit_priorities

W = TypeVar("W")


class PassArguments(NamedTuple, Generic[W]):
    """The arguments of the pass.

    Attributes:
        submit: ``float64[jobs]``. priority: ``int64[jobs]``; empty: all 0.
        agent: The weights.
    """

    submit: Floats
    priority: Ints
    agent: W


def pass_arguments(world: SimWorld, agent: W) -> PassArguments[W]:
    """Return the arguments for a replay's jobs."""
    return PassArguments(np.ascontiguousarray(world.sim.jobs["submit"]), explicit_priorities(world.trace), agent)


def maps(model: TrainedModel) -> bool:
    """Return False: the agent chooses servers itself."""
    return False


def runner(world: SimWorld, prepared: GistWeights | PaperWeights) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return a replay's runner: it runs to the end, or until the event log is full.

    Raises:
        ValueError: The paper's own network is for other servers, or jobs ask for MIG slices.
    """
    if isinstance(prepared, PaperWeights):
        requests = world.demand.requests
        for queue in world.trace.groups if world.unsplit is not None else ():
            check_whole(prepared, queue)
        if world.pool.total_gpus > 1:  # with one, passes are compiled ahead (`sim.replay`)
            for lo, hi in set(zip(requests.lo.tolist(), requests.hi.tolist(), strict=True)):
                check_size(prepared, world.demand.resources, lo, hi)
        return prepare_replay(world, run_paper_agent, pass_arguments(world, prepared))
    return prepare_replay(world, run_agent, pass_arguments(world, prepared))


@jit
def _decide(
    state: ClusterState, passes: Passes, queue: Ints, arguments: PassArguments[GistWeights], need_order: bool
) -> tuple[Ints, bool]:
    submit, priority, agent = arguments
    order, _, _, sound = agent_pass(state, passes.usable, queue, submit, priority, agent, need_order)
    return order, sound


run_agent = queue_runner(_decide)


@jit
def _decide_by_paper(
    state: ClusterState, passes: Passes, queue: Ints, arguments: PassArguments[PaperWeights], need_order: bool
) -> tuple[Ints, bool]:
    submit, priority, agent = arguments
    order, _, _, sound = paper_pass(state, queue, submit, priority, agent, need_order)
    return order, sound


run_paper_agent = queue_runner(_decide_by_paper)
