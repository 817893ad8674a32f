"""Node assignment with preemption: which jobs keep their nodes and which get others, live and in replays.

Jobs are gone through in a policy's order, running and waiting alike. A running job keeps its nodes where those before
it left them; another gets nodes that nobody runs on, else nodes of jobs that come after it: any by the placement's rule
(as LAS, SRTF and DRF do), or those of the last ones in the order (`Holders`, as RLTune does).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import take
from gpusched.sched.place import choose, node_fits
from gpusched.sched.state import Flags, Ints, PlacementRequest, Resources, Scratch, new_resources


class Holders(NamedTuple):
    """The running jobs that may be stopped, first to last in the policy's order.

    Attributes:
        first: ``int64[running]``: where each one's nodes begin in ``held``.
        parts, gpus, cores, memory: ``int64[running]``: on how many nodes it is, and what it has of each.
        kept: ``uint8[running]``: whether it has been gone through and keeps them.
        held: ``int64[...]``: nodes.
        room: To work in.
    """

    first: Ints
    parts: Ints
    gpus: Ints
    cores: Ints
    memory: Ints
    kept: Flags
    held: Ints
    room: Resources


def new_holders(running: int, held: Ints, nodes: int) -> Holders:
    """Return holders to be filled in."""
    first, parts, gpus, cores, memory = (np.zeros(running, np.int64) for _ in range(5))
    return Holders(first, parts, gpus, cores, memory, np.zeros(running, np.uint8), held, new_resources(nodes))


@jit
def hold(holders: Holders, at: int, first: int, request: PlacementRequest) -> None:
    """Fill in the holder at place ``at`` of the order; it has not been visited yet."""
    holders.first[at], holders.parts[at], holders.kept[at] = first, request.parts, 0
    holders.gpus[at], holders.cores[at], holders.memory[at] = request.gpus, request.cores, request.memory


@jit
def keeps(whole: Resources, usable: Resources, request: PlacementRequest, held: Ints, first: int) -> bool:
    """Take a running job's nodes (``held[first:first + parts]``) again, if earlier jobs left them.

    A node that is not available any more stays with its job. ``whole``: what those before it left of the pool;
    ``usable``: the pool empty, -1 GPUs where not available; ``request``: what the job has.
    """
    for part in range(request.parts):
        node = held[first + part]
        if usable.gpus[node] >= 0 and (
            whole.gpus[node] < request.gpus or whole.cores[node] < request.cores or whole.memory[node] < request.memory
        ):
            return False
    retain(whole, request, held, first)
    return True


@jit
def retain(whole: Resources, request: PlacementRequest, held: Ints, first: int) -> None:
    """Take a running job's nodes whatever is left there: it must not be preempted."""
    for part in range(request.parts):
        take(whole, request, held[first + part])


@jit
def finds(
    whole: Resources, idle: Resources, usable: Resources, masks: Flags, request: PlacementRequest, rule: int,
    scratch: Scratch,
    holders: Holders | None, through: Ints,
) -> bool:  # fmt: skip
    """Find and take nodes for a job (``scratch.chosen``); ``idle``: what no job runs on or was given yet.

    With ``holders``, ``through[1]`` of them, the last in the order are the first to go, and no more than it takes. The
    first ``through[0]`` have been gone through; those of them that did not keep their nodes are on their way out.
    ``usable``: see `keeps`.
    """
    if not choose(idle, masks, request, rule, scratch):
        if not choose(whole, masks, request, rule, scratch):
            return False
        if not _displaces(holders, idle, usable, masks, request, rule, scratch, through):
            return False
    for part in range(request.parts):
        take(whole, request, scratch.chosen[part])
        take(idle, request, scratch.chosen[part])
    return True


@jit
def _displaces(
    holders: Holders | None, idle: Resources, usable: Resources, masks: Flags, request: PlacementRequest, rule: int,
    scratch: Scratch, through: Ints,
) -> bool:  # fmt: skip
    """Find nodes by preempting the last holders; with no holders, use the nodes already chosen."""
    if holders is None:
        return True
    room, at, last = holders.room, through[0], through[1]
    room.gpus[:], room.cores[:], room.memory[:] = idle.gpus, idle.cores, idle.memory
    for k in range(at):
        if not holders.kept[k]:
            _add(room, usable, holders, k, masks, request)
    fits = choose(room, masks, request, rule, scratch)
    while not fits:
        last -= 1
        if last < at:
            return False
        # where nothing came back nothing has changed: to look at all nodes each time took seconds on a thousand
        fits = _add(room, usable, holders, last, masks, request) and choose(room, masks, request, rule, scratch)
    return True


@jit
def _add(room: Resources, usable: Resources, holders: Holders, k: int, masks: Flags, request: PlacementRequest) -> bool:
    """Add what a holder has on available nodes; return whether a part of the request fits on one now."""
    fits = False
    for part in range(holders.parts[k]):
        node = holders.held[holders.first[k] + part]
        if usable.gpus[node] >= 0:
            room.gpus[node] += holders.gpus[k]
        room.cores[node] += holders.cores[k]
        room.memory[node] += holders.memory[k]
        fits = fits or node_fits(room, masks, request, node)
    return fits
