"""Comparison of two replays: changes of means with intervals (bootstrap over days, paired by job)."""

from __future__ import annotations

import msgspec
import numpy as np

from gpusched.compiled.arrays import Floats, Ints
from gpusched.sim.result import ReplayResult
from gpusched.study.metrics import JobTimes, job_times

DAY_S = 86400.0
RESAMPLES = 2000
MIN_DAYS = 5
FIGURES = {"jct_s": "jct", "wait_s": "wait", "bounded_slowdown": "slowdown"}  # -> their columns of `JobTimes`


class MeanDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A mean of one replay compared with another's, over the jobs that ended in both.

    Attributes:
        figure: ``jct_s``, ``wait_s`` or ``bounded_slowdown``.
        base, other: The two means.
        relative: other / base - 1; None where base is 0. low, high: its 95 % interval.
        difference: other - base; difference_low, difference_high: its 95 % interval.
        days: Days resampled. With fewer than five there is no interval (None): too few to say.
    """

    figure: str
    base: float
    other: float
    relative: float | None
    low: float | None
    high: float | None
    difference: float
    difference_low: float | None
    difference_high: float | None
    days: int

    @property
    def sure(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.difference_low is not None and (self.difference_low > 0 or (self.difference_high or 0.0) < 0)


def compare(
    base: ReplayResult, other: ReplayResult, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[MeanDifference, ...]:
    """Return how ``other`` differs from ``base``, both of the same trace.

    Days (UTC, of submission) are drawn with replacement, since jobs of one day wait for each other and are not
    independent; both replays get the same days (Efron, Tibshirani: An Introduction to the Bootstrap, 1993: paired,
    percentile interval). Equal seeds give equal intervals.
    """
    both = np.flatnonzero(base.ran & other.ran)
    if not len(both):
        return ()
    day = day_of(base, both)
    days = int(day.max()) + 1
    count = np.bincount(day, minlength=days).astype(np.float64)
    draws = None
    if np.count_nonzero(count) >= MIN_DAYS:
        used = count > 0
        count, n = count[used], int(used.sum())
        draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples).astype(np.float64)
    times = job_times(base), job_times(other)
    return tuple(_change(name, times, both, day, count, draws) for name in FIGURES)


def day_of(result: ReplayResult, jobs: Ints) -> Ints:
    """Return each job's day of submission, counted from the first: UTC days if there is a calendar."""
    epoch = result.trace.epoch or 0.0
    day: Ints = np.floor((result.trace.submit[jobs] + epoch) / DAY_S).astype(np.int64)
    first: np.int64 = day.min()
    return np.subtract(day, first)


def _change(
    name: str,
    times: tuple[JobTimes, JobTimes],
    both: Ints,
    day: Ints,
    count: Floats,
    draws: Floats | None,
) -> MeanDifference:
    a, b = (getattr(t, FIGURES[name])[both] for t in times)
    base, other = float(a.mean()), float(b.mean())
    bounds: list[float | None] = []
    if draws is not None:
        sums = [np.bincount(day, values) for values in (a, b)]
        used = np.bincount(day) > 0
        jobs = draws @ count
        mean_a, mean_b = (draws @ s[used] / jobs for s in sums)
        bounds += np.percentile(mean_b - mean_a, [2.5, 97.5]).tolist()
        if (mean_a > 0).all():
            bounds += np.percentile(mean_b / mean_a - 1, [2.5, 97.5]).tolist()
    difference_low, difference_high, low, high = (*bounds, None, None, None, None)[:4]
    return MeanDifference(
        figure=name,
        base=base,
        other=other,
        relative=other / base - 1 if base > 0 else None,
        difference=other - base,
        difference_low=difference_low,
        difference_high=difference_high,
        low=low,
        high=high,
        days=len(count) if draws is not None else int(np.count_nonzero(np.bincount(day))),
    )
