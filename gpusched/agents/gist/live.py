"""The GIST agent in the live controller: checks of its arrays, and its pass over a partition's queue."""

from __future__ import annotations

from gpusched.agents.gist.decide import agent_pass
from gpusched.agents.gist.networks import PATIENCE_S, GistWeights, agent_of
from gpusched.agents.gist.paper_pass import PaperWeights, check_size, check_whole, paper_pass, paper_weights_of
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NAN_OUTPUT, Context, Unusable
from gpusched.sched.reasons import QueueBlock


def prepare(model: TrainedModel) -> GistWeights | PaperWeights:
    """Check the model's arrays and return its networks: by ``variant``, those of any size or the paper's own.

    Raises:
        ValueError: An array has another shape than this version's inputs, the variant cannot decide, or the patience is
            not a number.
    """
    patience_s = float(model.about.get("patience_s", PATIENCE_S))
    if model.about.get("variant", "scale") != "scale":
        return paper_weights_of(model, patience_s)
    return agent_of(model.arrays, patience_s)


def decide_queue(prepared: GistWeights | PaperWeights, context: Context) -> tuple[list[int], QueueBlock]:
    """Decide about one partition; see `gpusched.sched.agent`.

    Raises:
        ValueError: The paper's own network is for other servers, or jobs ask for MIG slices.
        Unusable: A network's output is NaN.
    """
    world, waiting = context.world, context.waiting
    queue, submit, priority = waiting.ordered(context.partition, "fifo"), waiting.keys.submit, waiting.keys.priority
    if isinstance(prepared, PaperWeights):
        check_whole(prepared, context.partition)
        check_size(prepared, world.total, *world.span[context.partition])
        ordered, head, shadow, sound = paper_pass(context.state, queue, submit, priority, prepared, True)
    else:
        ordered, head, shadow, sound = agent_pass(context.state, world.usable, queue, submit, priority, prepared, True)
    if not sound:
        raise Unusable(NAN_OUTPUT)
    return ordered.tolist(), QueueBlock(context.policy, int(head), float(shadow))
