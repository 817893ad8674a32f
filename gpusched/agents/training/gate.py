"""The gate of ``gpusched train``: weights worse than their untrained start or the best rule are not saved.

Both comparisons are rows of the final table, on draws or days that training never used; a rule counts if it knows no
more of run times than the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from gpusched.agents.common.evaluate import FIGURE, knows_no_more
from gpusched.agents.common.request import UNTRAINED, ResultRow

Outcome = Literal["better", "no worse", "untrained", "worse", "not judged"]
_TIE = 0.0005  # less than half of the last digit shown is no difference


class GateComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The agent compared with one row of the final table.

    ``change``: the agent's figure divided by that row's, minus 1; ``low``, ``high``: its 95 % interval, if known.
    """

    against: str
    change: float
    low: float | None = None
    high: float | None = None


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on one partition's weights.

    Attributes:
        outcome: ``better`` than its start and the best rule (both intervals exclude 0); ``no worse`` than either;
            ``untrained``: no worse than the rule, and equal to its start; ``worse`` than one of them; ``not judged``:
            there was no held-out part.
        line: The figures, as a sentence.
        start: Against the untrained start. rule: Against the best rule. None: the table has no such row.
        kept_anyway: Saved although the gate was closed.
    """

    outcome: Outcome
    line: str
    start: GateComparison | None = None
    rule: GateComparison | None = None
    kept_anyway: bool = False

    @property
    def closed(self) -> bool:
        """Whether the weights are not to be saved."""
        return self.outcome in ("worse", "not judged")


class _Cost(NamedTuple):
    """A comparison as a cost: above 0 the agent is worse."""

    mean: float
    high: float | None


def judge(rows: Sequence[ResultRow], is_start: bool = False) -> GateVerdict:
    """Return the verdict on the first row of a final table; ``is_start``: its weights are those it started with."""
    if not rows:
        return GateVerdict(outcome="not judged", line="no held-out jobs to judge it by")
    agent, *others = rows
    grows = agent.figure == "utilization"  # of all other figures, less is better
    begun = next((row for row in others if row.policy == UNTRAINED), None)
    rules = [
        row
        for row in others
        if row.policy != UNTRAINED and not row.bound and row.value is not None and knows_no_more(row.knows, agent.knows)
    ]
    best = min(rules, key=lambda row: -(row.value or 0.0) if grows else row.value or 0.0, default=None)
    start, rule = _comparison(agent, begun), _comparison(agent, best)
    found = [one for one in (start, rule) if one is not None]
    if not found:
        return GateVerdict(outcome="not judged", line="no held-out job ran, or there is nothing to compare it with")
    name = "mean JCT" if agent.figure == FIGURE else agent.figure.replace("_", " ")
    line = f"{name} {', '.join(_words(one) for one in found)}"
    return GateVerdict(
        outcome=_outcome([_cost(one, grows) for one in found], is_start), line=line, start=start, rule=rule
    )


def _comparison(agent: ResultRow, row: ResultRow | None) -> GateComparison | None:
    """Return the paired change of the table, or else that of the two values."""
    if row is None:
        return None
    if row.change is not None:
        return GateComparison(against=row.policy, change=row.change, low=row.change_low, high=row.change_high)
    if agent.value is None or not row.value:
        return None
    return GateComparison(against=row.policy, change=agent.value / row.value - 1)


def _cost(one: GateComparison, grows: bool) -> _Cost:
    if grows:
        return _Cost(-one.change, None if one.low is None else -one.low)
    return _Cost(one.change, one.high)


def _outcome(costs: Sequence[_Cost], is_start: bool) -> Outcome:
    if any(cost.mean > _TIE for cost in costs):
        return "worse"
    if is_start:
        return "untrained"
    return "better" if all(cost.high is not None and cost.high < 0.0 for cost in costs) else "no worse"


def _words(one: GateComparison) -> str:
    whose = f"its {UNTRAINED}" if one.against == UNTRAINED else one.against
    between = "" if one.low is None or one.high is None else f" ({one.low:+.1%} to {one.high:+.1%})"
    return f"{one.change:+.1%}{between} against {whose}"
