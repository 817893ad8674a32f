"""A snapshot as arrays: nodes by partition, what runs on them, what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from math import inf
from typing import Any, NamedTuple

import numpy as np

from gpusched.model.jobs import JobSpec
from gpusched.model.limits import leaf_of
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.accounts import accounts_of, gpu_scale, scaled_gpus
from gpusched.sched.order import Columns, Keys, queue_order, ranked_by
from gpusched.sched.reservations.calendar import Reserved, grouped, reserved_masks, reserved_of
from gpusched.sched.state import (
    Calendar,
    Flags,
    Floats,
    Ints,
    QueueJobs,
    Releases,
    Requests,
    Resources,
    Scratch,
    ints,
    new_releases,
    new_scratch,
    no_calendar,
)
from gpusched.sched.topology.spread import SpreadRequest, current_requests, rack_wait_until

# nodelist, exclude, excluded nodes, GPU types, size of whole nodes; all empty: any node
AllowedKey = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]]
MaskKey = tuple[int, int, float]  # number of its `AllowedKey`, reservation it is of (-1), alike to reservations
_ANYWHERE: AllowedKey = ((), (), (), (), ())
_NO_RESERVATIONS = -1.0
Column = Iterable[Any]
ShapeKey = tuple[str, int, int, int, int, int, int, int]


class NodeArrays(NamedTuple):
    """The nodes of a snapshot and what runs on them.

    Attributes:
        nodes: In the snapshot's order, partition by partition; their index is the row of all arrays.
        row: Node name -> row.
        span: Partition -> its rows ``(lo, hi)``.
        rack: ``int64[nodes]``: number of the node's rack; one that no switch names is a rack by itself. All 0 without a
            topology (``racked``).
        reserved: Reservations of its nodes that are not over.
        free: Per row the GPU indices that are free, ascending; taken from as jobs start.
        total: As declared. usable: without unavailable nodes and blocked GPUs, empty. resources: free now.
    """

    nodes: list[NodeView]
    row: dict[str, int]
    span: dict[str, tuple[int, int]]
    rack: Ints
    racked: bool
    reserved: Reserved
    free: list[list[int]]
    total: Resources
    usable: Resources
    resources: Resources


def node_arrays_of(snapshot: Snapshot) -> NodeArrays:
    """Build the node arrays. Duplicate nodes count once; a GPU is free if declared, not blocked and not held."""
    nodes = _by_partition(snapshot)
    row = {node.name: i for i, node in enumerate(nodes)}
    span: dict[str, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        span[node.partition] = (span.get(node.partition, (i, i))[0], i + 1)
    well = [_well(node) for node in nodes]
    taken: list[set[int]] = [set() for _ in nodes]
    cores, memory = [n.cores for n in nodes], [n.memory_mib for n in nodes]
    for job in snapshot.running:
        for part in job.allocation.parts:
            i = row.get(part.node, -1)
            if i >= 0:
                taken[i].update(part.gpus)
                cores[i] -= part.cores
                memory[i] -= part.memory_mib
    free = [[g for g in gpus if g not in held] if held else gpus[:] for gpus, held in zip(well, taken, strict=True)]
    up = np.array([n.available for n in nodes], dtype=np.bool_)
    all_cores, all_memory = ints([n.cores for n in nodes]), ints([n.memory_mib for n in nodes])
    return NodeArrays(
        nodes,
        row,
        span,
        racks_of([node.name for node in nodes], snapshot.topology),
        bool(snapshot.topology),
        reserved_of([node.reservations for node in nodes], snapshot.now),
        free,
        total=Resources(ints([len(n.gpus) for n in nodes]), all_cores, all_memory),
        usable=Resources(np.where(up, ints([len(g) for g in well]), -1), all_cores, all_memory),
        resources=Resources(np.where(up, ints([len(g) for g in free]), -1), ints(cores), ints(memory)),
    )


def racks_of(nodes: Sequence[str], topology: Topology) -> Ints:
    """Return a number for each node's rack, ``int64[nodes]``; a node on no switch is a rack by itself."""
    if not topology:
        return np.zeros(len(nodes), np.int64)
    names, known = topology.racks(), dict[str, int]()
    return ints([known.setdefault(names.get(name) or f" {name}", len(known)) for name in nodes])


def _by_partition(snapshot: Snapshot) -> list[NodeView]:
    groups: dict[str, dict[str, NodeView]] = {}
    seen: set[str] = set()
    for node in snapshot.nodes:
        if node.name not in seen:
            seen.add(node.name)
            groups.setdefault(node.partition, {})[node.name] = node
    return [node for group in groups.values() for node in group.values()]


def _well(node: NodeView) -> list[int]:
    """Return the GPU indices that are declared and not blocked, ascending."""
    return sorted(set(node.gpus).difference(node.blocked)) if node.blocked else sorted(node.gpus)


def releases_of(running: Sequence[RunningView], world: NodeArrays, spare_slots: int) -> Releases:
    """Return what running jobs give back (only usable GPUs), with ``spare_slots`` unused slots.

    ``owner`` is the index into ``running``, as -1 - index, so that it is never one of the queue's jobs.
    """
    parts = [
        (job.expected_end, row, _handed_back(world.nodes[row], part.gpus), part.cores, part.memory_mib, -1 - i)
        for i, job in enumerate(running)
        for part in job.allocation.parts
        if (row := world.row.get(part.node, -1)) >= 0
    ]
    releases = new_releases(len(parts) + spare_slots)
    if parts:
        columns = list(zip(*parts, strict=True))
        order = np.argsort(np.array(columns[0]), kind="stable")
        releases.end[: len(parts)] = np.array(columns[0])[order]
        for array, column in zip(releases[1:6], columns[1:], strict=True):
            array[: len(parts)] = np.array(column, dtype=np.int64)[order]
    releases.used[:] = len(parts)
    return releases


def _handed_back(node: NodeView, gpus: Sequence[int]) -> int:
    return sum(g not in node.blocked for g in gpus) if node.blocked else len(gpus)


class PendingArrays(NamedTuple):
    """The eligible jobs of a snapshot as arrays, in the snapshot's order.

    Attributes:
        parts: Nodes that all of them together could get.
        queues: Partition -> its jobs.
        calendar: When nodes are reserved; goes with the rows of ``jobs.masks``.
        scale: Into how many parts of a GPU ``jobs.account`` and ``jobs.room`` count (`accounts.gpu_scale`).
    """

    views: list[PendingView]
    jobs: QueueJobs
    requests: Requests
    keys: Keys
    parts: int
    queues: dict[str, list[int]]
    calendar: Calendar
    scale: int

    def ordered(self, partition: str, order: str, ties: str = "first") -> Ints:
        """Return the partition's jobs from first to last, ``int64[jobs]``; ``ties``: as a policy's."""
        chosen = ints(self.queues[partition])
        return chosen[queue_order(order, self.keys.of(chosen), self._ids(partition), ties)]

    def ordered_by(self, partition: str, columns_of: Callable[[Keys], Columns]) -> Ints:
        """Return the same, sorted by explicit priority and then by the caller's keys."""
        chosen = ints(self.queues[partition])
        keys = self.keys.of(chosen)
        return chosen[ranked_by(columns_of(keys), keys, self._ids(partition))]

    def _ids(self, partition: str) -> list[str]:
        return [self.views[i].id for i in self.queues[partition]]


def waiting_of(
    eligible: list[PendingView],
    world: NodeArrays,
    usage: dict[str, float],
    snapshot: Snapshot | None = None,
    by_limit: bool = False,
) -> PendingArrays:
    """Build the arrays of the pending jobs; equal requests share a shape. ``usage``: from `tally.usage_of`.

    All jobs must be of partitions in ``world.span`` or of partitions without nodes (which get an empty span). With
    ``snapshot`` jobs request what its policies allow now (`spread.current_requests`), else what their specs say.

    With reservations, jobs that share a row of the masks have about the same limit; ``by_limit``: at any time, as the
    rows are to be turned to other times, else now (none is rounded beyond the begin of a reservation).
    """
    specs = [job.spec for job in eligible]
    lefts = [s.time_limit_s if j.resizes is None else j.limit_s for j, s in zip(eligible, specs, strict=True)]
    left = np.array(lefts, dtype=np.float64)
    limit = np.maximum(left, 0.0)
    # Masks, shapes and limits are numbered as they first appear: most jobs of a long queue share a few of each.
    masks: dict[MaskKey, int] = {}
    owns, groups, lasts = _to_reservations(eligible, limit, world.reserved, by_limit)
    kinds: dict[AllowedKey, int] = {_ANYWHERE: 0}
    allowed = [
        kinds.setdefault((s.nodelist, s.exclude, j.excluded_nodes, s.gpu_types, _whole(s)), len(kinds))
        if s.nodelist or s.exclude or j.excluded_nodes or s.gpu_types or s.exclusive
        else 0
        for j, s in zip(eligible, specs, strict=True)
    ]
    mask = [
        masks.setdefault((kind, own, group), len(masks)) if kind or group >= 0 else -1
        for kind, own, group in zip(allowed, owns, groups, strict=False)
    ]
    partition = [s.partition for s in specs]
    parts, gpus = [s.nodes for s in specs], [s.gpus_per_node for s in specs]
    cores, memory = [s.cores_per_node for s in specs], [s.memory_mib_per_node for s in specs]
    shapes: dict[ShapeKey, int] = {}
    columns = zip(partition, parts, gpus, cores, memory, mask, repeat(0), repeat(-1), strict=False)
    rows, calendar = _masks_of(masks, list(kinds), mask, lasts, world)
    several = ints(parts)
    # without racks and splits every job has one request, and no chains are built
    if snapshot is not None and (world.racked or any(s.max_nodes is not None for s in specs)):
        open_to = calendar.base.tolist() or list(range(len(masks)))
        shape, most = _chains(eligible, mask, open_to, rows, world, snapshot, shapes)
    else:
        shape, most = [shapes.setdefault(key, len(shapes)) for key in columns], several
    requests = _requests_of(list(shapes), world)
    # Slurm lets jobs wait that ask for more nodes than there are, millions of them
    held = int(np.minimum(most, (requests.hi - requests.lo)[shape]).sum())
    whole = several * ints(gpus)
    scale = gpu_scale(snapshot, eligible)
    counted = whole if scale == 1 else ints([scaled_gpus(s.gpus, s, scale) for s in specs])
    bounds = snapshot.bounds if snapshot is not None else ()
    account, room, links = accounts_of(eligible, counted, limit, bounds, scale)
    jobs = QueueJobs(
        shape=ints(shape),
        limit=limit,
        account=account,
        room=room,
        feasibility=np.zeros(len(shapes), np.int64),
        masks=rows,
        links=links,
    )
    keys = Keys(
        priority=ints([j.priority for j in eligible]),
        standing=ints([j.standing for j in eligible]),
        submit=np.array([j.submit_time for j in eligible], dtype=np.float64),
        gpus=whole,
        cores=several * ints(cores),
        memory=several * ints(memory),
        limit=np.array([s.time_limit_s for s in specs], dtype=np.float64),
        expected=np.minimum(np.array([inf if (s := j.estimate_s) is None else s for j in eligible]), left),
        usage=np.array([usage.get(leaf_of(j.user, j.group), 0.0) for j in eligible], dtype=np.float64),
    )
    queues: dict[str, list[int]] = {}
    for i, name in enumerate(partition):
        queues.setdefault(name, []).append(i)
    return PendingArrays(eligible, jobs, requests, keys, held, queues, calendar, scale)


def scratch_for(world: NodeArrays, waiting: PendingArrays, releases: Releases) -> Scratch:
    """Return work space for passes over these jobs and nodes; each part begins and ends in a plan at most once."""
    shapes, changes = waiting.jobs.feasibility.size, 2 * len(releases.order)
    return new_scratch(len(world.nodes), shapes, world.rack, waiting.calendar, changes)


def _chains(
    eligible: list[PendingView],
    mask: list[int],
    open_to: list[int],
    masks: Flags,
    world: NodeArrays,
    snapshot: Snapshot,
    shapes: dict[ShapeKey, int],
) -> tuple[list[int], Ints]:
    """Enter each job's request and its looser ones into ``shapes``; return them and the most nodes it could get.

    ``open_to``: of each row of the masks, the row without reservations of others: these close nodes only for a time,
    like the jobs that run there, and a job waits for the best that it can have.
    """
    shape, most = [], []
    known: dict[tuple[object, ...], bool] = {}
    chains: dict[tuple[object, ...], tuple[int, int]] = {}  # most jobs ask for what another one asks for
    for job, of in zip(eligible, mask, strict=True):
        spec, partition = job.spec, job.spec.partition
        needs = (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node)
        if spec.nodes == 1 and spec.max_nodes is None:
            shape.append(shapes.setdefault((partition, 1, *needs, of, 0, -1), len(shapes)))
            most.append(1)
            continue
        patient = snapshot.now < rack_wait_until(job, snapshot.policies[partition])
        chain = (partition, of, spec.nodes, needs, spec.max_nodes, spec.max_spread, patient)
        if chain in chains:
            shape.append(chains[chain][0])
            most.append(chains[chain][1])
            continue

        def possible(ask: SpreadRequest, partition: str = partition, of: int = of) -> bool:
            key = (partition, of, ask)
            if key not in known:
                row = open_to[of] if of >= 0 else -1
                known[key] = racks_for_ask(world.usable, world, masks, row, partition, ask) is not None
            return known[key]

        asked = current_requests(job, snapshot.policies[partition], snapshot.now, world.racked, possible)
        looser = -1
        for ask in reversed(asked):
            key = (partition, ask.parts, *ask.needs, of, int(ask.one_rack), looser)
            looser = shapes.setdefault(key, len(shapes))
        shape.append(looser)
        most.append(max(ask.parts for ask in asked))
        chains[chain] = shape[-1], most[-1]
    return shape, ints(most)


def racks_for_ask(
    resources: Resources, world: NodeArrays, masks: Flags, mask: int, partition: str, ask: SpreadRequest
) -> int | None:
    """Return the fewest racks in which ``resources`` can satisfy the request; None: they cannot."""
    rows = slice(*world.span.get(partition, (0, 0)))
    fits = (resources.gpus[rows] >= ask.gpus) & (resources.cores[rows] >= ask.cores)
    fits &= resources.memory[rows] >= ask.memory_mib
    if mask >= 0:
        fits &= masks[mask, rows] != 0
    held = np.cumsum(np.sort(np.bincount(world.rack[rows][fits]))[::-1])  # by so many racks
    racks = int(np.searchsorted(held, ask.parts)) + 1 if len(held) and held[-1] >= ask.parts else None
    return racks if racks == 1 or not ask.one_rack else None


def _whole(spec: JobSpec) -> tuple[int, ...]:
    """Return the node size that an exclusive job requests."""
    return (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node) if spec.exclusive else ()


def _requests_of(shapes: list[ShapeKey], world: NodeArrays) -> Requests:
    spans = [world.span.get(shape[0], (0, 0)) for shape in shapes]
    columns = list(zip(*shapes, strict=True))[1:] if shapes else [()] * 7
    return Requests(ints([s[0] for s in spans]), ints([s[1] for s in spans]), *(ints(list(c)) for c in columns))


def _to_reservations(
    eligible: list[PendingView], limits: Floats, reserved: Reserved, by_limit: bool
) -> tuple[Column, Column, Floats]:
    """Return each job's reservation (-1: none), a number shared by jobs treated alike, and a limit."""
    if not reserved:
        return repeat(-1), repeat(_NO_RESERVATIONS), limits
    owns = [-1 if job.reserved is None else reserved.number.get(job.reserved.name, -1) for job in eligible]
    groups = grouped(limits)
    if by_limit:
        return owns, groups.tolist(), groups
    # how many begin before it would end, and about how long it lasts, by which nodes are kept (`keeping`)
    begun = np.searchsorted(reserved.begins, reserved.now + limits)
    return owns, (begun + groups * (len(reserved.begins) + 1)).tolist(), limits


def _longest(keys: Mapping[MaskKey, int], mask: list[int], lasts: Floats) -> dict[tuple[int, float], float]:
    """Return the longest of the limits ``lasts`` of jobs that are of one reservation and alike."""
    limits, longest = dict[tuple[int, float], float](), np.zeros(len(keys))
    np.maximum.at(longest, mask, lasts)
    for (_, own, like), most in zip(keys, longest.tolist(), strict=True):
        limits[own, like] = max(most, limits.get((own, like), 0.0))
    return limits


def _masks_of(
    keys: Mapping[MaskKey, int], kinds: list[AllowedKey], mask: list[int], lasts: Floats, world: NodeArrays
) -> tuple[Flags, Calendar]:
    """Return `_allowed` as reservations leave it now, one row per key, then one row as work space.

    ``mask``: each job's row. ``lasts``: its limit, or about that of all that are alike.
    """
    if not world.reserved or not keys:
        return _allowed([kinds[kind] for kind, _, _ in keys], world), no_calendar()
    place: dict[int, int] = {}
    base = ints([place.setdefault(kind, len(place)) for kind, _, _ in keys])
    longest = _longest(keys, mask, lasts)
    limit = np.array([longest[own, like] for _, own, like in keys], np.float64)
    own = ints([own for _, own, _ in keys])
    allowed = _allowed([kinds[kind] for kind in place], world)
    return reserved_masks(world.reserved, allowed, base, own, limit, world.usable)


def allowed_nodes(
    row: Mapping[str, int], types: Sequence[str], nodelist: Sequence[str], excluded: Sequence[str],
    accepted: Sequence[str],
) -> Flags:  # fmt: skip
    """Return the nodes that a job may use, ``uint8[nodes]``: in its nodelist (empty: all), not excluded, of its types.

    ``row``: name -> row. ``types``: of the nodes' GPUs. ``accepted``: the job's; empty: any.
    """
    mask = np.full(len(types), not nodelist, np.uint8)
    for names, allowed in ((nodelist, 1), (excluded, 0)):
        mask[[row[name] for name in names if name in row]] = allowed
    return mask & np.array([name in accepted for name in types], np.uint8) if accepted else mask


def _allowed(keys: list[AllowedKey], world: NodeArrays) -> Flags:
    """Return `allowed_nodes` of each key, ``uint8[masks, nodes]``; whole nodes are of exactly that size."""
    masks = np.zeros((len(keys), len(world.nodes)), dtype=np.uint8)
    types = [node.gpu_type for node in world.nodes]
    for i, (nodelist, exclude, failed, accepted, whole) in enumerate(keys):
        masks[i] = allowed_nodes(world.row, types, nodelist, (*exclude, *failed), accepted)
        if whole:
            masks[i] &= np.array([(len(n.gpus), n.cores, n.memory_mib) == whole for n in world.nodes], np.uint8)
    return masks
