"""MIG slices in replays: jobs and nodes split by profile as live decisions are (`sched.slices`), results joined again.

What begins a decision live begins the whole replay here: slices of one profile are nodes of a partition of their own,
whose queue has the jobs that ask for the profile. Every policy runs on that as on whole GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.slices import slice_index
from gpusched.model.slicetables import GPU_PARTS, parts_of, published
from gpusched.model.snapshot import NodeView, SliceView
from gpusched.sched.slicenames import inner_name
from gpusched.sched.slices.rows import rows_of
from gpusched.sched.slices.tree import most_of
from gpusched.sched.state import Ints, ints
from gpusched.sim.pool import AMPLE, NOT_MODELLED, NodeSpec, Pool
from gpusched.sim.result import NODE_DOWN, NODE_DRAIN, NODE_UP, Events, ReplayResult
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.sim.engine.build import ReplayOptions


class Unsplit(NamedTuple):
    """What a replay was asked for before it was split; ``node``: ``int64[rows]``: the node that a row is of."""

    trace: Trace
    pool: Pool
    node: Ints


def profile_index(trace: Trace) -> tuple[Ints, tuple[str, ...]]:
    """Return each job's profile, index into the names; the last name, "", is that of whole GPUs (also as -1)."""
    none = trace.profile is None
    return np.full(len(trace), -1, np.int64) if none else trace.profile, (*trace.profiles, "")  # type: ignore[return-value]


def parts_by_job(trace: Trace) -> Ints:
    """Return the parts of a GPU (`GPU_PARTS`) that each GPU or slice of a job counts for, ``int64[jobs]``."""
    index, names = profile_index(trace)
    return ints([parts_of(name) for name in names])[index]


def asks_for_slices(trace: Trace) -> bool:
    """Return whether any job is in slices."""
    return trace.profile is not None and bool((trace.profile >= 0).any())


def has_slices(trace: Trace, pool: Pool) -> bool:
    """Return whether jobs ask for slices, or nodes have or may have some."""
    return bool(pool.slices or pool.cuttable) or asks_for_slices(trace)


def on_demand(pool: Pool, profiles: Sequence[str]) -> Pool:
    """Return the pool with its GPUs cut on demand, as NVIDIA publishes it for their types and for these profiles."""
    tables = [published(name, profiles) for name in pool.gpu_types]
    cuttable = tuple(
        dict.fromkeys(range(gpus), tables[kind]) if tables[kind] else {}
        for gpus, kind in zip(pool.gpus.tolist(), pool.gpu_type.tolist(), strict=True)
    )
    return replace(pool, cuttable=cuttable if any(cuttable) else ())


def with_usual_slices(pool: Pool, trace: Trace) -> tuple[Pool, tuple[str, ...]]:
    """Return the pool with the GPUs that are cut on demand cut once, and a note; unchanged without any.

    For training, which plays whole episodes at once: each profile has its part of the trace's GPU hours, and at least
    as many GPUs as its largest job.
    """
    if not pool.cuttable:
        return pool, ()
    index, names = profile_index(trace)
    work = np.bincount(index % len(names), trace.gpus * parts_by_job(trace) * trace.duration, len(names))
    free = [(node, gpu) for node, gpus in enumerate(pool.cuttable) for gpu in gpus]
    slices = [list(pool.slices[node] if pool.slices else ()) for node in range(len(pool))]
    total, used = len(free), list[str]()
    for kind in np.argsort(-work[:-1], kind="stable").tolist():
        own, name = index == kind, names[kind]
        wanted = round(total * work[kind] / max(float(work.sum()), 1.0))
        there = 0
        while free and own.any() and (wanted > 0 or there < int(trace.gpus[own].max())):
            node, gpu = free.pop()
            found = most_of(pool.cuttable[node][gpu], name)
            slices[node] += [SliceView(slice_index(gpu, start), name) for name, start in found]
            there, wanted = there + len(found), wanted - 1
            used.append(name)
    counts = ", ".join(f"{used.count(name)} into {name}" for name in dict.fromkeys(used))
    note = f"GPUs that are cut on demand stay as they are in training: {counts or 'none is cut'}"
    return replace(pool, slices=tuple(map(tuple, slices)), cuttable=()), (note,)


def node_views(pool: Pool) -> list[NodeView]:
    """Return the nodes as in a snapshot; what is not modelled of them is ample."""
    columns = (pool.gpus, pool.cores, pool.memory_mib, pool.gpu_type, pool.partition)
    found = []
    for row, (gpus, cores, memory, kind, partition) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        found.append(NodeView(
            name=pool.names[row], partition=pool.partitions[partition], gpus=tuple(range(gpus)),
            cores=cores if cores >= 0 else AMPLE, memory_mib=memory if memory >= 0 else AMPLE,
            gpu_type=pool.gpu_types[kind], slices=pool.slices[row] if pool.slices else (),
            cuttable=dict(pool.cuttable[row]) if pool.cuttable else {},
        ))  # fmt: skip
    return found


def split_pool(pool: Pool, asked: Sequence[str]) -> tuple[Pool, Ints]:
    """Return the pool with a row for each profile of a node's slices, and each row's node.

    ``asked``: the jobs' profiles. GPUs that are cut on demand are in rows of whole GPUs and of slices, as live.
    """
    specs: list[NodeSpec] = []
    origin: list[int] = []
    for node, view in enumerate(node_views(pool)):
        for row in rows_of(view, asked):
            cores = row.cores if pool.cores[node] >= 0 else NOT_MODELLED
            memory = row.memory_mib if pool.memory_mib[node] >= 0 else NOT_MODELLED
            if row.gpus or cores > 0:  # not what is left of a node all of whose GPUs are cut
                specs.append(NodeSpec(len(row.gpus), cores, memory, row.gpu_type, row.partition, row.name))
                origin.append(node)
    # Partitions in the order in which live decisions take them.
    place = {name: f"{at:09}" for at, name in enumerate(pool.partitions)}
    order = sorted(range(len(specs)), key=lambda row: place.get(specs[row].partition, f"~{specs[row].partition}"))
    return Pool.of([specs[row] for row in order]), ints(origin)[order]


def split_trace(trace: Trace, pool: Pool) -> Trace:
    """Return the trace with the queue of each job as its group, as `sched.slicenames.queue_of`; ``pool``: as given."""
    index, names = profile_index(trace)
    group = trace.group if len(pool.partitions) > 1 else np.zeros(len(trace), np.int64)
    groups = (*trace.groups, "") if len(pool.partitions) > 1 else (pool.partitions[0], "")
    pairs, queue = np.unique(np.column_stack((group, index)), axis=0, return_inverse=True)
    queues = tuple(inner_name(groups[of], names[kind]) for of, kind in pairs.tolist())
    return replace(trace, group=queue.reshape(-1).astype(np.int64), groups=queues)


def split_nodes(trace: Trace, pool: Pool) -> tuple[Trace, Pool, Ints | None]:
    """Return trace and pool with slices apart, and each row's node; None: there are no slices."""
    if not has_slices(trace, pool):
        return trace if trace.profile is None else replace(trace, profile=None, profiles=()), pool, None
    index, names = profile_index(trace)
    rows, node = split_pool(pool, [name for i, name in enumerate(names[:-1]) if (index == i).any()])
    return split_trace(trace, pool), rows, node


def split_replay(
    trace: Trace, pool: Pool, options: ReplayOptions
) -> tuple[Trace, Pool, ReplayOptions, Unsplit | None]:  # fmt: skip
    """Return trace, pool and options with slices apart, and what they were; unchanged without slices.

    ``options.network`` is of the nodes as split already (`sim.network`).

    Raises:
        UsageError: An outage of a node that does not exist.
    """
    inner, rows, node = split_nodes(trace, pool)
    if node is None:
        return inner, pool, options, None
    index, _ = profile_index(trace)
    of = [np.flatnonzero(node == i).tolist() for i in range(len(pool))]
    believed, elastic = options.believed, options.elastic
    if elastic is not None:  # a slice cannot be resized
        rigid = index >= 0
        least, most = (np.where(rigid, trace.gpus, size) for size in (elastic.least, elastic.most))
        elastic = replace(elastic, least=least, most=most)
    for outage in options.failures:
        if not 0 <= outage.node < len(pool):
            raise UsageError(f"a failure names node {outage.node}; the pool has {len(pool)}")
    options = replace(
        options, elastic=elastic,
        failures=tuple(outage._replace(node=row) for outage in options.failures for row in of[outage.node]),
        reservations=tuple(b._replace(nodes=tuple(r for n in b.nodes for r in of[n])) for b in options.reservations),
        believed=None if believed is None else believed._replace(kind=believed.kind[node]),
    )  # fmt: skip
    return inner, rows, options, Unsplit(trace, pool, node)


def joined(result: ReplayResult, unsplit: Unsplit | None) -> ReplayResult:
    """Return the result in terms of what was asked for: each job on its nodes, a slice as its share of a GPU."""
    if unsplit is None:
        return result
    node, events = np.append(unsplit.node, -1), result.events  # -1, the last: it never ran
    of_node = np.isin(events.kind, (NODE_DOWN, NODE_DRAIN, NODE_UP))
    row = np.where(of_node, events.subject, -1)
    again = of_node & ~np.isin(row, np.unique(unsplit.node, return_index=True)[1])  # another row of the same node
    share = parts_by_job(unsplit.trace) / GPU_PARTS
    return replace(
        result, trace=unsplit.trace, pool=unsplit.pool, part_nodes=node[result.part_nodes],
        cut=replace(result.cut, part_nodes=node[result.cut.part_nodes]),
        events=Events(time=events.time[~again], kind=events.kind[~again],
                      subject=np.where(of_node, node[row], events.subject)[~again]),
        share=share if result.share is None else share * result.share,
    )  # fmt: skip
