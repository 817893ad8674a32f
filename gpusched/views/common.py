"""Formats that all screens share: unknown values, states, names and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean as mean
from statistics import stdev
from typing import TYPE_CHECKING, Any

from gpusched.errors import printable
from gpusched.model.indices import spans_of, text_of
from gpusched.model.jobs import JobState

if TYPE_CHECKING:
    from rich.table import Table

clean = printable
UNKNOWN = "-"
WHOLE = 1000
"""From so many columns on it is no terminal but a pipe: nothing is dropped, wrapped or shortened."""
STATE_STYLE = {
    JobState.PENDING: "yellow",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "green",
    JobState.COMPLETING: "cyan",
    JobState.COMPLETED: "dim",
    JobState.CANCELLED: "dim",
}
BAD_STATE_STYLE = "red"


def fields_of(source: object, *names: str) -> dict[str, Any]:
    """Return these attributes by name, for JSON that has them as they are."""
    return {name: getattr(source, name) for name in names}


def state_style(state: JobState) -> str:
    """Return the color of a job's state."""
    return STATE_STYLE.get(state, BAD_STATE_STYLE)


def shorten(text: str, width: int) -> str:
    """Shorten the text to at most ``width`` characters, with an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def ranges(numbers: Iterable[int], width: int = 0) -> str:
    """Format 2, 3, 4, 5, 9 as ``2-5,9``, or as ``02-05,09`` with a width of 2."""
    return text_of(spans_of(numbers), width)


def compress_names(names: Iterable[str]) -> str:
    """Format dgx1, dgx2, dgx3, login as ``dgx[1-3],login`` (Slurm's host lists)."""
    parts = [(name, re.fullmatch(r"(.*?)([0-9]{1,9})", name)) for name in dict.fromkeys(names)]
    padded = {(m[1], len(m[2])) for _, m in parts if m is not None and m[2].startswith("0") and m[2] != "0"}
    groups: dict[tuple[str, int], list[int]] = {}
    for name, match in parts:
        if match is None:
            groups[(name, -1)] = []
        else:
            width = len(match[2]) if (match[1], len(match[2])) in padded else 0
            groups.setdefault((match[1], width), []).append(int(match[2]))
    return ",".join(
        name if width < 0 else f"{name}{found[0]:0{width}}" if len(found) == 1 else f"{name}[{ranges(found, width)}]"
        for (name, width), found in groups.items()
    )


def energy(joules: float | None) -> str:
    """Format joules as ``1.23 kWh`` or ``45.0 Wh``; unknown is ``-``."""
    if joules is None:
        return UNKNOWN
    watt_hours = joules / 3600
    return f"{watt_hours / 1000:.2f} kWh" if watt_hours >= 1000 else f"{watt_hours:.1f} Wh"


def age(seconds: float | None) -> str:
    """Format seconds as ``8 s``, ``5 min``, ``3 h``, ``2 d``; unknown is ``-``."""
    if seconds is None:
        return UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def plain_table(
    *columns: str,
    right: Iterable[str] = (),
    wrap: Iterable[str] = (),
    drop: Iterable[str] = (),
    max_widths: Mapping[str, int] | None = None,
    header: bool = True,
) -> Table:
    """Return a table without lines, as ps and squeue print them, that fits its screen (`tables.FittedTable`).

    Args:
        columns: The column names.
        right: Columns of numbers, aligned right.
        wrap: Columns of text, which may wrap on a narrow screen.
        drop: Columns that a narrow screen omits, the least important first.
        max_widths: Column -> the number of characters that a terminal shows before an ellipsis.
        header: Whether the column names are shown.
    """
    from gpusched.views.tables import FittedTable

    return FittedTable(columns, tuple(right), tuple(wrap), tuple(drop), max_widths, header, WHOLE)


def relative_change(values: Sequence[float], base: Sequence[float] | None) -> str:
    """Return the change of the mean from ``base`` and its paired 95 % confidence interval; "-" without a base."""
    if base is None:
        return "-"
    ratios, n = [a / b for a, b in zip(values, base, strict=True)], len(values)
    change = f"{mean(values) / mean(base) - 1:+.1%}"
    return change if n < 3 or values == base else f"{change} ± {_t95(n - 1) * stdev(ratios) / n**0.5:.1%}"


def _t95(freedom: int) -> float:
    """Return Student's 97.5 % quantile, accurate to a hundredth from six degrees of freedom."""
    return {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}.get(freedom, 1.96 + 2.8 / (freedom - 0.3))
