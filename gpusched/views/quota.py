"""Limits and fair shares, as tables and JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.reports import QuotaReport, QuotaRow
from gpusched.model.units import format_duration, iso_utc
from gpusched.views import common

_NAMES = {
    "gpus": "GPUs at once",
    "jobs": "jobs at once",
    "queued": "jobs queued",
    "gpu_hours": "GPU hours in 7 days",
    "time": "time limit",
}
_REASON, _FREES = "REASON IF EXHAUSTED", "FREES WITHIN"


def quota_json(report: QuotaReport) -> dict[str, Any]:
    """Return the report as one object; times are UTC ISO-8601."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    fields["rows"] = [
        msgspec.to_builtins(row) | {"left": row.left, "frees": None if row.frees is None else iso_utc(row.frees)}
        for row in report.rows
    ]
    return fields | {"now": iso_utc(report.now)}


def quota_screen(report: QuotaReport, warning: str = "") -> RenderableType:
    """Return the use of each limit, the QoS classes and the fair-share ranks. ``warning``: in the first line."""
    parts: list[RenderableType] = [Text(f"warning: {common.clean(warning)}", "bold red")] if warning else []
    parts.append(_limits(report) if report.rows else Text("no limits"))
    if report.classes:
        table = common.plain_table(
            "CLASS", "PRIORITY", "PREEMPTIBLE", "LIMITS", right=("PRIORITY",), wrap=("LIMITS", "PREEMPTIBLE")
        )
        for row in report.classes:
            preemptible = "per job" if row.preemptible is None else "yes" if row.preemptible else "no"
            limits = "class limits only" if row.exempt else "class, user and group limits"
            table.add_row(common.clean(row.name), str(row.priority), preemptible, limits)
        parts += [Text(), table]
    if report.shares:
        numbers = ("SHARES", "GPU HOURS", "PLACE")
        table = common.plain_table("GROUP", "USER", *numbers, right=numbers)
        for share in report.shares:
            group, user = common.clean(share.group) or common.UNKNOWN, common.clean(share.user)
            table.add_row(group, user, str(share.shares), f"{share.gpu_hours:.1f}", str(share.place))
        parts += [Text(), table]
    return Group(*parts)


def _limits(report: QuotaReport) -> Table:
    when = (_FREES,) if any(row.frees for row in report.rows) else ()
    table = common.plain_table(
        "SUBJECT", "RESOURCE", "USED", "LIMIT", "LEFT", *when, _REASON, right=("USED", "LIMIT", "LEFT", _FREES),
        wrap=("SUBJECT", "RESOURCE", _REASON), drop=(_REASON, "LEFT"),
    )  # fmt: skip
    for row in report.rows:
        is_exhausted = row.left is not None and row.left < 1
        frees = [format_duration(max(0.0, row.frees - report.now)) if row.frees else ""] if when else []
        used, limit, left = (_figure(row, amount) for amount in (row.used, row.limit, row.left))
        reason = Text(row.reason, "red" if is_exhausted else "")
        table.add_row(common.clean(row.subject), _NAMES[row.resource], used, limit, left, *frees, reason)
    return table


def _figure(row: QuotaRow, amount: float | None) -> str:
    if amount is None:
        return common.UNKNOWN
    if row.resource == "time":
        return format_duration(amount)
    if row.resource == "gpu_hours":
        return f"{amount:.1f}"
    return f"{amount:.2f}" if round(amount, 2) % 1 else f"{amount:.0f}"  # MIG slices are parts of GPUs
