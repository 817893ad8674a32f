"""Decisions of topology agents."""

from __future__ import annotations

from msgspec.structs import replace

from gpusched.agents.common import vector
from gpusched.agents.topology.network import SHAPES, untrained
from gpusched.config.weights import TrainedModel
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.state import Floats


def weights(numbers: Floats | None = None) -> TrainedModel:
    arrays = vector.to_arrays(untrained(0) if numbers is None else numbers, SHAPES)
    return TrainedModel("topology", arrays, {}, "", f"w{id(numbers)}")


def by_agents(snap: Snapshot, schedulers: int = 1, backfill: str | None = None) -> Snapshot:
    """The same, decided by so many schedulers."""
    behind = next(iter(snap.policies.values()))
    behind = replace(behind, place="contention", backfill=backfill or behind.backfill)
    policy = PolicySpec(
        name="agents", agent="topology", fallback=behind, place="contention", backfill=behind.backfill,
        order=behind.order, schedulers=schedulers,
    )  # fmt: skip
    return replace(snap, policies=dict.fromkeys(snap.policies, policy))
