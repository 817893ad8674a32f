"""Faults by family, a file each; `KINDS` has them all by name."""

from __future__ import annotations

from tests.campaign.faults import client, clock, controller, declared, disk, gpu, inbox, node, runtime, store
from tests.campaign.faults.base import NODES, Fault

KINDS: dict[str, type[Fault]] = {
    kind.name(): kind
    for family in (controller, client, node, runtime, disk, clock, store, inbox, gpu, declared)
    for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Fault) and kind.__module__ == family.__name__
    and not kind.__name__.startswith("_")
}  # fmt: skip

__all__ = ["KINDS", "NODES", "Fault"]
