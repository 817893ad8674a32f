"""Evaluation of run time estimates: their errors, their quantiles, and the waits under shortest estimate first.

Each job is judged by what was known at its submission, so no day judged was seen. Compared with the mean of the user's
last two run times (Tsafrir, Etsion, Feitelson, IEEE TPDS 18(6), 2007) and the limit.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gpusched.estimation.estimators import Estimator, HistoryEstimator, LastTwo, Said
from gpusched.estimation.quantiles import MIDDLE
from gpusched.sched.state import Floats, Ints
from gpusched.traces.trace import Trace

DAY_S = 86400.0
RESAMPLES = 1000
MIN_DAYS = 5
LOAD = 0.9  # offered, of the replays for waits


class EstimateScore(msgspec.Struct, frozen=True, kw_only=True):
    """The accuracy of one estimate of run times.

    Attributes:
        estimate: Its name. jobs: Number of jobs evaluated (those with a limit, for the limit).
        log_error: Mean of |ln(estimate / run time)|: 0.69 is off by a factor of 2. low, high: its 95 % interval over
            days, resampled with replacement; None with fewer than five days.
        bias: Mean of ln(estimate / run time); above 0: too long.
        under, over: Fractions of the jobs estimated too short, and more than twice too long.
        within_2: Fraction within a factor of 2.
        wait_s: Mean wait of these jobs where the shortest estimate goes first; None: not replayed.
    """

    estimate: str
    jobs: int
    log_error: float
    low: float | None = None
    high: float | None = None
    bias: float
    under: float
    over: float
    within_2: float
    wait_s: float | None = None


class EstimateEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All estimates on the same jobs.

    Attributes:
        jobs: Number of jobs. days: Number of days on which they were submitted.
        covered_50, covered_90: Fraction of run times between the 25 and 75 %, and the 5 and 95 % quantiles.
        crps: Continuous ranked probability score of the distribution, of logarithms: for an estimate without one, this
            is its ``log_error``.
        rows: Estimate by estimate.
    """

    jobs: int
    days: int
    covered_50: float
    covered_90: float
    crps: float
    rows: tuple[EstimateScore, ...]


def evaluate(said: Said, trace: Trace, chosen: Ints, waits: bool = False) -> EstimateEvaluation:
    """Evaluate what was said of jobs, and the usual estimates, on the jobs ``chosen: int64[n]``.

    The trace also holds all jobs submitted before them, which are inputs. ``waits``: replay it, too.
    """
    run, limit = trace.duration[chosen], trace.limit[chosen]
    day = np.floor((trace.submit[chosen] + (trace.epoch or 0.0)) / DAY_S).astype(np.int64)
    middle = said.seconds[chosen, MIDDLE]
    estimates = {"history (median)": middle, "mean of last two": LastTwo().expected(trace)[chosen], "limit": limit}
    rows = [score_estimate(name, values, run, day) for name, values in estimates.items()]
    if waits:
        by: dict[str, Estimator] = {"history (median)": HistoryEstimator(), "mean of last two": LastTwo()}
        found = {name: mean_wait_s(trace, chosen, one) for name, one in by.items()}
        rows = [row and msgspec.structs.replace(row, wait_s=found.get(row.estimate)) for row in rows]
    covered = [_covered(said.seconds[chosen], run, *pair) for pair in ((1, -2), (0, -1))]
    return EstimateEvaluation(
        jobs=len(chosen), days=len(np.unique(day)), covered_50=covered[0], covered_90=covered[1],
        crps=float(said.crps[chosen].mean()), rows=tuple(row for row in rows if row is not None),
    )  # fmt: skip


def _covered(seconds: Floats, run: Floats, low: int, high: int) -> float:
    return float(((seconds[:, low] <= run) & (run <= seconds[:, high])).mean())


def mean_wait_s(trace: Trace, chosen: Ints, estimator: Estimator) -> float:
    """Return the mean wait of the chosen jobs where the shortest estimate goes first, on nodes for a load of `LOAD`."""
    from gpusched.sim.pool import Pool
    from gpusched.sim.replay import replay
    from gpusched.study.study import DEFAULT_GPUS_PER_NODE
    from gpusched.traces.slicing import nodes_for_load

    pool = Pool.uniform(nodes_for_load(trace, DEFAULT_GPUS_PER_NODE, LOAD), DEFAULT_GPUS_PER_NODE)
    result = replay(trace, pool, "sjf-estimate+skip", estimator=estimator)
    return float(np.nanmean((result.start - trace.submit)[chosen]))


def score_estimate(name: str, estimate: Floats, run: Floats, day: Ints) -> EstimateScore | None:
    """Return the accuracy of one estimate; None if it has no values."""
    known = np.isfinite(estimate) & (estimate > 0)
    if not known.any():
        return None
    log = np.log(np.maximum(estimate[known], 1.0) / np.maximum(run[known], 1.0))
    low, high = _interval(np.abs(log), day[known])
    return EstimateScore(
        estimate=name, jobs=int(known.sum()), log_error=float(np.abs(log).mean()), low=low, high=high,
        bias=float(log.mean()), under=float((log < 0).mean()), over=float((log > np.log(2)).mean()),
        within_2=float((np.abs(log) <= np.log(2)).mean()),
    )  # fmt: skip


def _interval(errors: Floats, day: Ints) -> tuple[float | None, float | None]:
    days, index = np.unique(day, return_inverse=True)
    if len(days) < MIN_DAYS:
        return None, None
    total, count = np.bincount(index, errors), np.bincount(index)
    drawn = np.random.default_rng(0).integers(0, len(days), (RESAMPLES, len(days)))
    means = total[drawn].sum(1) / count[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
