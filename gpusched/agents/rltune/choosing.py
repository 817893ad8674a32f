"""Which rule the agent begins from, and whether its network may speak: chosen by replays of the training part."""

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
_PRIOR = 0.05  # of the cost: by how much another rule must be better than the usual one
_KEPT = 8
_SLACK = 0.005  # of the logarithm of mean JCT: what the choice may be above the best heuristic
_MARGIN = 0.01  # by which a network must be better before it is believed


def untrained(settings: RltuneSettings) -> PreparedScorer | None:
    """The agent before it learned anything: the usual rule, without a network, with the odds of no jobs at all.

    None where the agent may not know enough for that rule: it begins from a heuristic then, which the table has anyway.
    """
    usual = next((rule for rule in rules(settings) if rule.name == DEFAULT), None)
    return None if usual is None else without_net(usual, settings, NO_ODDS)


class BaseChoice(NamedTuple):
    """The base: its rule, its mean cost, the best heuristic's, and that one's name."""

    rule: CandidateRule
    cost: float
    best: float
    heuristic: str


class Option(NamedTuple):
    """A network that may be used, and how strongly."""

    name: str
    strength: float
    prepared: PreparedScorer


def choose_base(
    evaluations: Sequence[TraceEvaluation],
    settings: RltuneSettings,
    odds: HazardRates,
    advance: Callable[[int, int], None],
) -> BaseChoice:
    """The rule with the least mean cost that is in mean JCT no worse than the best heuristic.

    All rules are tried by some evaluations, the best of them and the heuristics by all. The usual rule, which was the
    best on many clusters together, is taken unless another is clearly better: little data says little. Where jobs have
    limits there is none.
    """

    def played(rule: CandidateRule, some: Sequence[TraceEvaluation]) -> list[MeanFigures]:
        return [one.play(without_net(rule, settings, odds)) for one in some]

    limits = any(bool((np.isfinite(one.trace.limit) & (one.trace.limit > 0)).any()) for one in evaluations)
    tried, first = rules(settings, limits), evaluations[:: max(len(evaluations) // 3, 1)]
    quick = []
    for i, rule in enumerate(tried):
        quick.append(mean_cost(played(rule, first), settings.objective))
        advance(i + 1, len(tried))
    best = [tried[i] for i in np.argsort(quick, kind="stable")[:_KEPT]]
    known = heuristics(settings, limits)
    usual = [rule for rule in tried if rule.name == DEFAULT and not limits]
    finals = list({rule.name: rule for rule in (*best, *known, *usual)}.values())
    figures = {rule.name: played(rule, evaluations) for rule in finals}
    cost = {name: mean_cost(mine, settings.objective) for name, mine in figures.items()}
    jct = {name: mean_cost(mine, "jct") for name, mine in figures.items()}
    most = min(jct[rule.name] for rule in known) + _SLACK
    allowed = [rule for rule in finals if jct[rule.name] <= most or settings.objective != "slowdown"]
    found = min(allowed, key=lambda rule: cost[rule.name])
    found = next((rule for rule in usual if cost[rule.name] <= cost[found.name] + _PRIOR), found)
    heuristic = min(known, key=lambda rule: cost[rule.name])
    return BaseChoice(found, cost[found.name], cost[heuristic.name], heuristic.name)


def choose_strength(
    options: Sequence[Option], base: PreparedScorer, learned: Sequence[TraceEvaluation],
    later: Sequence[TraceEvaluation],
    settings: RltuneSettings,
) -> tuple[Option, list[str]]:  # fmt: skip
    """The network that is best on the later part, if it is surely no worse than none at all, there and before.

    "No worse" holds for the objective on both parts and for mean JCT on the later one. Returns what was chosen, with
    the figures as sentences.
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
