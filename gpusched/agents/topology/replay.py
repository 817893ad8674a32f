"""The topology agents among other policies of a replay: not yet, they have replays of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpusched.errors import UsageError
from gpusched.sim.engine.build import World
from gpusched.sim.engine.state import Log


def runner(world: World, prepared: Any) -> Callable[[Log], int]:
    """Refuses: see `gpusched.agents.topology.reproduce`.

    Raises:
        UsageError: Always.
    """
    hint = "gpusched reproduce topology --policy agents-4 --weights FILE compares them with rules"
    raise UsageError(f"{world.policy.name}: topology agents decide live, not in replays of traces", hint)
