"""The nodes on which ranks join a running hot job: one rule for trials, plans and replays."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.place import node_fits
from gpusched.sched.state import Flags, Ints, PlacementRequest, Records, Resources


@jit
def join_nodes(
    resources: Resources, masks: Flags, request: PlacementRequest, held: Ints, racks: Records | None, found: Ints
) -> int:
    """Find a node for each rank that joins: in the job's racks before others, the fullest first.

    Nothing is taken off ``resources``.

    Args:
        resources: What is free.
        masks: As in `PlacementRequest`.
        request: Of one rank.
        held: ``int64[ranks]``: the job's nodes; it has at most one rank on each.
        racks: As in `Scratch`.
        found: ``int64[ranks that join]``: for the answer.

    Returns:
        How many found a node.
    """
    barred, far = np.zeros(resources.gpus.size, np.uint8), np.zeros(resources.gpus.size, np.int64)
    for node in held:
        barred[node] = 1
    mark_far(racks, held, far)
    for at in range(found.size):
        best = -1
        for node in range(request.lo, request.hi):
            if barred[node] or not node_fits(resources, masks, request, node):
                continue
            nearer = best < 0 or far[node] < far[best]
            if nearer or (far[node] == far[best] and resources.gpus[node] < resources.gpus[best]):
                best = node
        if best < 0:
            return at
        found[at] = best
        barred[best] = 1
    return int(found.size)


@jit
def mark_far(racks: Records | None, held: Ints, far: Ints) -> None:
    """Mark the nodes in racks that have none of ``held``."""
    if racks is None:
        return
    for node in range(far.size):
        far[node] = 1
        for own in held:
            if racks[node]["number"] == racks[own]["number"]:
                far[node] = 0
