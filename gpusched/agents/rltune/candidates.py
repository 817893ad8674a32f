"""Candidate base rules: linear orders, and the jobs for which nodes are held. The best one is the agent's base."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.attention import arrays_of as attention_arrays
from gpusched.agents.common.attention import attention_of
from gpusched.agents.common.data import Bools, known_at
from gpusched.agents.common.nets import Net, net_of
from gpusched.agents.common.request import TrainJob
from gpusched.agents.rltune.decide import JobScorer, PreparedScorer
from gpusched.agents.rltune.history import FEATURES, Reals
from gpusched.agents.rltune.live import OUTPUTS
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import Arrays
from gpusched.estimation.odds import CLASSES, LEVELS, HazardRates, class_of, level_at
from gpusched.sched.state import NONE, SKIP, Floats, Ints
from gpusched.traces.trace import Trace

LEARNED = 0.7  # fraction of the jobs to learn from; the rest is for the choice
INPUTS = len(FEATURES)
Weights = dict[str, float]


class CandidateRule(NamedTuple):
    """An order and a hold by linear weights of the features (``one``: a constant)."""

    name: str
    order: Weights
    hold: Weights


ORDERS: dict[str, Weights] = {
    "fifo": {"waited": 1.0},
    "smallest": {"gpus": -100.0, "waited": 1.0},
    "sjf": {"estimate": -1.0},
    "area": {"estimate": -1.0, "gpus": -0.7},
    # Smith's rule (W. Smith, Naval Research Logistics Quarterly 3, 1956): the cost of a second of waiting over the GPU
    # seconds taken from others; with more or less weight on GPUs.
    "index": {"worth": 1.0, "work": -1.0, "gpus": -0.7},
    "index, small first": {"worth": 1.0, "work": -1.0, "gpus": -1.5},
    "index, by work": {"worth": 1.0, "work": -1.5, "gpus": -1.1},
    "index, aged": {"worth": 1.0, "work": -1.0, "gpus": -1.1, "waited": 0.2},
    "least work": {"work": -1.0, "gpus": -0.7},
}
# Where there are limits. WFP3 is linear in logarithms: (waited / limit)^3 times GPUs.
_BY_LIMIT: dict[str, Weights] = {
    "by limit": {"limit": -1.0},
    "by limit and size": {"limit": -1.0, "gpus": -0.7},
    "wfp3": {"waited": 3.0, "limit": -3.0, "gpus": 0.7},
}
HOLDS: dict[str, Weights] = {
    "": {"one": -1.0},
    "hold": {"one": 1.0},
    "hold within the hour": {"one": 8.2, "drain": -1.0},
    "hold as long as waited": {"waited": 1.0, "drain": -1.0},
    "hold four times as long as waited": {"waited": 1.0, "drain": -1.0, "one": 1.4},
    "hold as long as it runs": {"work": 1.0, "drain": -1.0},
}
# These hold no nodes: ordered by the estimate alone, a large job wrongly estimated as short would block all others.
_HOLD_NOTHING = ("fifo", "sjf", "index, aged", "least work", "by limit")
_NEED_NO_HISTORY = ("fifo", "smallest", *_BY_LIMIT)
_FEW = (20.0, 60.0, 2.0)  # chosen on all of Philly's clusters, see the docs


def rules(settings: RltuneSettings, limits: bool = False) -> list[CandidateRule]:
    """Return all combinations that use no more information than ``settings.knows``; without backfill only the orders.

    ``limits``: whether any job has a limit.
    """
    holds = HOLDS if settings.backfill else {"": HOLDS[""]}
    blind, found = settings.knows in ("nothing", "limit"), []
    for order, weights in (ORDERS | (_BY_LIMIT if limits and settings.knows != "nothing" else {})).items():
        if (settings.knows == "nothing" and order not in _NEED_NO_HISTORY) or (blind and "work" in weights):
            continue
        mine = {"": HOLDS[""]} if order in _HOLD_NOTHING else holds
        known = _oracle_weights(weights) if settings.knows == "oracle" else weights
        found += [
            CandidateRule(", ".join(x for x in (order, hold) if x), known, held)
            for hold, held in mine.items()
            if not blind or "work" not in held
        ]
    return found


def heuristics(settings: RltuneSettings, limits: bool = False) -> list[CandidateRule]:
    """Return the known heuristics among the rules, which the agent must match."""
    names = ("fifo", "smallest", "sjf", "by limit", "wfp3")
    return [rule for rule in rules(settings, limits) if rule.name in names]


def _oracle_weights(weights: Weights) -> Weights:
    """Return the same order by an oracle's run times, with the combined weight of the features they replace."""
    others = dict(weights)
    estimate, work, worth = (others.pop(name, 0.0) for name in ("estimate", "work", "worth"))
    return others | {"truth": estimate + work - worth}


def linear_of(rule: CandidateRule) -> Reals:
    """Return the linear weights, ``float32[2, FEATURES + 1]``, as in `JobScorer`."""
    linear = np.zeros((OUTPUTS, INPUTS + 1), np.float32)
    for output, weights in enumerate((rule.order, rule.hold)):
        for name, weight in weights.items():
            linear[output, INPUTS if name == "one" else FEATURES.index(name)] = weight
    return linear


def odds_of(gpus: Ints, ran_s: Floats, over: Bools | None = None) -> HazardRates:
    """Estimate the odds of run times by size class, with a prior where few jobs have ended.

    ``over``: whether each has ended (None: all have). A running job counts for the levels that it has passed.
    """
    ended, outran = np.zeros((CLASSES, LEVELS)), np.zeros((CLASSES, LEVELS))
    done = [True] * len(gpus) if over is None else over.tolist()
    for count, ran, is_over in zip(gpus.tolist(), ran_s.tolist(), done, strict=True):
        size, level = class_of(float(count)), level_at(float(ran))
        ended[size, level] += is_over
        outran[size, :level] += 1
    of_all = (ended.sum(0) + 1.0) / (ended.sum(0) + outran.sum(0) + 2.0)
    return HazardRates((_FEW[0] * of_all + ended) / (_FEW[0] + ended + outran), np.array(_FEW))


NO_ODDS = odds_of(np.zeros(0, np.int64), np.zeros(0))
"""The prior odds, without any data."""


def learned_odds(job: TrainJob) -> tuple[HazardRates, HazardRates]:
    """Return the odds for the choice and the final odds, each from the jobs ended by its cut.

    The first use data known at the start of the later part, by which the choice is made; the others all training data.
    """
    trace = job.scenario.trace
    early, over = known_at(trace, float(trace.submit[first_of_later(trace) - 1]))
    return odds_of(early.gpus, early.duration, over), odds_of(trace.gpus, trace.duration, job.ended)


def first_of_later(trace: Trace) -> int:
    """Return the first job of the part used for the choice; earlier jobs are learned from."""
    return max(int(LEARNED * len(trace)), 1)


def without_net(
    rule: CandidateRule, settings: RltuneSettings, odds: HazardRates, window: int | None = None
) -> PreparedScorer:
    """Return the rule without a network, as the passes take it."""
    nothing = np.zeros(INPUTS, np.float32)
    net = Net(np.zeros((INPUTS + 1) * OUTPUTS, np.float32), np.array([INPUTS, OUTPUTS], np.int64))
    size = np.array([window or settings.window], np.int64)
    scorer = JobScorer(net, linear_of(rule), nothing, nothing, np.zeros(OUTPUTS, np.float32), size, odds)
    return with_odds(PreparedScorer(scorer, settings.knows, SKIP if settings.backfill else NONE), odds)


def with_odds(prepared: PreparedScorer, odds: HazardRates) -> PreparedScorer:
    """Return the scorer with other odds; with none if it uses no run times."""
    if prepared.knows == "nothing":
        odds = odds._replace(prior=np.zeros_like(odds.prior))
    return prepared._replace(scorer=prepared.scorer._replace(odds=odds))


def with_net(rule: PreparedScorer, arrays: Arrays, mean: Reals, scale: Reals, strength: float) -> PreparedScorer:
    """Return the rule with a network's output, times ``strength``, added to its order."""
    net = net_of(arrays, "net", INPUTS, OUTPUTS)
    strengths = np.array([strength, 0.0], np.float32)
    attention = attention_of(arrays, net)
    return rule._replace(
        scorer=rule.scorer._replace(net=net, mean=mean, scale=scale, strength=strengths, attention=attention)
    )


def arrays_of(prepared: PreparedScorer) -> Arrays:
    """Convert the scorer to the arrays of the weights file; see `gpusched.agents.rltune.live.prepare`."""
    scorer = prepared.scorer
    found: Arrays = {name: getattr(scorer, name) for name in ("linear", "mean", "scale", "strength", "window")}
    found |= {"prior": scorer.odds.prior, "few": scorer.odds.few}
    at = 0
    for i, (before, after) in enumerate(pairwise(scorer.net.sizes.tolist())):
        layer = scorer.net.weights[at : at + (before + 1) * after].reshape(before + 1, after).copy()
        found |= {f"net.{i}.weight": np.ascontiguousarray(layer[:-1].T), f"net.{i}.bias": layer[-1]}
        at += layer.size
    return found | attention_arrays(scorer.attention)
