"""Usage rows of the time between two readings of a node: GPU seconds, joules, utilization, by holder.

A job is charged its own GPUs, never the whole host; while two share a GPU each is charged half of all that it does.
Energy is the difference of NVML's counters; where a GPU has no counter (or the counter went back: the driver was
reloaded) power is integrated by the trapezoid rule; where neither is known, the GPU seconds count as unknown, never as
zero joules.

A gap of more than a day without readings has one row for each whole hour, as old usage is kept, up to its last day.

A slice counts as its share of its GPU, in GPU seconds and in energy: NVML measures the GPU only. What no held slice of
a cut GPU covers counts as a GPU that no job holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import add
from typing import TypeVar

import msgspec

from gpusched.model.idle import IDLE_BELOW, IdleRules
from gpusched.model.jobs import JobRecord, parse_container_name
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node
from gpusched.model.slices import gpu_of, is_slice
from gpusched.model.slicetables import gpus_counted
from gpusched.queue.store import UsageRow

BUCKET_S, HOUR_S, DAY_S = 300, 3600, 86400
MAX_GAP_S = 30 * DAY_S  # of two readings further apart nothing is recorded: reports count that time as not measured
MAX_POWER_GAP_S = 60.0  # two power readings further apart say nothing of the time between them
_NO_RULES = IdleRules()
_AMOUNTS = UsageRow.__struct_fields__[5:]
_Key = TypeVar("_Key")


class GpuHolding(msgspec.Struct, frozen=True):
    """A GPU that a job holds until ``end`` (Unix seconds); ``shares``: another job may share it.

    ``begin``: not before; of a job of Slurm, which starts between readings. ``below``: utilization that counts as idle.
    ``part``: of a slice, its share of the GPU.
    """

    job_id: str
    user: str
    end: float
    shares: bool = False
    begin: float = float("-inf")
    below: float = IDLE_BELOW
    part: float = 1.0


def holdings(
    node: str, jobs: Iterable[JobRecord], now: float, rules: IdleRules = _NO_RULES
) -> dict[int, list[GpuHolding]]:
    """Return GPU index, or number of a slice -> its holders, by end.

    A job holds its GPUs from its allocation on, the pulling of its image included. Allocations are made right after a
    reading, so between two readings a holder begins where the one before it ends, or with the span; of jobs that share
    two at a time. Slurm's jobs begin when it says.

    ``jobs``: those that hold something, or have let go since the last reading (``end_time`` says when).
    """
    held: dict[int, list[GpuHolding]] = {}
    for job in jobs:
        begin = job.start_time if job.slurm is not None and job.start_time is not None else float("-inf")
        end = now if job.end_time is None else job.end_time
        below = rules.below if job.spec.session is None else rules.sessions_below
        share = gpus_counted(1, job.spec.profile)
        holding = GpuHolding(job.id, job.user, end, bool(job.spec.share), begin, below, share)
        for part in job.allocation.parts if job.allocation else ():
            if part.node == node:
                for gpu in part.gpus:
                    held.setdefault(gpu, []).append(holding)
    for holders in held.values():
        holders.sort(key=lambda holding: holding.end)
    return held


class Counters:
    """Last known energy counters: since counters are cumulative, a reading without them loses no joules."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[str | None, Gpu]] = {}

    def bridged(self, node: str, before: NodeReading | None, after: NodeReading) -> NodeReading | None:
        """Return ``before`` with missing counters filled in from earlier readings of the same boot; store both."""
        if before is None:
            return None
        self._learn(node, before)
        found = {gpu.index: gpu for gpu in before.gpus}
        span, same_boot = after.time - before.time, before.boot_id == after.boot_id
        for gpu in after.gpus:
            boot, known = self._known.get((node, gpu.index), (None, None))
            was = found.get(gpu.index, Gpu(index=gpu.index))
            if known is not None and was.energy_j is None and boot == before.boot_id:
                found[gpu.index] = msgspec.structs.replace(was, uuid=known.uuid, energy_j=known.energy_j)
            if gpu.energy_j is None and _energy_j(was, gpu, span, same_boot) is not None:
                self._known.pop((node, gpu.index), None)  # this time is counted by power: not by the counter, too
        self._learn(node, after)
        return msgspec.structs.replace(before, gpus=tuple(found.values()))

    def _learn(self, node: str, reading: NodeReading) -> None:
        for gpu in reading.gpus:
            if gpu.energy_j is not None:
                self._known[node, gpu.index] = (reading.boot_id, gpu)


def usage_between(
    node: Node, before: NodeReading | None, after: NodeReading, held: Mapping[int, list[GpuHolding]]
) -> list[UsageRow]:
    """Return usage rows of one node between two readings, split by buckets.

    Of the node's GPUs only declared ones count. ``held``: see `holdings`.
    """
    span = after.time - before.time if before is not None else 0.0
    if before is None or not 0 < span <= MAX_GAP_S:
        return []
    earlier = {gpu.index: gpu for gpu in before.gpus}
    same_boot = before.boot_id == after.boot_id
    users: dict[str, str] = {}
    rates: dict[tuple[float, float, str], list[float]] = {}  # (begin, end, job) -> amounts a second, as a row has them
    for gpu in after.gpus:
        if gpu.index not in node.indices():
            continue
        was = earlier.get(gpu.index)
        joules = _energy_j(was, gpu, span, same_boot)
        use = utilization_between(was, gpu, span)
        per_s = (1.0, (joules or 0.0) / span, float(joules is None), use or 0.0, float(use is not None))
        for left, right, holder, share in _parts(gpu.index, before.time, after.time, held):
            job_id, below = (holder.job_id, holder.below) if holder else ("", IDLE_BELOW)
            users[job_id] = holder.user if holder else ""
            amounts = [share * amount for amount in per_s]
            amounts += amounts[:3] if use is not None and use < below else (0.0, 0.0, 0.0)
            _add(rates, (left, right, job_id), amounts)
    sums: dict[tuple[int, str], list[float]] = {}
    buckets = list(_buckets(before.time, after.time))
    for (left, right, job_id), amounts in rates.items():
        for bucket, following in buckets:
            seconds = min(right, following) - max(left, bucket)
            if seconds > 0:
                _add(sums, (bucket, job_id), [seconds * amount for amount in amounts])
    return [
        UsageRow(
            bucket=bucket, node=node.name, job_id=job_id, user=users[job_id], partition=node.partition,
            **dict(zip(_AMOUNTS, amounts, strict=True)),
        )
        for (bucket, job_id), amounts in sums.items()
    ]  # fmt: skip


def _add(sums: dict[_Key, list[float]], key: _Key, amounts: list[float]) -> None:
    found = sums.get(key)
    sums[key] = amounts if found is None else list(map(add, found, amounts))


def charged_after(row: UsageRow, start: float, end: float, until: float) -> UsageRow | None:
    """Return the part of a job's row that is of the time after its end; None: nothing is.

    ``until``: up to there it was charged, or the job's next row on the node begins. In a bucket what it did is taken
    as even.
    """
    begin, last = max(row.bucket, start), min(row.bucket + (BUCKET_S if row.bucket % HOUR_S else HOUR_S), until)
    if last <= max(begin, end):
        return None
    part = (last - max(begin, end)) / (last - begin)
    names = ("bucket", "node", "job_id", "user", "partition")
    sums = {name: part * value for name, value in msgspec.structs.asdict(row).items() if name not in names}
    return msgspec.structs.replace(row, **sums)


def _energy_j(was: Gpu | None, gpu: Gpu, span_s: float, same_boot: bool) -> float | None:
    if was is None or was.uuid != gpu.uuid:
        return None
    if was.energy_j is not None and gpu.energy_j is not None and gpu.energy_j >= was.energy_j and same_boot:
        return gpu.energy_j - was.energy_j
    if was.power_w is not None and gpu.power_w is not None and span_s <= MAX_POWER_GAP_S:
        return (was.power_w + gpu.power_w) / 2 * span_s
    return None


def utilization_between(was: Gpu | None, gpu: Gpu, span_s: float) -> float | None:
    """Return a GPU's utilization (0..1) between two readings, the one measure of idleness; None: not known."""
    if span_s > MAX_POWER_GAP_S:
        return None
    known = [g.utilization_pct for g in (was, gpu) if g is not None and g.utilization_pct is not None]
    return sum(known) / len(known) / 100 if known else None


def own_utilization(was: Gpu | None, gpu: Gpu, span_s: float, job_id: str) -> float | None:
    """Return `utilization_between` of one job on a GPU that it shares, by process; None: not known."""
    known = [use for g in (was, gpu) if g is not None and (use := _of_processes(g, job_id)) is not None]
    return sum(known) / 2 / 100 if len(known) == 2 and span_s <= MAX_POWER_GAP_S else None


def _of_processes(gpu: Gpu, job_id: str) -> float | None:
    """Return the utilization (%) of a job's processes; None: it has none there, or one has no figure."""
    names = [(process, parse_container_name(process.container or "")) for process in gpu.processes]
    own = [process.utilization_pct for process, name in names if name is not None and name[0] == job_id]
    if own and len(own) == len(gpu.processes):
        return gpu.utilization_pct
    known = [use for use in own if use is not None]
    return sum(known) if own and len(known) == len(own) else None


def _parts(
    index: int, begin: float, end: float, held: Mapping[int, list[GpuHolding]]
) -> Iterator[tuple[float, float, GpuHolding | None, float]]:
    """Yield the time of a GPU as `_split` does; of one that is cut, each slice's by its share, and then the rest."""
    on = (holders for number, holders in held.items() if is_slice(number) and gpu_of(number) == index)
    # Those that let go before may have left a GPU that is whole again.
    slices = [there for holders in on if (there := [h for h in holders if h.begin < end and begin < h.end])]
    rest = 1.0
    for holders in slices:
        share = min(rest, max(holding.part for holding in holders))
        rest -= share
        yield from _split(begin, end, holders, share)
    if rest > 0:
        yield from _split(begin, end, held.get(index, []), rest)


def _split(
    begin: float, end: float, held: list[GpuHolding], share: float
) -> Iterator[tuple[float, float, GpuHolding | None, float]]:
    """Split [begin, end) at changes of holder; yield begin, end, holder or None, its share."""
    cuts = {begin, end, *(cut for h in held for cut in (h.begin, h.end) if begin < cut < end)}
    for left, right in pairwise(sorted(cuts)):
        middle = (left + right) / 2
        first, second = (*(h for h in held if h.begin <= middle < h.end), None, None)[:2]
        both = (first, second) if first and second and first.shares and second.shares else (first,)
        yield from ((left, right, one, share / len(both)) for one in both)


def _buckets(begin: float, end: float) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the buckets of [begin, end): whole hours that ended a day before its end are one."""
    at = int(begin // BUCKET_S) * BUCKET_S
    while at < end:
        is_hour = at % HOUR_S == 0 and begin <= at and at + HOUR_S <= end - DAY_S
        following = at + (HOUR_S if is_hour else BUCKET_S)
        yield at, following
        at = following


def add_usage_rows(a: UsageRow, b: UsageRow) -> UsageRow:
    """Return the sums of both, with the keys of the first."""
    return msgspec.structs.replace(
        a,
        gpu_s=a.gpu_s + b.gpu_s,
        energy_j=a.energy_j + b.energy_j,
        energy_unknown_s=a.energy_unknown_s + b.energy_unknown_s,
        util_s=a.util_s + b.util_s,
        util_known_s=a.util_known_s + b.util_known_s,
        idle_s=a.idle_s + b.idle_s,
        idle_energy_j=a.idle_energy_j + b.idle_energy_j,
        idle_energy_unknown_s=a.idle_energy_unknown_s + b.idle_energy_unknown_s,
    )
