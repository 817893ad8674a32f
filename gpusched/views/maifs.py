"""Our setting of MAIFS again, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.papers import MAIFS
from gpusched.views.common import against, plain_table

if TYPE_CHECKING:
    from gpusched.agents.maifs.reproduce import Row

WORDS = (
    f"The paper reports up to {MAIFS.jct:+.0%} mean JCT and up to {MAIFS.makespan:+.0%} makespan, in a setting that is "
    "not public: this one is ours, and these figures are no reproduction of those. Against: by proportional; ± 95 % "
    "intervals by drawn weeks. Of the gain: of what greedy-true gains over proportional, which knows every speed. "
    "Bound: every job alone on all nodes at its best size. Means over drawn weeks."
)


def screen(rows: Sequence[Row]) -> RenderableType:
    """One line for a trace, load and policy, and the bound."""
    heads = ("TRACE", "LOAD", "POLICY", "MEAN JCT", "AGAINST", "OF THE GAIN", "MAKESPAN", "AGAINST", "RESTARTS")
    table = plain_table(*heads, right=(heads[1], *heads[3:]), drop=("RESTARTS", "OF THE GAIN", "MAKESPAN"))
    for trace, load in dict.fromkeys((row.trace, row.load) for row in rows):
        here = [row for row in rows if (row.trace, row.load) == (trace, load)]
        found = {
            policy: [row for row in here if row.policy == policy] for policy in dict.fromkeys(r.policy for r in here)
        }
        jct = {policy: [row.mean_jct_s for row in mine] for policy, mine in found.items()}
        makespan = {policy: [row.makespan_s for row in mine] for policy, mine in found.items()}
        any_one = next(iter(found.values()))
        jct["bound"], makespan["bound"] = [r.bound_s for r in any_one], [r.bound_makespan_s for r in any_one]
        for policy, mine in jct.items():
            restarts = mean(row.restarts / row.jobs for row in found[policy]) if policy in found else 0.0
            table.add_row(
                trace, f"{load:g}", policy, f"{mean(mine) / 60:.1f} min", against(mine, jct.get("proportional")),
                _gained(mine, jct), f"{mean(makespan[policy]) / 86_400:.2f} d",
                against(makespan[policy], makespan.get("proportional")), f"{restarts:.1f} a job",
            )  # fmt: skip
    return Group(table, Text(), Text(WORDS))


def _gained(mine: Sequence[float], jct: dict[str, list[float]]) -> str:
    if "proportional" not in jct or "greedy-true" not in jct:
        return "-"
    base, best = mean(jct["proportional"]), mean(jct["greedy-true"])
    return f"{(base - mean(mine)) / (base - best):.1%}" if base > best else "-"
