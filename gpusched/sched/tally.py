"""A snapshot counted in plain Python: what each node has free and who holds the rest. To explain, not for speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, assert_never

import msgspec

from gpusched.model.ids import id_key
from gpusched.model.jobs import JobSpec
from gpusched.model.limits import leaf_of, split_leaf
from gpusched.model.policy import Order, PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.units import count_of, format_memory
from gpusched.sched.eligible import ineligible
from gpusched.sched.reservations.rules import closed_by, closed_text
from gpusched.sched.text import gpus_called, listed, listed_types
from gpusched.sched.topology.spread import Ask, asks, racks_for, splits

Has = Literal["total", "usable", "free"]


class NodeCount(msgspec.Struct, kw_only=True):
    """One node: declared, usable (well and empty) and free GPUs, cores, MiB; changed only while it is being counted.

    ``rack``: where it is, its own name where no switch names it; "" where there is no topology.
    """

    node: NodeView
    held: set[int]
    cores: int
    memory_mib: int
    rack: str = ""

    @property
    def total(self) -> tuple[int, int, int]:
        """As declared: (GPUs, cores, MiB)."""
        return len(self.node.gpus), self.node.cores, self.node.memory_mib

    @property
    def usable(self) -> tuple[int, int, int]:
        """Without blocked GPUs, empty of jobs; nothing on a node that is not available."""
        if not self.node.available:
            return -1, self.node.cores, self.node.memory_mib
        if not self.node.blocked:  # most nodes, and this is asked of every node for every kind of job in the queue
            return self.total
        return len(set(self.node.gpus) - self.node.blocked.keys()), self.node.cores, self.node.memory_mib

    @property
    def free(self) -> tuple[int, int, int]:
        """What a job could have now."""
        if not self.node.available:
            return -1, self.cores, self.memory_mib
        return len(set(self.node.gpus) - self.node.blocked.keys() - self.held), self.cores, self.memory_mib

    def has(self, what: Has) -> tuple[int, int, int]:
        """One of the three."""
        return self.total if what == "total" else self.usable if what == "usable" else self.free


def counts_of(snapshot: Snapshot) -> dict[str, NodeCount]:
    """Node name -> its count."""
    counts: dict[str, NodeCount] = {}
    racks, racked = snapshot.topology.racks(), bool(snapshot.topology)
    for n in snapshot.nodes:
        rack = racks.get(n.name, n.name) if racked else ""
        counts.setdefault(n.name, NodeCount(node=n, held=set(), cores=n.cores, memory_mib=n.memory_mib, rack=rack))
    for job in snapshot.running:
        for part in job.allocation.parts:
            if count := counts.get(part.node):
                count.held.update(part.gpus)
                count.cores -= part.cores
                count.memory_mib -= part.memory_mib
    return counts


def need(spec: JobSpec) -> tuple[int, int, int]:
    """GPUs, cores and MiB per node."""
    return spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node


def covers(has: tuple[int, int, int], needs: tuple[int, int, int]) -> bool:
    """Whether every figure is enough."""
    return all(h >= n for h, n in zip(has, needs, strict=True))


def at_size(spec: JobSpec, gpus: int, nodes: int, rooms: Iterable[tuple[int, int, int]]) -> JobSpec | None:
    """A resizable job's request over so many nodes with these (GPUs, cores, MiB) each; None: they cannot give it.

    Where its cores and memory have ranges, with the most of them that so many nodes have: of cores first.
    """
    found = spec.at_size(gpus, nodes)
    having = [room for room in rooms if covers(room, need(found.least))]
    if len(having) < nodes:
        return None
    cores = sorted(room[1] for room in having)[-nodes]
    memory = sorted(room[2] for room in having if room[1] >= min(cores, found.cores_per_node))[-nodes]
    found = spec.at_size(gpus, nodes, (cores, memory))
    return found if sum(covers(room, need(found)) for room in having) >= nodes else None


def excluded_by(spec: JobSpec, node: NodeView) -> str:
    """Why what was asked for leaves the node out even if it were empty; "" if it does not."""
    if node.partition != spec.partition:
        return f"is in partition {node.partition}"
    if spec.nodelist and node.name not in spec.nodelist:
        return "not in its nodelist"
    if node.name in spec.exclude:
        return "excluded by the job"
    if spec.gpu_types and node.gpu_type not in spec.gpu_types:
        return f"has {gpus_called(node.gpu_type)}, not {listed_types(spec.gpu_types)}"
    if spec.exclusive and (len(node.gpus), node.cores, node.memory_mib) != need(spec):
        return "differs in size from the whole nodes it requests"
    return ""


def barred(job: PendingView, node: NodeView) -> str:
    """Why the job may not use the node even if it were empty, and whatever the time; "" if it may."""
    if why := excluded_by(job.spec, node):
        return why
    if job.reserved is not None and all(one.name != job.reserved.name for one in node.reservations):
        return f"is not in {job.reserved.what}"
    return "an earlier attempt failed here" if node.name in job.excluded_nodes else ""


def shut(job: PendingView, node: NodeView, now: float) -> str:
    """Why the job may not start on the node now even if it were empty; "" if it may."""
    return barred(job, node) or (closed_text(job, node, now) if node.reservations else "")


HasOf = Callable[[NodeCount], tuple[int, int, int]]


def racks_of(job: PendingView, counts: Iterable[NodeCount], has: HasOf, ask: Ask) -> int | None:
    """The fewest racks in which what ``has`` says of each node that the job may use holds ``ask``; None: none do."""
    racks = racks_for((c.rack for c in counts if not barred(job, c.node) and covers(has(c), ask.needs)), ask.parts)
    return racks if racks == 1 or not ask.one_rack else None


def asks_of(
    snapshot: Snapshot, job: PendingView, counts: Iterable[NodeCount], at: float | None = None
) -> tuple[Ask, ...]:
    """What the job asks for now, or ``at`` a later time (`spread.asks`); ``counts``: of its partition's nodes."""
    own, policy = list(counts), snapshot.policies.get(job.spec.partition)
    if policy is None:
        return splits(job.spec)

    def possible(ask: Ask) -> bool:
        return racks_of(job, own, lambda count: count.usable, ask) is not None

    return asks(job, policy, snapshot.now if at is None else at, bool(snapshot.topology), possible)


def fits(job: PendingView, counts: Iterable[NodeCount], has: HasOf, asked: Iterable[Ask] = ()) -> bool:
    """Whether one of the requests fits on what ``has`` says of each node the job may use; without any its spec's."""
    own = list(counts)
    return any(racks_of(job, own, has, ask) is not None for ask in asked or splits(job.spec))


def usage_of(snapshot: Snapshot) -> dict[str, float]:
    """Fair share's figure: user -> recent GPU hours (``snapshot.usage``, decayed) plus one for every GPU held now.

    Without the second part, a user whose jobs have just begun would look idle until usage has accrued. With groups:
    `leaf_of` user and group -> place by their tree (`fairtree`).
    """
    usage = dict(snapshot.usage)
    for job in snapshot.running:
        leaf = leaf_of(job.user, job.group)
        usage[leaf] = usage.get(leaf, 0.0) + job.allocation.gpus
    if not snapshot.groups or not any(policy.order == "fairshare" for policy in _asked(snapshot)):
        return usage
    import numpy as np  # who explains needs neither this nor machine code elsewhere

    from gpusched.sched.fairtree import places, tree_of

    leaves = list(usage.keys() | {leaf_of(job.user, job.group) for job in snapshot.pending})
    tree = tree_of(snapshot.groups, [split_leaf(leaf) for leaf in leaves])
    found = places(tree, np.array([usage.get(leaf, 0.0) for leaf in leaves], np.float64))
    return {leaf: float(place) for leaf, place in zip(leaves, found.tolist(), strict=True)}


def _asked(snapshot: Snapshot) -> list[PolicySpec]:
    return [policy.fallback or policy for policy in snapshot.policies.values()]  # the fallback may have to decide


def plain_order(snapshot: Snapshot, partition: str) -> list[PendingView]:
    """The partition's jobs that may start, first to last; the same order as `order.queue_order`."""
    policy = snapshot.policies.get(partition)
    order: Order = policy.order if policy else "fifo"
    usage = usage_of(snapshot)

    def key(job: PendingView) -> tuple[object, ...]:
        spec = job.spec
        own: tuple[float, ...] = ()
        if order == "ljf":
            own = (-spec.gpus, -spec.nodes * spec.cores_per_node, -spec.nodes * spec.memory_mib_per_node)
        elif order == "sjf":
            own = (spec.time_limit_s,)
        elif order == "sjf-estimate":
            own = (job.expected_s,)
        elif order == "fairshare":
            own = (usage.get(leaf_of(job.user, job.group), 0.0),)
        elif order != "fifo":
            assert_never(order)
        return (-job.priority, *own, -job.standing, job.submit_time, id_key(job.id))

    jobs = (j for j in snapshot.pending if j.spec.partition == partition)
    return sorted((j for j in jobs if ineligible(j, snapshot.now, snapshot.policies) is None), key=key)


def open_to(job: PendingView, counts: Iterable[NodeCount], now: float) -> list[NodeCount]:
    """Those of the nodes from which no reservation keeps the job now."""
    return [c for c in counts if not (c.node.reservations or job.reserved) or closed_by(job, c.node, now) is None]


def earliest(snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount]) -> tuple[float, str] | None:
    """When the job fits at the latest, by the limits of what runs, were it alone in the queue; and thanks to whom.

    Returns:
        (Unix seconds, ``job X on dgx001 frees 4 GPUs``), or None if it fits now or never.
    """
    own = [c for c in counts.values() if c.node.partition == job.spec.partition]
    asked = asks_of(snapshot, job, own)
    if fits(job, open_to(job, own, snapshot.now), lambda c: c.free, asked):
        return None
    found = [when for ask in asked if (when := _earliest(snapshot, job, counts, ask)) is not None]
    return min(found, key=lambda when: when[0], default=None)


def _earliest(snapshot: Snapshot, job: PendingView, counts: dict[str, NodeCount], ask: Ask) -> tuple[float, str] | None:
    """Of one request. With reservations also when one ends; and a node counts only while it is the job's for long."""
    needs, now = ask.needs, snapshot.now
    has = {name: list(c.free) for name, c in counts.items() if not barred(job, c.node) and c.node.available}
    holding = {name for name, h in has.items() if covers((h[0], h[1], h[2]), needs)}
    reserved = {name for name in has if counts[name].node.reservations}
    always = Counter(_rack(counts[name], ask) for name in holding - reserved)  # nodes that fit, by rack if need be
    ends = [(r.expected_end, i, r) for i, r in enumerate(snapshot.running)]
    overs = {one.name: one for name in reserved for one in counts[name].node.reservations}
    changes: list[tuple[float, int, RunningView | Reservation]] = [*ends]
    changes += [(one.end, len(ends) + i, one) for i, one in enumerate(overs.values())]

    def enough(time: float) -> bool:
        found = always.copy()
        for name in holding & reserved:
            found[_rack(counts[name], ask)] += closed_by(job, counts[name].node, time) is None
        return any(count >= ask.parts for count in found.values())

    if reserved and enough(now):
        return now, ""
    for end, _, change in sorted(changes, key=lambda one: one[:2]):
        if isinstance(change, Reservation):
            if enough(max(end, now)):
                return max(end, now), f"{change.what} ends"
            continue
        for part in change.allocation.parts:
            if part.node not in has:
                continue
            h = has[part.node]
            gpus = sum(1 for g in part.gpus if g not in counts[part.node].node.blocked)
            h[0], h[1], h[2] = h[0] + gpus, h[1] + part.cores, h[2] + part.memory_mib
            if part.node in holding or not covers((h[0], h[1], h[2]), needs):
                continue
            holding.add(part.node)
            always[_rack(counts[part.node], ask)] += part.node not in reserved
            if enough(max(end, now)):
                return max(end, now), f"job {change.id} on {part.node} frees {count_of(gpus, 'GPU')}"
    return None


def _rack(count: NodeCount, ask: Ask) -> str:
    return count.rack if ask.one_rack else ""


def shortfall_of(count: NodeCount, needs: tuple[int, int, int]) -> tuple[Literal["gpus", "cores", "memory"], str]:
    """(dimension, text) of a node that does not fit: ``2 of 8 GPUs free, needs 4 (3 held by jobs, 1 LOST)``."""
    free, total = count.free, count.total
    if free[0] < needs[0]:
        return "gpus", f"{free[0]} of {count_of(total[0], 'GPU')} free, needs {needs[0]}{_gpus_gone(count)}"
    if free[1] < needs[1]:
        held = f" ({total[1] - free[1]} held by jobs)" if total[1] > free[1] else ""
        return "cores", f"{max(0, free[1])} of {count_of(total[1], 'core')} free, needs {needs[1]}{held}"
    held = f" ({format_memory(total[2] - free[2])} held by jobs)" if total[2] > free[2] else ""
    text = f"{format_memory(max(0, free[2]))} of {format_memory(total[2])} memory free, needs {format_memory(needs[2])}"
    return "memory", text + held


def _gpus_gone(count: NodeCount) -> str:
    """Who has the GPUs that are not free: `` (3 held by jobs, 2 foreign: pid 4711 of alice, 1 LOST)``."""
    gone: list[str] = []
    blocked = {g: why for g, why in sorted(count.node.blocked.items()) if g in count.node.gpus}
    held = len((count.held & set(count.node.gpus)) - blocked.keys())
    if held:
        gone.append(f"{held} held by jobs")
    kinds: dict[str, list[str]] = {}
    for why in blocked.values():
        kind, _, detail = why.partition(": ")
        kinds.setdefault(kind, []).append(detail)
    for kind, details in kinds.items():
        known = list(dict.fromkeys(d for d in details if d))
        name = "foreign" if kind == "BUSY" else kind
        gone.append(f"{len(details)} {name}" + (f": {listed(known)}" if known and kind == "BUSY" else ""))
    return f" ({', '.join(gone)})" if gone else ""
