"""The rules that the agent begins from: linear orders, and for which jobs nodes are held. The best one is its base."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.learn.request import Arrays
from gpusched.learn.rltune.settings import Settings
from gpusched.sched.agents.rltune import OUTPUTS, Prepared
from gpusched.sched.agents.rltune_book import FEATURES, Reals
from gpusched.sched.agents.rltune_pass import Scorer
from gpusched.sched.attention import arrays_of as attention_arrays
from gpusched.sched.attention import attention_of
from gpusched.sched.nets import Net, net_of
from gpusched.sched.state import NONE, SKIP

INPUTS = len(FEATURES)
Weights = dict[str, float]


class Rule(NamedTuple):
    """An order and a hold by linear weights of the features (``one``: a constant)."""

    name: str
    order: Weights
    hold: Weights


_ORDERS: dict[str, Weights] = {
    "fifo": {"waited": 1.0},
    "smallest": {"gpus": -100.0, "waited": 1.0},
    "sjf": {"estimate": -1.0},
    "area": {"estimate": -1.0, "gpus": -0.7},
    "area2": {"estimate": -1.0, "gpus": -2.0},
    "sjf, aged": {"estimate": -1.0, "waited": 0.4},
    "area, aged": {"estimate": -1.0, "gpus": -0.7, "waited": 0.3},
    "one of each burst": {"estimate": -1.0, "gpus": -0.7, "burst_ahead": -0.4, "burst_runs": -0.2},
}
_HOLDS: dict[str, Weights] = {
    "": {"one": -1.0},
    "hold": {"one": 1.0},
    "hold within the hour": {"one": 8.2, "drain": -1.0},
    "hold as long as waited": {"waited": 1.0, "drain": -1.0},
    "hold as long as waited / 4": {"waited": 1.0, "drain": -1.0, "one": -1.4},
    "hold as long as it runs": {"estimate": 1.0, "drain": -1.0},
}
# Held for by the estimate alone, a large job that is not short after all stops everything.
_MAY_HOLD = ("smallest", "area", "area2", "area, aged", "one of each burst")
_NEEDS_HISTORY = ("sjf", "area", "area2", "sjf, aged", "area, aged", "one of each burst")


def rules(settings: Settings) -> list[Rule]:
    """All combinations that need to know no more than ``settings.knows``; without backfill only the orders."""
    holds = _HOLDS if settings.backfill else {"": _HOLDS[""]}
    found = []
    for order, weights in _ORDERS.items():
        mine = holds if order in _MAY_HOLD else {"": _HOLDS[""]}
        if order in _NEEDS_HISTORY and settings.knows == "nothing":
            continue
        known = {("truth" if k == "estimate" and settings.knows == "oracle" else k): v for k, v in weights.items()}
        found += [Rule(", ".join(x for x in (order, hold) if x), known, held) for hold, held in mine.items()]
    return found


def heuristics(settings: Settings) -> list[Rule]:
    """Those of the rules that are known heuristics, which the agent must not be worse than."""
    names = ("fifo", "smallest", "sjf")
    return [rule for rule in rules(settings) if rule.name in names]


def linear_of(rule: Rule) -> Reals:
    """``float32[2, FEATURES + 1]``, as in `Scorer`."""
    linear = np.zeros((OUTPUTS, INPUTS + 1), np.float32)
    for output, weights in enumerate((rule.order, rule.hold)):
        for name, weight in weights.items():
            linear[output, INPUTS if name == "one" else FEATURES.index(name)] = weight
    return linear


def without_net(rule: Rule, settings: Settings, window: int | None = None) -> Prepared:
    """The rule alone, as the passes take it."""
    nothing = np.zeros(INPUTS, np.float32)
    net = Net(np.zeros((INPUTS + 1) * OUTPUTS, np.float32), np.array([INPUTS, OUTPUTS], np.int64))
    size = np.array([window or settings.window], np.int64)
    scorer = Scorer(net, linear_of(rule), nothing, nothing, np.zeros(OUTPUTS, np.float32), size)
    return Prepared(scorer, settings.knows, SKIP if settings.backfill else NONE)


def with_net(
    rule: Prepared, arrays: dict[str, npt.NDArray[np.generic]], mean: Reals, scale: Reals, strength: float
) -> Prepared:
    """The rule with a network's answer, times ``strength``, added to its order."""
    net = net_of(arrays, "net", INPUTS, OUTPUTS)
    strengths = np.array([strength, 0.0], np.float32)
    attention = attention_of(arrays, net)
    return rule._replace(
        scorer=rule.scorer._replace(net=net, mean=mean, scale=scale, strength=strengths, attention=attention)
    )


def arrays_of(prepared: Prepared) -> Arrays:
    """What the weights file holds; see `gpusched.sched.agents.rltune.prepare`."""
    scorer = prepared.scorer
    found: Arrays = {name: getattr(scorer, name) for name in ("linear", "mean", "scale", "strength", "window")}
    at, sizes = 0, scorer.net.sizes.tolist()
    for i, (before, after) in enumerate(pairwise(sizes)):
        found[f"net.{i}.weight"] = scorer.net.weights[at : at + before * after].reshape(before, after).T.copy()
        at += before * after
        found[f"net.{i}.bias"] = scorer.net.weights[at : at + after].copy()
        at += after
    return found | attention_arrays(scorer.attention)
