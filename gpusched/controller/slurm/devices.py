"""Which GPU of a node, as NVML counts them, each position in gres.conf (IDX) is."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.resources import Inventory
from gpusched.queue.store import NodeRecord


def devices_of(inventory: Inventory, records: Mapping[str, NodeRecord]) -> dict[str, tuple[int, ...]]:
    """Node -> NVML index of the GPU at each position; without the nodes of which it is not known."""
    return {}
