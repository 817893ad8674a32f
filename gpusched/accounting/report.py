"""The power report, from runs and usage rows: usage, waste and cost.

Utilization is Eq. 4 of the GIST paper (Narantuya et al., CMC 2022), ``U = sum(lambda * tau) / (R * T)`` with R = 1:

- ``lambda`` is `RunRecord.share`, the job's dominant share of its partition; ``tau`` its run time inside the window.
- ``T`` is Eq. 3: a partition's run time begins with the first start it ever saw, so its window is
  [max(since, first start ever), until]. A partition that never started a job has no U; its energy is still reported.
- A node's lambda is the run's share of the partition times the part of the run that is on the node, over the node's
  part of the partition; so the partition's U is the mean of its nodes', weighted by their GPUs.
- While two jobs share a GPU each has half of that time: of GPU hours, of energy, and lambda with them.
- A user's or job's figure is its part of the sum, and so is the total's: partitions weighted by GPUs times T.

Inefficient energy is capacity in kW times hours times (1 - U): what the rated power of the unused part amounts to. For
the paper's DGX A100 of 6.5 kW, a month of 720 h at U = 0.75: 6.5 * 720 * 0.25 = 1170 kWh.

Measured figures are NVML's. Energy counts every GPU of a partition or node, held or not, and only the GPUs held for
users and jobs. Where part of the GPU time has no measurement, the energy is a lower bound and the part is reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpusched.accounting.held_idle import HELD_IDLE_AFTER_S, held_idle
from gpusched.accounting.usage import BUCKET_S, add_usage_rows
from gpusched.config.validate import known_partition
from gpusched.errors import UsageError
from gpusched.model.jobs import JobRecord
from gpusched.model.reports import By, HeldIdle, PowerReport, PowerRow
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.model.units import parse_duration, parse_time
from gpusched.queue.overlaps import HeldGpus, overlaps
from gpusched.queue.store import Reader, RunRecord, UsageRow

_J_PER_KWH = 3.6e6
_FINE_S = 86400.0
_LATELY = "30d"
_UNMEASURED_TOLERANCE = 0.02  # the first and last tick of a window are never whole


class Window(msgspec.Struct, frozen=True):
    """[start, end) in Unix seconds; ``started`` is False for a partition that never started a job (no T, no U)."""

    start: float
    end: float
    started: bool = True

    @property
    def hours(self) -> float:
        """Return its length."""
        return max(0.0, self.end - self.start) / 3600

    def overlap_s(self, run: RunRecord) -> float:
        """Return the seconds of a run (Eq. 2's tau: until now while it runs) inside the window."""
        end = self.end if run.end_time is None else min(run.end_time, self.end)
        return max(0.0, end - max(run.start_time, self.start))


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Values shared by all rows of a report; ``weights``: partition -> GPUs (nodes where none has GPUs)."""

    partitions: tuple[Partition, ...]
    windows: Mapping[str, Window]
    weights: Mapping[str, float]
    price: float | None
    asked_s: float

    @property
    def capacity_s(self) -> float:
        """Return the weighted T of all partitions that ever started a job."""
        return sum(self.weights[p] * w.hours * 3600 for p, w in self.windows.items() if w.started)


class _Sums(msgspec.Struct):
    """The sums of one row."""

    partition: str | None = None
    user: str | None = None
    gpu_s: float = 0.0
    share_s: float = 0.0  # lambda * tau, in the row's own partition or node
    weighted_share_s: float = 0.0  # in its partition, times the partition's weight
    usage: UsageRow = UsageRow(bucket=0, node="", job_id="", user="", partition="")
    held_known_s: float = 0.0
    held_idle_s: float = 0.0
    idle_energy_j: float = 0.0
    idle_energy_unknown_s: float = 0.0


def parse_since(text: str | None, now: float) -> float:
    """Parse ``--since`` into Unix seconds: a duration before now (``7d``), ``all``, or a time; None: `_LATELY`.

    Raises:
        UsageError: None of them, or in the future.
    """
    text = _LATELY if text is None else text
    since = 0.0 if text == "all" else _parse_past("--since", text, now, "12h, 7d, all or 2026-11-20T18:00")
    if since >= now:
        raise UsageError(f"--since {text!r} is in the future", "for example 7d")
    return max(0.0, since)


def parse_period(since: str, until: str | None, now: float) -> tuple[float, float]:
    """Parse ``--since`` and ``--until`` into Unix seconds; without ``--until`` the period has no end.

    Raises:
        UsageError: One of them is neither a duration before now nor a time, or nothing is between them.
    """
    begin = parse_since(since, now)
    end = math.inf if until is None else _parse_past("--until", until, now, "12h, 7d or 2026-11-20T18:00")
    if end <= begin:
        raise UsageError(f"--until {until} is before --since {since}", "choose a later one")
    return begin, end


def _parse_past(option: str, text: str, now: float, examples: str) -> float:
    try:
        return now - parse_duration(text)
    except ValueError:
        pass
    try:
        return parse_time(text, now)
    except ValueError:
        raise UsageError(f"{option} {text!r} is neither a time nor a span", f"for example {examples}") from None


def power_report(
    reader: Reader | None, inventory: Inventory, *, since: float, until: float, by: By, partition: str | None = None
) -> PowerReport:
    """Build the report from the store.

    Args:
        reader: The store, or None where there is none yet.
        inventory: For capacities, rated power and the price.
        since: Unix seconds; where nothing was recorded yet, the report begins with the first record.
        until: Unix seconds.
        by: What a row is.
        partition: Only this one.

    Raises:
        UsageError: There is no such partition.
    """
    chosen = inventory.partitions if partition is None else (known_partition(inventory, partition),)
    if reader is None:
        return summarize(inventory, chosen, [], [], firsts={}, since=since, until=until, by=by)
    runs = reader.runs(since, until)
    firsts = reader.first_starts()
    bucket_s = BUCKET_S if until - since < _FINE_S else 3600  # old usage is kept by the hour
    first_bucket = int(since // bucket_s) * bucket_s
    usage = reader.usage_by_job(first_bucket, until)
    if partition is not None:
        runs = [run for run in runs if run.partition == partition]
        usage = [row for row in usage if row.partition == partition]
    first = min((row.bucket for row in usage), default=first_bucket)
    oldest = [row for row in reader.usage(first, first + 1) if partition in (None, row.partition)]
    since = max(since, min([_first_measured(inventory, oldest, until), *firsts.values()]))
    report = summarize(inventory, chosen, runs, usage, firsts=firsts, since=since, until=until, by=by)
    active = [job for job in reader.active() if partition in (None, job.spec.partition)]
    made_up = {r.name for r in reader.node_records().values() if r.reading and r.reading.source == "simulated"}
    simulated = tuple(n.name for p in chosen for n in p.nodes if n.name in made_up)
    idle = _held_idle(reader, active, first_bucket, until)
    return msgspec.structs.replace(report, held_idle=idle, simulated=simulated)


def _held_idle(reader: Reader, active: list[JobRecord], first_bucket: int, until: float) -> tuple[HeldIdle, ...]:
    """Return what `held_idle` does from ``first_bucket`` on; only of jobs that are idle now all usage is read."""
    recent = reader.usage(max(first_bucket, until - HELD_IDLE_AFTER_S - 3 * BUCKET_S), until)
    usage = [row for now_idle in held_idle(active, recent, until) for row in reader.usage_of_job(now_idle.job)]
    return held_idle(active, (row for row in usage if first_bucket <= row.bucket < until), until)


def _first_measured(inventory: Inventory, oldest: list[UsageRow], until: float) -> float:
    """Return when measuring began: the oldest bucket's end less its measured time, since it may not be full."""
    if not oldest:
        return until
    bucket = oldest[0].bucket
    seconds: dict[str, float] = defaultdict(float)
    for row in oldest:
        seconds[row.node] += row.gpu_s / max(1, node.gpus if (node := inventory.node(row.node)) else 1)
    return max(float(bucket), min(bucket + BUCKET_S, until) - max(seconds.values()))


def summarize(
    inventory: Inventory,
    partitions: tuple[Partition, ...],
    runs: Iterable[RunRecord],
    usage: list[UsageRow],
    *,
    firsts: Mapping[str, float],
    since: float,
    until: float,
    by: By,
) -> PowerReport:
    """Compute the report on ``partitions`` from runs and usage rows within [since, until).

    ``firsts``: partition -> first start ever (Unix seconds), where known to be other than ``since`` or later.
    """
    windows = {p.name: _window(firsts.get(p.name), since, until) for p in partitions}
    price, asked_s = inventory.settings.power_price_per_kwh, until - since
    frame = _Frame(partitions=partitions, windows=windows, weights=_weights(partitions), price=price, asked_s=asked_s)
    ran_s = [(run, windows.get(run.partition, Window(since, until)).overlap_s(run)) for run in runs]
    sums = _sums(frame, ran_s, usage, by)
    rows = _rows(frame, sums, by)
    return PowerReport(
        since=since,
        until=until,
        by=by,
        currency=inventory.settings.currency,
        price_per_kwh=frame.price,
        rows=tuple(rows),
        total=_total(frame, rows, sums, by),
        unheld_kwh=_unheld_kwh(usage),
        held_idle=(),
    )


def _weights(partitions: tuple[Partition, ...]) -> dict[str, float]:
    gpus = {p.name: float(sum(n.gpus for n in p.nodes)) for p in partitions}
    return gpus if any(gpus.values()) else {p.name: float(len(p.nodes)) for p in partitions}


def _window(first: float | None, since: float, until: float) -> Window:
    if first is None or first >= until:
        return Window(since, until, started=False)
    return Window(max(since, first), until)


def _on_nodes(run: RunRecord, weights: Mapping[str, float]) -> Iterator[tuple[str, float, float, float]]:
    """Yield per node: its name, the run's GPUs there, their part (0..1) of the run, and its lambda there."""
    total = sum(run.nodes.values())
    scale = run.gpus / total if 0 < run.gpus < total else 1.0  # slices are counted by their share of a GPU
    for name, count in run.nodes.items():
        gpus = count * scale
        part = gpus / run.gpus if run.gpus else 1 / len(run.nodes)
        weight = weights.get(name, 0.0)  # none of a node no longer in the partition
        yield name, gpus, part, run.share * part / weight if weight else 0.0


def _node_weights(nodes: tuple[Node, ...]) -> dict[str, float]:
    """Return each node's part of its partition: by GPUs, without any by cores."""
    sizes = {n.name: n.gpus for n in nodes}
    if not any(sizes.values()):
        sizes = {n.name: n.cores for n in nodes}
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}


def _sums(frame: _Frame, ran_s: list[tuple[RunRecord, float]], usage: list[UsageRow], by: By) -> dict[str, _Sums]:
    sums: dict[str, _Sums] = defaultdict(_Sums)
    weights = {p.name: _node_weights(p.nodes) for p in frame.partitions}
    held_s: dict[tuple[str, str], float] = defaultdict(float)  # (job, node) -> GPU seconds
    measured: dict[tuple[str, str], list[UsageRow]] = defaultdict(list)
    for run, seconds in _charged_runs(frame, ran_s):
        parts = _on_nodes(run, weights.get(run.partition, {})) if by == "node" else [("", run.gpus, 1.0, run.share)]
        for node, gpus, part, share in parts:
            row = sums[{"partition": run.partition, "node": node, "user": run.user, "job": run.job_id}[by]]
            row.partition, row.user = run.partition, run.user
            row.gpu_s += gpus * seconds
            row.share_s += share * seconds
            row.weighted_share_s += frame.weights.get(run.partition, 0.0) * run.share * part * seconds
        for node, gpus in run.nodes.items():
            held_s[run.job_id, node] += gpus * seconds
    for u in usage:
        if u.job_id or by in ("partition", "node"):
            row = sums[{"partition": u.partition, "node": u.node, "user": u.user, "job": u.job_id}[by]]
            row.partition, row.user = u.partition, u.user
            row.usage = add_usage_rows(row.usage, u)
            if u.job_id:
                measured[u.job_id, u.node].append(u)
                row.held_known_s += u.util_known_s
    for cell, rows in measured.items():
        row = sums[{"partition": rows[0].partition, "node": cell[1], "user": rows[0].user, "job": cell[0]}[by]]
        idle_s, measured_s = _idle_s(rows, held_s[cell]), sum(u.idle_s for u in rows)
        row.held_idle_s += idle_s
        if measured_s:
            row.idle_energy_j += sum(u.idle_energy_j for u in rows) * idle_s / measured_s
            row.idle_energy_unknown_s += sum(u.idle_energy_unknown_s for u in rows) * idle_s / measured_s
    return sums


def _idle_s(usage: list[UsageRow], held_s: float) -> float:
    """Return a job's idle GPU seconds on a node, at most ``held_s``.

    More can be measured than it ran: its GPUs are its from the allocation on, while its image is still on its way, and
    the window may begin within a bucket. That excess is taken to be idle.
    """
    excess_s = max(0.0, sum(u.gpu_s for u in usage) - held_s)
    return max(0.0, sum(u.idle_s for u in usage) - excess_s)


def _charged_runs(frame: _Frame, ran_s: list[tuple[RunRecord, float]]) -> Iterator[tuple[RunRecord, float]]:
    """Yield the runs with their charged seconds: half of the time on shared GPUs."""
    held = {}
    for number, (run, _) in enumerate(ran_s):
        window = frame.windows.get(run.partition)
        if run.shareable and window is not None:
            end = window.end if run.end_time is None else min(run.end_time, window.end)
            held[number] = HeldGpus(run.shareable, max(run.start_time, window.start), end)
    less: dict[int, float] = defaultdict(float)
    for a, b, gpus, begin, end in overlaps(held):
        for number in (a, b):
            less[number] += gpus * (end - begin) / 2
    for number, (run, seconds) in enumerate(ran_s):
        yield run, seconds - less[number] / run.gpus if number in less else seconds


def _rows(frame: _Frame, sums: dict[str, _Sums], by: By) -> list[PowerRow]:
    """Return the rows: places in the inventory's order; users, jobs and former places by GPU hours."""
    rows = []
    if by == "partition":
        rows = [_place(frame, p.name, p, p.nodes, sums.get(p.name, _Sums())) for p in frame.partitions]
    elif by == "node":
        rows = [_place(frame, n.name, p, (n,), sums.get(n.name, _Sums())) for p in frame.partitions for n in p.nodes]
    known = {row.name for row in rows}
    others = [_holder(frame, name, row, by) for name, row in sums.items() if name not in known]
    return rows + sorted(others, key=lambda r: (-r.gpu_hours, -(r.energy_kwh or 0.0), r.name))


def _place(frame: _Frame, name: str, partition: Partition, nodes: tuple[Node, ...], row: _Sums) -> PowerRow:
    window = frame.windows[partition.name]
    seconds = window.hours * 3600
    use = row.share_s / seconds if window.started and seconds > 0 else None
    rated_kw = [n.rated_power_w / 1000 for n in nodes if n.rated_power_w is not None]
    rated = sum(rated_kw) * window.hours if len(rated_kw) == len(nodes) and window.started else None
    inefficient = rated * max(0.0, 1 - use) if rated is not None and use is not None else None
    return msgspec.structs.replace(
        _measured(row, sum(n.gpus for n in nodes) * frame.asked_s, frame.price),
        name=name,
        partition=partition.name,
        hours=window.hours if window.started else None,
        utilization=use,
        rated_kwh=rated,
        inefficient_kwh=inefficient,
        inefficient_cost=_cost(inefficient, frame.price),
    )


def _holder(frame: _Frame, name: str, row: _Sums, by: By) -> PowerRow:
    """Return the row of a user, a job, or a place that is no longer in the inventory."""
    use = row.weighted_share_s / frame.capacity_s if frame.capacity_s > 0 else None
    return msgspec.structs.replace(
        _measured(row, row.gpu_s, frame.price),
        name=name,
        utilization=use,
        partition=row.partition if by in ("job", "node") else None,
        user=row.user if by in ("job", "user") else None,
    )


def _measured(row: _Sums, expected_gpu_s: float, price: float | None) -> PowerRow:
    """Return the row's measured sums; ``expected_gpu_s``: GPU seconds that should have a measurement."""
    used = row.usage
    known_s = used.gpu_s - used.energy_unknown_s
    expected_s = max(used.gpu_s, expected_gpu_s)
    energy = used.energy_j / _J_PER_KWH if known_s > 0 else None
    unknown = max(0.0, 1 - known_s / expected_s) if expected_s > 0 else None
    return PowerRow(
        name="",
        gpu_hours=row.gpu_s / 3600,
        measured_utilization=used.util_s / used.util_known_s if used.util_known_s > 0 else None,
        idle_gpu_hours=row.held_idle_s / 3600 if row.held_known_s > 0 else None,
        idle_energy_kwh=row.idle_energy_j / _J_PER_KWH if row.idle_energy_unknown_s < row.held_idle_s else None,
        idle_energy_unknown_share=row.idle_energy_unknown_s / row.held_idle_s if row.held_idle_s > 0 else None,
        energy_kwh=energy,
        energy_unknown_share=0.0 if unknown is not None and unknown < _UNMEASURED_TOLERANCE else unknown,
        cost=_cost(energy, price),
    )


def _total(frame: _Frame, rows: list[PowerRow], sums: dict[str, _Sums], by: By) -> PowerRow:
    """Return the total row: sums of amounts, and ratios averaged over all GPU time."""
    whole = _Sums()
    for part in sums.values():
        whole.gpu_s += part.gpu_s
        whole.weighted_share_s += part.weighted_share_s
        whole.held_known_s += part.held_known_s
        whole.held_idle_s += part.held_idle_s
        whole.idle_energy_j += part.idle_energy_j
        whole.idle_energy_unknown_s += part.idle_energy_unknown_s
        whole.usage = add_usage_rows(whole.usage, part.usage)
    declared_s = sum(n.gpus for p in frame.partitions for n in p.nodes) * frame.asked_s
    inefficient = _sum_or_none(row.inefficient_kwh for row in rows)
    return msgspec.structs.replace(
        _measured(whole, whole.gpu_s if by in ("user", "job") else declared_s, frame.price),
        name="total",
        utilization=whole.weighted_share_s / frame.capacity_s if frame.capacity_s > 0 else None,
        rated_kwh=_sum_or_none(row.rated_kwh for row in rows),
        inefficient_kwh=inefficient,
        inefficient_cost=_cost(inefficient, frame.price),
    )


def _unheld_kwh(usage: list[UsageRow]) -> float | None:
    unallocated = [u for u in usage if not u.job_id]
    known = sum(u.gpu_s - u.energy_unknown_s for u in unallocated)
    return sum(u.energy_j for u in unallocated) / _J_PER_KWH if known > 0 else None


def _sum_or_none(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _cost(kwh: float | None, price: float | None) -> float | None:
    return kwh * price if kwh is not None and price is not None else None
