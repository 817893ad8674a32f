"""Failures by node and GPU, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.reports import FailureRow
from gpusched.views import common

_COLUMNS = ("NODE", "GPU", "ATTEMPTS", "FAILED", "EXPECTED", "RATIO", "OOM", "CONFIDENCE")
_MAX_UNNAMED = 10


def failures_screen(rows: Sequence[FailureRow], days: int, *, everything: bool = False) -> RenderableType:
    """Return the table, and what it says; of rows that are not conspicuous only the first, unless ``everything``."""
    if not rows:
        return Text(f"no attempt has ended in the last {days} days")
    named = [row for row in rows if row.named]
    shown = rows if everything else [*named, *[row for row in rows if not row.named][:_MAX_UNNAMED]]
    table = common.plain_table(*_COLUMNS, right=_COLUMNS[1:], drop=("OOM", "RATIO"))
    for row in shown:
        style = "bold red" if row.named else ""
        ratio = f"{row.failed_compared / row.expected:.1f}" if row.expected > 0 else common.UNKNOWN
        table.add_row(
            Text(row.node, style or "bold"), "all" if row.gpu is None else str(row.gpu), str(row.attempts),
            str(row.failed), f"{row.expected:.1f}", ratio, str(row.out_of_memory), Text(_confidence(row), style),
        )  # fmt: skip
    return Group(table, Text(), Text(_summary(named, days)))


def _confidence(row: FailureRow) -> str:
    if row.corrected >= 0.5:
        return common.UNKNOWN
    return "> 99.9 %" if row.corrected < 0.001 else f"{100 * (1 - row.corrected):.1f} %"


def _summary(named: Sequence[FailureRow], days: int) -> str:
    if not named:
        return f"no GPU or node fails more often than the same jobs do elsewhere (last {days} days)"
    names = ", ".join(row.node if row.gpu is None else f"GPU {row.gpu} of {row.node}" for row in named)
    return f"more failures than of the same jobs elsewhere (last {days} days): {names}"
