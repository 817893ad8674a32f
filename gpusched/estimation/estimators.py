"""Estimators of run times: quantiles from the groups of a job, and the mean of a user's last two run times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from gpusched.compiled.arrays import Floats
from gpusched.estimation.groups import KEEPS, groups_of
from gpusched.estimation.last_two import PastRunTimes, fill_last_two, of_owners, time_limits
from gpusched.estimation.quantiles import QUANTILES, SAID, RunTimes, follow, new_run_times

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace


class Estimator(Protocol):
    """Estimates how long jobs run from those that have ended and that run; the same live and in replays."""

    @property
    def name(self) -> str:
        """Name of the estimator, as printed with its estimates."""

    def expected(self, trace: Trace) -> Floats:
        """Return the expected run time of each job at its submission, ``float64[jobs]``, seconds."""

    def in_replay(self, trace: Trace) -> tuple[PastRunTimes, RunTimes | None]:
        """Return the arrays for a replay of ``trace`` from its beginning; None: made once, at submission."""


class LastTwo:
    """The mean of the user's last two run times, at most the limit; without any the limit, else an hour."""

    name = "last-two"

    def expected(self, trace: Trace) -> Floats:
        """Return the estimates; see `Estimator`."""
        end, found = ends_of(trace), np.zeros(len(trace))
        fill_last_two(of_owners(trace), trace.arrivals, end, trace.duration, np.argsort(end, kind="stable"), found)
        return found

    def in_replay(self, trace: Trace) -> tuple[PastRunTimes, None]:
        """Return the arrays; see `Estimator`."""
        return of_owners(trace), None


class HistoryEstimator:
    """Quantiles by the jobs of the same burst, command, name, image, user, partition (`quantiles`)."""

    name = "history"

    def expected(self, trace: Trace) -> Floats:
        """Return the estimates; see `Estimator`."""
        return followed(trace)[0].expected

    def in_replay(self, trace: Trace) -> tuple[PastRunTimes, RunTimes]:
        """Return the arrays; see `Estimator`."""
        return of_owners(trace), new_run_times(groups_of(trace), KEEPS, time_limits(trace))


ESTIMATORS: dict[str, type[HistoryEstimator] | type[LastTwo]] = {"history": HistoryEstimator, "last-two": LastTwo}


class Said(NamedTuple):
    """What was known of each job at its submission.

    Attributes:
        seconds: ``float64[jobs, QUANTILES]``. expected: ``float64[jobs]``: what jobs are ordered by.
        crps: ``float64[jobs]``: the continuous ranked probability score, of logarithms.
    """

    seconds: Floats
    expected: Floats
    crps: Floats


def followed(trace: Trace, until: float = np.inf) -> tuple[Said, RunTimes]:
    """Live through a trace up to a time on its clock; return what was said of each job, and what is known then.

    Jobs without a known wait count as started when they were submitted.
    """
    known = HistoryEstimator().in_replay(trace)[1]
    start, said = starts_of(trace), np.full((len(trace), SAID), np.nan)
    end, started = start + trace.duration, np.flatnonzero(np.isfinite(start))
    by_start, by_end = (started[np.argsort(times[started], kind="stable")] for times in (start, end))
    follow(known, trace.arrivals, start, trace.duration, by_start, by_end, until, said)
    quantiles = len(QUANTILES)
    return Said(said[:, :quantiles], said[:, quantiles], said[:, quantiles + 1]), known


def starts_of(trace: Trace) -> Floats:
    """Return when each job started in the source, or would have without waiting if unknown, ``float64[jobs]``."""
    return np.maximum(trace.submit + np.where(np.isnan(trace.wait), 0.0, trace.wait), trace.arrivals)


def ends_of(trace: Trace) -> Floats:
    """Return when each job ended in the source, or would have without waiting if unknown, ``float64[jobs]``."""
    return starts_of(trace) + trace.duration
