"""The nodes on which ranks of a hot job join it, beside everything that starts in the same plan; plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from gpusched.compiled import in_python
from gpusched.model.jobs import NodeAllocation
from gpusched.model.plan import Resize, Start
from gpusched.model.snapshot import RunningView, Snapshot
from gpusched.sched.arrays import NodeArrays
from gpusched.sched.gpus import picked
from gpusched.sched.limits import Rooms
from gpusched.sched.place import node_fits
from gpusched.sched.sizing.ranks import join_nodes, mark_far
from gpusched.sched.sizing.shapes import rank_view, reservation_of
from gpusched.sched.state import RACK_ROOM, PlacementRequest, filled, ints, resources_of
from gpusched.sched.tally import closed_reason

_join_nodes = in_python(join_nodes, node_fits=node_fits, mark_far=mark_far)  # a plan has few: nothing to compile for


def with_joins(
    resizes: Sequence[Resize], snapshot: Snapshot, world: NodeArrays, starts: Iterable[Start] = ()
) -> tuple[Resize, ...]:
    """Return the resizes, those that grow a hot job with the nodes of its new ranks; without those that find none.

    Nor are there those for which limits leave too little, after the starts. ``world``: its ``free`` GPUs are those that
    the starts leave, and then those that the joining ranks leave.
    """
    if not resizes:
        return ()
    running = {job.id: job for job in snapshot.running}
    rooms, pending = Rooms(snapshot), {job.id: job for job in snapshot.pending}
    for start in starts:
        rooms.take(pending[start.job_id], start.allocation.gpus)
    room: dict[str, tuple[int, int]] = {}
    found = []
    for resize in resizes:
        job = running[resize.job_id]
        if rooms.exceeds(job, resize.gpus):
            continue
        if job.spec is not None and job.spec.is_hot and resize.gpus >= job.allocation.gpus:
            room = room or _room(snapshot, starts)
            count = resize.gpus // job.spec.gpus_per_node - len(job.allocation.parts)
            if not (joins := _joins(job, count, snapshot, world, room)):
                continue
            resize = replace(resize, joins=joins)
        rooms.refuse_resize(job, resize.gpus)
        found.append(resize)
    return tuple(found)


def _room(snapshot: Snapshot, starts: Iterable[Start]) -> dict[str, tuple[int, int]]:
    """Return node -> free cores and MiB."""
    room = {node.name: (node.cores, node.memory_mib) for node in snapshot.nodes}
    for allocation in [*(job.allocation for job in snapshot.running), *(start.allocation for start in starts)]:
        for part in allocation.parts:
            if part.node in room:
                cores, memory_mib = room[part.node]
                room[part.node] = cores - part.cores, memory_mib - part.memory_mib
    return room


def _joins(
    job: RunningView, count: int, snapshot: Snapshot, world: NodeArrays, room: dict[str, tuple[int, int]]
) -> tuple[NodeAllocation, ...]:
    """Return where so many ranks join, by `join_nodes`; () if not all do."""
    view = rank_view(job, job.expected_end - snapshot.now, reservation_of(job, snapshot))
    gpus, cores, memory_mib = view.spec.gpus_per_node, view.spec.cores_per_node, view.spec.memory_mib_per_node
    held = ints([world.row[part.node] for part in job.allocation.parts if part.node in world.row])
    free = [len(found) if node.available else -1 for node, found in zip(world.nodes, world.free, strict=True)]
    rooms = zip(*(room[node.name] for node in world.nodes), strict=True)
    open_to = [[not closed_reason(view, node, snapshot.now) for node in world.nodes]]
    found = np.zeros(max(0, count), np.int64)
    joined = _join_nodes(
        resources_of(map(ints, (free, *map(list, rooms)))), np.array(open_to, np.uint8),
        PlacementRequest(0, len(free), 1, gpus, cores, memory_mib, 0), held,
        filled(RACK_ROOM, len(free), number=world.rack), found,
    )  # fmt: skip
    if count < 1 or joined < count:
        return ()
    joins = []
    for rank, row in enumerate(found.tolist(), max(part.rank for part in job.allocation.parts) + 1):
        node = world.nodes[row]
        given = picked(node, world.free[row], gpus, {})
        world.free[row] = [gpu for gpu in world.free[row] if gpu not in given]
        room[node.name] = room[node.name][0] - cores, room[node.name][1] - memory_mib
        joins.append(NodeAllocation(rank=rank, node=node.name, gpus=given, cores=cores, memory_mib=memory_mib))
    return tuple(joins)
