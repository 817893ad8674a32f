"""The topology agents among other policies of a replay; see `engine`."""

from __future__ import annotations

from gpusched.agents.topology.engine import Acting, new_acting, run_agents
from gpusched.agents.topology.network import TopologyWeights
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.state import EventLog

_IN_TURN = (
    "topology agents take jobs in order of submission here, and whoever fits goes: live their policy's order and "
    "backfill count"
)


class TopologyRun:
    """A replay by agents."""

    def __init__(self, world: SimWorld, acting: Acting, notes: tuple[str, ...]) -> None:
        self._world, self._acting, self.notes = world, acting, notes

    def __call__(self, log: EventLog) -> int:
        """To its end, or to where the log needs more room."""
        return run_agents(self._world.sim, log, self._world.passes, self._acting)


def maps(model: TrainedModel) -> bool:
    """It chooses nodes itself."""
    return False


def runner(world: SimWorld, prepared: TopologyWeights) -> tuple[SimWorld, TopologyRun]:
    """The run of one replay.

    Raises:
        UsageError: Placement costs nothing there, or is another rule's.
    """
    policy, spec = world.policy, world.policy.spec
    if world.options.network is None:
        raise UsageError(f"{policy.name}: topology agents decide by what placement costs", "say --topology FILE")
    if world.rule != policy.placement:
        raise UsageError(f"{policy.name} cannot be combined with --placement {world.rule}", "omit --placement")
    notes = () if spec is None or (spec.order, spec.backfill) == ("fifo", "skip") else (_IN_TURN,)
    world, acting = new_acting(world, prepared, spec.schedulers if spec is not None else 1)
    return world, TopologyRun(world, acting, notes)
