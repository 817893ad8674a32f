"""Node assignment with preemption: which jobs keep their nodes and which get others, live and in replays.

Jobs are gone through in a policy's order, running and waiting alike. A running job keeps its nodes where those before
it left them; another gets nodes without running jobs, else nodes of jobs behind it: any by the placement rule
(as LAS, SRTF and DRF do), or those of the last ones in the order (`Holders`, as RLTune does).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import copy_room, enter, returned, take, take_part
from gpusched.sched.fit import with_gpus
from gpusched.sched.place import choose, node_fits, with_room
from gpusched.sched.state import (
    WHOLE,
    Flags,
    Ints,
    PlacementRequest,
    Resources,
    Scratch,
    SharedGpus,
    new_resources,
)


class Holders(NamedTuple):
    """The running jobs that may be stopped, first to last in the policy's order.

    Attributes:
        first: ``int64[running]``: where each one's nodes begin in ``held``.
        parts, gpus, cores, memory: ``int64[running]``: on how many nodes it is, and what it has of each.
        job: ``int64[running]``: which job it is. kept: ``uint8[running]``: whether it has been gone through and keeps
            its nodes.
        held: ``int64[...]``: nodes.
        room: Work space.
    """

    first: Ints
    parts: Ints
    gpus: Ints
    cores: Ints
    memory: Ints
    job: Ints
    kept: Flags
    held: Ints
    room: Resources


def new_holders(running: int, held: Ints, nodes: int) -> Holders:
    """Return holders to be filled in."""
    first, parts, gpus, cores, memory, job = (np.zeros(running, np.int64) for _ in range(6))
    return Holders(first, parts, gpus, cores, memory, job, np.zeros(running, np.uint8), held, new_resources(nodes))


@jit
def hold(holders: Holders, at: int, first: int, request: PlacementRequest, job: int) -> None:
    """Fill in the holder at place ``at`` of the order; it has not been visited yet."""
    holders.first[at], holders.parts[at], holders.kept[at], holders.job[at] = first, request.parts, 0, job
    holders.gpus[at], holders.cores[at], holders.memory[at] = request.gpus, request.cores, request.memory


@jit
def keeps(whole: Resources, usable: Resources, request: PlacementRequest, held: Ints, first: int, job: int) -> bool:
    """Take a running job's nodes (``held[first:first + parts]``) again, if earlier jobs left them.

    A node that is not available any more stays with its job. ``whole``: what those before it left of the pool;
    ``usable``: the pool empty, -1 GPUs where not available; ``request``: what the job has.
    """
    for part in range(request.parts):
        node = held[first + part]
        if usable.gpus[node] >= 0 and (
            _left_gpus(whole.shared, whole.gpus[node], job) < request.gpus
            or whole.cores[node] < request.cores
            or whole.memory[node] < request.memory
        ):
            return False
    retain(whole, request, held, first, job)
    return True


@jit
def _left_gpus(shared: SharedGpus | None, free: int, job: int) -> int:
    """Return how many GPUs of a node were left for a running job: of its part of one, whether it was."""
    if shared is None:
        return free
    gpu = shared.on[job]
    if gpu < 0 or shared.room[gpu] == WHOLE:
        return free
    return 1 if shared.room[gpu] >= shared.milli[job] else 0


@jit
def retain(whole: Resources, request: PlacementRequest, held: Ints, first: int, job: int) -> None:
    """Take a running job's nodes whatever is left there: it must not be preempted."""
    request = enter(whole.shared, request, job, held[first])
    for part in range(request.parts):
        take(whole, request, held[first + part])


@jit
def finds(
    whole: Resources, idle: Resources, usable: Resources, masks: Flags, request: PlacementRequest, rule: int,
    scratch: Scratch,
    holders: Holders | None, through: Ints, job: int,
) -> bool:  # fmt: skip
    """Find and take nodes for a job (``scratch.chosen``); ``idle``: what no job runs on or was given yet.

    With ``holders``, ``through[1]`` of them, the last in the order are the first to go, and no more than it takes. The
    first ``through[0]`` have been gone through; those of them that did not keep their nodes are on their way out.
    ``usable``: see `keeps`.
    """
    found = idle
    if not choose(idle, masks, request, rule, scratch):
        if not choose(whole, masks, request, rule, scratch):
            return False
        if not _displaces(holders, idle, usable, masks, request, rule, scratch, through):
            return False
        found = _found_in(holders, whole)
    _choose_gpu(found.shared, whole.shared, idle.shared, job, scratch.chosen[0])
    of_whole = part_taken(whole.shared, whole.shared, request, job)
    of_idle = part_taken(whole.shared, idle.shared, request, job)
    for part in range(request.parts):
        take(whole, of_whole, scratch.chosen[part])
        take(idle, of_idle, scratch.chosen[part])
    return True


@jit
def _found_in(holders: Holders | None, whole: Resources) -> Resources:
    """Return the resources among which nodes were found by preempting others."""
    return whole if holders is None else holders.room


@jit
def _choose_gpu(
    found: SharedGpus | None, whole: SharedGpus | None, idle: SharedGpus | None, job: int, node: int
) -> None:  # fmt: skip
    """Choose the GPU of a job's part: with least left over, else a new one, if possible one that no job uses now."""
    if found is None or whole is None or idle is None:
        return
    if whole.milli[job] >= WHOLE:
        return
    gpu = whole.on[job] = with_room(found, whole.milli[job], node)
    if gpu >= 0:
        return
    for other in range(whole.first[node], whole.first[node + 1]):
        if found.room[other] == WHOLE and (gpu < 0 or idle.room[gpu] < WHOLE == idle.room[other]):
            gpu = whole.on[job] = other


@jit
def part_taken(
    shared: SharedGpus | None, of: SharedGpus | None, request: PlacementRequest, job: int
) -> PlacementRequest:  # fmt: skip
    """Take a job's part of the chosen GPU of ``of``; return what it takes of whole ones there."""
    if shared is None or of is None:
        return request
    if shared.milli[job] >= WHOLE:
        return request
    return with_gpus(request, take_part(of, shared.on[job], shared.milli[job]))


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
    copy_room(room.shared, idle.shared)
    for k in range(at):
        if not holders.kept[k]:
            _add(room, idle.shared, usable, holders, k, masks, request)
    fits = choose(room, masks, request, rule, scratch)
    while not fits:
        last -= 1
        if last < at:
            return False
        # where nothing came back nothing has changed: to look at all nodes each time took seconds on a thousand
        fits = _add(room, idle.shared, usable, holders, last, masks, request)
        fits = fits and choose(room, masks, request, rule, scratch)
    return True


@jit
def _add(
    room: Resources, held: SharedGpus | None, usable: Resources, holders: Holders, k: int, masks: Flags,
    request: PlacementRequest,
) -> bool:  # fmt: skip
    """Add what a holder has on available nodes; return whether a part of the request fits on one now."""
    fits = False
    for part in range(holders.parts[k]):
        node = holders.held[holders.first[k] + part]
        if usable.gpus[node] >= 0:
            room.gpus[node] += returned(held, room.shared, holders.job[k], holders.gpus[k])
        room.cores[node] += holders.cores[k]
        room.memory[node] += holders.memory[k]
        fits = fits or node_fits(room, masks, request, node)
    return fits
