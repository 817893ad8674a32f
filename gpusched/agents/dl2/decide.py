"""DL2's decision: a slot is allocated in steps, each giving one job one more worker, server or both.

A small network scores each possible step, and "done". A step's gain is the best over all larger sizes that it leads to,
by observed speeds, since the next size alone may bring nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.agents.dl2.observed import ObservedClasses
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints

Reals = npt.NDArray[np.float32]
SERVER, WORKER, BOTH = 0, 1, 2
STEP_FEATURES = (
    "gain per slot, over all larger sizes", "no larger size is faster", "time left", "age in slots", "work left",
    "share", "servers", "workers", "speed", "speed gained by the step", "speed gained at the best larger size",
    "steps to the best larger size", "a server", "a worker", "both", "done", "within the last slot's size",
    "best larger size is the last slot's", "gain per slot of the step", "time left less the jobs' mean",
)  # fmt: skip
"""Inputs of one possible step of one job, in the order of the indices in `_step_inputs`."""
CLUSTER_FEATURES = (
    "free CPU slots", "free GPU slots", "jobs", "slots per job", "slots wanted", "jobs without slots", "mean time left",
)  # fmt: skip
"""Inputs common to all steps."""
INPUTS, SHARED = len(STEP_FEATURES), len(CLUSTER_FEATURES)
DONE_INPUT = STEP_FEATURES.index("done")
SHORT_JOB_POWER = 0.25
"""A job's weight in the reward is its time left to the power of minus this, so short jobs count more."""
_MIN_GAIN = 1e-6


class Actor(NamedTuple):
    """The weights of a step's score: a linear part plus one hidden layer.

    Attributes:
        linear: ``float32[INPUTS]``: linear part. done: ``float32[SHARED]``: the same of "done", by the common inputs.
        own, shared: ``float32[INPUTS, hidden]``, ``float32[SHARED, hidden]``: to the hidden layer.
        bias, out: ``float32[hidden]``: of the hidden layer, and from it to the score.
    """

    linear: Reals
    done: Reals
    own: Reals
    shared: Reals
    bias: Reals
    out: Reals


def zero_actor(hidden: int = 1) -> Actor:
    """Return weights of zeros."""
    sizes = ((INPUTS,), (SHARED,), (INPUTS, hidden), (SHARED, hidden), (hidden,), (hidden,))
    return Actor(*(np.zeros(size, np.float32) for size in sizes))


class ActiveJobs(NamedTuple):
    """The active jobs, by arrival. A size is a pair: servers, workers.

    Attributes:
        kind: ``int64[jobs]``: row of `ObservedClasses`.
        left, total: ``float64[jobs]``: work left and in all. age: ``float64[jobs]``: slots since arrival.
        before: ``int64[jobs, 2]``: sizes in the last slot; 0: none.
        sizes: ``int64[jobs, 2]``: sizes in this slot, written.
    """

    kind: Ints
    left: Floats
    total: Floats
    age: Floats
    before: Ints
    sizes: Ints


class Tape(NamedTuple):
    """The observations and steps recorded for training; empty arrays outside of training.

    Attributes:
        number: ``int64[3]``: numbers of steps, of steps kept and of rows kept so far.
        state: ``float32[steps, CRITIC]``: the critic's input at each step. reward: ``float32[steps]``: of every step.
        kept: ``int64[kept, 4]``: of a step kept: its number, its first row, its number of rows, and the chosen one.
        log_prob: ``float32[kept]``: log-probability of the chosen row.
        shared: ``float32[kept, SHARED]``: the common inputs.
        rows: ``float32[rows, INPUTS]``: inputs of the possible steps.
    """

    number: Ints
    state: Reals
    reward: Reals
    kept: Ints
    log_prob: Reals
    shared: Reals
    rows: Reals


CRITIC = SHARED + 16


def new_tape(steps: int, kept: int, rows: int) -> Tape:
    """Return an empty tape for this number of steps, steps kept, and rows of those."""
    return Tape(
        np.zeros(3, np.int64), np.zeros((steps, CRITIC), np.float32), np.zeros(steps, np.float32),
        np.zeros((kept, 4), np.int64), np.zeros(kept, np.float32), np.zeros((kept, SHARED), np.float32),
        np.zeros((rows, INPUTS), np.float32),
    )  # fmt: skip


@jit
def look_ahead(kinds: ObservedClasses, kind: int, a: int, b: int, free: Ints, current: Ints) -> tuple[float, int, int]:
    """Return the best gain over ``current``, and the size that has it, of sizes from (a, b) up that fit.

    The gain is relative speed per dominant slot (the larger of CPU and GPU slots) added; 0.0 and (-1, -1): none.
    """
    now = kinds.relative[kind, current[0], current[1]]
    need = kinds.need[kind, current[0], current[1]]
    best, to_a, to_b = 0.0, -1, -1
    for p in range(kinds.points[kind]):  # only the Pareto front: other sizes are never the best
        c, d = kinds.front[kind, p, 0], kinds.front[kind, p, 1]
        if c < a or d < b:
            continue
        then = kinds.need[kind, c, d]
        if then[0] - need[0] > free[0] or then[1] - need[1] > free[1]:
            continue
        gain = (kinds.relative[kind, c, d] - now) / max(max(then[0], then[1]) - max(need[0], need[1]), 1)
        if gain > best:
            best, to_a, to_b = gain, c, d
    return best, to_a, to_b


@jit
def _step_inputs(
    x: Reals, kinds: ObservedClasses, jobs: ActiveJobs, j: int, action: int, free: Ints, per_job: float,
    mean_left: float, target: Ints
) -> bool:  # fmt: skip
    """Write the inputs of one step; return False if the step cannot be taken."""
    kind, size = jobs.kind[j], jobs.sizes[j]
    a = size[0] + (1 if action != WORKER else 0)
    b = size[1] + (1 if action != SERVER else 0)
    if a >= kinds.relative.shape[1] or b >= kinds.relative.shape[2]:
        return False
    if action != BOTH and kinds.relative.shape[1] > 1 and size[0] == 0:
        return False  # one of each is needed to run
    need, then = kinds.need[kind, size[0], size[1]], kinds.need[kind, a, b]
    if then[0] - need[0] > free[0] or then[1] - need[1] > free[1]:
        return False
    x[:] = 0.0
    now = kinds.relative[kind, size[0], size[1]]
    gain, to_a, to_b = look_ahead(kinds, kind, a, b, free, size)
    target[0], target[1] = to_a, to_b
    left = np.log(max(jobs.left[j] / kinds.best[kind], 1e-3))
    own, after = max(need[0], need[1]), max(then[0], then[1])
    # Indices: see STEP_FEATURES. Logarithms and divisors bring the inputs to about the same range.
    if gain > _MIN_GAIN:
        x[0] = np.log(gain)
        x[10] = kinds.relative[kind, to_a, to_b] - now
        x[11] = max(to_a - a, to_b - b) / 8.0
        x[17] = 1.0 if to_a == jobs.before[j, 0] and to_b == jobs.before[j, 1] else 0.0
    else:
        x[0], x[1] = np.log(_MIN_GAIN) / 2.0, 1.0
    x[2], x[3], x[4] = left, np.log1p(jobs.age[j]), jobs.left[j] / jobs.total[j]
    x[5] = own / per_job
    x[6], x[7] = np.log1p(size[0]), np.log1p(size[1])
    x[8], x[9] = now, kinds.relative[kind, a, b] - now
    x[12 + action] = 1.0
    x[16] = 1.0 if a <= jobs.before[j, 0] and b <= jobs.before[j, 1] else 0.0
    x[18] = max(x[9], -1.0) / max(after - own, 1)
    x[19] = left - mean_left
    return True


@jit
def _score(actor: Actor, x: Reals, hidden: Reals) -> float:
    """Return the linear part of a step's score; write the step's own part of the hidden layer."""
    width = actor.bias.size
    for h in range(width):
        hidden[h] = 0.0
    linear = np.float32(0.0)
    for i in range(INPUTS):
        value = x[i]
        if value != 0.0:
            linear += value * actor.linear[i]
            for h in range(width):
                hidden[h] += value * actor.own[i, h]
    return float(linear)


@jit
def _critic_inputs(
    state: Reals, shared: Reals, kinds: ObservedClasses, jobs: ActiveJobs, coming: float, gained_sum: float,
    rows: Reals, possible: npt.NDArray[np.bool_], job_weight: Floats
) -> None:  # fmt: skip
    """Write the critic's input: the common inputs, then sums over jobs, scaled to about 1."""
    state[:SHARED] = shared
    at = SHARED
    n = jobs.kind.size
    state[at : at + 16] = 0.0
    for r in range(3 * n):
        if possible[r] and rows[r, 1] == 0.0:  # the step leads to a faster size
            gain = rows[r, 10] * job_weight[r // 3]
            state[at + 13] += gain
            state[at + 14] = max(state[at + 14], 10.0 * gain)
            state[at + 15] = max(state[at + 15], 10.0 * np.exp(rows[r, 0]) * job_weight[r // 3])
    for j in range(n):
        left = jobs.left[j] / kinds.best[jobs.kind[j]]
        state[at] += left / 100.0
        state[at + 1] += np.sqrt(left) / 20.0
        state[at + 2] += jobs.left[j] / jobs.total[j] / 10.0
        edge = 3  # 3 to 8: a histogram of the time left
        for bound in (1.0, 3.0, 6.0, 12.0, 24.0):
            if left > bound:
                edge += 1
        state[at + edge] += 0.1
    state[at + 9] = coming / 20.0
    state[at + 10] = gained_sum
    state[at + 11] = n / 20.0
    state[at + 12] = 1.0


@jit
def allocate(
    actor: Actor, kinds: ObservedClasses, jobs: ActiveJobs, free: Ints, capacity: Ints, draw: bool, keep: float,
    tape: Tape, coming: float, teacher: Ints, restart: float, true: ObservedClasses
) -> bool:  # fmt: skip
    """Choose the sizes of one slot step by step, until "done" or nothing fits; return False if a score is not finite.

    Args:
        actor: The weights.
        kinds: Expected speeds of the kinds of jobs.
        jobs: The active jobs; ``sizes`` holds the initial sizes and is updated.
        free: ``int64[2]``: free CPU and GPU slots, updated.
        capacity: ``int64[2]``: all CPU and GPU slots.
        draw: Whether steps are sampled (by compiled code's own generator, see `seed_draws`); else the best is taken.
        keep: Fraction of the steps to keep on the tape.
        tape: Records the steps if ``draw``.
        coming: Jobs yet to arrive, for the critic.
        teacher: ``int64[jobs, 2]``: with ``draw``, sizes to imitate, by steps of the job with the smallest share
            first; empty: the weights decide.
        restart: Cost of a resize as a fraction of a slot, for the reward.
        true: The speeds used for rewards: ``kinds``, or what jobs reported later.
    """
    n, width = jobs.kind.size, actor.bias.size
    rows, most = np.zeros((3 * n + 1, INPUTS), np.float32), 3 * n
    possible, linear = np.zeros(most + 1, np.bool_), np.zeros(most + 1, np.float32)
    hidden, target = np.zeros((most + 1, width), np.float32), np.zeros((most + 1, 2), np.int64)
    score, base = np.zeros(most + 1, np.float32), np.zeros(width, np.float32)
    shared = np.zeros(SHARED, np.float32)
    total_slots = max(capacity[0], capacity[1])
    wanted, mean_left, idle = 0.0, 0.0, 0
    job_weight = np.zeros(n)  # reward of a slot at full speed
    for j in range(n):
        k = jobs.kind[j]
        job_weight[j] = max(jobs.left[j] / kinds.best[k], 0.5) ** -SHORT_JOB_POWER
        last = kinds.points[k] - 1
        if last >= 0:
            need = kinds.need[k, kinds.front[k, last, 0], kinds.front[k, last, 1]]
            wanted += max(need[0], need[1])
        mean_left += np.log(max(jobs.left[j] / kinds.best[k], 1e-3)) / n
        idle += jobs.sizes[j, 0] + jobs.sizes[j, 1] == 0
    per_job = total_slots / max(n, 1)
    shared[2], shared[3], shared[4] = np.log1p(n), np.log(per_job), np.log((wanted + 1.0) / total_slots)
    shared[6] = mean_left
    # Row 3j + action is a step of job j; the last row is "done".
    possible[most] = True
    rows[most, DONE_INPUT] = 1.0
    linear[most] = _score(actor, rows[most], hidden[most])
    stale = np.ones(n, np.bool_)
    gained_sum = 0.0
    while True:
        # A step changes the free slots. Recompute only rows of the job that grew, and of steps that no longer fit.
        shared[0], shared[1] = free[0] / max(capacity[0], 1), free[1] / max(capacity[1], 1)
        shared[5] = idle / max(n, 1)
        any_left = False
        for j in range(n):
            kind = jobs.kind[j]
            for action in range(3):
                r = 3 * j + action
                renew = stale[j]
                if not renew and possible[r]:
                    a = jobs.sizes[j, 0] + (1 if action != WORKER else 0)
                    b = jobs.sizes[j, 1] + (1 if action != SERVER else 0)
                    if target[r, 0] >= 0:  # the larger size behind the gain may no longer fit
                        a, b = target[r, 0], target[r, 1]
                    need, then = kinds.need[kind, jobs.sizes[j, 0], jobs.sizes[j, 1]], kinds.need[kind, a, b]
                    renew = then[0] - need[0] > free[0] or then[1] - need[1] > free[1]
                if renew:
                    possible[r] = _step_inputs(rows[r], kinds, jobs, j, action, free, per_job, mean_left, target[r])
                    if possible[r]:
                        linear[r] = _score(actor, rows[r], hidden[r])
                any_left |= possible[r]
            stale[j] = False
        if not any_left:
            return True
        possible[most] = idle < n  # "done" needs at least one job with resources
        # The shared part of the hidden layer is common to all rows, so each row adds only its own part.
        for h in range(width):
            base[h] = actor.bias[h]
            for i in range(SHARED):
                base[h] += shared[i] * actor.shared[i, h]
        # Score every possible step and "done".
        best, chosen = np.float32(-np.inf), most
        for r in range(most + 1):
            if possible[r]:
                value = linear[r]
                for h in range(width):
                    value += max(hidden[r, h] + base[h], np.float32(0.0)) * actor.out[h]
                if r == most:
                    for i in range(SHARED):
                        value += shared[i] * actor.done[i]
                score[r] = value
                if not np.isfinite(value):
                    return False
                if value > best:
                    best, chosen = value, r
        # Take the best; in training sample, or follow the teacher, and record the step.
        if draw:
            if len(teacher) > 0:
                chosen = _teacher_step(jobs, rows, possible, teacher)
            total = 0.0  # softmax over the possible steps, shifted by the best score
            for r in range(most + 1):
                if possible[r]:
                    total += np.exp(score[r] - best)
            at = np.random.random() * total
            for r in range(most + 1):
                if possible[r] and len(teacher) == 0:
                    chosen = r
                    at -= np.exp(score[r] - best)
                    if at < 0.0:
                        break
            step = tape.number[0]
            if step < tape.reward.size:
                _critic_inputs(tape.state[step], shared, kinds, jobs, coming, gained_sum, rows, possible, job_weight)
                if tape.number[1] < len(tape.kept) and np.random.random() < keep:
                    _record_step(tape, rows, possible, chosen, shared, score[chosen] - best - np.log(total))
                tape.number[0] += 1
        else:
            step = 0
        if chosen == most:
            return True
        # Apply it. Its reward is the work that it adds in this slot, with short jobs counting more.
        j, action = chosen // 3, chosen % 3
        k, size = jobs.kind[j], jobs.sizes[j]
        before, need = _slot_training(true, jobs, j, restart), kinds.need[k, size[0], size[1]]
        idle -= size[0] + size[1] == 0
        size[0] += action != WORKER
        size[1] += action != SERVER
        then = kinds.need[k, size[0], size[1]]
        free[0] -= then[0] - need[0]
        free[1] -= then[1] - need[1]
        gained = (_slot_training(true, jobs, j, restart) - before) * job_weight[j]
        gained_sum += gained
        if draw and step < tape.reward.size:
            tape.reward[step] = gained
        stale[j] = True


@jit
def _slot_training(kinds: ObservedClasses, jobs: ActiveJobs, j: int, restart: float) -> float:
    """Return the work that a job does in this slot at its size, less a restart's cost, relative to its best size."""
    size, before = jobs.sizes[j], jobs.before[j]
    resized = before[0] + before[1] > 0 and (size[0] != before[0] or size[1] != before[1])
    return float(kinds.relative[jobs.kind[j], size[0], size[1]]) * (1.0 - restart if resized else 1.0)


@jit
def _teacher_step(jobs: ActiveJobs, rows: Reals, possible: npt.NDArray[np.bool_], teacher: Ints) -> int:
    """Return the next step towards the teacher's sizes: of the job with the smallest share, both tasks if both lack."""
    chosen, least = possible.size - 1, np.inf
    for j in range(jobs.kind.size):
        server, worker = jobs.sizes[j, 0] < teacher[j, 0], jobs.sizes[j, 1] < teacher[j, 1]
        if not (server or worker):
            continue
        r = 3 * j + (BOTH if server and worker else SERVER if server else WORKER)
        if possible[r] and rows[r, 5] < least:
            chosen, least = r, rows[r, 5]
    return chosen


@jit
def seed_draws(seed: int) -> None:
    """Seed this thread's sampling of steps."""
    np.random.seed(seed)


@jit
def _record_step(
    tape: Tape, rows: Reals, possible: npt.NDArray[np.bool_], pick: int, shared: Reals, log_prob: float
) -> None:
    first = tape.number[2]
    at, chosen = first, -1
    for r in range(possible.size):
        if possible[r]:
            if at >= len(tape.rows):
                return
            if r == pick:
                chosen = at - first
            tape.rows[at] = rows[r]
            at += 1
    i = tape.number[1]
    tape.kept[i, 0], tape.kept[i, 1], tape.kept[i, 2], tape.kept[i, 3] = tape.number[0], first, at - first, chosen
    tape.log_prob[i] = log_prob
    tape.shared[i] = shared
    tape.number[1] += 1
    tape.number[2] = at
