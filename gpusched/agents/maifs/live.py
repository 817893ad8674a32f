"""Sizes of a partition's resizable jobs by the trained agents, live and in replays: the joint step of the setting.

Agents are the partition's racks, or groups of at most four nodes. Each bids for jobs at points (GPUs, nodes, cores,
memory), by speeds learned from reports. GPUs, cores and memory of the result are the answer; the policy's stages
choose the nodes, so that a job that keeps its size is never moved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.vector import to_vector
from gpusched.agents.maifs.joint import GRAPH, MODES, JointProblem, fill, new_plan, put
from gpusched.agents.maifs.market import problem_of
from gpusched.agents.maifs.network import SHAPES, MaifsWeights, agent_of, set_weights
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.sizing.question import Claims, Question
from gpusched.sched.state import Ints


class LiveAgents(NamedTuple):
    """The weights, and how the agents coordinate (see `joint.MODES`) and whether they attend to each other."""

    weights: MaifsWeights
    mode: int = GRAPH
    attends: bool = True


def prepare(model: TrainedModel) -> LiveAgents:
    """Return the weights.

    Raises:
        ValueError: They have another shape, or are those of a rule for GPUs only, from an earlier version.
    """
    if "slot_s" in model.about:
        raise ValueError("these weights are of an earlier version; train them again: gpusched train")
    weights, mode = agent_of(to_vector(model.arrays, SHAPES)), model.about.get("coordination", "graph")
    if mode not in MODES:
        raise ValueError(f"coordination is {mode!r}, expected one of {', '.join(MODES)}")
    return LiveAgents(weights, MODES[mode], model.about.get("attends", "yes") == "yes")


def choose_sizes(prepared: LiveAgents, question: Question) -> Ints:
    """Choose GPUs, cores and MiB of each job, ``int64[jobs, 3]``; 0 cores or MiB: it has no range of them."""
    problem = problem_of(question, float(prepared.weights.bold[0]))
    return _choose(prepared, problem, question.claims)


@jit
def _choose(prepared: LiveAgents, problem: JointProblem, claims: Claims) -> Ints:
    n = len(problem.kind)
    plan, answer = new_plan(problem, np.arange(n)), np.zeros((n, 3), np.int64)
    set_weights(problem, plan, prepared.weights, prepared.attends)
    for i in range(n):
        # What may not be resized now stays where it is: others bid for the rest.
        if problem.point[i] >= 0 and problem.options[i] == 1 and problem.option[i, 0] == problem.point[i]:
            put(problem, plan, i, problem.point[i], problem.at[i])
    fill(problem, plan, prepared.mode)
    for i in range(n):
        point = plan.point[i]
        answer[i, 0] = problem.gpus[point] if point >= 0 else problem.floor[i]
        if point >= 0 and point != problem.point[i]:
            for r in (1, 2):
                answer[i, r] = round(problem.need[point, r] * problem.spread[point])
    return answer
