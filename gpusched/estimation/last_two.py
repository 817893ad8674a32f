"""The mean of a user's last two run times (Tsafrir, Etsion, Feitelson, IEEE TPDS 18(6), 2007), compiled.

Estimated once, at submission; only jobs that have ended by then count. What other estimates are compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints, Records, filled

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

NO_HISTORY_S = 3600.0  # estimate for a job without a limit whose user has no ended jobs

PAST = np.dtype([("ended", np.int64), ("last", np.float64), ("before", np.float64)])  # how many, the last two run times


class PastRunTimes(NamedTuple):
    """The last run times of each user, or of each group if the trace has no users; jobs without either share one.

    Attributes:
        past: ``PAST[owners]``, changed as jobs end. owner: ``int64[jobs]``: index into ``past``.
        limit: ``float64[jobs]``: what an estimate is at most; infinite: the job has none.
    """

    past: Records
    owner: Ints
    limit: Floats


def of_owners(trace: Trace) -> PastRunTimes:
    """Return the store before any job has ended."""
    owner = trace.user if (trace.user >= 0).any() else trace.group
    owner = np.where(owner >= 0, owner, owner.max(initial=-1) + 1)
    return PastRunTimes(filled(PAST, int(owner.max(initial=-1)) + 1), owner, time_limits(trace))


def time_limits(trace: Trace) -> Floats:
    """Return the time limits, ``float64[jobs]``; infinite: none."""
    return np.where(trace.limit > 0, trace.limit, np.inf)


@jit
def note_run(known: PastRunTimes, job: int, seconds: float) -> None:
    """Record that a job ended after so many seconds."""
    of = known.past[known.owner[job]]
    of["before"] = of["last"]
    of["last"] = seconds
    of["ended"] += 1


@jit
def last_two_s(known: PastRunTimes, job: int) -> float:
    """Return the estimate of a job submitted now, in seconds, at most its limit; without a past the limit."""
    of, limit = known.past[known.owner[job]], known.limit[job]
    if of["ended"] == 0:
        return float(limit if np.isfinite(limit) else NO_HISTORY_S)
    return float(min(of["last"] if of["ended"] == 1 else 0.5 * (of["last"] + of["before"]), limit))


@jit
def fill_last_two(
    known: PastRunTimes, submit: Floats, end: Floats, seconds: Floats, by_end: Ints, found: Floats
) -> None:
    """Fill in each job's estimate at its submission, ``found: float64[jobs]``; ``submit: float64[jobs]`` ascends.

    ``end: float64[jobs]``, infinite: never; ``by_end: int64[jobs]``: the jobs in order of their ends.
    """
    done = 0
    for job in range(submit.size):
        while done < by_end.size and end[by_end[done]] <= submit[job]:
            note_run(known, by_end[done], seconds[by_end[done]])
            done += 1
        found[job] = last_two_s(known, job)
