"""The power report, as table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.reports import HeldIdle, IdleReport, PowerReport, PowerRow
from gpusched.model.units import count_of, iso_utc
from gpusched.views import bars, common

MAX_ROWS = 40
"""Rows of a table; ``--json`` has them all."""

_PLACES = ("partition", "node")
_WIDE = 120


def power_json(report: PowerReport | IdleReport) -> dict[str, Any]:
    """Return the report as one object; times are UTC ISO-8601."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields | {"since": iso_utc(report.since), "until": iso_utc(report.until)}


def power_screen(report: PowerReport, width: int, warning: str = "") -> RenderableType:
    """Return energy, waste and cost, and the jobs whose GPUs are idle.

    A terminal of fewer columns (``width``) shows fewer values. ``warning``: why they are not updated, or "".
    """
    parts: list[RenderableType] = [Text(f"warning: {warning}", "bold red")] if warning else []
    parts += [_head(report), Text(), _table(report, width)]
    if len(report.rows) > MAX_ROWS:
        parts.append(Text(f"and {len(report.rows) - MAX_ROWS} more; list all with --json", "dim"))
    parts += [Text(), *_remarks(report)]
    if report.held_idle:
        count = sum(idle.idle_gpus for idle in report.held_idle)
        title = f"Allocated but idle: {count_of(count, 'GPU')}"
        parts += [Text(), Text(title, "bold yellow"), _idle_table(report.held_idle)]
    return Group(*parts)


def _head(report: PowerReport) -> Text:
    span = report.until - report.since
    form = "%Y-%m-%d %H:%M"
    begin, end = (datetime.fromtimestamp(t).strftime(form) for t in (report.since, report.until))
    return Text.assemble((f"{begin} to {end}", "bold"), f" ({common.age(span)}), by {report.by}")


def _columns(report: PowerReport) -> list[str]:
    """Return the column names that the rows have values for."""
    money = report.currency if report.price_per_kwh is not None else None
    columns = [report.by.upper()]
    if report.by == "job":
        columns += ["USER", "PARTITION"]
    columns += ["GPU HOURS", "UTILIZATION", "MEASURED"]
    columns += ["IDLE GPU H", "KWH"]
    columns += [money] if money else []
    if report.by in _PLACES:
        columns += ["RATED KWH", "INEFFICIENT", *([f"INEFF. {money}"] if money else [])]
    return columns


def _table(report: PowerReport, width: int) -> Table:
    columns = _columns(report)
    numbers = [c for c in columns[1:] if c not in ("USER", "PARTITION")]
    money = (f"INEFF. {report.currency}", report.currency)
    places = ("IDLE GPU H",) if report.by in _PLACES else ()
    drop = ("PARTITION", "RATED KWH", money[0], *places, "MEASURED", money[1], "USER", "INEFFICIENT", "UTILIZATION")
    table = common.plain_table(*columns, right=numbers, drop=[c for c in drop if c != columns[0]])
    shown = report.rows[:MAX_ROWS]
    for row in shown:
        table.add_row(*_cells(report, row, columns, width))
    total = _cells(report, report.total, columns, width)
    for cell in total:
        cell.stylize("bold")
    table.add_row(*total)
    return table


def _cells(report: PowerReport, row: PowerRow, columns: Sequence[str], width: int) -> list[Text]:
    at_least = "≥" if _is_bound(row) else ""
    meter = 10 if width >= _WIDE else 0
    cells = {
        "USER": Text(common.clean(row.user or "")),
        "PARTITION": Text(row.partition or ""),
        "GPU HOURS": Text(bars.quantity(row.gpu_hours)),
        "UTILIZATION": _share(row.utilization, meter),
        "MEASURED": _share(row.measured_utilization, meter),
        "IDLE GPU H": Text(bars.quantity(row.idle_gpu_hours)),
        "KWH": _bound(at_least, row.energy_kwh),
        "RATED KWH": Text(bars.quantity(row.rated_kwh)),
        "INEFFICIENT": Text(bars.quantity(row.inefficient_kwh)),
        report.currency: _bound(at_least, row.cost),
        f"INEFF. {report.currency}": Text(bars.quantity(row.inefficient_cost)),
    }
    return [Text(common.clean(row.name), "bold"), *(cells[name] for name in columns[1:])]


def _share(fraction: float | None, meter: int) -> Text:
    if not meter or fraction is None:
        return Text(bars.percent(fraction))
    return Text.assemble(bars.meter(fraction, meter, "cyan"), f"{bars.percent(fraction):>5}")


def _is_bound(row: PowerRow) -> bool:
    """Return whether a visible share is unmeasured: less than 0.5 % rounds to 0 %."""
    return (row.energy_unknown_share or 0.0) >= 0.005


def _bound(at_least: str, value: float | None) -> Text:
    return Text(bars.quantity(value) if value is None else at_least + bars.quantity(value))


def _remarks(report: PowerReport) -> list[Text]:
    lines = [
        "UTILIZATION: share of the cluster allocated to jobs, since the first of them started.",
        "MEASURED: GPU utilization from NVML.",
    ]
    if report.by in _PLACES:
        lines += ["INEFFICIENT: kWh; rated kW x hours x (1 - utilization).", "KWH: GPU energy, allocated or idle."]
    else:
        lines.append("KWH: energy of the GPUs while allocated.")
        if report.unheld_kwh is not None:
            lines.append(f"Unallocated GPUs used a further {bars.quantity(report.unheld_kwh)} kWh.")
    if any(map(_is_bound, report.rows)):
        share = bars.percent(report.total.energy_unknown_share)
        lines.append(f"≥: lower bound; {share} of the GPU time was not measured.")
    remarks = [Text(line, "dim") for line in lines]
    if report.simulated:
        nodes = common.compress_names(report.simulated)
        remarks.append(Text(f"SIMULATED: energy and utilization of {nodes} are not measured.", "bold magenta"))
    return remarks


def _idle_table(held_idle: Sequence[HeldIdle]) -> Table:
    columns = ("JOB", "NAME", "USER", "PARTITION", "NODES", "GPUS", "IDLE", "SINCE")
    drop = ("NAME", "PARTITION", "GPUS")
    right = ("GPUS", "IDLE", "SINCE")
    table = common.plain_table(*columns, right=right, wrap=("NODES",), drop=drop, max_widths={"NAME": 24})
    for idle in held_idle:
        table.add_row(
            Text(idle.job, "bold"),
            Text(common.clean(idle.name)),
            Text(common.clean(idle.user)),
            Text(idle.partition),
            Text(common.compress_names(idle.nodes)),
            str(idle.gpus),
            str(idle.idle_gpus),
            common.age(idle.idle_s),
        )
    return table
