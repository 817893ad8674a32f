"""The RLTune reproduction as a table and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.views import figures as plot
from gpusched.views.bars import change, number
from gpusched.views.common import plain_table
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.agents.rltune.reproduce import ComparisonLine, Rltune

TITLE = "Dongare et al. (SoCC 2025), headline figures again"
_HEADS = ("TRACE", "BASE", "JOBS", "UTILIZATION", "MEAN WAIT", "CHANGE", "MEAN JCT", "CHANGE")
_PAGE_HEADS = ("Trace", "Base", "It knows", "Jobs", "Utilization", "Mean wait", "Change", "Mean JCT", "Change",
               "Mean bounded slowdown")  # fmt: skip


def screen(paper: Rltune, lines: Sequence[ComparisonLine]) -> RenderableType:
    """Return the table and its explanation."""
    table = plain_table(*_HEADS, drop=("JOBS", "UTILIZATION", "MEAN WAIT"))
    for row in lines:
        table.add_row(row.trace, row.base, f"{row.jobs:,}", *_figures(row))
    return Group(table, Text(), Text(paper.words.format(**paper.published)))


def page(paper: Rltune, lines: Sequence[ComparisonLine]) -> str:
    """Return the table, and for each trace the changes beside the paper's best."""
    rows = [
        [
            row.trace,
            row.base,
            row.knows,
            f"{row.jobs:,}",
            *_figures(row),
            f"{_number(row.slowdown_base)} -> {_number(row.slowdown)}",
        ]
        for row in lines
    ]
    parts = [plot.table(_PAGE_HEADS, rows)]
    for trace in dict.fromkeys(row.trace for row in lines):
        drawings = [
            _changes(title, [row for row in lines if row.trace == trace], gain, 100 * paper.published[key])
            for title, (gain, key) in _CHANGES.items()
        ]
        parts.append(f'<div class="grid">{"".join(drawings)}</div>')
    return plot.page(TITLE, paper.words.format(**paper.published), parts)


def _utilization_change(row: ComparisonLine) -> float | None:
    if row.utilization is None or not row.utilization_base:
        return None
    return row.utilization / row.utilization_base - 1


_CHANGES: dict[str, tuple[Callable[[ComparisonLine], float | None], str]] = {
    "Utilization": (_utilization_change, "utilization"),
    "Queueing delay": (lambda x: x.wait_change, "wait"),
    "JCT": (lambda x: x.jct_change, "jct"),
}


def _changes(
    title: str, lines: Sequence[ComparisonLine], gain: Callable[[ComparisonLine], float | None], paper: float
) -> str:
    """Return by how many percent the agent's mean is above (or below) each base's, on one trace."""
    trace = lines[0].trace
    groups = [(row.base.replace(" (estimate)", ""), (100 * (gain(row) or 0.0),)) for row in lines]
    groups.append(("paper", (paper,)))
    drawing = plot.bars(groups, ("agent against the base",), "%", f"{title}, {trace}", digits=0)
    return plot.figure(title, f"{trace}: the agent against each base policy; the last is the paper's best", drawing)


def _figures(row: ComparisonLine) -> list[str]:
    return [
        f"{number(row.utilization_base, 3)} -> {number(row.utilization, 3)}",
        f"{span(row.wait_base_s)} -> {span(row.wait_s)}", change(row.wait_change),
        f"{span(row.jct_base_s)} -> {span(row.jct_s)}", change(row.jct_change),
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
