"""The report on idle GPUs, as tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.reports import IdleReport, IdleRow
from gpusched.views import bars, common

MAX_ROWS = 40
"""Jobs in the table; ``--json`` has them all."""


def idle_screen(report: IdleReport, warning: str = "") -> RenderableType:
    """Return users and jobs with their idle GPU hours. ``warning``: why they are not updated, or ""."""
    parts: list[RenderableType] = [Text(f"warning: {warning}", "bold red")] if warning else []
    form = "%Y-%m-%d %H:%M"
    begin, end = (datetime.fromtimestamp(t).strftime(form) for t in (report.since, report.until))
    parts += [Text.assemble((f"{begin} to {end}", "bold"), f" ({common.age(report.until - report.since)})"), Text()]
    if not report.jobs:
        return Group(*parts, Text("No job held idle GPUs."))
    parts += [_users(report), Text(), _jobs(report)]
    if len(report.jobs) > MAX_ROWS:
        parts.append(Text(f"and {len(report.jobs) - MAX_ROWS} more jobs; list all with --json", "dim"))
    parts += [Text(), Text("IDLE GPU H: GPU hours held below the threshold of utilization. KWH: used in them.", "dim")]
    if any(row.energy_unknown_share for row in report.jobs):
        parts.append(Text("≥: lower bound; not all of it was measured.", "dim"))
    return Group(*parts)


def _users(report: IdleReport) -> Table:
    table = _table(report, "USER")
    for row in report.users:
        table.add_row(Text(common.clean(row.user), "bold"), *_figures(report, row))
    if len(report.users) > 1:
        table.add_row(*(Text(text, "bold") for text in ("total", *_figures(report, report.total))))
    return table


def _jobs(report: IdleReport) -> Table:
    table = _table(report, "JOB", "NAME", "USER", "PARTITION")
    for row in report.jobs[:MAX_ROWS]:
        name = Text(common.clean(row.name or common.UNKNOWN))
        job = Text(row.job or "", "bold").append(" *" if row.running else "")
        table.add_row(job, name, Text(common.clean(row.user)), Text(row.partition or ""), *_figures(report, row))
    return table


def _table(report: IdleReport, *names: str) -> Table:
    money = (report.currency,) if report.price_per_kwh is not None else ()
    figures = ("GPU HOURS", "IDLE GPU H", "IDLE", "KWH", *money)
    drop = ("PARTITION", "NAME", "IDLE", "GPU HOURS", *money)
    return common.plain_table(*names, *figures, right=figures, drop=drop, max_widths={"NAME": 24})


def _figures(report: IdleReport, row: IdleRow) -> Sequence[str]:
    at_least = "≥" if (row.energy_unknown_share or 0.0) >= 0.005 else ""
    money = [(row.cost, at_least)] if report.price_per_kwh is not None else []
    return (
        bars.quantity(row.gpu_hours),
        bars.quantity(row.idle_gpu_hours),
        bars.percent(row.idle_gpu_hours / row.gpu_hours if row.gpu_hours else None),
        *(
            bars.quantity(value) if value is None else bound + bars.quantity(value)
            for value, bound in [(row.energy_kwh, at_least), *money]
        ),
    )
