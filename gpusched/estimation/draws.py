"""Draws of run times for forecasts, compiled: the inverse of the calibrated distribution (`quantiles`)."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import is_cached, jit
from gpusched.compiled.arrays import Floats, Ints
from gpusched.estimation.quantiles import QUANTILES, SAID, RunTimes, fill_mass, follow, new_run_times, quantile


@jit
def calibrated(level: Floats, stated: float) -> float:
    """Return the level of the distribution that is the stated one, between those of `QUANTILES` (``level``)."""
    below, from_ = 0.0, 0.0
    for q in range(level.size + 1):
        above = QUANTILES[q] if q < level.size else 1.0
        to = max(level[q], from_) if q < level.size else 1.0
        if stated <= above:
            return float(from_ + (to - from_) * (stated - below) / (above - below))
        below, from_ = above, to
    return 1.0


@jit
def fill_drawn(known: RunTimes, job: Ints, had_s: Floats, level: Floats, found: Floats) -> None:
    """Fill in run times in all, in seconds, ``found: float64[draws, n]``, longer than ``had_s``, at most the limit.

    ``job: int64[n]``; ``had_s: float64[n]``: how long each has run, 0: it waits. ``level: float64[draws, n]``: the
    level of each draw, 0 to 1.
    """
    for i in range(job.size):
        evidence = fill_mass(known, job[i], had_s[i])
        for draw in range(level.shape[0]):
            of_all = calibrated(known.level[evidence], level[draw, i])
            found[draw, i] = quantile(known, job[i], of_all, had_s[i])


def _smallest() -> tuple[RunTimes, Floats, Ints, Floats]:
    """Return one job that nothing is known of, and arrays of one number."""
    one = np.ones(1)
    return new_run_times(np.zeros((1, 1), np.int64), one, one), one, np.zeros(1, np.int64), np.ones((1, 1))


def draws_are_compiled() -> bool:
    """Return whether what draws need is compiled."""
    known, one, job, table = _smallest()
    return is_cached(fill_drawn, known, job, one, table, table) and is_cached(
        follow, known, one, one, one, job, job, 1.0, np.empty((1, SAID))
    )


def warm_up_draws() -> None:
    """Compile or load what draws need."""
    known, one, job, table = _smallest()
    follow(known, one, one, one, job, job, 1.0, np.empty((1, SAID)))
    fill_drawn(known, job, one, table, table.copy())
