"""DL2's setting again, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpusched.model.papers import DL2

if TYPE_CHECKING:
    from gpusched.agents.dl2.reproduce import Row

WORDS = (
    f"The paper reports a mean JCT of {DL2.drf:+.1%} against DRF and {DL2.optimus:+.1%} against Optimus for its agent, "
    "which is not here yet. All of these are rules. They are told every speed, but for optimus-5%, whose table is up "
    "to 5 % wrong. Bound: every job alone on all nodes at its best size. Means over workloads, in slots of 20 minutes."
)


def screen(rows: Sequence[Row]) -> RenderableType:
    """One line for a setting and policy."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SETTING", no_wrap=True)
    table.add_column("POLICY", no_wrap=True)
    for head in ("WORKLOADS", "MEAN JCT", "AGAINST DRF", "ABOVE BOUND", "MAKESPAN"):
        table.add_column(head, no_wrap=True, justify="right")
    for setting, policy in dict.fromkeys((row.setting, row.policy) for row in rows):
        mine = [row for row in rows if (row.setting, row.policy) == (setting, policy)]
        jct = _mean([row.mean_jct_slots for row in mine])
        drf = [row.mean_jct_slots for row in rows if (row.setting, row.policy) == (setting, "drf")]
        bound = _mean([row.bound_slots for row in mine])
        table.add_row(
            setting, policy, f"{len(mine)}", f"{jct:.2f}", f"{jct / _mean(drf) - 1:+.1%}" if drf else "-",
            f"{jct / bound - 1:+.1%}", f"{_mean([row.makespan_slots for row in mine]):.1f}",
        )  # fmt: skip
    return Group(table, Text(), Text(WORDS))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
