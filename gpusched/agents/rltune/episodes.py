"""Training episodes: sequences of jobs from the training data, started in the cluster state that the base policy left.

Picks are sampled from the softmax of the scores and recorded. Sorting scores plus Gumbel noise samples all picks in
turn (Plackett-Luce; Yellott 1977), also among the jobs that fit. So the passes decide as in a replay, and only the
order is sampled.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.queue_replay import new_queue, queue_runner
from gpusched.agents.rltune.decide import (
    PreparedScorer,
    ScoringState,
    new_scoring_state,
    none_fits,
    observation_of,
    scores_of,
    window_of,
)
from gpusched.agents.rltune.evaluation import MeanFigures, figures, world_for
from gpusched.agents.rltune.history import FEATURES, JobHistory, Reals, new_job_history
from gpusched.agents.rltune.known import facts_of_world
from gpusched.agents.rltune.replay import ended, started
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.compiled import jit
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.sched.fit import fitting
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.place import next_random
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import ClusterState, Flags, Floats, Ints, PassOutcome, Words, seed_words
from gpusched.sim.engine.build import SimWorld, log_of
from gpusched.sim.engine.state import GROW, Passes, Sim, grown
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.pool import Pool
from gpusched.sim.result import ReplayResult
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

_WORD = 4294967296.0
_SHORTEST_S = 10.0  # shorter run times count as this much, as in bounded slowdown


class Trajectory(NamedTuple):
    """The recorded picks; a pick is one job of those of its window that fitted.

    Attributes:
        rows: ``float32[rows, FEATURES]``: the network's inputs. score: ``float32[rows]``: without the noise.
        job: ``int64[rows]``: the job of the row.
        first, size: ``int64[picks]``: the rows of a pick's window.
        choice: ``int64[picks]``: the position of the picked job in its window.
        mask: ``uint8[picks, window]``: jobs that could be picked.
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
    """Return an empty trajectory of these sizes."""
    job, first, size, choice = (np.zeros(n, np.int64) for n in (rows, picks, picks, picks))
    return Trajectory(
        rows=np.zeros((rows, features), np.float32), score=np.zeros(rows, np.float32), job=job, first=first, size=size,
        choice=choice, mask=np.zeros((picks, window), np.uint8), used=np.zeros(3, np.int64),
    )  # fmt: skip


class SamplingState(NamedTuple):
    """The state of sampled decisions (temperature 0: as in a replay; only the number of starts is recorded)."""

    by: ScoringState
    temperature: float
    rng: Words
    trajectory: Trajectory


@jit
def _started(sim: Sim, job: int, drawn: SamplingState) -> None:
    started(sim, job, drawn.by)


@jit
def _ended(sim: Sim, job: int, drawn: SamplingState) -> None:
    ended(sim, job, drawn.by)


@jit
def _decide(
    state: ClusterState, passes: Passes, queue: Ints, drawn: SamplingState, need_order: bool
) -> tuple[Ints, bool]:
    by, obs = drawn.by, observation_of(state, passes.total, queue)
    if none_fits(state, obs, queue):
        return queue, True
    places = window_of(by, queue)
    scores = scores_of(state, obs, queue, places, by)[places]
    window = places[: by.scorer.window[0]].copy()
    noisy = scores[: window.size].copy()
    if drawn.temperature > 0.0:
        for i in range(window.size):
            uniform = (next_random(drawn.rng, 4294967295) + 0.5) / _WORD
            noisy[i] -= drawn.temperature * np.log(-np.log(uniform))
    places[: window.size] = window[stable_order(-noisy)]
    jobs = queue[window]
    fits = fitting(state, jobs)[state.jobs.shape[jobs]]
    pass_by_rule(state, queue[places], by.backfill, PlacementRule(by.rule, passes.rng))
    drawn.trajectory.used[2] += state.outcome.total[0]
    if drawn.temperature > 0.0 and np.sum(fits) > 1:
        _record_picks(drawn.trajectory, state.outcome, by.inputs, jobs, fits, scores)
    return queue, True


play_sequence = queue_runner(_decide, _started, _ended)


@jit
def _record_picks(
    trajectory: Trajectory, outcome: PassOutcome, inputs: Reals, window: Ints, fits: Flags, scores: Floats
) -> None:  # fmt: skip
    """Record the window and every start from it; a started job is masked for later picks."""
    first, size = trajectory.used[0], window.size
    if first + size > trajectory.job.size:
        return
    trajectory.rows[first : first + size] = inputs[:size]
    trajectory.score[first : first + size] = scores[:size]
    trajectory.job[first : first + size] = window
    trajectory.used[0] += size
    for k in range(outcome.total[0]):
        pick = trajectory.used[1]
        if pick == trajectory.choice.size or np.sum(fits) < 2:
            return
        at = -1
        for i in range(size):
            if window[i] == outcome.started[k]:
                at = i
        if at < 0:
            continue
        trajectory.first[pick], trajectory.size[pick], trajectory.choice[pick] = first, size, at
        trajectory.mask[pick, :size] = fits
        fits[at] = 0
        trajectory.used[1] += 1


_ROWS_PER_PICK = 24


class Episode(NamedTuple):
    """One sequence: jobs running or waiting at first, and later arrivals; ``truth: float64[jobs]``: log seconds."""

    trace: Trace
    pool: Pool
    world: SimWorld
    known: JobHistory
    truth: Floats


class SimulatedEpisode(NamedTuple):
    """The result of one simulation of a sequence."""

    figures: MeanFigures
    trajectory: Trajectory


def cut_episodes(before: ReplayResult, settings: RltuneSettings, count: int, rng: np.random.Generator) -> list[Episode]:
    """Cut ``count`` sequences out of the base policy's replay, each from a random job.

    Run times are estimated as at each job's submission in that replay; within a sequence they are not renewed.
    """
    jobs = len(before.trace)
    last = max(jobs - settings.sequence, 0)
    starts = np.unique(rng.integers(0, last + 1, count)) if last else np.zeros(1, np.int64)
    wait = np.nan_to_num(before.start - before.trace.submit, nan=np.inf)  # infinite: it never ran
    expected = HistoryEstimator().expected(replace(before.trace, wait=wait))
    return [_episode(before, expected, int(start), settings) for start in starts]


def _episode(before: ReplayResult, expected: Floats, first: int, settings: RltuneSettings) -> Episode:
    """Return the world at the submission of job ``first``: running jobs with their remaining work, on nodes at once."""
    trace, time = before.trace, float(before.trace.submit[first])
    active = np.flatnonzero((trace.submit < time) & ~(before.end <= time))
    runs = active[before.start[active] <= time]
    waits = active[~(before.start[active] <= time)][-settings.sequence :]
    coming = np.arange(first, min(first + settings.sequence, len(trace)))
    chosen = np.unique(np.concatenate([runs, waits, coming]))
    had = np.zeros(len(trace))
    had[runs] = time - before.start[runs]
    facts = facts_of_world(world_for(select(trace, chosen), before.pool, settings), settings.knows)
    facts["had"] = had[chosen]
    # Running jobs are submitted first, so that they start before all others, on nodes that they fit.
    order = np.lexsort((chosen, had[chosen] <= 0, np.maximum(trace.submit[chosen], time)))
    chosen, facts = chosen[order], facts[order]
    part = _reordered(trace, chosen)
    now = replace(
        part, submit=np.maximum(part.submit, time), duration=np.maximum(part.duration - facts["had"], 1.0), epoch=None
    )  # fmt: skip
    world = world_for(now, before.pool, settings)
    if settings.knows == "estimate":
        world.sim.jobs["expected"] = world.passes.jobs.limit[:] = expected[chosen]  # equal: releases are found by it
    truth = np.log(np.maximum(part.duration, _SHORTEST_S))
    return Episode(part, before.pool, world, new_job_history(facts), truth)


def _reordered(trace: Trace, order: Ints) -> Trace:
    """Return the trace's jobs in another order, without dependencies."""
    free = replace(trace, depends_on=np.full(len(trace), -1, np.int64))
    return select(free, order)


def simulate(
    episode: Episode, prepared: PreparedScorer, temperature: float, seed: int, picks: int, window: int
) -> SimulatedEpisode:
    """Simulate a sequence once and record at most ``picks`` picks."""
    world = episode.world
    sim, passes, known = deepcopy((world.sim, world.passes, episode.known))
    trajectory = new_trajectory(picks * _ROWS_PER_PICK, picks, window, len(FEATURES))
    by = new_scoring_state(prepared, known, PLACEMENTS[world.rule], passes.jobs.limit)
    drawn = SamplingState(by, temperature, seed_words(seed), trajectory)
    queue, log = new_queue(sim, drawn), log_of(world)
    while play_sequence(sim, log, passes, queue) == GROW:
        log = grown(log, sim)
    return SimulatedEpisode(figures(episode.trace, sim.state["end"], episode.pool.total_gpus), trajectory)
