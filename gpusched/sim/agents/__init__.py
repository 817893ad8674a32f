"""Trained agents in the simulator: the same passes as live, called at the engine's decisions.

An agent's module here is named after it and offers ``runner(world, prepared) -> Callable[[Log], int]``: what replays to
the end (OVER, or GROW: call again with more room), as the compiled runs of ``gpusched.sim.engine`` do. One that leaves
nodes to the mapping does so with ``place: milp`` and ``fastest``, where ``MAPS`` is true in its module. ``prepared`` is
what the agent's module in ``gpusched.sched.agents`` makes of the weights. Where the policy preempts, the module is the
one with ``_preempt`` behind the agent's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from gpusched.errors import UsageError
from gpusched.sched.agents import prepared
from gpusched.sim.engine_build import World
from gpusched.sim.engine_mapped import is_mapped
from gpusched.sim.engine_state import Log


def agent_runner(world: World) -> Callable[[Log], int]:
    """The run of the policy's agent.

    Raises:
        UsageError: The weights are of another shape.
    """
    model = world.policy.model
    assert model is not None
    module = importlib.import_module(f"gpusched.sim.agents.{model.agent}{'_preempt' if world.policy.preempts else ''}")
    if is_mapped(world) and not getattr(module, "MAPS", False):
        raise UsageError(f"{world.policy.name} does not go with --placement {world.rule}", "use another placement")
    try:
        return module.runner(world, prepared(model))  # type: ignore[no-any-return]
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "train it again") from None
