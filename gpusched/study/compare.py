"""Compares two replays of one trace: differences of means over the same jobs, with bootstrap intervals over days."""

from __future__ import annotations

import msgspec
import numpy as np

from gpusched.compiled.arrays import Floats, Ints
from gpusched.sim.result import ReplayResult
from gpusched.study.metrics import JobTimes, job_times

DAY_S = 86400.0
RESAMPLES = 2000
MIN_DAYS = 5
"""Days with jobs that an interval needs."""
FIGURES = {"jct_s": "jct", "wait_s": "wait", "bounded_slowdown": "slowdown"}
"""Figure -> its column of `JobTimes`."""


class MeanDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A mean of one replay compared with another's, over the jobs that ended in both.

    Attributes:
        figure: ``jct_s``, ``wait_s`` or ``bounded_slowdown``.
        base, other: The two means, in seconds (slowdowns have no unit).
        relative: other / base - 1; None if base is 0. low, high: its 95 % interval.
        difference: other - base. difference_low, difference_high: its 95 % interval.
        days: Number of days with jobs; these are resampled. With fewer than `MIN_DAYS` the bounds are None.
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
    def is_significant(self) -> bool:
        """Return whether the interval of the difference excludes 0."""
        return self.difference_low is not None and (self.difference_low > 0 or (self.difference_high or 0.0) < 0)


def compare(
    base: ReplayResult, other: ReplayResult, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[MeanDifference, ...]:
    """Return how ``other`` differs from ``base`` over the jobs that ended in both; (): there are none.

    Both must be replays of the same trace. Jobs of one day wait for each other and are not independent, so whole days
    (of submission, UTC) are drawn with replacement, the same ones for both replays: a paired percentile interval
    (Efron, Tibshirani: An Introduction to the Bootstrap, 1993). Equal seeds give equal intervals.
    """
    both = np.flatnonzero(base.ran & other.ran)
    if not len(both):
        return ()
    # `day` numbers the days with jobs from 0.
    _, day, jobs_of_day = np.unique(day_of(base, both), return_inverse=True, return_counts=True)
    days = len(jobs_of_day)
    draws = None
    if days >= MIN_DAYS:
        draws = np.random.default_rng(seed).multinomial(days, np.full(days, 1 / days), resamples).astype(np.float64)
    times = job_times(base), job_times(other)
    return tuple(_mean_difference(name, times, both, day, jobs_of_day, draws) for name in FIGURES)


def day_of(result: ReplayResult, jobs: Ints) -> Ints:
    """Return each job's day of submission, 0 for the first; UTC days if the trace has a calendar, else its own."""
    epoch = result.trace.epoch or 0.0
    day: Ints = np.floor((result.trace.submit[jobs] + epoch) / DAY_S).astype(np.int64)
    first: np.int64 = day.min()
    return np.subtract(day, first)


def _mean_difference(
    figure: str,
    times: tuple[JobTimes, JobTimes],
    both: Ints,
    day: Ints,
    jobs_of_day: Ints,
    draws: Floats | None,
) -> MeanDifference:
    """Return the difference in one figure.

    Args:
        figure: Key of `FIGURES`.
        times: Of all jobs, under base and other.
        both: ``int64[n]``: the jobs that are compared.
        day: ``int64[n]``: day of each of them, an index into ``jobs_of_day: int64[days]``.
        jobs_of_day: Number of these jobs on each day.
        draws: ``float64[resamples, days]``: how often each resample contains each day; None: too few days.
    """
    base_values, other_values = (getattr(t, FIGURES[figure])[both] for t in times)
    base, other = float(base_values.mean()), float(other_values.mean())
    difference: tuple[float | None, float | None] = (None, None)
    relative: tuple[float | None, float | None] = (None, None)
    if draws is not None:
        # A resample's mean: jobs' sums by day, weighted by how often each day was drawn, over the number of jobs drawn.
        jobs = draws @ jobs_of_day.astype(np.float64)
        base_means, other_means = (draws @ np.bincount(day, values) / jobs for values in (base_values, other_values))
        difference = _interval(other_means - base_means)
        if (base_means > 0).all():
            relative = _interval(other_means / base_means - 1)
    return MeanDifference(
        figure=figure,
        base=base,
        other=other,
        relative=other / base - 1 if base > 0 else None,
        difference=other - base,
        difference_low=difference[0],
        difference_high=difference[1],
        low=relative[0],
        high=relative[1],
        days=len(jobs_of_day),
    )


def _interval(resampled: Floats) -> tuple[float, float]:
    """Return the 95 % percentile interval."""
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    return low, high
