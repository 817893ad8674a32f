"""The choice of the agent's base rule and of its network, by replays of the training data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.candidates import NO_ODDS, CandidateRule, heuristics, rules, without_net
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.evaluation import MeanFigures, TraceEvaluation, mean_cost
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.estimation.odds import HazardRates

DEFAULT = "index, by work, hold four times as long as waited"
_PRIOR = 0.05  # of the cost: required improvement over the default rule
_KEPT = 8  # rules of the quick replays that the final ones compare
_SLACK = 0.005  # of the log of mean JCT: allowed excess over the best heuristic
_MARGIN = 0.01  # required improvement by a network


def untrained(settings: RltuneSettings) -> PreparedScorer | None:
    """Return the untrained agent: the default rule, without a network, with prior odds.

    None if the agent lacks the information for that rule: it then starts from a heuristic, which the table has anyway.
    """
    defaults = next((rule for rule in rules(settings) if rule.name == DEFAULT), None)
    return None if defaults is None else without_net(defaults, settings, NO_ODDS)


class BaseChoice(NamedTuple):
    """The chosen base: its rule and mean cost; the best heuristic's cost and name."""

    rule: CandidateRule
    cost: float
    best: float
    heuristic: str


class Option(NamedTuple):
    """A candidate network and its strength."""

    name: str
    strength: float
    prepared: PreparedScorer


def choose_base(
    evaluations: Sequence[TraceEvaluation],
    settings: RltuneSettings,
    odds: HazardRates,
    advance: Callable[[int, int], None],
    finals_on: Sequence[TraceEvaluation] = (),
) -> BaseChoice:
    """Return the rule with the least mean cost whose mean JCT is no worse than the best heuristic's.

    All rules run on some evaluations, the best of them and the heuristics on all (or ``finals_on``). The default rule,
    the best over many clusters, is preferred unless another is clearly better, since a single trace is little data.
    With limits there is no default.
    """

    def evaluate(rule: CandidateRule, some: Sequence[TraceEvaluation]) -> list[MeanFigures]:
        return [one.play(without_net(rule, settings, odds)) for one in some]

    limits = any(bool((np.isfinite(one.trace.limit) & (one.trace.limit > 0)).any()) for one in evaluations)
    tried, first = rules(settings, limits), evaluations[:: max(len(evaluations) // 3, 1)]
    quick = []
    for i, rule in enumerate(tried):
        quick.append(mean_cost(evaluate(rule, first), settings.objective))
        advance(i + 1, len(tried))
    best = [tried[i] for i in np.argsort(quick, kind="stable")[:_KEPT]]
    known = heuristics(settings, limits)
    defaults = [rule for rule in tried if rule.name == DEFAULT and not limits]
    finals = list({rule.name: rule for rule in (*best, *known, *defaults)}.values())
    figures = {rule.name: evaluate(rule, finals_on or evaluations) for rule in finals}
    cost = {name: mean_cost(results, settings.objective) for name, results in figures.items()}
    jct = {name: mean_cost(results, "jct") for name, results in figures.items()}
    most = min(jct[rule.name] for rule in known) + _SLACK
    allowed = [rule for rule in finals if jct[rule.name] <= most or settings.objective != "slowdown"]
    found = min(allowed, key=lambda rule: cost[rule.name])
    found = next((rule for rule in defaults if cost[rule.name] <= cost[found.name] + _PRIOR), found)
    heuristic = min(known, key=lambda rule: cost[rule.name])
    return BaseChoice(found, cost[found.name], cost[heuristic.name], heuristic.name)


def choose_strength(
    options: Sequence[Option], base: PreparedScorer, learned: Sequence[TraceEvaluation],
    later: Sequence[TraceEvaluation],
    settings: RltuneSettings,
) -> tuple[Option, list[str]]:  # fmt: skip
    """Return the network that is best on the later part, if on both parts it is no worse than no network.

    "No worse" refers to the objective on both parts and to mean JCT on the later one. Return the choice, and its
    results as sentences.
    """

    def costs(prepared: PreparedScorer) -> tuple[float, float, float]:
        after = [one.play(prepared) for one in later]
        before = mean_cost([one.play(prepared) for one in learned], settings.objective)
        return before, mean_cost(after, settings.objective), mean_cost(after, "jct")

    before_none, after_none, jct_none = costs(base)
    found, least, words = Option("no network", 0.0, base), after_none - _MARGIN, []
    for option in options:
        before, after, jct = costs(option.prepared)
        gain, early = after_none - after, before_none - before
        gains = f"{1 - np.exp(-gain):+.1%} later, {1 - np.exp(-early):+.1%} before"
        words.append(f"{option.name} x {option.strength:g}: {gains}")
        if early >= 0.0 and jct <= jct_none + _SLACK and after < least:
            found, least = option, after
    return found, words
