"""Sequences of jobs cut from the training part, begun as the base policy left the cluster, and played: compiled.

Picks are drawn from the scores' softmax, and every pick is written down. Scores plus Gumbel noise, sorted, is one draw
of every pick in turn (Plackett-Luce; Yellott 1977), and among those jobs that fit, too. So the passes decide as in a
replay, and only the order is drawn.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.queue_replay import new_queue, queue_runner
from gpusched.agents.rltune.decide import PreparedScorer, Scored, arrange, look, nobody_fits, observation_of, scored_by
from gpusched.agents.rltune.evaluation import MeanFigures, figures, world_for
from gpusched.agents.rltune.history import FEATURES, JobHistory, Reals, note_ended
from gpusched.agents.rltune.known import known_of_world
from gpusched.agents.rltune.replay import ended, started
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.compiled import jit
from gpusched.estimation import REMEMBERED
from gpusched.estimation.odds import SHORTEST_S, History
from gpusched.sched.fit import fitting
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
def _started(sim: Sim, job: int, drawn: Drawn) -> None:
    started(sim, job, drawn.by)


@jit
def _ended(sim: Sim, job: int, drawn: Drawn) -> None:
    ended(sim, job, drawn.by)


@jit
def _decide(state: ClusterState, passes: Passes, queue: Ints, drawn: Drawn) -> bool:
    by, obs = drawn.by, observation_of(state, passes.total, queue)
    if nobody_fits(state, obs, queue):
        return True
    places, scores = look(state, obs, queue, by)
    window = places[: scores.shape[0]].copy()
    noisy = scores[:, 0].astype(np.float64)
    if drawn.temperature > 0.0:
        for i in range(window.size):
            uniform = (next_random(drawn.rng, 4294967295) + 0.5) / _WORD
            noisy[i] -= drawn.temperature * np.log(-np.log(uniform))
    places[: window.size] = window[stable_order(-noisy)]
    jobs = queue[window]
    fits = fitting(state, jobs)[state.jobs.shape[jobs]]
    arrange(state, queue[places], by)
    drawn.trajectory.used[2] += state.outcome.total[0]
    if drawn.temperature > 0.0 and np.sum(fits) > 1:
        _write(drawn.trajectory, state.outcome, by.seen, jobs, fits, scores)
    return True


play_sequence = queue_runner(_decide, _started, _ended)


@jit
def _write(
    trajectory: Trajectory, outcome: PassOutcome, seen: Reals, window: Ints, fits: Flags, scores: Reals
) -> None:  # fmt: skip
    """The window, and every start out of it; who has started cannot be picked again."""
    first, size = trajectory.used[0], window.size
    if first + size > trajectory.job.size:
        return
    trajectory.rows[first : first + size] = seen[:size]
    trajectory.score[first : first + size] = scores[:, 0]
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
    """One sequence: jobs that ran or waited at first, and that come; ``truth: float64[jobs]``: log seconds."""

    trace: Trace
    pool: Pool
    world: SimWorld
    known: JobHistory
    truth: Floats


class EpisodePlay(NamedTuple):
    """What one play of a sequence gave."""

    figures: MeanFigures
    trajectory: Trajectory


def cut(before: ReplayResult, settings: RltuneSettings, count: int, rng: np.random.Generator) -> list[Episode]:
    """``count`` sequences of the base policy's replay, begun at random jobs."""
    jobs = len(before.trace)
    last = max(jobs - settings.sequence, 0)
    starts = np.unique(rng.integers(0, last + 1, count)) if last else np.zeros(1, np.int64)
    return [_episode(before, int(start), settings) for start in starts]


def _episode(before: ReplayResult, first: int, settings: RltuneSettings) -> Episode:
    trace, time = before.trace, float(before.trace.submit[first])
    past = np.flatnonzero(trace.submit < time)
    there = past[~(before.end[past] <= time)]
    ended = past[before.end[past] <= time][-REMEMBERED:]
    runs = there[before.start[there] <= time]
    waits = there[~(before.start[there] <= time)][-settings.sequence :]
    coming = np.arange(first, min(first + settings.sequence, len(trace)))
    chosen = np.unique(np.concatenate([ended, runs, waits, coming]))
    had = np.zeros(len(chosen))
    had[np.searchsorted(chosen, runs)] = time - before.start[runs]
    gone = np.searchsorted(chosen, ended)
    return _begun(select(trace, chosen), before.pool, settings, time, had, gone, before.end[ended])


def _begun(
    part: Trace, pool: Pool, settings: RltuneSettings, time: float, had: Floats, gone: Ints, end: Floats
) -> Episode:  # fmt: skip
    """The world at ``time``: what ran has the rest of its work left, what has ended is only remembered."""
    whole = known_of_world(world_for(part, pool, settings), settings.knows)
    if whole.learns[0]:
        for i in np.argsort(end, kind="stable"):
            note_ended(whole, int(gone[i]), float(part.duration[gone[i]]))
    kept = np.ones(len(part), np.bool_)
    kept[gone] = False
    rest, facts = select(part, kept), whole.facts[kept].copy()
    facts["had"] = had[kept]
    # What ran is submitted first, so that it starts before all others, on nodes that it fits.
    order = np.lexsort((np.arange(len(rest)), facts["had"] <= 0, np.maximum(rest.submit, time)))
    rest, facts = _reordered(rest, order), facts[order]
    seen, *own = whole.history
    history = History(seen, *(of[kept][order] for of in own))
    truth = np.log(np.maximum(rest.duration, SHORTEST_S))
    now = replace(
        rest, submit=np.maximum(rest.submit, time), duration=np.maximum(rest.duration - facts["had"], 1.0), epoch=None
    )  # fmt: skip
    world = world_for(now, pool, settings)
    return Episode(rest, pool, world, whole._replace(facts=facts, history=history), truth)


def _reordered(trace: Trace, order: Ints) -> Trace:
    """The trace's jobs in another order; nobody waits for another then."""
    free = replace(trace, depends_on=np.full(len(trace), -1, np.int64))
    return select(free, order)


def play(
    episode: Episode, prepared: PreparedScorer, temperature: float, seed: int, picks: int, window: int
) -> EpisodePlay:
    """Plays a sequence once; at most ``picks`` picks are written down."""
    world = episode.world
    sim, passes, known = deepcopy((world.sim, world.passes, episode.known))
    trajectory = new_trajectory(picks * _ROWS_PER_PICK, picks, window, len(FEATURES))
    drawn = Drawn(scored_by(prepared, known, PLACEMENTS[world.rule]), temperature, seed_words(seed), trajectory)
    queue, log = new_queue(sim, drawn), log_of(world)
    while play_sequence(sim, log, passes, queue) == GROW:
        log = grown(log, sim)
    return EpisodePlay(figures(episode.trace, sim.state["end"], episode.pool.total_gpus), trajectory)
