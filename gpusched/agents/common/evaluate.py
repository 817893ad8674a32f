"""The final table: the trained agent against every heuristic that knows as much, and against what nobody can beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gpusched.agents.common.request import UNTRAINED, ResultRow
from gpusched.config.weights import Arrays
from gpusched.sched.sizing.rules import RULES
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.orders import ORDERS
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_order
from gpusched.study.compare import compare
from gpusched.study.request import elastic_of
from gpusched.study.study import PlannedReplay, Scenario, StudyOutcome, run_all

FIGURE = "mean_jct_s"
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_KNOWN = {"nothing": 0, "limit": 1, "estimate": 2, "oracle": 3}
_BACKFILL_KNOWS = {"+none": "nothing", "+skip": "nothing", "+easy": "limit"}


def heuristics(knows: str) -> list[ReplayPolicy]:
    """Every heuristic without preemption that knows no more of run times than ``knows``.

    Conservative backfill is left out: it is near EASY, and several times slower.
    """
    found = []
    for name, rule in ORDERS.items():
        for suffix, needs in _BACKFILL_KNOWS.items():
            if rule.kind != "preemptive" and max(_KNOWN[rule.knows], _KNOWN[needs]) <= _KNOWN[knows]:
                found.append(policy_of_order(name + suffix))
    return found


def rules(agent: ReplayPolicy) -> list[ReplayPolicy]:
    """What an agent is compared with: heuristics that know as much; of one that chooses sizes the rules for sizes."""
    if not agent.chooses_sizes:
        return heuristics(agent.knows)
    return [
        policy_by_name(name, sizes=True)
        for name in ("easy", "elastic", *(rule for rule in RULES if rule != "greedy-gain"))
    ]


def before(agent: ReplayPolicy, untrained: Arrays | None) -> ReplayPolicy | None:
    """The agent as it was before it learned anything."""
    if agent.model is None or untrained is None:
        return None
    model = replace(agent.model, arrays=untrained, digest="", path=f"<{UNTRAINED}>")
    return replace(agent, name=UNTRAINED, model=model)


def table(
    agent: ReplayPolicy, scenarios: Sequence[Scenario], advance: Callable[[int, int], None] = lambda done, total: None,
    untrained: ReplayPolicy | None = None,
) -> tuple[ResultRow, ...]:  # fmt: skip
    """The agent first, then what it was untrained, then the heuristics by mean JCT, then the lower bound.

    Over several scenarios (draws of a workload) an interval is Student's, and the change is paired by scenario; over
    one it is a bootstrap over days, as in ``gpusched replay``. ``advance`` is called with (replays done, in all).
    """
    policies = [agent, *([] if untrained is None else [untrained]), *rules(agent)]
    about = agent.model.about if agent.model is not None and agent.chooses_sizes else {}
    restart_s = float(about.get("restart_s", 0.0))
    runs = [
        PlannedReplay(scenario, policy, ReplayOptions(restart_s=restart_s, elastic=elastic_of(scenario.trace, sizes)))
        for policy in policies
        for sizes in [about.get("sizes") if policy.chooses_sizes else None]
        for scenario in scenarios
    ]
    outcomes: list[list[StudyOutcome]] = [[] for _ in policies]
    for i, outcome in enumerate(run_all(runs)):
        outcomes[i // len(scenarios)].append(outcome)
        advance(i + 1, len(runs))
    return rows_of([(p.name, mine[0].result.knows) for p, mine in zip(policies, outcomes, strict=True)], outcomes)


def rows_of(named: Sequence[tuple[str, str]], outcomes: Sequence[list[StudyOutcome]]) -> tuple[ResultRow, ...]:
    """The table of policies (``named``: name, and what it knows), in the order of `table`; the agent comes first.

    ``outcomes``: of each policy, over the same scenarios.
    """
    first, *rows = (_row(*names, mine, outcomes[0]) for names, mine in zip(named, outcomes, strict=True))
    rows.sort(key=lambda row: (row.policy != UNTRAINED, row.value is None, row.value))
    bounds = [o.bounds.mean_jct_s for o in outcomes[0]]
    known = [b for b in bounds if b is not None]
    if known and len(known) == len(bounds):
        low, high = interval(known)
        value = _mean(known)
        rows.append(ResultRow(policy="lower bound", figure=FIGURE, value=value, low=low, high=high, mean_jct_s=value))
    return (first, *rows)


def _row(name: str, knows: str, mine: list[StudyOutcome], agents: list[StudyOutcome]) -> ResultRow:
    known = [o.metrics.mean_jct_s for o in mine if o.metrics.mean_jct_s is not None]
    low, high = interval(known)
    change, change_low, change_high = (None, None, None) if mine is agents else _change(mine, agents)
    return ResultRow(
        policy=name, knows=knows, figure=FIGURE, value=_mean(known), low=low, high=high,
        mean_jct_s=_mean(known), mean_wait_s=_mean([o.metrics.mean_wait_s for o in mine]),
        utilization=_mean([o.metrics.utilization for o in mine]), change=change, change_low=change_low,
        change_high=change_high,
    )  # fmt: skip


def _change(mine: list[StudyOutcome], agents: list[StudyOutcome]) -> tuple[float | None, float | None, float | None]:
    """The agent's mean JCT over the heuristic's, less 1."""
    if len(mine) == 1:
        changes = compare(mine[0].result, agents[0].result)
        return (changes[0].relative, changes[0].low, changes[0].high) if changes else (None, None, None)
    pairs = [(a.metrics.mean_jct_s, b.metrics.mean_jct_s) for a, b in zip(agents, mine, strict=True)]
    relative = [a / b - 1 for a, b in pairs if a is not None and b]
    return _mean(relative), *interval(relative)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; nothing with fewer than two values."""
    n = len(values)
    if n < 2:
        return None, None
    half = _T95.get(n - 1, 1.96 + 2.5 / (n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(values))
    return mean - half, mean + half
