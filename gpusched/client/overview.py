"""The current state of the nodes: their last readings joined with the jobs that run on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpusched.config.inventory import flavor_nodes
from gpusched.errors import UsageError
from gpusched.model.gpustates import GpuStatus, gpu_states
from gpusched.model.health import KIND, Condition, HealthAction, action_of, text_of
from gpusched.model.healthchecks import CheckCondition, CheckRecord, open_conditions
from gpusched.model.jobs import JobRecord, NodeAllocation
from gpusched.model.readings import Gpu, GpuState, NodeState
from gpusched.model.reports import (
    ConditionRow,
    FailureRow,
    FlavorRow,
    GpuRow,
    NodeRow,
    SliceRow,
    TopologyReport,
    WiredNode,
)
from gpusched.model.reservations import Reservation, by_node
from gpusched.model.resources import Flavor, Inventory, Node, Partition
from gpusched.model.slices import gpu_label
from gpusched.model.topology import islands
from gpusched.queue.snapshots import NOT_FOR_NEW_JOBS, held_gpus, topology_of, uncleaned_gpus
from gpusched.queue.store import NodeRecord, Reader

_SILENT = frozenset({NodeState.DOWN, NodeState.UNKNOWN})
_MIN_STALE_S = 15.0


def cluster_rows(
    reader: Reader | None, inventory: Inventory, now: float, *, names: Sequence[str] = (), partition: str | None = None
) -> tuple[NodeRow, ...]:
    """Return the rows of the declared nodes in inventory order, then of removed nodes that still run jobs.

    Without a store every node is unknown. GPUs of ended attempts that may still run are BUSY. A reading older than
    three ticks (at least 15 s) is marked stale.

    Raises:
        UsageError: There is no such node or partition.
    """
    removed = tuple(r.declared for r in (reader.left_nodes() if reader else ()) if r.declared is not None)
    nodes = _chosen(inventory, removed, names, partition)
    records = reader.node_records() if reader else {}
    jobs = {job.id: job for job in (reader.active() if reader else ())}
    job_of_gpu = held_gpus(jobs.values())
    leftovers = uncleaned_gpus(jobs.values(), reader.ranks() if reader else [])
    slow = slow_by_node(reader)
    parts_on: dict[str, list[NodeAllocation]] = {}
    for job in jobs.values():
        for part in job.allocation.parts if job.allocation else ():
            parts_on.setdefault(part.node, []).append(part)
    reserved = by_node(reader.reservations(now), now) if reader else {}
    checks = open_conditions(reader.check_records() if reader else (), inventory.declared_checks())
    stale_after_s = max(
        3 * (reader.number("tick_s", inventory.settings.tick_s) if reader else inventory.settings.tick_s), _MIN_STALE_S
    )
    return tuple(
        _node_row(
            node,
            records.get(node.name) or NodeRecord(name=node.name, reason="not probed yet"),
            jobs,
            parts_on.get(node.name, ()),
            job_of_gpu.get(node.name, {}),
            leftovers.get(node.name, {}),
            slow.get(node.name, {}),
            now,
            stale_after_s,
            reserved.get(node.name, ()),
            tuple(condition for condition in checks if condition.node == node.name),
        )
        for node in nodes
    )


def check_rows(
    reader: Reader | None, inventory: Inventory, *, names: Sequence[str] = (), partition: str | None = None
) -> list[CheckRecord]:
    """Return what is known of each declared check on declared nodes; those that have never run included.

    Raises:
        UsageError: There is no such node or partition.
    """
    chosen = {node.name for node in _chosen(inventory, (), names, partition)}
    known = {(record.node, record.check): record for record in (reader.check_records() if reader else ())}
    return [
        known.get((node, check.name)) or CheckRecord(node=node, check=check.name)
        for node, check in inventory.declared_checks()
        if node in chosen
    ]


def failures_report(
    reader: Reader | None, inventory: Inventory, now: float, *, names: Sequence[str] = (), partition: str | None = None
) -> list[FailureRow]:
    """Return the failures on declared nodes and their GPUs, compared on all nodes.

    Raises:
        UsageError: There is no such node or partition.
    """
    from gpusched.accounting.failures import DAYS, failure_rows

    chosen = {node.name for node in _chosen(inventory, (), names, partition)}
    attempts = reader.ended_attempts(now - DAYS * 86400) if reader else ()
    return [row for row in failure_rows(attempts) if row.node in chosen]


def topology_report(
    reader: Reader | None, inventory: Inventory, *, names: Sequence[str] = (), partition: str | None = None
) -> TopologyReport:
    """Return the topology of the declared nodes, declared or else discovered, with each node's last reading.

    Only switches above the chosen nodes are included; all of them if nothing is chosen.

    Raises:
        UsageError: There is no such node or partition.
    """
    chosen = _chosen(inventory, (), names, partition)
    records = reader.node_records() if reader else {}
    topology = topology_of(inventory, records)
    racks = topology.racks()
    switch_names = {name for node in chosen if node.name in racks for name in topology.above(racks[node.name])}
    return TopologyReport(
        source="declared" if inventory.topology else "discovered" if topology else "none",
        switches=tuple(s for s in topology.switches if s.name in switch_names or len(chosen) == len(inventory.nodes)),
        nodes=tuple(_wired_node(node, records.get(node.name), racks.get(node.name)) for node in chosen),
    )


def _wired_node(node: Node, record: NodeRecord | None, switch: str | None) -> WiredNode:
    wired = WiredNode(name=node.name, partition=node.partition, switch=switch, gpus_total=node.gpus)
    if record is None or record.wiring is None:
        return wired
    wiring = record.wiring
    return msgspec.structs.replace(
        wired,
        read=True,
        islands=islands(record.links),
        domains=wiring.domains(),
        fabric_gbps=_sum(nic.rate_gbps for nic in wiring.fabric_nics()),
        gpus=wiring.gpus,
        nics=wiring.nics,
    )


def _chosen(
    inventory: Inventory, removed: tuple[Node, ...], names: Sequence[str], partition: str | None
) -> tuple[Node, ...]:
    from gpusched.model.suggest import did_you_mean

    partitions = [p.name for p in inventory.partitions]
    if partition is not None and partition not in partitions:
        raise UsageError(f"there is no partition {partition!r}{did_you_mean(partition, partitions)}")
    nodes = (*inventory.nodes, *(node for node in removed if inventory.node(node.name) is None))
    known = [node.name for node in nodes]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no node {name!r}{did_you_mean(name, known)}")
    return tuple(n for n in nodes if (not names or n.name in names) and partition in (None, n.partition))


def _node_row(
    node: Node,
    record: NodeRecord,
    jobs: Mapping[str, JobRecord],
    parts: Sequence[NodeAllocation],
    held: Mapping[int, tuple[str, ...]],
    leftovers: Mapping[int, str],
    slow: Mapping[int, str],
    now: float,
    stale_after_s: float,
    reserved: Sequence[Reservation],
    checks: tuple[CheckCondition, ...],
) -> NodeRow:
    reading = record.reading
    silent = record.state in _SILENT
    found = {gpu.index: gpu for gpu in reading.gpus} if reading else {}
    statuses = gpu_states(node, None if silent else reading, held, record.health.conditions)
    conditions = record.health.conditions
    notes = {i: "; ".join(text_of(c) for c in conditions if c.index == i) for i in node.indices()}
    gpus = tuple(
        _gpu_row(s, found.get(s.index), jobs, leftovers, notes[s.index] or slow.get(s.index, ""), silent)
        for s in statuses
    )
    age = None if record.last_seen is None else max(0.0, now - record.last_seen)
    in_service = record.state not in NOT_FOR_NEW_JOBS
    return NodeRow(
        name=node.name,
        partition=node.partition,
        state=record.state,
        reason=record.reason,
        gpus_total=len(gpus),
        gpus_free=sum(gpu.state is GpuState.FREE for gpu in gpus) if in_service else 0,
        power_w=_sum(gpu.power_w for gpu in gpus),
        power_limit_w=_sum(gpu.power_limit_w for gpu in gpus),
        rated_power_w=node.rated_power_w,
        cores_total=node.cores,
        cores_free=max(0, node.cores - sum(p.cores for p in parts)) if in_service else 0,
        memory_total_mib=node.memory_mib,
        memory_free_mib=max(0, node.memory_mib - sum(p.memory_mib for p in parts)) if in_service else 0,
        load1=None if silent or reading is None else reading.load1,
        disk_free_mib=None if silent or reading is None else reading.disk_free_mib,
        clock_skew_s=reading.clock_skew_s if reading else None,
        source=reading.source if reading else "none",
        driver_version=reading.driver_version if reading else None,
        runtime_error=reading.runtime_error if reading else None,
        last_seen=record.last_seen,
        age_s=age,
        stale=age is not None and age > stale_after_s,
        gpus=gpus,
        slices=_slice_counts(gpus, in_service),
        reserved=_reservation_text(reserved[0], now) if reserved else None,
        conditions=(*(condition_row(condition, node) for condition in conditions), *map(_check_row, checks)),
    )


def _check_row(found: CheckCondition) -> ConditionRow:
    return ConditionRow(
        condition=found.kind, action=HealthAction(found.then), since=found.since, last_seen=found.last_seen,
        detail=found.detail, check=found.check,
    )  # fmt: skip


def condition_row(condition: Condition, node: Node) -> ConditionRow:
    """Return a condition with what follows from it on its node, and what to do."""
    kind = KIND.get(condition.kind)
    return ConditionRow(
        condition=condition.kind, gpu=condition.index, uuid=condition.gpu, since=condition.since,
        action=action_of(condition.kind, node.health), last_seen=condition.last_seen, detail=text_of(condition),
        advice=kind.advice if kind is not None else "", job=condition.job,
    )  # fmt: skip


def _slice_counts(gpus: Iterable[GpuRow], in_service: bool) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for one in (one for gpu in gpus for one in gpu.slices):
        free, total = found.get(one.profile, (0, 0))
        found[one.profile] = free + (one.state is GpuState.FREE and in_service), total + 1
    return found


def _reservation_text(reservation: Reservation, now: float) -> str:
    owners = ", ".join((*reservation.users, *reservation.groups))
    details = "; ".join(filter(None, (f"for {owners}" if owners else "", reservation.reason)))
    return f"{reservation.what} {reservation.when(now)}" + (f": {details}" if details else "")


def slow_by_node(reader: Reader | None) -> dict[str, dict[int, str]]:
    """Return node -> GPU index -> how much slower it is than GPUs of its type, for slow GPUs only."""
    if reader is None or not (paces := reader.paces()):
        return {}
    from gpusched.sched.interference.gpus import slow_gpus

    found: dict[str, dict[int, str]] = {}
    for gpu in slow_gpus(paces):
        found.setdefault(gpu.node, {})[gpu.index] = gpu.line
    return found


def _gpu_row(
    status: GpuStatus,
    gpu: Gpu | None,
    jobs: Mapping[str, JobRecord],
    leftovers: Mapping[int, str],
    note: str,
    silent: bool,
) -> GpuRow:
    state, reason, leftover = status.state, status.reason or note, leftovers.get(status.index)
    if silent:
        reason = "node does not respond" if gpu is not None else reason
    elif leftover and state is GpuState.FREE:
        state, reason = GpuState.BUSY, leftover
    job, partner = (jobs.get(name) if name else None for name in (status.job_id, status.partner_id))
    row = GpuRow(
        index=status.index,
        uuid=gpu.uuid if gpu else None,
        name=gpu.name if gpu else None,
        state=state,
        reason=reason,
        job=status.job_id,
        user=job.user if job else None,
        shared_with=status.partner_id,
        shared_user=partner.user if partner else None,
        memory_total_mib=gpu.memory_total_mib if gpu else None,
    )
    if gpu is None or silent:
        return row
    return msgspec.structs.replace(
        row,
        memory_used_mib=gpu.memory_used_mib,
        utilization_pct=gpu.utilization_pct,
        power_w=gpu.power_w,
        power_limit_w=gpu.power_limit_w,
        temperature_c=gpu.temperature_c,
        energy_j=gpu.energy_j,
        ecc_errors=gpu.ecc_errors,
        mig_mode=gpu.mig_mode,
        processes=gpu.processes,
        slices=tuple(_slice_row(one, gpu, jobs, leftovers.get(one.index)) for one in status.slices),
    )


def _slice_row(status: GpuStatus, gpu: Gpu, jobs: Mapping[str, JobRecord], leftover: str | None) -> SliceRow:
    state, reason = status.state, status.reason
    if leftover and state is GpuState.FREE:
        state, reason = GpuState.BUSY, leftover
    job = jobs.get(status.job_id) if status.job_id else None
    one = next(one for one in gpu.slices if one.number == status.index)
    return SliceRow(
        label=gpu_label(status.index, status.profile), profile=status.profile, start=one.start, uuid=one.uuid,
        state=state, reason=reason, job=status.job_id, user=job.user if job else None,
        memory_total_mib=one.memory_mib, memory_used_mib=one.memory_used_mib,
    )  # fmt: skip


def _sum(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def flavor_rows(inventory: Inventory, rows: Sequence[NodeRow], partition: str | None = None) -> tuple[FlavorRow, ...]:
    """Return the flavors (of one partition) and how many jobs of each, counted alone, fit on free resources."""
    return tuple(
        _flavor_row(flavor, p, [row for row in rows if row.partition == p.name])
        for p in inventory.partitions
        if partition in (None, p.name)
        for flavor in p.flavors
    )


def _flavor_row(flavor: Flavor, partition: Partition, rows: Sequence[NodeRow]) -> FlavorRow:
    nodes = flavor_nodes(flavor, partition.nodes)
    totals = [sum(f) for f in zip(*((n.gpus, n.cores, n.memory_mib) for n in partition.nodes), strict=True)]
    requested = (flavor.gpus, flavor.cores, flavor.memory_mib)
    return FlavorRow(
        partition=partition.name,
        flavor=flavor.name,
        gpus=flavor.gpus,
        cores=flavor.cores,
        memory_mib=flavor.memory_mib,
        time_limit_s=flavor.time_limit_s,
        nodes=nodes,
        share=max((w / t for w, t in zip(requested, totals, strict=False) if t), default=0.0),
        free_now=_fitting(tuple(w // nodes for w in requested), nodes, rows) if nodes else 0,
    )


def _fitting(part: tuple[int, ...], nodes: int, rows: Sequence[NodeRow]) -> int:
    """Return how many gangs of ``nodes`` equal parts on distinct nodes fit at once."""
    capacity = [_room(part, row) for row in rows if row.state not in NOT_FOR_NEW_JOBS]
    gangs = 0
    while sum(min(r, gangs + 1) for r in capacity) >= (gangs + 1) * nodes:
        gangs += 1
    return gangs


def _room(part: tuple[int, ...], row: NodeRow) -> int:
    free = (row.gpus_free, row.cores_free, row.memory_free_mib)
    return min((f // p for f, p in zip(free, part, strict=True) if p), default=0)
