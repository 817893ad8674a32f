"""The power report: rows -> table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.reports import HeldIdle, PowerReport, PowerRow
from gpusched.model.units import iso_utc
from gpusched.views import bars, common

MAX_ROWS = 40
"""Rows of a table; ``--json`` has them all."""

_PLACES = ("partition", "node")
_WIDE = 120


def power_json(report: PowerReport) -> dict[str, Any]:
    """The report as one object; times are UTC ISO-8601."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields | {"since": iso_utc(report.since), "until": iso_utc(report.until)}


def power_screen(report: PowerReport, width: int, warning: str = "") -> RenderableType:
    """What was used, wasted and paid, and who holds GPUs without using them.

    A terminal of fewer columns (``width``) shows fewer figures. ``warning``: why they do not move, or "".
    """
    parts: list[RenderableType] = [Text(f"warning: {warning}", "bold red")] if warning else []
    parts += [_head(report), Text(), _table(report, width)]
    if len(report.rows) > MAX_ROWS:
        parts.append(Text(f"and {len(report.rows) - MAX_ROWS} more; --json has them all", "dim"))
    parts += [Text(), *_remarks(report)]
    if report.held_idle:
        count = sum(idle.idle_gpus for idle in report.held_idle)
        title = f"Held but idle: {count} GPU{'s' if count != 1 else ''}"
        parts += [Text(), Text(title, "bold yellow"), _idle_table(report.held_idle)]
    return Group(*parts)


def _head(report: PowerReport) -> Text:
    span = report.until - report.since
    form = "%Y-%m-%d %H:%M"
    begin, end = (datetime.fromtimestamp(t).strftime(form) for t in (report.since, report.until))
    return Text.assemble((f"{begin} to {end}", "bold"), f" ({common.age(span)}), by {report.by}")


def _columns(report: PowerReport, width: int) -> list[str]:
    """Column names by what the rows can tell and what fits."""
    money = report.currency if report.price_per_kwh is not None else None
    columns = [report.by.upper()]
    if report.by == "job":
        columns += ["USER"] + (["PARTITION"] if width >= _WIDE else [])
    columns += ["GPU HOURS", "UTILIZATION", "MEASURED"]
    columns += ["IDLE GPU H"] if width >= 90 or report.by not in _PLACES else []
    columns += ["KWH"]
    columns += [money] if money else []
    if report.by in _PLACES:
        columns += (["RATED KWH"] if width >= 105 else []) + ["INEFFICIENT"]
        columns += [f"INEFF. {money}"] if money and width >= 100 else []
    return columns


def _table(report: PowerReport, width: int) -> Table:
    columns = _columns(report, width)
    table = common.plain_table(*columns, right=[c for c in columns[1:] if c not in ("USER", "PARTITION")])
    shown = report.rows[:MAX_ROWS]
    for row in shown:
        table.add_row(*_cells(report, row, columns, width))
    total = _cells(report, report.total, columns, width)
    for cell in total:
        cell.stylize("bold")
    table.add_row(*total)
    return table


def _cells(report: PowerReport, row: PowerRow, columns: Sequence[str], width: int) -> list[Text]:
    at_least = "≥" if row.energy_unknown_share else ""
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


def _bound(at_least: str, value: float | None) -> Text:
    return Text(bars.quantity(value) if value is None else at_least + bars.quantity(value))


def _remarks(report: PowerReport) -> list[Text]:
    lines = [
        "UTILIZATION: how much of the cluster jobs held, over the time since the first of them started.",
        "MEASURED: NVML's.",
    ]
    if report.by in _PLACES:
        lines += ["INEFFICIENT: kWh; rated kW x hours x (1 - utilization).", "KWH: of the GPUs, held or not."]
    else:
        lines.append("KWH: of the GPUs held, while they were held.")
        if report.unheld_kwh is not None:
            lines.append(f"GPUs that nobody held drew {bars.quantity(report.unheld_kwh)} kWh besides.")
    if any(row.energy_unknown_share for row in report.rows):
        share = bars.percent(report.total.energy_unknown_share)
        lines.append(f"≥: a lower bound; {share} of the GPU time has no measurement.")
    remarks = [Text(line, "dim") for line in lines]
    if report.simulated:
        nodes = common.compress_names(report.simulated)
        remarks.append(Text(f"SIMULATED: energy and measured utilization of {nodes} are made up.", "bold magenta"))
    return remarks


def _idle_table(held_idle: Sequence[HeldIdle]) -> Table:
    columns = ("JOB", "NAME", "USER", "PARTITION", "NODES", "GPUS", "IDLE", "SINCE")
    table = common.plain_table(*columns, right=("GPUS", "IDLE", "SINCE"))
    for idle in held_idle:
        table.add_row(
            Text(idle.job, "bold"),
            Text(common.shorten(common.clean(idle.name), 24)),
            Text(common.clean(idle.user)),
            Text(idle.partition),
            Text(common.compress_names(idle.nodes)),
            str(idle.gpus),
            str(idle.idle_gpus),
            common.age(idle.idle_s),
        )
    return table
