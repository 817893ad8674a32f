"""Our setting of schedulers that know where jobs run, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.views.common import against, plain_table

if TYPE_CHECKING:
    from gpusched.agents.topology.reproduce import Row

BASE = "rack-wait"
WORDS = (
    "The setting is ours, after Zhao and Wu (IEEE TNSM 2022), of which only the abstract is public: no figure of "
    "theirs is claimed. Means over seeds; against: mean JCT by rack-wait, ± 95 % intervals by seeds, both on the same "
    "jobs. Slowdown: how much longer jobs ran than alone where they are fastest. Contention and agents are told the "
    "true model. Untrained: the agents' rule, to which no network adds anything; -4: by four schedulers. Ideal: best "
    "fit, with links that take no time."
)


def screen(rows: Sequence[Row]) -> RenderableType:
    """One line for a topology, load and policy."""
    heads = ("TOPOLOGY", "PAIRS", "LOAD", "POLICY", "MEAN JCT", "AGAINST", "P99 JCT", "SLOWDOWN")
    table = plain_table(*heads, right=(heads[2], *heads[4:]), drop=("P99 JCT", "PAIRS", "SLOWDOWN"))
    for at in dict.fromkeys((row.topology, row.combine, row.load) for row in rows):
        here = [row for row in rows if (row.topology, row.combine, row.load) == at]
        by = {name: [row for row in here if row.policy == name] for name in dict.fromkeys(row.policy for row in here)}
        base = [row.mean_jct_h for row in by[BASE]] if BASE in by else None
        for name, mine in by.items():
            jct = [row.mean_jct_h for row in mine]
            table.add_row(
                at[0], at[1], f"{at[2]:g}", name, f"{mean(jct):.2f} h", against(jct, base),
                f"{mean(row.p99_jct_h for row in mine):.1f} h", f"{mean(row.mean_slowdown for row in mine) - 1:+.1%}",
            )  # fmt: skip
    return Group(table, Text(), Text(WORDS))
