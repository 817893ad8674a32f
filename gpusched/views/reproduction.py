"""Results of ``gpusched reproduce`` as a table; the scenario defines the columns and the notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.views.common import UNKNOWN, plain_table, relative_change

if TYPE_CHECKING:
    from gpusched.study.paper import Column, Paper

BOUND = "bound"


def screen(paper: Paper, rows: Sequence[Any]) -> RenderableType:
    """Return one line for each policy in each group of rows; rows of a group differ only in their random draws."""
    keys = [column for column in paper.table if column.in_common and column.of != "policy"]
    right = [c.head for c in paper.table if not (c.in_common and all(isinstance(getattr(r, c.of), str) for r in rows))]
    table = plain_table(*(column.head for column in paper.table), right=right, drop=paper.drop)
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in rows:
        group = tuple(getattr(row, column.of) for column in keys)
        groups.setdefault(group, {}).setdefault(row.policy, []).append(row)
    for by in groups.values():
        if paper.bound:
            by[BOUND] = next(iter(by.values()))
        for policy in by:
            table.add_row(*(_cell(paper, column, policy, by) for column in paper.table))
    return Group(table, Text(), Text(paper.words.format(**paper.published).strip()))


def _cell(paper: Paper, column: Column, policy: str, by: Mapping[str, Sequence[Any]]) -> str:
    if column.in_common:
        value = policy if column.of == "policy" else getattr(by[policy][0], column.of)
        return value if isinstance(value, str) else f"{value:g}"
    if column.published:
        return f"{paper.published[column.published[policy]]:+.1%}" if policy in column.published else UNKNOWN
    if not column.of:
        return f"{len(by[policy])}"

    def figures(name: str) -> list[float]:
        key = paper.bound.get(column.of) if name == BOUND else column.of
        return [_figure_of(row, key) / _figure_of(row, column.per) for row in by.get(name, ())] if key else []

    values = figures(policy)
    if not values:
        return UNKNOWN
    if column.against:
        return relative_change(values, figures(column.against) or None)
    if column.gain is not None:
        base, best = map(figures, column.gain)
        full_gain = mean(base) - mean(best) if base and best else 0.0
        return f"{(mean(base) - mean(values)) / full_gain:.1%}" if full_gain > 0.0 else UNKNOWN
    if column.above:
        return f"{mean(values) / mean(_figure_of(row, column.above) for row in by[policy]) - 1:+.1%}"
    return column.format.format(mean(values))


def _figure_of(row: Any, key: str | float) -> float:
    """Return a figure of a row, or the number itself."""
    return float(getattr(row, key)) if isinstance(key, str) else key
