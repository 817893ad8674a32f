"""The topology agents among other policies of a replay: not yet, they have replays of their own."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.agents.topology.network import Agent
from gpusched.config.weights import Model
from gpusched.errors import UsageError
from gpusched.sim.engine.build import World
from gpusched.sim.engine.state import Log


def maps(model: Model) -> bool:
    """It chooses nodes itself."""
    return False


def runner(world: World, prepared: Agent) -> Callable[[Log], int]:
    """Refuses: see `gpusched.agents.topology.reproduce`.

    Raises:
        UsageError: Always.
    """
    hint = "gpusched reproduce topology --policy agents-4 --weights FILE compares them with rules"
    raise UsageError(f"{world.policy.name}: topology agents decide live, not in replays of traces", hint)
