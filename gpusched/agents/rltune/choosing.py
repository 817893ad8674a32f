"""Which rule the agent begins from, and whether its network may speak: chosen by replays of the training part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.candidates import NO_ODDS, Rule, heuristics, rules, without_net
from gpusched.agents.rltune.evaluation import Evaluation, Figures
from gpusched.agents.rltune.live import Prepared
from gpusched.agents.rltune.odds import Odds
from gpusched.agents.rltune.settings import Settings

DEFAULT = "index, by work, hold four times as long as waited"
_PRIOR = 0.05  # of the cost: by how much another rule must be better than the usual one
_KEPT = 8
_SLACK = 0.005  # of the logarithm of mean JCT: what the choice may be above the best heuristic
_MARGIN = 0.01  # by which a network must be better before it is believed


def untrained(settings: Settings) -> Prepared | None:
    """The agent before it learned anything: the usual rule, without a network, with the odds of no jobs at all.

    None where the agent may not know enough for that rule: it begins from a heuristic then, which the table has anyway.
    """
    usual = next((rule for rule in rules(settings) if rule.name == DEFAULT), None)
    return None if usual is None else without_net(usual, settings, NO_ODDS)


class Choice(NamedTuple):
    """The base: its rule, its mean cost, the best heuristic's, and that one's name."""

    rule: Rule
    cost: float
    best: float
    heuristic: str


class Option(NamedTuple):
    """A network that may be used, and how strongly."""

    name: str
    strength: float
    prepared: Prepared


def choose_base(
    evaluations: Sequence[Evaluation], settings: Settings, odds: Odds, advance: Callable[[int, int], None]
) -> Choice:
    """The rule with the least mean cost that is in mean JCT no worse than the best heuristic.

    All rules are tried by some evaluations, the best of them and the heuristics by all. The usual rule, which was the
    best on many clusters together, is taken unless another is clearly better: little data says little. Where jobs have
    limits there is none.
    """
    limits = any(
        bool((np.isfinite(evaluation.trace.limit) & (evaluation.trace.limit > 0)).any()) for evaluation in evaluations
    )
    tried, first = rules(settings, limits), list(evaluations[:: max(len(evaluations) // 3, 1)])
    quick = []
    for i, rule in enumerate(tried):
        quick.append(_cost(first, rule, settings, odds))
        advance(i + 1, len(tried))
    best = [tried[i] for i in np.argsort(quick, kind="stable")[:_KEPT]]
    known = heuristics(settings, limits)
    usual = [rule for rule in tried if rule.name == DEFAULT and not limits]
    finals = list({rule.name: rule for rule in (*best, *known, *usual)}.values())
    played = {
        rule.name: [evaluation.play(without_net(rule, settings, odds)) for evaluation in evaluations] for rule in finals
    }
    cost = {name: _mean(figures, settings.objective) for name, figures in played.items()}
    jct = {name: _mean(figures, "jct") for name, figures in played.items()}
    most = min(jct[rule.name] for rule in known) + _SLACK
    allowed = [rule for rule in finals if jct[rule.name] <= most or settings.objective != "slowdown"]
    found = min(allowed, key=lambda rule: cost[rule.name])
    found = next((rule for rule in usual if cost[rule.name] <= cost[found.name] + _PRIOR), found)
    heuristic = min(known, key=lambda rule: cost[rule.name])
    return Choice(found, cost[found.name], cost[heuristic.name], heuristic.name)


def choose_strength(
    options: Sequence[Option],
    base: Prepared,
    learned: Sequence[Evaluation],
    later: Sequence[Evaluation],
    settings: Settings,
) -> tuple[Option, list[str]]:
    """The network that is best on the later part, if it is surely no worse than none at all, there and before.

    "No worse" holds for the objective on both parts and for mean JCT on the later one. Returns what was chosen, with
    the figures as sentences.
    """
    none = Option("no network", 0.0, base)
    played = {id(o): ([a.play(o.prepared) for a in later], [a.play(o.prepared) for a in learned])
              for o in (none, *options)}  # fmt: skip
    found, least = none, _mean(played[id(none)][0], settings.objective) - _MARGIN
    words = []
    for option in options:
        (after, before), (after_none, before_none) = played[id(option)], played[id(none)]
        gain = _mean(after_none, settings.objective) - _mean(after, settings.objective)
        early = _mean(before_none, settings.objective) - _mean(before, settings.objective)
        gains = f"{1 - np.exp(-gain):+.1%} later, {1 - np.exp(-early):+.1%} before"
        words.append(f"{option.name} x {option.strength:g}: {gains}")
        sound = early >= 0.0 and _mean(after, "jct") <= _mean(after_none, "jct") + _SLACK
        if sound and _mean(after, settings.objective) < least:
            found, least = option, _mean(after, settings.objective)
    return found, words


def _cost(evaluations: Sequence[Evaluation], rule: Rule, settings: Settings, odds: Odds) -> float:
    prepared = without_net(rule, settings, odds)
    return _mean([evaluation.play(prepared) for evaluation in evaluations], settings.objective)


def _mean(figures: Sequence[Figures], objective: str) -> float:
    return float(np.mean([f.cost(objective) for f in figures]))
