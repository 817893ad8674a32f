"""The RLTune reproduction as a table and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.views import figures as plot
from gpusched.views.replay import span

if TYPE_CHECKING:
    from gpusched.learn.rltune.reproduce import Line

TITLE = "Dongare et al. (SoCC 2025), headline figures again"
WORDS = (
    "The paper reports at best: utilization +20 %, queueing delay -81 %, JCT -70 %, each against some base policy on "
    "some trace. Below: each base policy and the agent trained here, replayed on jobs that came after those learned "
    "from. Run times are not known to either; FCFS lets nobody pass its head, and most of its waiting comes from that."
)
_HEADS = ("TRACE", "BASE", "JOBS", "UTILIZATION", "MEAN WAIT", "CHANGE", "MEAN JCT", "CHANGE")


def screen(lines: Sequence[Line]) -> RenderableType:
    """The table and a word on what it means."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in _HEADS:
        table.add_column(head, no_wrap=True)
    for row in _rows(lines):
        table.add_row(*row)
    return Group(table, Text(), Text(WORDS))


def page(lines: Sequence[Line]) -> str:
    """The table with plots."""
    names = [f"{line.trace} / {line.base}" for line in lines]
    drawn = (
        (
            "Utilization",
            [(n, (x.utilization_base or 0.0, x.utilization or 0.0)) for n, x in zip(names, lines, strict=True)],
            "",
        ),
        (
            "Queueing delay",
            [(n, ((x.wait_base_s or 0) / 3600, (x.wait_s or 0) / 3600)) for n, x in zip(names, lines, strict=True)],
            "h",
        ),
        (
            "JCT",
            [(n, ((x.jct_base_s or 0) / 3600, (x.jct_s or 0) / 3600)) for n, x in zip(names, lines, strict=True)],
            "h",
        ),
    )
    parts = [plot.table([h.capitalize() for h in _HEADS], _rows(lines))]
    parts += [plot.figure(title, "by trace and base policy", plot.bars(groups, ("base", "agent"), unit, title))
              for title, groups, unit in drawn]  # fmt: skip
    return plot.page(TITLE, WORDS, parts)


def _rows(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [x.trace, x.base, f"{x.jobs:,}", f"{_share(x.utilization_base)} -> {_share(x.utilization)}",
         f"{span(x.wait_base_s)} -> {span(x.wait_s)}", _percent(x.wait_change),
         f"{span(x.jct_base_s)} -> {span(x.jct_s)}", _percent(x.jct_change)]
        for x in lines
    ]  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
