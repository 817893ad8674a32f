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


def screen(of: Rltune, lines: Sequence[ComparisonLine]) -> RenderableType:
    """The table and a word on what it means."""
    table = plain_table(*_HEADS, drop=("JOBS", "UTILIZATION", "MEAN WAIT"))
    for x in lines:
        table.add_row(x.trace, x.base, f"{x.jobs:,}", *_figures(x))
    return Group(table, Text(), Text(of.words.format(**of.published)))


def page(of: Rltune, lines: Sequence[ComparisonLine]) -> str:
    """The table, and for each trace the changes beside the paper's best."""
    rows = [
        [x.trace, x.base, x.knows, f"{x.jobs:,}", *_figures(x), f"{_number(x.slowdown_base)} -> {_number(x.slowdown)}"]
        for x in lines
    ]
    parts = [plot.table(_PAGE_HEADS, rows)]
    for trace in dict.fromkeys(x.trace for x in lines):
        drawings = [
            _changes(title, [x for x in lines if x.trace == trace], gain, 100 * of.published[key])
            for title, (gain, key) in _CHANGES.items()
        ]
        parts.append(f'<div class="grid">{"".join(drawings)}</div>')
    return plot.page(TITLE, of.words.format(**of.published), parts)


def _utilization_change(x: ComparisonLine) -> float | None:
    return x.utilization / x.utilization_base - 1 if x.utilization is not None and x.utilization_base else None


_CHANGES: dict[str, tuple[Callable[[ComparisonLine], float | None], str]] = {
    "Utilization": (_utilization_change, "utilization"),
    "Queueing delay": (lambda x: x.wait_change, "wait"),
    "JCT": (lambda x: x.jct_change, "jct"),
}


def _changes(
    title: str, lines: Sequence[ComparisonLine], gain: Callable[[ComparisonLine], float | None], paper: float
) -> str:
    """By how many percent the agent's mean is above (or below) each base's, on one trace."""
    trace = lines[0].trace
    groups = [(x.base.replace(" (estimate)", ""), (100 * (gain(x) or 0.0),)) for x in lines]
    groups.append(("paper", (paper,)))
    drawing = plot.bars(groups, ("agent against the base",), "%", f"{title}, {trace}", digits=0)
    return plot.figure(title, f"{trace}: the agent against each base policy; the last is the paper's best", drawing)


def _figures(x: ComparisonLine) -> list[str]:
    return [
        f"{number(x.utilization_base, 3)} -> {number(x.utilization, 3)}", f"{span(x.wait_base_s)} -> {span(x.wait_s)}",
        change(x.wait_change), f"{span(x.jct_base_s)} -> {span(x.jct_s)}", change(x.jct_change),
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
