"""The GIST agent in the live controller: its arrays checked, and its pass over a partition's queue."""

from __future__ import annotations

from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.networks import PATIENCE_S, GistWeights, agent_of
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NO_NUMBER, Context, Unusable
from gpusched.sched.reasons import QueueBlock


def prepare(model: TrainedModel) -> GistWeights:
    """The model's networks.

    Raises:
        ValueError: They are of another shape than this version's inputs, or of the paper's own setting; the patience
            is no number.
    """
    variant = model.about.get("variant", "scale")
    if variant != "scale":
        raise ValueError(f"these are weights of the {variant} variant, which decides only in the paper's own setting")
    return agent_of(model.arrays, float(model.about.get("patience_s", PATIENCE_S)))


def decide_queue(prepared: GistWeights, context: Context) -> tuple[list[int], QueueBlock]:
    """One partition's decision; see `gpusched.sched.agent`.

    Raises:
        Unusable: A network's answer is no number.
    """
    world, waiting = context.world, context.waiting
    queue = waiting.ordered(context.partition, "fifo")
    ordered, head, shadow, sound = agent_pass(
        context.state, world.usable, queue, waiting.keys.submit, waiting.keys.priority, prepared, True
    )
    if not sound:
        raise Unusable(NO_NUMBER)
    return ordered.tolist(), QueueBlock(context.policy, int(head), float(shadow))
