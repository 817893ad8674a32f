"""Sizes of a partition's resizable jobs by the trained agents, live and in replays.

Of the joint step only the number of GPUs is decided here. Cores and memory follow it and the policy's stages choose the
nodes, so there is one agent for all nodes, without attention or graph.
"""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.vector import to_vector
from gpusched.agents.maifs.network import HIDDEN, JOB, SHAPES, MaifsWeights, agent_of, job_values, restart_factor
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.sizing.question import CAPACITY, TOTAL, Claims, Question
from gpusched.sched.state import Ints

_UNCERTAINTY = 0.3  # of a job without measured speeds


def prepare(model: TrainedModel) -> MaifsWeights:
    """Return the weights. ValueError: they have another shape."""
    return agent_of(to_vector(model.arrays, SHAPES))


def choose_sizes(prepared: MaifsWeights, question: Question) -> Ints:
    """Choose GPUs per job: first the minimum, then steps with the largest weighted gain per share while any gains."""
    at = _choose(prepared, question.claims)
    sizes: Ints = question.claims.sizes[np.arange(len(at)), at]
    return sizes


@jit
def _choose(agent: MaifsWeights, claims: Claims) -> Ints:
    """Return the index of each job's size, ``int64[n]``."""
    sizes, allowed, pace, (n, most) = claims.sizes, claims.allowed, claims.pace, claims.sizes.shape
    at, weight, value = np.zeros(n, np.int64), np.zeros(n), np.zeros((n, most))
    inputs, hidden, asked, left_over = np.zeros(JOB), np.zeros(HIDDEN), 1.0, claims.number[CAPACITY]
    # Each job begins with the smallest size that it may have; what is left over is then given away.
    for i in range(n):
        while at[i] < most - 1 and not allowed[i, at[i]]:
            at[i] += 1
        asked += sizes[i, at[i]]
        left_over -= sizes[i, at[i]]
    for i in range(n):
        job = claims.jobs[i]
        held, best, now, count, largest = job["held"], 0.0, pace[i, at[i]], 0, 1
        for k in range(most):
            if sizes[i, k] > 0:
                count += claims.reported[i, k]
                largest = sizes[i, k]
                best = max(best, pace[i, k])
                if sizes[i, k] == held:
                    now = pace[i, k]
        # left_s is at the present size's speed; the network reads it at the best one's.
        left = max(job["left_s"], 1.0) * now / max(best, 1e-9)
        cost_s = max(job["cost_s"], 1.0)
        inputs[0] = 1.0
        inputs[1] = np.log(left / 600.0 + 1e-3) / 3.0
        inputs[2] = np.log1p(max(job["age_s"], 0.0) / 600.0) / 3.0
        inputs[3] = 1.0 if held > 0 else 0.0
        inputs[4] = np.log2(max(sizes[i, 0], 1) * largest) / 4.0
        inputs[5] = np.log(cost_s / 60.0)
        inputs[6] = 0.0 if count > 0 else _UNCERTAINTY
        inputs[7] = np.log(asked / claims.number[TOTAL])
        inputs[8] = job["age_s"] / (job["age_s"] + left)
        inputs[9] = np.log1p(job["restarts"])
        log_weight, horizon = job_values(agent, inputs, hidden)
        weight[i] = np.exp(min(max(log_weight, -20.0), 20.0)) / max(job["share"], 1e-9)
        keep = restart_factor(left, horizon, cost_s)
        for k in range(most):
            value[i, k] = pace[i, k] / max(best, 1e-9) * (keep if held > 0 and sizes[i, k] != held else 1.0)
    # Greedy by gain per GPU. All larger sizes are tried, not the next one alone: gains need not be concave.
    while True:
        best_gain, winner, best_size = 0.0, -1, -1
        for i in range(n):
            for k in range(at[i] + 1, most):
                more = sizes[i, k] - sizes[i, at[i]]
                if sizes[i, k] > 0 and allowed[i, k] and more <= left_over:
                    gain = weight[i] * (value[i, k] - value[i, at[i]]) / more
                    if gain > best_gain:
                        best_gain, winner, best_size = gain, i, k
        if winner < 0:
            return at
        left_over -= sizes[winner, best_size] - sizes[winner, at[winner]]
        at[winner] = best_size
