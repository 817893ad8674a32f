"""The GIST agent in replays: the live pass, run at every instant with an event in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.queue_replay import prepare_replay, queue_runner
from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.networks import GistWeights
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.state import ClusterState, Floats, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.state import EventLog, Passes, Sim


class PassArguments(NamedTuple):
    """The arguments of the pass.

    Attributes:
        submit: ``float64[jobs]``. priority: ``int64[jobs]``: all 0 in a replay.
        agent: The weights.
    """

    submit: Floats
    priority: Ints
    agent: GistWeights


def pass_arguments(sim: Sim, agent: GistWeights) -> PassArguments:
    """Return the arguments for a replay's jobs."""
    return PassArguments(np.ascontiguousarray(sim.jobs["submit"]), np.zeros(len(sim.jobs), np.int64), agent)


def maps(model: TrainedModel) -> bool:
    """Return False: the agent chooses servers itself."""
    return False


def runner(world: SimWorld, prepared: GistWeights) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return a replay's runner: it runs to the end, or until the event log is full."""
    return prepare_replay(world, run_agent, pass_arguments(world.sim, prepared))


@jit
def _decide(state: ClusterState, passes: Passes, queue: Ints, arguments: PassArguments) -> bool:
    return agent_pass(state, passes.usable, queue, arguments.submit, arguments.priority, arguments.agent, False)[3]


run_agent = queue_runner(_decide)
