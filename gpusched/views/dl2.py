"""DL2's setting again, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.papers import DL2
from gpusched.views.common import plain_table

if TYPE_CHECKING:
    from gpusched.agents.dl2.reproduce import Row

WORDS = (
    f"The paper reports a mean JCT of {DL2.drf:+.1%} against DRF and {DL2.optimus:+.1%} against Optimus for its agent, "
    "dl2 here. It learns speeds from job progress; dl2-warm-up is that agent after imitating drf, dl2-untrained "
    "before that. The others are rules that know every speed, but for optimus-5%, whose table is up to 5 % "
    "wrong. Bound: every job alone on all nodes at its best size. Means over workloads, in slots of 20 minutes."
)


def screen(rows: Sequence[Row]) -> RenderableType:
    """One line for a setting and policy."""
    heads = ("SETTING", "POLICY", "WORKLOADS", "MEAN JCT", "AGAINST DRF", "ABOVE BOUND", "MAKESPAN")
    table = plain_table(*heads, right=heads[2:], drop=("WORKLOADS", "MAKESPAN", "ABOVE BOUND"))
    for setting, policy in dict.fromkeys((row.setting, row.policy) for row in rows):
        mine = [row for row in rows if (row.setting, row.policy) == (setting, policy)]
        jct = mean(row.mean_jct_slots for row in mine)
        drf = [row.mean_jct_slots for row in rows if (row.setting, row.policy) == (setting, "drf")]
        bound = mean(row.bound_slots for row in mine)
        table.add_row(
            setting, policy, f"{len(mine)}", f"{jct:.2f}", f"{jct / mean(drf) - 1:+.1%}" if drf else "-",
            f"{jct / bound - 1:+.1%}", f"{mean(row.makespan_slots for row in mine):.1f}",
        )  # fmt: skip
    return Group(table, Text(), Text(WORDS))
