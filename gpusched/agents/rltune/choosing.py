"""The choice of the agent's base rule and of its network, by replays of the training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.candidates import CandidateRule, heuristics, rules, without_net
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.evaluation import MeanFigures, TraceEvaluation, mean_cost
from gpusched.agents.rltune.settings import RltuneSettings

_GAIN = 0.01  # of the mean cost: required improvement over the usual rule
_WINS = 0.75  # of the replays that differ: in which a rule must be better than the usual one
_SAME = 1e-3  # costs that differ by less are equal
_KEPT = 8  # rules of the quick replays that the final ones compare
_SLACK = 0.005  # of the log of mean JCT: allowed excess by a network
_MARGIN = 0.01  # required improvement by a network

Costs = Sequence[tuple[float, float]]
"""A rule's cost and log of mean JCT, by replay."""


def untrained(settings: RltuneSettings) -> PreparedScorer | None:
    """Return the untrained agent: the usual rule, ``sjf-estimate-skip``, without a network.

    None if the agent knows no run times: it then starts from a heuristic, which the table has anyway.
    """
    return without_net(rules(settings)[0], settings) if settings.knows in ("estimate", "oracle") else None


class BaseChoice(NamedTuple):
    """The chosen base: its rule and mean cost; the usual rule's cost and name."""

    rule: CandidateRule
    cost: float
    usual_cost: float
    usual: str


class Option(NamedTuple):
    """A candidate network and its strength."""

    name: str
    strength: float
    prepared: PreparedScorer


def choose_base(
    evaluations: Sequence[TraceEvaluation],
    settings: RltuneSettings,
    advance: Callable[[int, int], None],
    finals_on: Sequence[TraceEvaluation] = (),
) -> BaseChoice:
    """Return the base by `preferred`; the usual rule is the first of `rules`.

    All rules run on some evaluations, the best of them and the heuristics on all (or ``finals_on``).
    """

    def evaluate(rule: CandidateRule, some: Sequence[TraceEvaluation]) -> list[MeanFigures]:
        return [one.play(without_net(rule, settings)) for one in some]

    limits = any(bool((np.isfinite(one.trace.limit) & (one.trace.limit > 0)).any()) for one in evaluations)
    tried, first = rules(settings, limits), evaluations[:: max(len(evaluations) // 3, 1)]
    quick = []
    for i, rule in enumerate(tried):
        quick.append(mean_cost(evaluate(rule, first), settings.objective))
        advance(i + 1, len(tried))
    best = [tried[i] for i in np.argsort(quick, kind="stable")[:_KEPT]]
    finals = {rule.name: rule for rule in (tried[0], *best, *heuristics(settings, limits))}
    figures = {name: evaluate(rule, finals_on or evaluations) for name, rule in finals.items()}
    costs = {name: [(f.cost(settings.objective), f.cost("jct")) for f in of] for name, of in figures.items()}
    found, usual = preferred(costs, tried[0].name), tried[0].name
    cost, usual_cost = (mean_cost(figures[name], settings.objective) for name in (found, usual))
    return BaseChoice(finals[found], cost, usual_cost, usual)


def preferred(costs: Mapping[str, Costs], usual: str) -> str:
    """Return the rule with the least mean cost among those that are certainly better than the usual one, else that.

    Certainly: by `_GAIN` in the mean, in `_WINS` of the replays in which they differ, and with no longer a mean JCT.
    """

    def is_better(name: str) -> bool:
        gain, jct_gain = (np.array(costs[usual]) - np.array(costs[name])).T
        wins, losses = int((gain > _SAME).sum()), int((gain < -_SAME).sum())
        return bool(gain.mean() > _GAIN and jct_gain.mean() >= 0.0 and wins >= _WINS * (wins + losses))

    return min(filter(is_better, costs), key=lambda name: np.mean(costs[name], axis=0)[0], default=usual)


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
