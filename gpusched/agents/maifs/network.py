"""The agents' network: the weight of each job's speed, the cost of restarts, and the agents' prices.

One small network evaluates every job, another every agent (a group of nodes). Agents attend to each other: a mixture of
the others' values sets an agent's prices of GPUs, cores and memory, and adjusts its weights of jobs. All agents share
the network's weights, so there may be any number of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.common.vector import split_vector
from gpusched.agents.maifs.joint import JointDecision, JointProblem
from gpusched.compiled import jit
from gpusched.sched.state import Floats

JOB, GROUP, HIDDEN, WIDTH = 10, 9, 12, 4
"""Inputs of a job and of a group, hidden units, and the width of attention."""
SHAPES = {
    "job.skip": (JOB, 2), "job.in": (JOB, HIDDEN), "job.out": (HIDDEN, 2 + WIDTH),
    "group.skip": (GROUP, 3), "group.in": (GROUP, WIDTH), "attention": (3, WIDTH, WIDTH),
    "group.out": (WIDTH, 3), "bold": (1,),
}  # fmt: skip
"""Name -> shape of the weights. ``bold``: see `beliefs.new_beliefs`."""
HORIZON_S = 120.0
WINDOW = 128
"""Maximum of waiting jobs considered, those of largest weight: jobs behind these would get nothing anyway."""
_TINY = 1e-9


class MaifsWeights(NamedTuple):
    """The weights, by the names of `SHAPES`; float64."""

    job_skip: Floats
    job_in: Floats
    job_out: Floats
    group_skip: Floats
    group_in: Floats
    attention: Floats
    group_out: Floats
    bold: Floats


def agent_of(numbers: Floats) -> MaifsWeights:
    """Convert ``float64[numbers]`` to weights."""
    return MaifsWeights(*split_vector(numbers, SHAPES))


def untrained(seed: int) -> Floats:
    """Return the initial weights, ``float64[numbers]``: random hidden layers with outputs of 0.

    All jobs then have equal weight, all prices are 1 and a restart counts over `HORIZON_S`: the greedy joint step with
    speeds learned from running jobs.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for name, shape in SHAPES.items():
        drawn = rng.normal(0, 1 / np.sqrt(shape[-2] if len(shape) > 1 else 1), shape)
        parts.append(drawn.ravel() * (name in ("job.in", "group.in", "attention")))
    return np.concatenate(parts)


POWERS = (0.25, 0.5, 1.0)
"""Of a job's time left: rules that a search may begin with."""


def with_power(numbers: Floats, power: float) -> Floats:
    """Return the weights with jobs weighted by their time left to the minus ``power``."""
    found = numbers.copy()
    found[: 2 * JOB].reshape(JOB, 2)[1, 0] = -3.0 * power  # `set_weights` reads a third of its logarithm
    return found


@jit
def set_weights(problem: JointProblem, plan: JointDecision, agent: MaifsWeights, attends: bool) -> None:
    """Write the weights, prices and restart costs of an empty decision."""
    (n, groups), hidden, liking = plan.weight.shape, np.zeros(HIDDEN), np.zeros(WIDTH)
    inputs, context = job_inputs(problem, plan), _contexts(problem, plan, agent, attends)
    for i in range(n):
        weight, horizon = job_values(agent, inputs[i], hidden)
        liking[:] = 0.0
        for w in range(WIDTH):
            for h in range(HIDDEN):
                liking[w] += hidden[h] * agent.job_out[h, 2 + w]
        for group in range(groups):
            mine = weight
            for w in range(WIDTH):
                mine += liking[w] * context[group, w]
            plan.weight[i, group] = np.exp(min(max(mine, -20.0), 20.0))
        plan.keep[i] = restart_factor(time_left(problem, plan, i), horizon, problem.cost_s[i])
    waiting = np.zeros(n)
    for i in range(n):
        waiting[i] = plan.weight[i].max() if problem.point[i] < 0 else 0.0
    if (waiting > 0.0).sum() > WINDOW:
        least = np.sort(waiting)[n - WINDOW]
        for i in range(n):
            if 0.0 < waiting[i] < least:
                plan.weight[i] = 0.0


@jit
def time_left(problem: JointProblem, plan: JointDecision, i: int) -> float:
    """Return a job's time left at its best point, in seconds."""
    return float(max(problem.work[i], _TINY) / max(plan.best[i], _TINY))


@jit
def _pressure(problem: JointProblem) -> float:
    asked = 0.0
    for low in problem.low:
        asked += low
    return float(np.log((1.0 + asked) / max(problem.node[:, 0].sum(), 1.0)))


@jit
def job_inputs(problem: JointProblem, plan: JointDecision) -> Floats:
    """Return the network's inputs of each job, ``float64[n, JOB]``."""
    inputs, pressure = np.zeros((len(plan.job), JOB)), _pressure(problem)
    for i in range(len(plan.job)):
        inputs[i, 0] = 1.0
        inputs[i, 1] = np.log(time_left(problem, plan, i) / 600.0 + 1e-3) / 3.0
        inputs[i, 2] = np.log1p(problem.age_s[i] / 600.0) / 3.0
        inputs[i, 3] = 1.0 if problem.point[i] >= 0 else 0.0
        inputs[i, 4] = np.log2(problem.low[i] * problem.high[i]) / 4.0
        inputs[i, 5] = np.log(problem.cost_s[i] / 60.0)
        inputs[i, 6] = problem.doubt[i]
        inputs[i, 7] = pressure
        inputs[i, 8] = problem.done[i]
        inputs[i, 9] = np.log1p(problem.restarts[i])
    return inputs


@jit
def job_values(agent: MaifsWeights, inputs: Floats, hidden: Floats) -> tuple[float, float]:
    """Return logs of a job's weight and horizon (over `HORIZON_S`), before an agent's adjustment; write ``hidden``."""
    weight, horizon = 0.0, 0.0
    for d in range(JOB):
        weight += inputs[d] * agent.job_skip[d, 0]
        horizon += inputs[d] * agent.job_skip[d, 1]
    for h in range(HIDDEN):
        total = 0.0
        for d in range(JOB):
            total += inputs[d] * agent.job_in[d, h]
        hidden[h] = np.tanh(total)
        weight += hidden[h] * agent.job_out[h, 0]
        horizon += hidden[h] * agent.job_out[h, 1]
    return weight, horizon


@jit
def restart_factor(left: float, horizon: float, restart_s: float) -> float:
    """Return the fraction of a job's speed left by a restart, over its horizon or its time left (seconds)."""
    span = min(left, HORIZON_S * np.exp(min(max(horizon, -4.0), 4.0)))
    return float(span / (span + restart_s))


@jit
def group_inputs(problem: JointProblem, plan: JointDecision) -> Floats:
    """Return the network's inputs of each agent, ``float64[groups, GROUP]``, of an empty decision."""
    groups = len(problem.group) - 1
    inputs, pressure = np.zeros((groups, GROUP)), _pressure(problem)
    for group in range(groups):
        first, end = problem.group[group], problem.group[group + 1]
        inputs[group, 0] = 1.0
        for r in range(3):
            all_of = problem.node[first:end, r].sum()
            inputs[group, 1 + r] = plan.held[first:end, r].sum() / max(all_of, _TINY)
        inputs[group, 4] = pressure
        inputs[group, 8] = (end - first) / 4.0
    gpus = max(problem.node[:, 0].sum(), 1.0) / groups
    for i in range(len(plan.job)):
        if problem.point[i] >= 0:
            group = problem.group_of[problem.at[i, 0]]
            inputs[group, 5] += 4.0 / gpus
            inputs[group, 6] += np.log(time_left(problem, plan, i) / 600.0 + 1e-3) / gpus
            inputs[group, 7] += problem.gpus[problem.point[i]] * problem.cost_s[i] / 100.0 / gpus
    return inputs


@jit
def _contexts(problem: JointProblem, plan: JointDecision, agent: MaifsWeights, attends: bool) -> Floats:
    """Return each agent's context, ``float64[groups, WIDTH]``; write the prices."""
    inputs, groups = group_inputs(problem, plan), len(problem.group) - 1
    context = np.zeros((groups, WIDTH))
    heads = np.zeros((3, groups, WIDTH))
    for group in range(groups):
        for w in range(WIDTH):
            total = 0.0
            for d in range(GROUP):
                total += inputs[group, d] * agent.group_in[d, w]
            context[group, w] = np.tanh(total)
    for head in range(3):
        for group in range(groups):
            for w in range(WIDTH):
                for v in range(WIDTH):
                    heads[head, group, w] += context[group, v] * agent.attention[head, v, w]
    if attends:
        for group in range(groups):
            _attend(heads, group, context[group])
    for group in range(groups):
        for r in range(3):
            total = 0.0
            for d in range(GROUP):
                total += inputs[group, d] * agent.group_skip[d, r]
            for w in range(WIDTH):
                total += context[group, w] * agent.group_out[w, r]
            plan.price[group, r] = np.exp(min(max(total, -4.0), 4.0))
    return context


@jit
def _attend(heads: Floats, group: int, context: Floats) -> None:
    """Add to a group's context a mixture of the others' values, by the similarity of its query to their keys."""
    groups = heads.shape[1]
    weight, largest = np.zeros(groups), -np.inf
    for other in range(groups):
        for w in range(WIDTH):
            weight[other] += heads[0, group, w] * heads[1, other, w] / np.sqrt(WIDTH)
        largest = max(largest, weight[other])
    total = 0.0
    for other in range(groups):
        weight[other] = np.exp(weight[other] - largest)
        total += weight[other]
    for other in range(groups):
        for w in range(WIDTH):
            context[w] += weight[other] / total * heads[2, other, w]
