"""Faults by family, a file each; `KINDS` has them all by name."""

from __future__ import annotations

from fnmatch import fnmatch

from tests.campaign.faults import (
    client,
    clock,
    controller,
    declared,
    disk,
    fuse,
    gpu,
    inbox,
    node,
    runtime,
    slurm,
    store,
)
from tests.campaign.faults.base import NODES, Fault

KINDS: dict[str, type[Fault]] = {
    kind.name(): kind
    for family in (controller, client, node, runtime, disk, clock, store, inbox, gpu, declared, slurm, fuse)
    for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Fault) and kind.__module__ == family.__name__
    and not kind.__name__.startswith("_")
}  # fmt: skip

WITH_SLURM = (
    "slurm.*", "controller.*", "inbox.*", "declared.garbage", "declared.removed", "store.locked", "disk.*_full",
    "disk.*_broken", "disk.dead", "disk.read_only",
)  # fmt: skip
"""Those that say something where Slurm is the engine; nodes are Slurm's affair there."""


def matching(patterns: str, engine: str) -> list[str]:
    """The kinds of faults that match one of these patterns, and say something with this engine.

    Those of FUSE only where a pattern names the family: it changes where the state folder is.

    Raises:
        ValueError: None does.
    """
    ours = [
        kind for kind in KINDS
        if (any(fnmatch(kind, known) for known in WITH_SLURM) and kind not in ("disk.node_full", "controller.standby")
            if engine == "slurm" else not kind.startswith("slurm."))
    ]  # fmt: skip
    found = [
        kind for kind in ours for pattern in patterns.split(",")
        if fnmatch(kind, pattern) and (not kind.startswith("fuse.") or pattern.startswith("fuse."))
    ]  # fmt: skip
    found = list(dict.fromkeys(found))
    if not found:
        raise ValueError(f"--kinds {patterns}: none of {', '.join(ours)}")
    return found


__all__ = ["KINDS", "NODES", "Fault", "matching"]
