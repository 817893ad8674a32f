"""Trained agents in the simulator: the same passes as live, called at the engine's decisions.

`gpusched.agents.base.Replay` is what an agent offers for that.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusched.errors import UsageError
from gpusched.sched.agent import parts_of, prepared
from gpusched.sim.engine.build import World
from gpusched.sim.engine.mapped import is_mapped
from gpusched.sim.engine.state import Log


def agent_runner(world: World) -> Callable[[Log], int]:
    """The run of the policy's agent.

    Raises:
        UsageError: The weights are of another shape.
    """
    model = world.policy.model
    assert model is not None
    replay = parts_of(model.agent).replay
    assert replay is not None
    if is_mapped(world) and not replay().maps(model):
        raise UsageError(
            f"{world.policy.name} cannot be combined with --placement {world.rule}", "use another placement"
        )
    try:
        return replay().runner(world, prepared(model))
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "train it again") from None
