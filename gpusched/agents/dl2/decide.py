"""Who gets one more worker, server or both next, or nobody: DL2's decision, by one small network for all steps.

What a job may gain is looked ahead for over all larger sizes that are expected to be worth it, by observed speeds.
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
STEP = (
    "gain per slot, over all larger sizes", "no larger size is faster", "time left", "slots stayed", "work left",
    "share", "servers", "workers", "speed", "speed after the step", "speed at the size looked ahead to",
    "steps to it", "a server", "a worker", "both", "done", "had as much", "had just that", "gain per slot of the step",
    "time left against others'",
)  # fmt: skip
"""Inputs of one possible step of one job."""
CLUSTER = ("free CPU slots", "free GPU slots", "jobs", "slots a job", "wanted", "nothing yet", "time left of all")
"""Inputs that all steps share."""
INPUTS, SHARED = len(STEP), len(CLUSTER)
DONE_ROW = STEP.index("done")
PATIENCE = 0.25
"""Slots go to jobs with little left first, by this power of it."""
_LEAST = 1e-6


class Actor(NamedTuple):
    """The weights: a linear score and one hidden layer beside it, for every step; and for "done".

    Attributes:
        linear: ``float32[INPUTS]``. done: ``float32[SHARED]``.
        own: ``float32[INPUTS, hidden]``. shared: ``float32[SHARED, hidden]``. bias, out: ``float32[hidden]``.
    """

    linear: Reals
    done: Reals
    own: Reals
    shared: Reals
    bias: Reals
    out: Reals


def nobody(hidden: int = 1) -> Actor:
    """Weights that are all 0."""
    sizes = ((INPUTS,), (SHARED,), (INPUTS, hidden), (SHARED, hidden), (hidden,), (hidden,))
    return Actor(*(np.zeros(size, np.float32) for size in sizes))


class Present(NamedTuple):
    """The jobs that are there, by arrival.

    Attributes:
        kind: ``int64[jobs]``: of `ObservedClasses`.
        left, total: ``float64[jobs]``: work. stayed: ``float64[jobs]``: slots.
        before: ``int64[jobs, 2]``: sizes in the last slot; 0: none.
        sizes: ``int64[jobs, 2]``: in this slot, written.
    """

    kind: Ints
    left: Floats
    total: Floats
    stayed: Floats
    before: Ints
    sizes: Ints


class Tape(NamedTuple):
    """What was seen and done, for learning. Empty arrays where nobody learns.

    Attributes:
        number: ``int64[3]``: steps, steps kept, rows kept.
        state: ``float32[steps, CRITIC]``: of every step. reward: ``float32[steps]``: what it brought.
        kept: ``int64[kept, 4]``: step, first row, rows, and which of them was done. chance: ``float32[kept]``: its
            logarithm. shared: ``float32[kept, SHARED]``.
        rows: ``float32[rows, INPUTS]``.
    """

    number: Ints
    state: Reals
    reward: Reals
    kept: Ints
    chance: Reals
    shared: Reals
    rows: Reals


CRITIC = SHARED + 16


def no_tape() -> Tape:
    """Of nobody who learns."""
    return new_tape(0, 0, 0)


def new_tape(steps: int, kept: int, rows: int) -> Tape:
    """Room for so many steps in all, steps kept, and rows of those."""
    return Tape(
        np.zeros(3, np.int64), np.zeros((steps, CRITIC), np.float32), np.zeros(steps, np.float32),
        np.zeros((kept, 4), np.int64), np.zeros(kept, np.float32), np.zeros((kept, SHARED), np.float32),
        np.zeros((rows, INPUTS), np.float32),
    )  # fmt: skip


@jit
def look_ahead(kinds: ObservedClasses, kind: int, a: int, b: int, free: Ints, here: Ints) -> tuple[float, int, int]:
    """The most relative speed gained per dominant slot, of sizes from (a, b) on that fit; against size ``here``."""
    now = kinds.relative[kind, here[0], here[1]]
    need = kinds.need[kind, here[0], here[1]]
    best, to_a, to_b = 0.0, -1, -1
    for p in range(kinds.points[kind]):
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
def _row(
    x: Reals, kinds: ObservedClasses, jobs: Present, j: int, action: int, free: Ints, per_job: float,
    mean_left: float, target: Ints
) -> bool:  # fmt: skip
    """Writes the inputs of one step; False: it cannot be taken."""
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
    if gain > _LEAST:
        x[0] = np.log(gain)
        x[10] = kinds.relative[kind, to_a, to_b] - now
        x[11] = max(to_a - a, to_b - b) / 8.0
        x[17] = 1.0 if to_a == jobs.before[j, 0] and to_b == jobs.before[j, 1] else 0.0
    else:
        x[0], x[1] = np.log(_LEAST) / 2.0, 1.0
    x[2], x[3], x[4] = left, np.log1p(jobs.stayed[j]), jobs.left[j] / jobs.total[j]
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
    """The linear part; writes the part of the hidden layer that is the step's own."""
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
def _state(
    state: Reals, shared: Reals, kinds: ObservedClasses, jobs: Present, coming: float, granted: float, rows: Reals,
    possible: npt.NDArray[np.bool_], worth: Floats
) -> None:  # fmt: skip
    """What the critic sees."""
    state[:SHARED] = shared
    at = SHARED
    n = jobs.kind.size
    state[at : at + 16] = 0.0
    for r in range(3 * n):
        if possible[r] and rows[r, 1] == 0.0:
            gain = rows[r, 10] * worth[r // 3]
            state[at + 13] += gain
            state[at + 14] = max(state[at + 14], 10.0 * gain)
            state[at + 15] = max(state[at + 15], 10.0 * np.exp(rows[r, 0]) * worth[r // 3])
    for j in range(n):
        left = jobs.left[j] / kinds.best[jobs.kind[j]]
        state[at] += left / 100.0
        state[at + 1] += np.sqrt(left) / 20.0
        state[at + 2] += jobs.left[j] / jobs.total[j] / 10.0
        edge = 3
        for bound in (1.0, 3.0, 6.0, 12.0, 24.0):
            if left > bound:
                edge += 1
        state[at + edge] += 0.1
    state[at + 9] = coming / 20.0
    state[at + 10] = granted
    state[at + 11] = n / 20.0
    state[at + 12] = 1.0


@jit
def allocate(actor: Actor, kinds: ObservedClasses, jobs: Present, free: Ints, capacity: Ints, draw: bool, keep: float,
             tape: Tape, coming: float, teacher: Ints, restart: float) -> bool:  # fmt: skip
    """Sizes of one slot: one step after the other, until "done" or nothing fits. False: a score is no number.

    Args:
        actor: The weights.
        kinds: What is expected of kinds of jobs.
        jobs: Those that are there; ``sizes`` as they begin, and written.
        free: ``int64[2]``: CPU and GPU slots that are free, written.
        capacity: ``int64[2]``: of all.
        draw: Steps are drawn by their chances (numpy's generator of compiled code), else the best is taken.
        keep: The part of all steps whose rows are kept on the tape.
        tape: See there.
        coming: Jobs yet to arrive, for the critic.
        teacher: ``int64[jobs, 2]``: sizes that are to be reached, with ``draw``, by steps to the smallest share first;
            empty: the weights decide.
        restart: The part of a slot that a job loses which goes on with another size than it had, for the reward.
    """
    n, width = jobs.kind.size, actor.bias.size
    rows, most = np.zeros((3 * n + 1, INPUTS), np.float32), 3 * n
    possible, linear = np.zeros(most + 1, np.bool_), np.zeros(most + 1, np.float32)
    hidden, target = np.zeros((most + 1, width), np.float32), np.zeros((most + 1, 2), np.int64)
    score, base = np.zeros(most + 1, np.float32), np.zeros(width, np.float32)
    shared = np.zeros(SHARED, np.float32)
    whole = max(capacity[0], capacity[1])
    wanted, mean_left, idle = 0.0, 0.0, 0
    worth = np.zeros(n)  # what full speed in this slot brings, for the reward
    for j in range(n):
        k = jobs.kind[j]
        worth[j] = max(jobs.left[j] / kinds.best[k], 0.5) ** -PATIENCE
        last = kinds.points[k] - 1
        if last >= 0:
            need = kinds.need[k, kinds.front[k, last, 0], kinds.front[k, last, 1]]
            wanted += max(need[0], need[1])
        mean_left += np.log(max(jobs.left[j] / kinds.best[k], 1e-3)) / n
        idle += jobs.sizes[j, 0] + jobs.sizes[j, 1] == 0
    per_job = whole / max(n, 1)
    shared[2], shared[3], shared[4] = np.log1p(n), np.log(per_job), np.log((wanted + 1.0) / whole)
    shared[6] = mean_left
    possible[most] = True
    rows[most, DONE_ROW] = 1.0
    linear[most] = _score(actor, rows[most], hidden[most])
    stale = np.ones(n, np.bool_)
    granted = 0.0
    while True:
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
                    if target[r, 0] >= 0:  # what it looked ahead to may not fit any more
                        a, b = target[r, 0], target[r, 1]
                    need, then = kinds.need[kind, jobs.sizes[j, 0], jobs.sizes[j, 1]], kinds.need[kind, a, b]
                    renew = then[0] - need[0] > free[0] or then[1] - need[1] > free[1]
                if renew:
                    possible[r] = _row(rows[r], kinds, jobs, j, action, free, per_job, mean_left, target[r])
                    if possible[r]:
                        linear[r] = _score(actor, rows[r], hidden[r])
                any_left |= possible[r]
            stale[j] = False
        if not any_left:
            return True
        possible[most] = idle < n  # somebody has to run
        for h in range(width):
            base[h] = actor.bias[h]
            for i in range(SHARED):
                base[h] += shared[i] * actor.shared[i, h]
        best, which = np.float32(-np.inf), most
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
                    best, which = value, r
        if draw:
            if len(teacher) > 0:
                which = _taught(jobs, rows, possible, teacher)
            total = 0.0
            for r in range(most + 1):
                if possible[r]:
                    total += np.exp(score[r] - best)
            at = np.random.random() * total
            for r in range(most + 1):
                if possible[r] and len(teacher) == 0:
                    which = r
                    at -= np.exp(score[r] - best)
                    if at < 0.0:
                        break
            step = tape.number[0]
            if step < tape.reward.size:
                _state(tape.state[step], shared, kinds, jobs, coming, granted, rows, possible, worth)
                if tape.number[1] < len(tape.kept) and np.random.random() < keep:
                    _keep(tape, rows, possible, which, shared, score[which] - best - np.log(total))
                tape.number[0] += 1
        else:
            step = 0
        if which == most:
            return True
        j, action = which // 3, which % 3
        k, size = jobs.kind[j], jobs.sizes[j]
        before, need = _trained(kinds, jobs, j, restart), kinds.need[k, size[0], size[1]]
        idle -= size[0] + size[1] == 0
        size[0] += action != WORKER
        size[1] += action != SERVER
        then = kinds.need[k, size[0], size[1]]
        free[0] -= then[0] - need[0]
        free[1] -= then[1] - need[1]
        gained = (_trained(kinds, jobs, j, restart) - before) * worth[j]
        granted += gained
        if draw and step < tape.reward.size:
            tape.reward[step] = gained
        stale[j] = True


@jit
def _trained(kinds: ObservedClasses, jobs: Present, j: int, restart: float) -> float:
    """What a job would train in this slot at its size, in parts of what it would at its best one."""
    size, before = jobs.sizes[j], jobs.before[j]
    resized = before[0] + before[1] > 0 and (size[0] != before[0] or size[1] != before[1])
    return float(kinds.relative[jobs.kind[j], size[0], size[1]]) * (1.0 - restart if resized else 1.0)


@jit
def _taught(jobs: Present, rows: Reals, possible: npt.NDArray[np.bool_], teacher: Ints) -> int:
    """The next step to the sizes of a teacher: to the job with the smallest share, both if both are wanted."""
    which, least = possible.size - 1, np.inf
    for j in range(jobs.kind.size):
        server, worker = jobs.sizes[j, 0] < teacher[j, 0], jobs.sizes[j, 1] < teacher[j, 1]
        if not (server or worker):
            continue
        r = 3 * j + (BOTH if server and worker else SERVER if server else WORKER)
        if possible[r] and rows[r, 5] < least:
            which, least = r, rows[r, 5]
    return which


@jit
def seed_draws(seed: int) -> None:
    """Of this thread's steps that are drawn."""
    np.random.seed(seed)


@jit
def _keep(tape: Tape, rows: Reals, possible: npt.NDArray[np.bool_], which: int, shared: Reals, chance: float) -> None:
    first = tape.number[2]
    at, chosen = first, -1
    for r in range(possible.size):
        if possible[r]:
            if at >= len(tape.rows):
                return
            if r == which:
                chosen = at - first
            tape.rows[at] = rows[r]
            at += 1
    i = tape.number[1]
    tape.kept[i, 0], tape.kept[i, 1], tape.kept[i, 2], tape.kept[i, 3] = tape.number[0], first, at - first, chosen
    tape.chance[i] = chance
    tape.shared[i] = shared
    tape.number[1] += 1
    tape.number[2] = at
