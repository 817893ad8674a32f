"""RLTune's order (Dongare et al., SoCC 2025): every job of a window gets a score.

A linear rule gives it, and a network beside the rule where training kept one.
Of the public design this keeps the shape: one small network for every job, the scores' order is the priority. Beside
the priority it says whether nodes are to be held free for a job that does not fit, which the paper leaves to its
mapping: without that large jobs wait for ever behind small ones, with it for every job nodes stand idle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.attention import attention_of
from gpusched.agents.common.nets import check_shapes, net_of
from gpusched.agents.rltune import live_preempt
from gpusched.agents.rltune.decide import Scorer, arrange, observation_of, ordered
from gpusched.agents.rltune.history import FEATURES, Known
from gpusched.agents.rltune.mapped import map_order
from gpusched.agents.rltune.preempt import Preempting, prepare_ranks
from gpusched.agents.rltune.snapshot import known_of_snapshot
from gpusched.config.weights import Model
from gpusched.estimation.odds import CLASSES, LEVELS, Odds
from gpusched.model.policy import MAPPED
from gpusched.sched.agent import Context, Unusable
from gpusched.sched.reasons import Block
from gpusched.sched.state import BEST_FIT, FIRST_FIT, NONE, SKIP, SPREAD

OUTPUTS = 2
NO_NUMBER = "its network's answer is no number"
_PLACES = {"first-fit": FIRST_FIT, "best-fit": BEST_FIT, "spread": SPREAD}


class Prepared(NamedTuple):
    """The weights, and what they were trained for."""

    scorer: Scorer
    knows: str
    backfill: int


def prepare(model: Model) -> Prepared | Preempting:
    """The arrays of the weights, checked.

    Raises:
        ValueError: An array is missing or of another shape.
    """
    if model.preempts:
        return prepare_ranks(model)
    inputs = len(FEATURES)
    wanted = {"linear": (OUTPUTS, inputs + 1), "mean": (inputs,), "scale": (inputs,), "strength": (OUTPUTS,),
              "window": (1,), "prior": (CLASSES, LEVELS), "few": (3,)}  # fmt: skip
    check_shapes(model.arrays, wanted)
    if model.arrays["window"][0] < 1:
        raise ValueError(f"window is {model.arrays['window'][0]}, expected at least 1")
    odds = Odds(*(np.ascontiguousarray(model.arrays[n], np.float64) for n in Odds._fields))
    if not np.all(odds.few > 0):
        raise ValueError(f"few is {odds.few}, expected more than 0")
    mean, scale, strength, linear = (
        np.ascontiguousarray(model.arrays[n], np.float32) for n in ("mean", "scale", "strength", "linear")
    )
    net = net_of(model.arrays, "net", inputs, OUTPUTS)
    window, attention = model.arrays["window"].astype(np.int64), attention_of(model.arrays, net)
    scorer = Scorer(net, linear, mean, scale, strength, window, odds, attention)
    backfill = NONE if model.about.get("backfill") == "none" else SKIP
    return Prepared(scorer, model.knows, backfill)


def decide_queue(prepared: Prepared | Preempting, context: Context) -> tuple[list[int], Block]:
    """One partition's decision: by operators' priority first, then by score, or by rank where running jobs are stopped.

    Raises:
        Unusable: A score is no number.
    """
    if isinstance(prepared, Preempting):
        return live_preempt.decide_queue(prepared, context)
    waiting, world, snapshot = context.waiting, context.world, context.snapshot
    lo, hi = world.span.get(context.partition, (0, 0))
    queue = waiting.ordered(context.partition, "fifo")
    known: Known = known_of_snapshot(context, prepared.knows)
    obs = observation_of(world.resources, world.total, lo, hi, len(queue), snapshot.now)
    seen = np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)
    ahead = np.zeros(len(queue) + 1, np.int64)
    hold, state = np.zeros(len(waiting.views), np.uint8), context.state
    order, sound = ordered(known, prepared.scorer, obs, state, queue, ahead, seen, hold)
    if not sound:
        raise Unusable(NO_NUMBER)
    order = order[np.argsort(-waiting.keys.priority[order], kind="stable")]
    if context.policy.place in MAPPED:
        return order.tolist(), map_order(context, known, order, hold, prepared.backfill)
    rule = _PLACES.get(context.policy.place, BEST_FIT)
    head = arrange(state, known, prepared.scorer.odds, order, hold, rule, prepared.backfill)
    return order.tolist(), Block(context.policy, int(head), float("inf"))
