"""DL2 in real clusters: a worker is a GPU of a resizable job, and there are no servers.

Every job starts from its smallest size; the agent chooses which job grows next, until "done" or nothing fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.decide import ActiveJobs, Actor, Tape, allocate, new_tape
from gpusched.agents.dl2.observed import kinds_of
from gpusched.agents.dl2.weights import actor_of
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NAN_OUTPUT, Unusable
from gpusched.sched.sizing.question import CAPACITY, COUNT, Claims, Question
from gpusched.sched.state import Floats, Ints

NO_TEACHER: Ints = np.zeros(0, np.int64)
_NEVER = 1 << 40  # GPUs of sizes that a job does not have: they never fit
_KEPT = 0.05  # fraction of steps recorded for training


class LiveActor(NamedTuple):
    """The weights, and the slot length in seconds that they were trained for."""

    actor: Actor
    slot_s: float


class Learning(NamedTuple):
    """Inputs of a decision during training.

    Attributes:
        tape: Records the sampled steps.
        explore: Per job, the probability of a random initial size.
        teacher: ``int64[jobs]``: target GPUs; empty: the weights decide.
        coming: Jobs yet to arrive. restart: Cost of a resize as a fraction of a slot.
        kept: Fraction of steps recorded.
        pace: ``float64[jobs, most]``: speeds for the reward, where more is known by now; empty: those of the claims.
    """

    tape: Tape
    explore: float
    teacher: Ints
    coming: float
    restart: float
    kept: float = _KEPT
    pace: Floats = np.zeros((0, 0))


_NOT_LEARNING = Learning(new_tape(0, 0, 0), 0.0, NO_TEACHER, 0.0, 0.0)


def prepare(model: TrainedModel) -> LiveActor:
    """Check the model's arrays and return them.

    Raises:
        ValueError: An array is missing or has another shape, or the weights are of DL2's public setting.
    """
    slot_s = float(model.about.get("slot_s", "nan"))
    if not slot_s > 0.0:
        raise ValueError("these are weights of DL2's own setting; train some for this cluster: gpusched train")
    return LiveActor(actor_of(model), slot_s)


def choose_sizes(prepared: LiveActor, question: Question) -> Ints:
    """Choose the GPUs of each job.

    Raises:
        Unusable: A score is NaN.
    """
    return choose(prepared, question.claims, None)


def choose(prepared: LiveActor, claims: Claims, learning: Learning | None) -> Ints:
    """Choose the GPUs of each job, ``int64[jobs]``, also during training; see `choose_sizes`."""
    sizes = _choose(prepared.actor, claims, prepared.slot_s, learning is not None, learning or _NOT_LEARNING)
    if len(sizes) < claims.number[COUNT]:
        raise Unusable(NAN_OUTPUT)
    return sizes


@jit
def _choose(actor: Actor, claims: Claims, slot_s: float, draw: bool, learning: Learning) -> Ints:
    """Choose sizes as `choose` does; return an empty array if a score is NaN."""
    count, total_gpus, most = claims.number[COUNT], claims.number[CAPACITY], claims.sizes.shape[1]
    jobs, all_sizes, allowed, pace = claims.jobs[:count], claims.sizes, claims.allowed, claims.pace
    tape, explore, teacher, coming, restart, kept, true_pace = learning
    # Allowed sizes of each job: none first, then ascending. Entries beyond the last keep `_NEVER` and are not chosen.
    sizes, speeds = np.zeros((count, most + 1), np.int64), np.zeros((count, 1, most + 1))
    true_speeds = np.zeros(speeds.shape if true_pace.size > 0 else (0, 1, 1))
    need = np.full((count, 1, most + 1, 2), _NEVER)
    before, initial, taught = (
        np.zeros((count, 2), np.int64),
        np.ones((count, 2), np.int64),
        np.zeros((count, 2), np.int64),
    )
    left, done = np.zeros(count), np.zeros(count)
    free = np.full(2, total_gpus)
    for j in range(count):
        last = 0
        need[j, 0, 0] = 0
        for k in range(jobs[j]["count"]):
            if not allowed[j, k]:
                continue
            last += 1
            gpus = all_sizes[j, k]
            sizes[j, last], speeds[j, 0, last] = gpus, pace[j, k] * slot_s
            need[j, 0, last] = gpus
            if true_pace.size > 0:
                true_speeds[j, 0, last] = true_pace[j, k] * slot_s
            if gpus == jobs[j]["held"]:
                before[j, 1] = last
            if teacher.size > 0 and gpus == teacher[j]:
                taught[j, 1] = last
        now = speeds[j, 0, before[j, 1]] if before[j, 1] > 0 else pace[j, 0] * slot_s
        left[j] = max(jobs[j]["left_s"] / slot_s * now, 1e-9)
        done[j] = jobs[j]["age_s"] / slot_s * now
        initial[j, 0] = 0
        free -= sizes[j, 1]
    for j in range(count):  # DL2's exploration by job: random sizes, so that their speeds are measured
        if explore > 0.0 and np.random.random() < explore:
            at = np.random.randint(1, (sizes[j] > 0).sum() + 1)
            if sizes[j, at] - sizes[j, 1] <= free[0]:
                initial[j, 1] = at
                free -= sizes[j, at] - sizes[j, 1]
    present = ActiveJobs(np.arange(count), left, left + done, jobs["age_s"] / slot_s, before, initial)
    capacity, steps = np.full(2, total_gpus), taught if teacher.size > 0 else taught[:0]
    kinds = kinds_of(speeds, need)
    true = kinds_of(true_speeds, need) if true_pace.size > 0 else kinds
    if not allocate(actor, kinds, present, free, capacity, draw, kept, tape, coming, steps, restart, true):
        return np.zeros(0, np.int64)
    chosen = np.zeros(count, np.int64)
    for j in range(count):
        chosen[j] = sizes[j, initial[j, 1]]
    return chosen
