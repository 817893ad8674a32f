"""RLTune's order (Dongare et al., SoCC 2025): every job of a window gets a score.

The score comes from a linear rule, plus a network if training kept one. As in the published design, one small network
scores every job, and the order of scores is the priority. Jobs may pass one that does not fit.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gpusched.agents.common.attention import attention_of
from gpusched.agents.common.nets import check_shapes, net_of
from gpusched.agents.rltune import live_preempt
from gpusched.agents.rltune.decide import JobScorer, PreparedScorer, in_order, new_scoring_state, observation_of
from gpusched.agents.rltune.history import FEATURES
from gpusched.agents.rltune.known import known_of_snapshot
from gpusched.agents.rltune.preempt import PreemptionModel, prepare_ranks
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NAN_OUTPUT, Context, Unusable
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.stages import place_queue
from gpusched.sched.state import BEST_FIT, NONE, SKIP

OUTPUTS = 1
# The optimiser's share of the agent's time budget. The rest is for scoring and for a busy machine: an agent that
# exceeds its budget loses its turn.
SHARE = 0.6


def prepare(model: TrainedModel) -> PreparedScorer | PreemptionModel:
    """Check the arrays of the weights and return them.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    if model.preempts:
        return prepare_ranks(model)
    inputs = len(FEATURES)
    shapes = {"linear": (OUTPUTS, inputs + 1), "mean": (inputs,), "scale": (inputs,), "strength": (OUTPUTS,),
              "window": (1,)}  # fmt: skip
    check_shapes(model.arrays, shapes)
    if model.arrays["window"][0] < 1:
        raise ValueError(f"window is {model.arrays['window'][0]}, expected at least 1")
    mean, scale, strength, linear = (
        np.ascontiguousarray(model.arrays[n], np.float32) for n in ("mean", "scale", "strength", "linear")
    )
    net = net_of(model.arrays, "net", inputs, OUTPUTS)
    window, attention = model.arrays["window"].astype(np.int64), attention_of(model.arrays, net)
    scorer = JobScorer(net, linear, mean, scale, strength, window, attention)
    backfill = NONE if model.about.get("backfill") == "none" else SKIP
    return PreparedScorer(scorer, model.knows, backfill)


def decide_queue(prepared: PreparedScorer | PreemptionModel, context: Context) -> tuple[list[int], QueueBlock]:
    """Decide about one partition: by operators' priority, then by score, or by rank if running jobs may be preempted.

    Raises:
        Unusable: A score is NaN.
    """
    if isinstance(prepared, PreemptionModel):
        return live_preempt.decide_queue(prepared, context)
    waiting, policy, state = context.waiting, context.policy, context.state
    queue, known = waiting.ordered(context.partition, "fifo"), known_of_snapshot(context, prepared.knows)
    by = new_scoring_state(prepared, known, BEST_FIT, waiting.keys.expected, waiting.keys.priority)
    order, sound = in_order(state, observation_of(state, context.world.total, queue), queue, by)
    if not sound:
        raise Unusable(NAN_OUTPUT)
    budget_s = min(policy.mapping.budget_s, SHARE * policy.budget_s)
    mapping = msgspec.structs.replace(policy.mapping, budget_s=budget_s)
    own = msgspec.structs.replace(policy, mapping=mapping, backfill="none" if by.backfill == NONE else "skip")
    return order.tolist(), place_queue(context._replace(policy=own), order)
