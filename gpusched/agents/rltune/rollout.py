"""Plays a sequence of jobs with picks drawn from the scores' softmax, and writes down every pick: compiled.

Scores plus Gumbel noise, sorted, is one draw of every pick in turn (Plackett-Luce; Yellott 1977), and among those jobs
that fit, too. So the passes decide as in a replay, and only the order is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.decide import Field, arrange, observation_of, scores_of, window_of
from gpusched.agents.rltune.history import Reals
from gpusched.agents.rltune.replay import Queue, Scored, carry_out, remember
from gpusched.compiled import jit
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose, next_random
from gpusched.sched.state import FIRST_FIT, OK, Flags, Ints, Words
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import waiting_in
from gpusched.sim.engine.state import DECIDE, Log, Passes, Sim

_WORD = 4294967296.0


class Trajectory(NamedTuple):
    """What was picked; a pick is one job out of those of its window that fitted.

    Attributes:
        rows: ``float32[rows, FEATURES]``: what the network saw. score: ``float32[rows]``: before the noise.
        job: ``int64[rows]``: whose row.
        first, size: ``int64[picks]``: the rows of a pick's window.
        choice: ``int64[picks]``: the place of the picked job in its window.
        mask: ``uint8[picks, window]``: who could be picked.
        used: ``int64[3]``: rows, picks, and jobs started in all.
    """

    rows: Reals
    score: Reals
    job: Ints
    first: Ints
    size: Ints
    choice: Ints
    mask: Flags
    used: Ints


def new_trajectory(rows: int, picks: int, window: int, features: int) -> Trajectory:
    """An empty trajectory with room for so many."""
    job, first, size, choice = (np.zeros(n, np.int64) for n in (rows, picks, picks, picks))
    return Trajectory(
        rows=np.zeros((rows, features), np.float32), score=np.zeros(rows, np.float32), job=job, first=first, size=size,
        choice=choice, mask=np.zeros((picks, window), np.uint8), used=np.zeros(3, np.int64),
    )  # fmt: skip


class Drawn(NamedTuple):
    """Who decides, with picks drawn at a temperature (0: as a replay; nothing is written but the starts' number)."""

    by: Scored
    temperature: float
    rng: Words
    trajectory: Trajectory


@jit
def decide_drawn(sim: Sim, log: Log, passes: Passes, drawn: Drawn) -> int:
    """Every partition's pass in which something happened."""
    queue = drawn.by.queue
    remember(sim, queue, drawn.by.known)
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            sim.dirty[partition] = 0
            own = waiting_in(sim, queue.waiting, queue.size, partition)
            if own.size:
                _decide(sim, log, passes, drawn, own)
    return DECIDE


play_sequence = looped(decide_drawn)


@jit
def _decide(sim: Sim, log: Log, passes: Passes, drawn: Drawn, own: Ints) -> None:
    queue, known, scorer = drawn.by.queue, drawn.by.known, drawn.by.scorer
    rule, backfill, temperature, rng, trajectory = (
        drawn.by.rule,
        drawn.by.backfill,
        drawn.temperature,
        drawn.rng,
        drawn.trajectory,
    )
    shape, now = sim.shapes[sim.jobs[own[0]]["shape"]], sim.clock[0]
    obs = observation_of(sim.resources, passes.total, shape["lo"], shape["hi"], own.size, now)
    if obs.free == 0.0 and shape["gpus"] > 0:
        return
    field = Field(sim.resources, passes.usable, passes.requests, passes.jobs, passes.scratch)
    order = window_of(known, own, scorer.window[0], queue.ahead)
    size = min(own.size, scorer.window[0])
    window = order[:size].copy()
    scores = scores_of(known, scorer, obs, field, passes.releases, own, window, queue.ahead, queue.seen)
    noisy = scores[:, 0].astype(np.float64)
    if temperature > 0.0:
        for i in range(size):
            uniform = (next_random(rng, 4294967295) + 0.5) / _WORD
            noisy[i] -= temperature * np.log(-np.log(uniform))
    best = np.argsort(-noisy, kind="mergesort")
    order[:size] = window[best]
    hold = np.zeros(own.size, np.uint8)
    for i in range(size):
        hold[i] = scores[best[i], 1] > 0.0
    fits = _fitting(sim, field, own, window)
    queue.outcome.total[:] = 0
    arrange(known, scorer.odds, field, passes.releases, own[order], hold, rule, backfill, now, queue.outcome)
    trajectory.used[2] += queue.outcome.total[0]
    if temperature > 0.0 and np.sum(fits) > 1:
        _write(trajectory, queue, own, window, fits, scores)
    carry_out(sim, log, queue, known)


@jit
def _fitting(sim: Sim, field: Field, own: Ints, window: Ints) -> Flags:
    """Which jobs of the window could start now, ``uint8[window]``."""
    known = np.full(field.jobs.feasibility.size, -1, np.int64)
    fits = np.zeros(window.size, np.uint8)
    for i in range(window.size):
        shape = sim.jobs[own[window[i]]]["shape"]
        if known[shape] < 0:
            request = request_of(field.requests, shape)
            known[shape] = field.jobs.feasibility[shape] == OK and choose(
                field.resources, field.jobs.masks, request, FIRST_FIT, field.scratch
            )
        fits[i] = known[shape]
    return fits


@jit
def _write(trajectory: Trajectory, queue: Queue, own: Ints, window: Ints, fits: Flags, scores: Reals) -> None:
    """The window, and every start out of it; who has started cannot be picked again."""
    first, size = trajectory.used[0], window.size
    if first + size > trajectory.job.size:
        return
    for i in range(size):
        trajectory.rows[first + i] = queue.seen[i]
        trajectory.score[first + i] = scores[i, 0]
        trajectory.job[first + i] = own[window[i]]
    trajectory.used[0] += size
    for k in range(queue.outcome.total[0]):
        pick = trajectory.used[1]
        if pick == trajectory.choice.size or np.sum(fits) < 2:
            return
        at = -1
        for i in range(size):
            if own[window[i]] == queue.outcome.started[k]:
                at = i
        if at < 0:
            continue
        trajectory.first[pick], trajectory.size[pick], trajectory.choice[pick] = first, size, at
        for i in range(size):
            trajectory.mask[pick, i] = fits[i]
        fits[at] = 0
        trajectory.used[1] += 1
