"""DL2 in our own clusters: a worker is a GPU of a resizable job, and servers do not exist; one action kind less.

Everybody has its least size; who takes the next larger one is the agent's, until it says "done" or nothing fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.dl2.decide import Actor, Present, Tape, allocate, no_tape
from gpusched.agents.dl2.observed import kinds_of
from gpusched.agents.dl2.weights import actor_of
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.agent import NO_NUMBER, Unusable
from gpusched.sched.sizing.question import CAPACITY, COUNT, Claims, Question
from gpusched.sched.state import Flags, Floats, Ints, Records

NO_TEACHER: Ints = np.zeros(0, np.int64)
_NEVER = 1 << 40  # GPUs that a size takes which there is not
_KEPT = 0.05  # of the steps, for learning


class LiveActor(NamedTuple):
    """The weights, and the seconds that they take for a slot."""

    actor: Actor
    slot_s: float


class Learning(NamedTuple):
    """What else there is while it learns.

    Attributes:
        tape: Where steps, drawn by their chances, are written down.
        explore: By job, the chance that it begins with a drawn size.
        teacher: ``int64[jobs]``: GPUs to be reached; empty: the weights decide.
        coming: Jobs yet to arrive. restart: The part of a slot that another size costs.
    """

    tape: Tape
    explore: float
    teacher: Ints
    coming: float
    restart: float


_NOT_LEARNING = Learning(no_tape(), 0.0, NO_TEACHER, 0.0, 0.0)


def prepare(model: TrainedModel) -> LiveActor:
    """The model's arrays, checked.

    Raises:
        ValueError: One is missing or of another shape; they are DL2's own setting's; a slot is no time.
    """
    slot_s = float(model.about.get("slot_s", "nan"))
    if not slot_s > 0.0:
        raise ValueError("these are weights of DL2's own setting; train some for this cluster: gpusched train")
    return LiveActor(actor_of(model), slot_s)


def choose_sizes(prepared: LiveActor, question: Question) -> Ints:
    """GPUs of each job.

    Raises:
        Unusable: A score is no number.
    """
    chosen = choose(prepared, question.claims, None)
    if chosen is None:
        raise Unusable(NO_NUMBER)
    return chosen


def choose(prepared: LiveActor, claims: Claims, learning: Learning | None) -> Ints | None:
    """GPUs of each job, ``int64[jobs]``; None: a score is no number."""
    count, whole = int(claims.number[COUNT]), int(claims.number[CAPACITY])
    known = claims.jobs[:count], claims.sizes[:count], claims.allowed[:count], claims.pace[:count]
    more = learning or _NOT_LEARNING
    found = _choose(
        prepared.actor, *known, whole, prepared.slot_s, learning is not None, more.tape, more.explore, more.teacher,
        more.coming, more.restart,
    )  # fmt: skip
    return found if len(found) == count else None


@jit
def _choose(actor: Actor, jobs: Records, all_sizes: Ints, allowed: Flags, pace: Floats, whole: int, slot_s: float,
            draw: bool, tape: Tape, explore: float, teacher: Ints, coming: float, restart: float) -> Ints:  # fmt: skip
    """As `choose`; nothing at all where a score is no number."""
    count, most = all_sizes.shape
    # Sizes that it may have now: nothing first, 0 beyond the last. What is beyond would never fit.
    sizes, speeds = np.zeros((count, most + 1), np.int64), np.zeros((count, 1, most + 1))
    need = np.full((count, 1, most + 1, 2), _NEVER)
    before, begun, taught = (
        np.zeros((count, 2), np.int64),
        np.ones((count, 2), np.int64),
        np.zeros((count, 2), np.int64),
    )
    left, done = np.zeros(count), np.zeros(count)
    free = np.full(2, whole)
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
            if gpus == jobs[j]["held"]:
                before[j, 1] = last
            if teacher.size > 0 and gpus == teacher[j]:
                taught[j, 1] = last
        now = speeds[j, 0, before[j, 1]] if before[j, 1] > 0 else pace[j, 0] * slot_s
        left[j] = max(jobs[j]["left_s"] / slot_s * now, 1e-9)
        done[j] = jobs[j]["age_s"] / slot_s * now
        begun[j, 0] = 0
        free -= sizes[j, 1]
    for j in range(count):  # DL2's exploration by job: sizes drawn, so that speeds become known
        if explore > 0.0 and np.random.random() < explore:
            at = np.random.randint(1, (sizes[j] > 0).sum() + 1)
            if sizes[j, at] - sizes[j, 1] <= free[0]:
                begun[j, 1] = at
                free -= sizes[j, at] - sizes[j, 1]
    present = Present(np.arange(count), left, left + done, jobs["age_s"] / slot_s, before, begun)
    capacity, steps = np.full(2, whole), taught if teacher.size > 0 else taught[:0]
    kinds = kinds_of(speeds, need)
    if not allocate(actor, kinds, present, free, capacity, draw, _KEPT, tape, coming, steps, restart):
        return np.zeros(0, np.int64)
    chosen = np.zeros(count, np.int64)
    for j in range(count):
        chosen[j] = sizes[j, begun[j, 1]]
    return chosen
