"""The GIST agent in replays: the live pass, called at every instant at which something happened in a partition."""

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


class Judging(NamedTuple):
    """What the pass goes by.

    Attributes:
        submit: ``float64[jobs]``. priority: ``int64[jobs]``: nobody has any in a replay.
        agent: Who decides.
    """

    submit: Floats
    priority: Ints
    agent: GistWeights


def judging(sim: Sim, agent: GistWeights) -> Judging:
    """Return that of a replay's jobs."""
    return Judging(np.ascontiguousarray(sim.jobs["submit"]), np.zeros(len(sim.jobs), np.int64), agent)


def maps(model: TrainedModel) -> bool:
    """It chooses servers itself."""
    return False


def runner(world: SimWorld, prepared: GistWeights) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """The run of one replay: to its end, or to where the log needs more room."""
    return prepare_replay(world, run_agent, judging(world.sim, prepared))


@jit
def _decide(state: ClusterState, passes: Passes, queue: Ints, of: Judging) -> bool:
    return agent_pass(state, passes.usable, queue, of.submit, of.priority, of.agent, False)[3]


run_agent = queue_runner(_decide)
