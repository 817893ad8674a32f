"""Collect metrics from the store: the state of jobs, nodes and quotas, and the totals that the controller keeps."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from gpusched import __version__
from gpusched.config.paths import write_atomic
from gpusched.model.backups import BACKUP_META, backup_result
from gpusched.model.gpustates import GpuStatus, gpu_states, plain_states
from gpusched.model.healthchecks import open_conditions
from gpusched.model.metrics import Family, MetricTotals, UsageTotal, family
from gpusched.model.readings import GpuState, NodeState
from gpusched.model.slices import is_slice
from gpusched.model.slicetables import gpus_counted
from gpusched.queue.clock import ANCHOR, now_by
from gpusched.queue.lastgood import Declared, kept_declarations
from gpusched.queue.lease import STANDBYS
from gpusched.queue.metrics import NodeFigures, ReadingFigures
from gpusched.queue.quotas import QuotaLedger, recent_quota_usage
from gpusched.queue.snapshots import held_gpus
from gpusched.queue.store import INVENTORY_TROUBLE, Reader

T = TypeVar("T")
_SILENT = frozenset({NodeState.DOWN, NodeState.UNKNOWN})
_OF_NODES = ("node_up", "node_gpus", "node_gpus_allocated", "node_gpu_utilization_ratio", "node_gpu_power_watts")
_RESOURCES = {"gpus": "gpus", "jobs": "jobs", "gpu_s": "gpu_seconds"}


def collect(reader: Reader | None) -> list[Family]:
    """Return all metrics; without a store those of an installation that has not run yet."""
    found = [family("build_info", [((__version__,), 1.0)])]
    if reader is None:
        return found
    with _without_collector():
        return [*found, *_families(reader)]


def _families(reader: Reader) -> Iterator[Family]:
    declared, totals = kept_declarations(reader), reader.metric_totals() or MetricTotals(seq=0)
    for part in (
        _controller(reader, totals), _jobs(reader, totals), _nodes(reader, totals), _usage(reader.usage_totals()),
        _quotas(reader, declared), _agents(reader, totals), _deliveries(reader),
    ):  # fmt: skip
        yield from part


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the cyclic collector from going through the readings of all GPUs again and again: they have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _controller(reader: Reader, totals: MetricTotals) -> Iterator[Family]:
    heartbeat = reader.number("heartbeat", 0.0)
    if heartbeat:  # its clock may differ from this machine's wall clock, which others compare it with
        age = max(0.0, now_by(reader.meta(ANCHOR)) - heartbeat)
        yield family("controller_last_cycle_timestamp_seconds", [((), time.time() - age)])
    yield family("controller_standbys", [((), float(len((reader.meta(STANDBYS) or "").split())))])
    yield family("controller_cycle_seconds", [((), totals.cycles)])
    yield family("controller_phase_seconds", (((name,), s) for name, s in sorted(totals.phases.items())))
    yield family("inventory_valid", [((), 0.0 if reader.meta(INVENTORY_TROUBLE) else 1.0)])
    if (backup := backup_result(reader.meta(BACKUP_META))) is not None:
        yield family("backup_last_success_timestamp_seconds", [((), backup.made)] if backup.made is not None else [])
        yield family("backup_failed", [((), float(backup.error != ""))])


def _jobs(reader: Reader, totals: MetricTotals) -> Iterator[Family]:
    pending = reader.pending_sums()
    gpus: Counter[str] = Counter()
    for one in pending:
        gpus[one.partition] += one.gpus
    yield family("jobs", sorted(reader.unended_counts().items()))
    yield family("pending_jobs", (((one.partition, one.reason or "None"), one.jobs) for one in pending))
    yield family("pending_gpus", _by_partition(gpus))
    yield family("job_submissions", _by_partition(totals.submitted))
    yield family("job_starts", _by_partition(totals.started))
    yield family("job_ends", _by_two(totals.ended))
    yield family("job_requeues", _by_two(totals.requeued))
    yield family("job_wait_seconds", _by_partition(totals.waits))


def _nodes(reader: Reader, totals: MetricTotals) -> Iterator[Family]:
    held = held_gpus(reader.gpu_holders())
    states: Counter[tuple[str, str]] = Counter()
    gpus: Counter[tuple[str, str, str]] = Counter()
    slices: Counter[tuple[str, str, str]] = Counter()
    conditions: Counter[tuple[str, str, str]] = Counter()
    of_nodes: dict[str, list[tuple[tuple[str, str], float]]] = {name: [] for name in _OF_NODES}
    records = reader.node_figures()
    for record in records:
        node = record.declared
        if node is None:  # it was in the inventory of an earlier version
            continue
        reading = None if record.state in _SILENT else record.reading
        on_node = held.get(record.name, {})
        states[node.partition, record.state] += 1
        states_of_gpus, parts = _states(reader, record, reading, on_node)
        for state in states_of_gpus:
            gpus[node.partition, node.gpu_type, state] += 1
        for part in parts:
            slices[node.partition, part.profile, part.state] += 1
        for condition in record.health.conditions:
            conditions[record.name, node.partition, condition.kind] += 1
        allocated = float(sum(not is_slice(number) for number in on_node))
        allocated += sum(gpus_counted(1, part.profile) for part in parts if part.index in on_node)
        values = (float(record.state not in _SILENT), node.gpus, allocated, *_measured(reading))
        for name, value in zip(_OF_NODES, values, strict=True):
            if value is not None:
                of_nodes[name].append(((record.name, node.partition), value))
    yield family("nodes", sorted(states.items()))
    yield family("gpus", sorted(gpus.items()))
    yield family("slices", sorted(slices.items()))
    declared = {r.name: r.declared for r in records if r.declared is not None}
    checks = ((name, check) for name, node in declared.items() for check in node.health_checks)
    for found in open_conditions(reader.check_records(), checks):
        conditions[found.node, declared[found.node].partition, found.kind] += 1
    yield family("node_conditions", sorted(conditions.items()))
    for name, samples in of_nodes.items():
        yield family(name, samples)
    yield family("node_failures", _by_partition(totals.nodes_down))
    yield family("gpu_failures", _by_partition(totals.gpus_lost))


def _states(
    reader: Reader, record: NodeFigures, reading: ReadingFigures | None, held: Mapping[int, tuple[str, ...]]
) -> tuple[list[GpuState], tuple[GpuStatus, ...]]:
    """Return the states of a node's GPUs, and its slices; the whole record is read only if something is odd."""
    node = record.declared
    assert node is not None
    if reading is not None and reading.source != "none" and not record.health.conditions:
        indices = node.gpu_indices if node.gpu_indices is not None else tuple(range(node.gpus))
        plain = plain_states(indices, {gpu.index: gpu for gpu in reading.gpus}, held)
        if plain is not None:
            return plain, ()
    whole = reader.node_record(record.name)
    if whole is None or whole.declared is None:
        return [], ()  # removed meanwhile
    found = gpu_states(whole.declared, whole.reading if reading is not None else None, held, whole.health.conditions)
    return [status.state for status in found], tuple(one for status in found for one in status.slices)


def _measured(reading: ReadingFigures | None) -> tuple[float | None, float | None]:
    """Return the mean utilization (0..1) and the power in watts of a node's GPUs; None: not known."""
    gpus = reading.gpus if reading is not None else ()
    use = [gpu.utilization_pct for gpu in gpus if gpu.utilization_pct is not None]
    power = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    return sum(use) / len(use) / 100 if use else None, sum(power) if power else None


def _usage(totals: list[UsageTotal]) -> Iterator[Family]:
    held, others = ([one for one in totals if one.held is whether] for whether in (True, False))
    yield family("gpu_allocated_seconds", (((one.partition,), one.gpu_s) for one in held))
    yield family("gpu_unallocated_seconds", (((one.partition,), one.gpu_s) for one in others))
    yield family("gpu_held_idle_seconds", (((one.partition,), one.idle_s) for one in held))
    yield family("gpu_measured_seconds", (((one.partition,), one.util_known_s) for one in held))
    yield family("gpu_utilized_seconds", (((one.partition,), one.util_s) for one in held))
    holders = (((one.partition, "job" if one.held else "none"), one.energy_j) for one in totals)
    yield family("gpu_energy_joules", holders)


def _quotas(reader: Reader, declared: Declared | None) -> Iterator[Family]:
    """Yield limits of groups and classes with their use; limits of users would be a series for each of them."""
    quotas = declared.inventory.quotas if declared is not None else None
    if not quotas:
        return
    now = now_by(reader.meta(ANCHOR))
    ledger = QuotaLedger(quotas, reader.active(), recent_quota_usage(reader, quotas, now), now)
    for group in quotas.groups.groups:
        ledger.of_kind("", group.name, "")
    for qos in quotas.qos:
        ledger.of_kind("", "", qos.name)
    bounds = {}
    for bound in ledger.bounds():
        user, group_name, qos_name = bound.rule.key
        if not user and (group_name or qos_name):
            kind = "class" if qos_name else "group"
            bounds[kind, qos_name or group_name, _RESOURCES[bound.rule.unit]] = bound
    yield family("quota_limit", ((key, bound.rule.limit) for key, bound in sorted(bounds.items())))
    yield family("quota_used", ((key, bound.used) for key, bound in sorted(bounds.items())))


def _agents(reader: Reader, totals: MetricTotals) -> Iterator[Family]:
    out = reader.fallbacks()
    known = sorted({*totals.decisions, *totals.fallbacks, *out})
    yield family("agent_fallback", (((name,), float(name in out)) for name in known))
    yield family("agent_fallbacks", _by_partition(totals.fallbacks))
    yield family("agent_decision_seconds", _by_partition(totals.decisions))
    yield family("agent_late_decisions", _by_partition(totals.late))


def _deliveries(reader: Reader) -> Iterator[Family]:
    yield family("notices_failed", [((), len(reader.failed_notices()))])
    last = reader.latest_event()
    yield family("events_unsent", (((name,), last - seq) for name, seq in sorted(reader.event_positions().items())))


def _by_partition(values: Mapping[str, T]) -> list[tuple[tuple[str, ...], T]]:
    return [((name,), value) for name, value in sorted(values.items())]


def _by_two(values: Mapping[str, Mapping[str, int]]) -> list[tuple[tuple[str, ...], float]]:
    return [((name, key), count) for name, counts in sorted(values.items()) for key, count in sorted(counts.items())]


def write_textfile(path: str, text: str) -> None:
    """Replace a file atomically, readable by all: the collector never sees a part of it.

    Raises:
        OSError: It cannot be written; an earlier file remains.
    """
    write_atomic(Path(path), text.encode(), 0o644)  # its draft is not read: the collector reads *.prom only
