"""Sequences of jobs cut from the training part, begun on the cluster as the base policy left it at that moment."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.evaluation import Figures, figures, fresh, grown_log, shared, world_for
from gpusched.agents.rltune.history import FEATURES, Known, note_ended
from gpusched.agents.rltune.live import Prepared
from gpusched.agents.rltune.odds import SHORTEST_S
from gpusched.agents.rltune.replay import Scored, known_of_trace, new_queue
from gpusched.agents.rltune.rollout import Drawn, Trajectory, new_trajectory, play_sequence
from gpusched.agents.rltune.settings import Settings
from gpusched.sched.state import Floats, Ints, seed_words
from gpusched.sim.engine.build import World, log_of
from gpusched.sim.engine.state import GROW
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.pool import Pool
from gpusched.sim.result import Result
from gpusched.traces.file import FLOATS, INTS
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

_MOST_BEFORE = 2000  # ended jobs that are known to a sequence
_ROWS_PER_PICK = 24


class Episode(NamedTuple):
    """One sequence: jobs that ran or waited at first, and that come; ``truth: float64[jobs]``: log seconds."""

    trace: Trace
    pool: Pool
    world: World
    known: Known
    truth: Floats


class Play(NamedTuple):
    """What one play of a sequence gave."""

    figures: Figures
    trajectory: Trajectory


def cut(before: Result, settings: Settings, count: int, rng: np.random.Generator) -> list[Episode]:
    """``count`` sequences of the base policy's replay, begun at random jobs."""
    jobs = len(before.trace)
    last = max(jobs - settings.sequence, 0)
    starts = np.unique(rng.integers(0, last + 1, count)) if last else np.zeros(1, np.int64)
    return [_episode(before, int(start), settings) for start in starts]


def _episode(before: Result, first: int, settings: Settings) -> Episode:
    trace, time = before.trace, float(before.trace.submit[first])
    past = np.flatnonzero(trace.submit < time)
    there = past[~(before.end[past] <= time)]
    ended = past[before.end[past] <= time][-_MOST_BEFORE:]
    runs = there[before.start[there] <= time]
    waits = there[~(before.start[there] <= time)][-settings.sequence :]
    coming = np.arange(first, min(first + settings.sequence, len(trace)))
    chosen = np.unique(np.concatenate([ended, runs, waits, coming]))
    had = np.zeros(len(chosen))
    had[np.searchsorted(chosen, runs)] = time - before.start[runs]
    gone = np.searchsorted(chosen, ended)
    return _begun(select(trace, chosen), before.pool, settings, time, had, gone, before.end[ended])


def _begun(
    part: Trace, pool: Pool, settings: Settings, time: float, had: Floats, gone: Ints, end: Floats
) -> Episode:  # fmt: skip
    """The world at ``time``: what ran has the rest of its work left, what has ended is only remembered."""
    demand = world_for(part, pool, settings).demand
    whole = known_of_trace(part, demand, len(pool.partitions), settings.knows)
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
    history = whole.history._replace(passed=whole.history.passed[kept][order])
    truth = np.log(np.maximum(rest.duration, SHORTEST_S))
    now = replace(
        rest, submit=np.maximum(rest.submit, time), duration=np.maximum(rest.duration - facts["had"], 1.0), epoch=None
    )  # fmt: skip
    world = world_for(now, pool, settings)
    return Episode(rest, pool, world, whole._replace(facts=facts, history=history), truth)


def _reordered(trace: Trace, order: Ints) -> Trace:
    """The trace's jobs in another order; nobody waits for another then."""
    columns = {name: getattr(trace, name)[order] for name in (*FLOATS, *INTS) if name != "depends_on"}
    ids = tuple(trace.ids[i] for i in order.tolist())
    return replace(trace, ids=ids, depends_on=np.full(len(order), -1, np.int64), **columns)


def play(episode: Episode, prepared: Prepared, temperature: float, seed: int, picks: int, window: int) -> Play:
    """Plays a sequence once; at most ``picks`` picks are written down."""
    world = episode.world
    sim, passes = shared(world.sim, world.passes)
    queue, known = new_queue(sim, window), fresh(episode.known)
    trajectory = new_trajectory(picks * _ROWS_PER_PICK, picks, window, len(FEATURES))
    by = Scored(queue, known, prepared.scorer, PLACEMENTS[world.rule], prepared.backfill)
    log, drawn = log_of(world), Drawn(by, temperature, seed_words(seed), trajectory)
    while play_sequence(sim, log, passes, drawn) == GROW:
        log = grown_log(log, sim)
    return Play(figures(episode.trace, sim.state["end"], episode.pool.total_gpus), trajectory)
