"""Which rule the agent begins from, and whether its network may speak: chosen by replays of the training part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.learn.rltune.arena import Arena, Figures
from gpusched.learn.rltune.candidates import Rule, heuristics, rules, without_net
from gpusched.learn.rltune.settings import Settings
from gpusched.sched.agents.rltune import Prepared

DEFAULT = "one of each burst, hold as long as waited / 4"
_PRIOR = 0.02
_KEPT = 8
_SLACK = 0.005  # of the logarithm of mean JCT: what the choice may be above the best heuristic
_MARGIN = 0.01  # by which a network must be better before it is believed


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


def choose_base(arenas: Sequence[Arena], settings: Settings, advance: Callable[[int, int], None]) -> Choice:
    """The rule with the least mean cost that is in mean JCT no worse than the best heuristic.

    All rules are replayed on some arenas, the best of them and the heuristics on all. The usual rule is taken where it
    is nearly as good as the best and no worse than any heuristic: little data says little.
    """
    tried, first = rules(settings), list(arenas[:: max(len(arenas) // 3, 1)])
    quick = []
    for i, rule in enumerate(tried):
        quick.append(_cost(first, rule, settings))
        advance(i + 1, len(tried))
    best = [tried[i] for i in np.argsort(quick, kind="stable")[:_KEPT]]
    known = heuristics(settings)
    usual = [rule for rule in tried if rule.name == DEFAULT]
    finals = list({rule.name: rule for rule in (*best, *known, *usual)}.values())
    played = {rule.name: [arena.play(without_net(rule, settings)) for arena in arenas] for rule in finals}
    cost = {name: _mean(figures, settings.objective) for name, figures in played.items()}
    jct = {name: _mean(figures, "jct") for name, figures in played.items()}
    most = min(jct[rule.name] for rule in known) + _SLACK
    allowed = [rule for rule in finals if jct[rule.name] <= most or settings.objective != "slowdown"]
    found = min(allowed, key=lambda rule: cost[rule.name])
    most_cost = min(cost[found.name] + _PRIOR, min(cost[rule.name] for rule in known))
    found = next((rule for rule in allowed if rule.name == DEFAULT and cost[rule.name] <= most_cost), found)
    heuristic = min(known, key=lambda rule: cost[rule.name])
    return Choice(found, cost[found.name], cost[heuristic.name], heuristic.name)


def choose_strength(
    options: Sequence[Option], base: Prepared, learned: Sequence[Arena], later: Sequence[Arena], settings: Settings
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


def _cost(arenas: Sequence[Arena], rule: Rule, settings: Settings) -> float:
    prepared = without_net(rule, settings)
    return _mean([arena.play(prepared) for arena in arenas], settings.objective)


def _mean(figures: Sequence[Figures], objective: str) -> float:
    return float(np.mean([f.cost(objective) for f in figures]))
