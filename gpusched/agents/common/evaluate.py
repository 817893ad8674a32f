"""The final table: the trained agent, every heuristic with the same information, and a lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gpusched.agents.common.request import UNTRAINED, ResultRow
from gpusched.config.weights import Arrays
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.model.policy import PolicySpec
from gpusched.sched.sizing.rules import RULES
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.orders import ORDERS
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_order
from gpusched.study.compare import compare
from gpusched.study.request import elastic_of
from gpusched.study.study import PlannedReplay, Scenario, StudyOutcome, placement_costs, run_all

FIGURE = "mean_jct_s"
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_KNOWN = {"nothing": 0, "limit": 1, "estimate": 2, "oracle": 3}
_BACKFILL_KNOWS = {"+none": "nothing", "+skip": "nothing", "+easy": "limit"}


def knows_no_more(knows: str, than: str) -> bool:
    """Return whether a policy that knows ``knows`` of run times uses no more information than one that knows ``than``.

    What is no such level is no policy's.
    """
    return _KNOWN.get(knows, len(_KNOWN)) <= _KNOWN.get(than, -1)


def heuristics(knows: str) -> list[ReplayPolicy]:
    """Return every heuristic without preemption that uses no more information on run times than ``knows``.

    Conservative backfill is excluded: its results are near EASY's, and it is several times slower.
    """
    found = []
    for name, rule in ORDERS.items():
        for suffix, needs in _BACKFILL_KNOWS.items():
            if rule.kind != "preemptive" and knows_no_more(rule.knows, knows) and knows_no_more(needs, knows):
                found.append(policy_of_order(name + suffix))
    return found


def baselines(agent: ReplayPolicy) -> list[ReplayPolicy]:
    """Return the policies to compare an agent with: heuristics with the same information, sizing or placement rules."""
    if agent.places and agent.spec is not None:
        return _placement_rules(agent.spec, agent.backfill)
    if not agent.chooses_sizes:
        return heuristics(agent.knows)
    return [policy_by_name(name) for name in ("easy", "elastic", *(rule for rule in RULES if rule != "greedy-gain"))]


def _placement_rules(spec: PolicySpec, backfill: str) -> list[ReplayPolicy]:
    """Return rules for nodes with the agent's order, backfill and longest wait."""
    base = policy_of_order(f"{spec.order}+{backfill}")
    return [
        replace(base, name=place, placement=place, placement_wait_s=spec.placement_wait_s)
        for place in ("contention", "rack-wait", "rack", "best-fit")
    ]


def untrained_policy(agent: ReplayPolicy, untrained: Arrays | None) -> ReplayPolicy | None:
    """Return the agent with its initial weights."""
    if agent.model is None or untrained is None:
        return None
    model = replace(agent.model, arrays=untrained, digest="", path=f"<{UNTRAINED}>")
    return replace(agent, name=UNTRAINED, model=model)


def final_table(
    agent: ReplayPolicy, scenarios: Sequence[Scenario], advance: Callable[[int, int], None] = lambda done, total: None,
    untrained: ReplayPolicy | None = None,
) -> tuple[ResultRow, ...]:  # fmt: skip
    """Return rows for the agent, its untrained start, the heuristics by mean JCT, and the lower bound.

    Over several scenarios (draws of a workload) intervals are Student's, and the change is paired by scenario; over
    one they are a bootstrap over days, as in ``gpusched replay``. ``advance`` is called with (replays done, total).
    """
    policies = [agent, *([] if untrained is None else [untrained]), *baselines(agent)]
    about = agent.model.about if agent.model is not None and agent.chooses_sizes else {}
    restart_s = float(about.get("restart_s", 0.0))
    networks = [placement_costs(scenario)[0] if agent.places else None for scenario in scenarios]
    runs = [
        PlannedReplay(
            scenario, policy,
            ReplayOptions(
                restart_s=restart_s, elastic=elastic_of(scenario.trace, sizes), network=network,
                estimator=HistoryEstimator(),  # as live
            ),
        )
        for policy in policies
        for sizes in [about.get("sizes") if policy.chooses_sizes else None]
        for scenario, network in zip(scenarios, networks, strict=True)
    ]  # fmt: skip
    outcomes: list[list[StudyOutcome]] = [[] for _ in policies]
    for i, outcome in enumerate(run_all(runs)):
        outcomes[i // len(scenarios)].append(outcome)
        advance(i + 1, len(runs))
    return rows_of([(p.name, own[0].result.knows) for p, own in zip(policies, outcomes, strict=True)], outcomes)


def rows_of(named: Sequence[tuple[str, str]], outcomes: Sequence[list[StudyOutcome]]) -> tuple[ResultRow, ...]:
    """Return the table of policies (``named``: name, information used), the agent first, as in `final_table`.

    ``outcomes``: of each policy, over the same scenarios.
    """
    first, *rows = (_row(*names, own, outcomes[0]) for names, own in zip(named, outcomes, strict=True))
    rows.sort(key=lambda row: (row.policy != UNTRAINED, row.value is None, row.value))
    bounds = [o.bounds.mean_jct_s for o in outcomes[0]]
    known = [b for b in bounds if b is not None]
    if known and len(known) == len(bounds):
        low, high = interval(known)
        value = _mean(known)
        rows.append(
            ResultRow(
                policy="lower bound", figure=FIGURE, value=value, low=low, high=high, mean_jct_s=value, bound=True
            )
        )
    return (first, *rows)


def _row(name: str, knows: str, outcomes: list[StudyOutcome], agent_outcomes: list[StudyOutcome]) -> ResultRow:
    known = [o.metrics.mean_jct_s for o in outcomes if o.metrics.mean_jct_s is not None]
    low, high = interval(known)
    change, change_low, change_high = (
        (None, None, None) if outcomes is agent_outcomes else _change(outcomes, agent_outcomes)
    )
    return ResultRow(
        policy=name, knows=knows, figure=FIGURE, value=_mean(known), low=low, high=high,
        mean_jct_s=_mean(known), mean_wait_s=_mean([o.metrics.mean_wait_s for o in outcomes]),
        utilization=_mean([o.metrics.utilization for o in outcomes]), change=change, change_low=change_low,
        change_high=change_high,
    )  # fmt: skip


def _change(
    outcomes: list[StudyOutcome], agent_outcomes: list[StudyOutcome]
) -> tuple[float | None, float | None, float | None]:
    """Return the agent's mean JCT divided by the heuristic's, minus 1, and its interval."""
    if len(outcomes) == 1:
        changes = compare(outcomes[0].result, agent_outcomes[0].result)
        return (changes[0].relative, changes[0].low, changes[0].high) if changes else (None, None, None)
    pairs = [(a.metrics.mean_jct_s, b.metrics.mean_jct_s) for a, b in zip(agent_outcomes, outcomes, strict=True)]
    relative = [a / b - 1 for a, b in pairs if a is not None and b]
    return _mean(relative), *interval(relative)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return Student's 95 % confidence interval of the mean; (None, None) with fewer than two values."""
    n = len(values)
    if n < 2:
        return None, None
    half = _T95.get(n - 1, 1.96 + 2.5 / (n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(values))
    return mean - half, mean + half
