"""Candidate base rules: linear orders of a job's features. The best one is the agent's base."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gpusched.agents.common.attention import arrays_of as attention_arrays
from gpusched.agents.common.attention import attention_of
from gpusched.agents.common.nets import Net, net_of
from gpusched.agents.rltune.decide import JobScorer, PreparedScorer
from gpusched.agents.rltune.history import FEATURES, Reals
from gpusched.agents.rltune.live import OUTPUTS
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import Arrays, TrainedModel
from gpusched.sched.state import NONE, SKIP
from gpusched.sim.policies import ReplayPolicy
from gpusched.traces.trace import Trace

LEARNED = 0.7  # fraction of the jobs to learn from; the rest is for the choice
INPUTS = len(FEATURES)
Weights = dict[str, float]


class CandidateRule(NamedTuple):
    """An order by linear weights of the features (``one``: a constant)."""

    name: str
    order: Weights


ORDERS: dict[str, Weights] = {
    "sjf": {"estimate": -1.0},
    "fifo": {"waited": 1.0},
    "smallest": {"gpus": -100.0, "waited": 1.0},
}
# Where there are limits. WFP3 is linear in logarithms: (waited / limit)^3 times GPUs.
_BY_LIMIT: dict[str, Weights] = {
    "by limit": {"limit": -1.0},
    "by limit and size": {"limit": -1.0, "gpus": -0.7},
    "wfp3": {"waited": 3.0, "limit": -3.0, "gpus": 0.7},
}
# Added to the order by estimates, alone and in pairs. The first jobs of a burst show how long the others run.
_CHANGES: dict[str, Weights] = {
    "small first": {"gpus": -0.7},
    "aged": {"waited": 0.1},
    "large bursts first": {"burst_waiting": 0.3},
    "large bursts first, clearly": {"burst_waiting": 1.0},
    "one of each burst first": {"burst_ahead": -0.5},
    "begun bursts last": {"burst_runs": -0.3},
    "old bursts last": {"burst_age": -0.2},
    "idle users first": {"user_share": -2.0},
}
_PAIRED = ("large bursts first", "large bursts first, clearly")


def rules(settings: RltuneSettings, limits: bool = False) -> list[CandidateRule]:
    """Return the rules that use no more information than ``settings.knows``, the usual one first.

    ``limits``: whether any job has a limit.
    """
    by_limit = _BY_LIMIT if limits and settings.knows != "nothing" else {}
    if settings.knows in ("nothing", "limit"):
        found = by_limit | {name: ORDERS[name] for name in ("fifo", "smallest")}
    else:
        found = ORDERS | by_limit | {f"sjf, {name}": ORDERS["sjf"] | change for name, change in _CHANGES.items()}
        for first in _PAIRED:
            others = {name: change for name, change in _CHANGES.items() if name not in _PAIRED}
            found |= {f"sjf, {first}, {x}": ORDERS["sjf"] | _CHANGES[first] | others[x] for x in others}
    return [CandidateRule(name, order) for name, order in found.items()]


def heuristics(settings: RltuneSettings, limits: bool = False) -> list[CandidateRule]:
    """Return the known heuristics among the rules."""
    names = ("fifo", "smallest", "sjf", "by limit", "wfp3")
    return [rule for rule in rules(settings, limits) if rule.name in names]


def linear_of(rule: CandidateRule) -> Reals:
    """Return the linear weights, ``float32[1, FEATURES + 1]``, as in `JobScorer`."""
    linear = np.zeros((OUTPUTS, INPUTS + 1), np.float32)
    for name, weight in rule.order.items():
        linear[0, INPUTS if name == "one" else FEATURES.index(name)] = weight
    return linear


def first_of_later(trace: Trace) -> int:
    """Return the first job of the part used for the choice; earlier jobs are learned from."""
    return max(int(LEARNED * len(trace)), 1)


def without_net(rule: CandidateRule, settings: RltuneSettings, window: int | None = None) -> PreparedScorer:
    """Return the rule without a network, as the passes take it."""
    nothing = np.zeros(INPUTS, np.float32)
    net = Net(np.zeros((INPUTS + 1) * OUTPUTS, np.float32), np.array([INPUTS, OUTPUTS], np.int64))
    size = np.array([window or settings.window], np.int64)
    scorer = JobScorer(net, linear_of(rule), nothing, nothing, np.zeros(OUTPUTS, np.float32), size)
    return PreparedScorer(scorer, settings.knows, SKIP if settings.backfill else NONE)


def with_net(rule: PreparedScorer, arrays: Arrays, mean: Reals, scale: Reals, strength: float) -> PreparedScorer:
    """Return the rule with a network's output, times ``strength``, added to its order."""
    net = net_of(arrays, "net", INPUTS, OUTPUTS)
    strengths, attention = np.array([strength], np.float32), attention_of(arrays, net)
    return rule._replace(
        scorer=rule.scorer._replace(net=net, mean=mean, scale=scale, strength=strengths, attention=attention)
    )


def arrays_of(prepared: PreparedScorer) -> Arrays:
    """Convert the scorer to the arrays of the weights file; see `gpusched.agents.rltune.live.prepare`."""
    scorer = prepared.scorer
    found: Arrays = {name: getattr(scorer, name) for name in ("linear", "mean", "scale", "strength", "window")}
    at = 0
    for i, (before, after) in enumerate(pairwise(scorer.net.sizes.tolist())):
        layer = scorer.net.weights[at : at + (before + 1) * after].reshape(before + 1, after).copy()
        found |= {f"net.{i}.weight": np.ascontiguousarray(layer[:-1].T), f"net.{i}.bias": layer[-1]}
        at += layer.size
    return found | attention_arrays(scorer.attention)


def agent_of(prepared: PreparedScorer, name: str, settings: RltuneSettings) -> ReplayPolicy:
    """Return a replay policy for an agent in memory."""
    about = {"knows": settings.knows, "backfill": "skip" if settings.backfill else "none"}
    return agent_of_model(name, TrainedModel("rltune", arrays_of(prepared), about, "", f"<{name}>"))


def agent_of_model(name: str, model: TrainedModel) -> ReplayPolicy:
    """Return a replay policy for weights in memory."""
    knows: Any = model.knows
    return ReplayPolicy(
        name=name, order="rltune", knows=knows, source="rltune agent", backfill=model.about["backfill"],
        placement="best-fit", model=model,
    )  # fmt: skip
