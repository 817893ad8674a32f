"""Trained agents in the simulator: the same passes as live, called at the engine's decisions.

An agent's folder, ``gpusched.agents.NAME``, has a module ``replay`` with
``runner(world, prepared) -> Callable[[Log], int]``: what replays to the end (OVER, or GROW: call again with more room),
as the compiled runs of `gpusched.sim.replay` do. One that leaves nodes to the mapping does so with ``place: milp`` and
``fastest``, where ``MAPS`` is true in its module. ``prepared`` is what `gpusched.sched.agent.prepared` makes of the
weights. Where the policy preempts, the module is ``replay_preempt``.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusched.errors import UsageError
from gpusched.sched.agent import part_of, prepared
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
    module = part_of(model.agent, "replay_preempt" if world.policy.preempts else "replay")
    if is_mapped(world) and not getattr(module, "MAPS", False):
        raise UsageError(
            f"{world.policy.name} cannot be combined with --placement {world.rule}", "use another placement"
        )
    try:
        return module.runner(world, prepared(model))  # type: ignore[no-any-return]
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "train it again") from None
