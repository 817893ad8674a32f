"""The GIST agent in the live controller: checks of its arrays, and its pass over a partition's queue."""

from __future__ import annotations

from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.networks import PATIENCE_S, GistWeights, agent_of
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NAN_OUTPUT, Context, Unusable
from gpusched.sched.reasons import QueueBlock


def prepare(model: TrainedModel) -> GistWeights:
    """Check the model's arrays and return its networks.

    Raises:
        ValueError: An array has another shape than this version's inputs, the weights are of the paper's own setting,
            or the patience is not a number.
    """
    variant = model.about.get("variant", "scale")
    if variant != "scale":
        raise ValueError(f"these are weights of the {variant} variant, which decides only in the paper's own setting")
    return agent_of(model.arrays, float(model.about.get("patience_s", PATIENCE_S)))


def decide_queue(prepared: GistWeights, context: Context) -> tuple[list[int], QueueBlock]:
    """Decide about one partition; see `gpusched.sched.agent`.

    Raises:
        Unusable: A network's output is NaN.
    """
    world, waiting = context.world, context.waiting
    queue = waiting.ordered(context.partition, "fifo")
    ordered, head, shadow, sound = agent_pass(
        context.state, world.usable, queue, waiting.keys.submit, waiting.keys.priority, prepared, True
    )
    if not sound:
        raise Unusable(NAN_OUTPUT)
    return ordered.tolist(), QueueBlock(context.policy, int(head), float(shadow))
