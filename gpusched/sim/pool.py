"""The pool of nodes on which a trace is replayed, and what each job requests of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.resources import Inventory
from gpusched.model.slices import SliceProfile, gpu_of, slice_index, start_of
from gpusched.model.slicetables import published
from gpusched.model.snapshot import NodeView, SliceView
from gpusched.model.units import count_of
from gpusched.sched.arrays import allowed_nodes
from gpusched.sched.slicenames import base_of, inner_name, profile_of
from gpusched.sched.state import WHOLE, Flags, Ints, Requests, Resources, ints
from gpusched.traces.trace import Trace

NOT_MODELLED = -1


class NodeSpec(NamedTuple):
    """One node; -1 cores or MiB: not modelled, no constraint. ``slices``, ``cuttable`` (items): as in `NodeView`."""

    gpus: int
    cores: int = NOT_MODELLED
    memory_mib: int = NOT_MODELLED
    gpu_type: str = ""
    partition: str = ""
    name: str = ""
    slices: tuple[SliceView, ...] = ()
    cuttable: tuple[tuple[int, tuple[SliceProfile, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Nodes, partition by partition; one entry per node in all arrays.

    Attributes:
        gpus, cores, memory_mib: What the node has; -1 cores or MiB: not modelled.
        gpu_type, partition: Index into ``gpu_types``, ``partitions``.
        names: The nodes' names.
        slices, cuttable: By node, as in `NodeView`; (): no node has any.
    """

    gpus: Ints
    cores: Ints
    memory_mib: Ints
    gpu_type: Ints
    partition: Ints
    names: tuple[str, ...]
    gpu_types: tuple[str, ...] = ("",)
    partitions: tuple[str, ...] = ("",)
    slices: tuple[tuple[SliceView, ...], ...] = ()
    cuttable: tuple[Mapping[int, tuple[SliceProfile, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes."""
        return int(self.gpus.sum())

    @classmethod
    def of(cls, nodes: Sequence[NodeSpec]) -> Pool:
        """Return a pool of these nodes, grouped by partition, otherwise in the order given.

        Raises:
            UsageError: No nodes, or one without GPUs and cores.
        """
        if not nodes:
            raise UsageError("a pool needs at least one node")
        partitions = tuple(dict.fromkeys(n.partition for n in nodes))
        types = tuple(dict.fromkeys(n.gpu_type for n in nodes))
        ordered = sorted(nodes, key=lambda n: partitions.index(n.partition))
        for i, n in enumerate(ordered):
            if n.gpus < 0 or (n.gpus == 0 and n.cores <= 0):
                raise UsageError(f"node {n.name or i} has neither GPUs nor cores")
        return cls(
            gpus=ints([n.gpus for n in ordered]),
            cores=ints([n.cores for n in ordered]),
            memory_mib=ints([n.memory_mib for n in ordered]),
            gpu_type=ints([types.index(n.gpu_type) for n in ordered]),
            partition=ints([partitions.index(n.partition) for n in ordered]),
            names=tuple(n.name or f"n{i:04}" for i, n in enumerate(ordered)),
            gpu_types=types,
            partitions=partitions,
            slices=tuple(n.slices for n in ordered) if any(n.slices for n in ordered) else (),
            cuttable=tuple(dict(n.cuttable) for n in ordered) if any(n.cuttable for n in ordered) else (),
        )

    @classmethod
    def uniform(cls, nodes: int, gpus_per_node: int, *, gpu_type: str = "") -> Pool:
        """Return a pool of identical nodes in one partition (`--nodes N --gpus-per-node G --gpu-type T`)."""
        if nodes < 1 or gpus_per_node < 1:
            raise UsageError("a pool needs at least one node with at least one GPU")
        return cls.of([NodeSpec(gpus_per_node, gpu_type=gpu_type)] * nodes)

    @classmethod
    def of_inventory(cls, inventory: Inventory, seen: Mapping[str, NodeView] = {}) -> Pool:
        """Return the nodes of an inventory, with their MIG slices as ``seen`` last, by name.

        Of nodes not seen GPUs that are cut on demand are cut as NVIDIA publishes it for their type.
        """
        found = []
        for n in (n for p in inventory.partitions for n in p.nodes):
            spec = NodeSpec(n.gpus, n.cores, n.memory_mib, n.gpu_type, n.partition, n.name)
            if n.name in seen:
                found.append(with_slices(spec, n.indices(), seen[n.name]))
            else:
                numbers = [at for at, index in enumerate(n.indices()) if index in n.cut_on_demand()]
                table = published(n.gpu_type) if numbers else ()
                found.append(spec._replace(cuttable=tuple((n, table) for n in numbers) if table else ()))
        return cls.of(found)

    def span(self, partition: int) -> tuple[int, int]:
        """Return the rows ``lo <= node < hi`` of one partition."""
        rows = np.flatnonzero(self.partition == partition)
        return int(rows[0]), int(rows[-1]) + 1


def with_slices(spec: NodeSpec, indices: Sequence[int], seen: NodeView) -> NodeSpec:
    """Return the node with its slices as seen; GPUs are numbered from 0 in pools, by ``indices`` in readings."""
    place = {index: at for at, index in enumerate(indices)}
    fixed = (one for one in seen.slices if gpu_of(one.number) in place and gpu_of(one.number) not in seen.cuttable)
    slices = (SliceView(slice_index(place[gpu_of(one.number)], start_of(one.number)), one.profile) for one in fixed)
    cuttable = tuple((place[index], table) for index, table in seen.cuttable.items() if index in place)
    return spec._replace(slices=tuple(slices), cuttable=cuttable)


class Demand(NamedTuple):
    """The requests of a trace's jobs, in the form of the compiled passes.

    Attributes:
        shape: ``int64[jobs]``: index into ``requests``; -1: can never run.
        requests: The distinct requests.
        masks: ``uint8[masks, nodes]``.
        parts: ``int64[jobs]``: nodes of each job (0: can never run).
        resources: The pool, empty. queue: ``int64[shapes]``: the partition that a shape queues in.
        infeasible: Job -> why it can never run.
        gpus_only: Cores and memory bind nowhere, and no request has a mask: nodes differ in free GPUs alone.
        milli: ``int64[shapes]``: thousandths of its one GPU; 1000: whole GPUs.
    """

    shape: Ints
    requests: Requests
    masks: Flags
    parts: Ints
    resources: Resources
    queue: Ints
    infeasible: dict[int, str]
    gpus_only: bool
    milli: Ints

    @property
    def job_milli(self) -> Ints:
        """Return ``milli`` of each job, ``int64[jobs]``; WHOLE where it can never run."""
        found: Ints = np.append(self.milli, WHOLE)[self.shape]  # of -1 the last
        return found


def demand_of(trace: Trace, pool: Pool, *, shares: bool = False, in_proportion: bool = False) -> Demand:
    """Split every job into the fewest equal parts that fit nodes of its partition (and type).

    A job's own ``nodes`` is kept where the pool can give it and its GPUs divide by it. Groups name partitions only
    where the pool has several. Cores or memory that are unknown are taken in proportion to GPUs, by the leanest node.
    GPU types bind where the pool knows any type, a list of nodes where it has one of them, whole nodes where it has
    nodes of exactly that size. With ``shares`` a job of one GPU takes the thousandths it asks for. Where no job says
    how many cores, or how much memory, these bind nothing, but with ``in_proportion``.
    """
    milli = np.where((trace.gpus == 1) & shares, trace.gpu_milli, 1000)
    columns = [trace.gpus, trace.nodes, trace.cores, trace.memory_mib, trace.group, trace.gpu_type, milli]
    of_nodes = (trace.exclusive, 0), (trace.nodelist, -1), (trace.exclude, -1)
    if any(column is not None for column, _ in of_nodes):
        columns += [np.full(len(trace), none) if column is None else column for column, none in of_nodes]
    distinct, index = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    splitter = _Splitter(trace, pool, in_proportion)
    kinds = [splitter.split(*(int(x) for x in row)) for row in distinct]
    shape_of_kind = ints([k if isinstance(k, int) else -1 for k in kinds])
    shape = shape_of_kind[index.reshape(-1)] if len(kinds) else ints([])
    why = {int(j): str(kinds[index.reshape(-1)[j]]) for j in np.flatnonzero(shape < 0)}
    requests, masks = splitter.requests(), splitter.masks()
    parts = np.where(shape >= 0, requests.parts[shape] if requests.parts.size else 0, 0)
    modelled = requests.cores.any() or requests.memory.any()
    cores, memory = (_capacity(c, bool(modelled)) for c in (pool.cores, pool.memory_mib))
    resources = Resources(pool.gpus.copy(), cores, memory)
    gpus_only = not modelled and masks.shape[0] == 0
    return Demand(shape, requests, masks, parts, resources, ints(splitter.queues), why, gpus_only, splitter.milli())


def with_more_nodes(demand: Demand, trace: Trace, pool: Pool) -> Demand:
    """Return the demand with the requests of jobs that may be over more nodes, and the most nodes of each job."""
    assert trace.max_nodes is not None
    rows = [tuple(row) for row in np.column_stack((*demand.requests[:7], demand.queue, demand.milli)).tolist()]
    known, parts = dict.fromkeys(rows), demand.parts.copy()
    wide = (trace.max_nodes > 0) & (demand.shape >= 0)
    if not wide.any():
        return demand
    for shape, most in set(zip(demand.shape[wide].tolist(), trace.max_nodes[wide].tolist(), strict=True)):
        *span, before, gpus_each, cores_each, mib_each, of_mask, queue, milli = rows[shape]
        counts = node_counts(pool, demand, shape, most)
        for n in counts:
            each = (-(-of * before // n) for of in (gpus_each, cores_each, mib_each))
            known[*span, n, *each, of_mask, queue, milli] = None
        parts[wide & (demand.shape == shape) & (trace.max_nodes == most)] = counts[-1]
    lo, hi, nodes, gpus, cores, memory, mask, queues, millis = (ints(list(of)) for of in zip(*known, strict=True))
    return demand._replace(
        requests=Requests(lo, hi, nodes, gpus, cores, memory, mask, None, None), queue=queues, milli=millis, parts=parts
    )  # fmt: skip


def over_nodes(request: Mapping[str, int], count: int, one_rack: bool) -> dict[str, int]:
    """Return a request (a row of `SHAPE`, by column) over so many equal nodes; ``one_rack``: all in one."""
    each = {name: -(-request[name] * request["parts"] // count) for name in ("gpus", "cores", "memory")}
    return {**request, **each, "parts": count, "spread": int(one_rack)}


def most_nodes(trace: Trace, keeps: bool) -> Ints:
    """Return over how many nodes each job may be, at most, ``int64[jobs]``; 0: as many as it requests.

    ``keeps``: also jobs that do not say.
    """
    most = np.where((trace.nodes > 0) | keeps, 0, AMPLE)
    return most if trace.max_nodes is None else np.where(trace.max_nodes > 0, trace.max_nodes, most)


def node_counts(pool: Pool, demand: Demand, shape: int, most: int) -> list[int]:
    """Return over how many nodes a request's GPUs may be divided equally, fewest first; ``most``: as `most_nodes`."""
    of = demand.requests
    fewest, mask, nodes = int(of.parts[shape]), int(of.mask[shape]), np.arange(of.lo[shape], of.hi[shape])
    gpus = fewest * int(of.gpus[shape])
    has = pool.gpus[nodes if mask < 0 else nodes[demand.masks[mask, nodes] != 0]]
    counts = range(fewest, max(fewest, min(most, gpus, len(has))) + 1)
    return [n for n in counts if gpus % n == 0 and (has >= gpus // n).sum() >= n]


def node_lists(trace: Trace, pool: Pool) -> list[list[str]]:
    """Return the names in each of the trace's lists of nodes; none, where the pool has no such node."""
    hosts = {base_of(name) for name in pool.names} if trace.node_lists else set()
    return [names if hosts.intersection(names := text.split("|")) else [] for text in trace.node_lists] + [[]]


AMPLE = (1 << 32) - 1  # cores, or MiB, of nodes that declare none


def _capacity(declared: Ints, modelled: bool) -> Ints:
    """Return cores or MiB of the empty nodes; equal on all nodes if no job requests any, so that ties remain ties."""
    if not modelled:
        return np.zeros(len(declared), np.int64)
    return np.where(declared < 0, AMPLE, declared)


def _no_partition(name: str) -> str:
    profile = profile_of(name)
    return f"no node has MIG slices of {profile}" if profile else f"no partition named {name!r}"


class _Splitter:
    """Builds the distinct requests of distinct demands."""

    def __init__(self, trace: Trace, pool: Pool, in_proportion: bool) -> None:
        self._trace, self._pool = trace, pool
        self._shapes: dict[tuple[int, ...], int] = {}
        self._masks: dict[bytes, int] = {}
        self._row = {name: row for row, name in enumerate(pool.names)}
        self._types = [pool.gpu_types[kind] for kind in pool.gpu_type.tolist()]
        self._lists = node_lists(trace, pool)
        self.queues: list[int] = []
        self._cores = bool((pool.cores >= 0).any() and (in_proportion or (trace.cores > 0).any()))
        self._memory = bool((pool.memory_mib >= 0).any() and (in_proportion or (trace.memory_mib > 0).any()))

    def split(
        self, gpus: int, nodes: int, cores: int, memory: int, group: int, gpu_type: int, milli: int, whole: int = 0,
        *lists: int,
    ) -> int | str:  # fmt: skip
        """Return the index of the request, or why there is none; ``lists``: its nodelist, and the nodes it avoids."""
        pool = self._pool
        partition = 0
        if len(pool.partitions) > 1 or self._trace.profile is not None:  # split: the group is the queue
            name = self._trace.groups[group] if group >= 0 else ""
            if name not in pool.partitions:
                return _no_partition(name)
            partition = pool.partitions.index(name)
        lo, hi = pool.span(partition)
        rows = np.arange(lo, hi)
        mask, wanted = -1, ""
        if gpu_type >= 0 and pool.gpu_types != ("",):
            wanted = self._trace.gpu_types[gpu_type]
            if not set(pool.gpu_types).intersection(wanted.split("|")):
                return f"no node has GPUs of type {wanted!r}"
        profile = profile_of(pool.partitions[partition])
        listed = [[inner_name(name, profile) for name in self._lists[at]] for at in lists]
        if wanted or any(listed):
            nodelist, excluded = listed or ([], [])
            allowed = allowed_nodes(self._row, self._types, nodelist, excluded, wanted.split("|") if wanted else ())
            rows = rows[allowed[rows] != 0]
            if any(listed) and not len(rows):
                return "its lists of nodes leave none of its partition"
        else:
            allowed = np.ones(len(pool), np.uint8)
        if whole and (same := self._same_size(gpus, cores, memory, nodes) & allowed)[lo:hi].any():
            allowed, rows = same, rows[same[rows] != 0]
        if len(rows) < hi - lo:
            mask = self._masks.setdefault(allowed.tobytes(), len(self._masks))
        if gpus < 0:
            return f"requests {count_of(gpus, 'GPU')}"
        cores = self._known(cores, gpus, rows, pool.cores) if self._cores else 0
        memory = self._known(memory, gpus, rows, pool.memory_mib) if self._memory else 0
        parts = self._parts(gpus, cores, memory, nodes, rows)
        if parts == 0:
            return self._too_large(gpus, cores, memory, rows)
        key = (lo, hi, parts, gpus // parts, -(-cores // parts), -(-memory // parts), mask, milli)
        if key not in self._shapes:
            self.queues.append(partition)
        return self._shapes.setdefault(key, len(self._shapes))

    def _same_size(self, gpus: int, cores: int, memory: int, nodes: int) -> Flags:
        """Return the nodes that are exactly as large as each part of a job in so many, ``uint8[nodes]``."""
        pool, found = self._pool, np.ones(len(self._pool), np.bool_)
        for asked, has in ((gpus, pool.gpus), (cores, pool.cores), (memory, pool.memory_mib)):
            found &= (has == NOT_MODELLED) | (has * max(nodes, 1) == asked)
        return found.astype(np.uint8)

    def _known(self, asked: int, gpus: int, rows: Ints, has: Ints) -> int:
        """Return the amount requested or, if unknown, the GPUs' share on the leanest node."""
        if asked >= 0:
            return asked
        having = rows[(has[rows] >= 0) & (self._pool.gpus[rows] > 0)]
        return int(min((gpus * int(has[r]) // int(self._pool.gpus[r]) for r in having), default=0))

    def _parts(self, gpus: int, cores: int, memory: int, nodes: int, rows: Ints) -> int:
        """Return the number of equal parts: as requested if possible, else the fewest; 0: impossible."""
        if nodes > 0 and self._possible(gpus, cores, memory, nodes, rows):
            return nodes
        most = min(len(rows), max(gpus, 1))
        return next((p for p in range(1, most + 1) if self._possible(gpus, cores, memory, p, rows)), 0)

    def _possible(self, gpus: int, cores: int, memory: int, parts: int, rows: Ints) -> bool:
        if gpus % parts or parts > len(rows):
            return False
        pool = self._pool
        fits = pool.gpus[rows] >= gpus // parts
        for asked, has in ((cores, pool.cores), (memory, pool.memory_mib)):
            fits &= (has[rows] < 0) | (has[rows] >= -(-asked // parts))
        return int(fits.sum()) >= parts

    def _too_large(self, gpus: int, cores: int, memory: int, rows: Ints) -> str:
        pool = self._pool
        has = f"{count_of(len(rows), 'node')} with {count_of(int(pool.gpus[rows].sum()) if len(rows) else 0, 'GPU')}"
        return (
            f"{count_of(gpus, 'GPU')}, {count_of(cores, 'core')}, {memory} MiB in equal parts: more than {has} can give"
        )

    def requests(self) -> Requests:
        """Return all distinct requests."""
        columns = list(zip(*self._shapes, strict=True))[:-1] if self._shapes else [()] * 7
        lo, hi, parts, gpus, cores, memory, mask = (ints(list(c)) for c in columns)
        return Requests(lo, hi, parts, gpus, cores, memory, mask, spread=None, looser=None)

    def milli(self) -> Ints:
        """Return the thousandths of one GPU, by request."""
        return ints([key[-1] for key in self._shapes])

    def masks(self) -> Flags:
        """Return the eligible nodes by requested GPU type and lists of nodes."""
        return np.array([*map(bytearray, self._masks)], np.uint8).reshape(-1, len(self._pool))
