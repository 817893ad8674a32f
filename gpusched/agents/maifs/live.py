"""Sizes of a partition's resizable jobs by what the agents learned of jobs, live and in replays.

Of the joint step this is the part that a cluster lets it decide: GPUs. Cores and memory follow them, the policy's
stages choose the nodes, so there is one agent for all nodes: nobody to attend to, and no graph.
"""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.vector import to_vector
from gpusched.agents.maifs.network import HIDDEN, JOB, SHAPES, MaifsWeights, agent_of, kept, look
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.sizing.question import CAPACITY, TOTAL, Claims, Question
from gpusched.sched.state import Ints

_UNSURE = 0.3  # of a job that told nothing of its speed


def prepare(model: TrainedModel) -> MaifsWeights:
    """The weights. ValueError: they are of another shape."""
    return agent_of(to_vector(model.arrays, SHAPES))


def choose_sizes(prepared: MaifsWeights, question: Question) -> Ints:
    """GPUs by job: everybody the least, then whoever gains the most weighed speed for its share, as long as any do."""
    at = _choose(prepared, question.claims)
    sizes: Ints = question.claims.sizes[np.arange(len(at)), at]
    return sizes


@jit
def _choose(agent: MaifsWeights, claims: Claims) -> Ints:
    """Which of its sizes each job gets, ``int64[n]``."""
    sizes, allowed, pace, (n, most) = claims.sizes, claims.allowed, claims.pace, claims.sizes.shape
    at, weight, value = np.zeros(n, np.int64), np.zeros(n), np.zeros((n, most))
    inputs, hidden, asked, left_over = np.zeros(JOB), np.zeros(HIDDEN), 1.0, claims.number[CAPACITY]
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
        left = max(job["left_s"], 1.0) * now / max(best, 1e-9)
        cost_s = max(job["cost_s"], 1.0)
        inputs[0] = 1.0
        inputs[1] = np.log(left / 600.0 + 1e-3) / 3.0
        inputs[2] = np.log1p(max(job["age_s"], 0.0) / 600.0) / 3.0
        inputs[3] = 1.0 if held > 0 else 0.0
        inputs[4] = np.log2(max(sizes[i, 0], 1) * largest) / 4.0
        inputs[5] = np.log(cost_s / 60.0)
        inputs[6] = 0.0 if count > 0 else _UNSURE
        inputs[7] = np.log(asked / claims.number[TOTAL])
        inputs[8] = job["age_s"] / (job["age_s"] + left)
        inputs[9] = np.log1p(job["restarts"])
        log_weight, horizon = look(agent, inputs, hidden)
        weight[i] = np.exp(min(max(log_weight, -20.0), 20.0)) / max(job["share"], 1e-9)
        keep = kept(left, horizon, cost_s)
        for k in range(most):
            value[i, k] = pace[i, k] / max(best, 1e-9) * (keep if held > 0 and sizes[i, k] != held else 1.0)
    while True:
        top, who, to = 0.0, -1, -1
        for i in range(n):
            for k in range(at[i] + 1, most):
                more = sizes[i, k] - sizes[i, at[i]]
                if sizes[i, k] > 0 and allowed[i, k] and more <= left_over:
                    gain = weight[i] * (value[i, k] - value[i, at[i]]) / more
                    if gain > top:
                        top, who, to = gain, i, k
        if who < 0:
            return at
        left_over -= sizes[who, to] - sizes[who, at[who]]
        at[who] = to
