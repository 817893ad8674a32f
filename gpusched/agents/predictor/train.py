"""Training and judging predictors of run times: gradient boosting (scikit-learn) on the jobs that have ended.

Quantile regression on the logarithm of the run time, by histogram gradient boosting (Ke et al., LightGBM, NeurIPS 2017,
as in scikit-learn), made to keep its quantiles by `calibrate`. Judged on days after all that was learned, against the
mean of the user's last two run times (Tsafrir, Etsion, Feitelson, IEEE TPDS 18(6), 2007), the limit, and the median of
what was learned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gpusched import __version__
from gpusched.agents.common.torch_ import require
from gpusched.agents.predictor.calibrate import calibrated
from gpusched.errors import GpuschedError
from gpusched.estimation.features import ANCHOR, DAY_S, Forest
from gpusched.estimation.predictor import LastTwo, Predictor, ends_of, features_of
from gpusched.model.units import count_of
from gpusched.sched.state import Floats, Ints
from gpusched.traces.trace import Trace

QUANTILES = (0.1, 0.5, 0.9)
MIN_JOBS = 50
RESAMPLES = 1000
MIN_DAYS = 5


class BoostingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Hyper-parameters of the boosting, the same for every quantile."""

    trees: int = 150
    leaves: int = 31
    learning_rate: float = 0.06
    jobs_per_leaf: int = 20


class EstimateScore(msgspec.Struct, frozen=True, kw_only=True):
    """One way to estimate run times, on the held-out jobs.

    Attributes:
        estimate: Its name. jobs: How many it was judged on (those with a limit, for the limit).
        log_error: Mean of |ln(estimate / run time)|: 0.69 is off by a factor of 2. low, high: its 95 % interval over
            days, drawn with replacement; None with fewer than five days.
        bias: Mean of ln(estimate / run time); above 0: too long.
        under, over: Parts of the jobs estimated too short, and more than twice too long.
        within_2: Part within a factor of 2.
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


class EstimateEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All estimates on the same held-out jobs.

    Attributes:
        jobs: How many. days: On how many days they were submitted.
        covered: Part of their run times between the 10 and the 90 % quantile; uncalibrated_covered: without shifts.
        rows: Estimate by estimate.
    """

    jobs: int
    days: int
    covered: float | None
    uncalibrated_covered: float | None
    rows: tuple[EstimateScore, ...]


class TrainedPredictor(msgspec.Struct, frozen=True, kw_only=True):
    """What was made, and how good it is on what was held out (None: nothing was)."""

    path: str
    jobs: int
    seconds: float
    evaluation: EstimateEvaluation | None
    notes: tuple[str, ...]


def train(trace: Trace, *, until: float, seed: int = 0, settings: BoostingSettings | None = None) -> Predictor:
    """A predictor that has seen only jobs that had ended at ``until`` (seconds on the trace's clock).

    Raises:
        GpuschedError: scikit-learn is not installed, or there are too few such jobs.
    """
    require("sklearn.ensemble")
    settings = settings or BoostingSettings()
    ended = int((ends_of(trace) <= until).sum())
    if ended < MIN_JOBS:
        raise GpuschedError(
            f"{trace.name}: {count_of(ended, 'job')} ended in time to train on; at least {MIN_JOBS} are needed"
        )
    forest = fit(trace, until, seed, settings)

    def earlier(edge: float) -> Forest | None:
        return fit(trace, edge, seed, settings) if (ends_of(trace) <= edge).sum() >= MIN_JOBS else None

    shifts, calibration_jobs = calibrated(trace, until, QUANTILES, earlier)
    about = {
        "trace": trace.name, "jobs": str(ended), "calibration_jobs": str(calibration_jobs), "seed": str(seed),
        "code": __version__, "settings": msgspec.json.encode(settings).decode(),
    }  # fmt: skip
    calendar = trace.epoch is not None
    return Predictor(
        forest=forest, quantiles=QUANTILES, shifts=shifts, learned_until=until + (trace.epoch or 0.0),
        calendar=calendar, about=about,
    )  # fmt: skip


def fit(trace: Trace, until: float, seed: int, settings: BoostingSettings) -> Forest:
    """The trees of all quantiles, learned from the jobs that had ended at ``until``.

    Raises:
        GpuschedError: scikit-learn is not installed.
    """
    boosting = require("sklearn.ensemble").HistGradientBoostingRegressor
    limits = require("threadpoolctl").threadpool_limits
    chosen = np.flatnonzero(ends_of(trace) <= until)
    logs = np.log(np.maximum(trace.duration[chosen], 1.0))
    typical = float(np.median(logs))
    rows = features_of(trace, typical)[chosen]
    target = logs - rows[:, ANCHOR]
    rows[:, ANCHOR] = np.nan  # how long things take in all drifts; only differences are learned
    used = np.flatnonzero([len(np.unique(column[~np.isnan(column)])) > 1 for column in rows.T])
    trees = []
    for quantile in QUANTILES:
        model = boosting(
            loss="quantile", quantile=quantile, max_iter=settings.trees, max_leaf_nodes=settings.leaves,
            learning_rate=settings.learning_rate, min_samples_leaf=settings.jobs_per_leaf, early_stopping=False,
            random_state=seed,
        )  # fmt: skip
        with limits(limits=1, user_api="openmp"):  # on a busy machine more threads wait for one another
            trees.append(model.fit(rows[:, used], target))
    return forest_of(trees, used, typical)


def forest_of(models: list[Any], used: Ints, typical: float) -> Forest:
    """scikit-learn's trees as arrays, the same answers without scikit-learn; ``used``: the features they were given."""
    parts: list[np.ndarray[Any, Any]] = []
    roots = np.zeros((len(models), len(models[0]._predictors)), np.int64)
    at = 0
    for quantile, model in enumerate(models):
        for number, (tree,) in enumerate(model._predictors):
            roots[quantile, number] = at
            nodes = tree.nodes.copy()
            inner = nodes["is_leaf"] == 0
            nodes["left"][inner] += at
            nodes["right"][inner] += at
            parts.append(nodes)
            at += len(nodes)
    nodes = np.concatenate(parts)
    leaf = nodes["is_leaf"] != 0
    most = np.finfo(np.float64).max
    return Forest(
        feature=np.where(leaf, -1, used[nodes["feature_idx"]]).astype(np.int64),
        threshold=np.clip(np.where(leaf, 0.0, nodes["num_threshold"]), -most, most),
        missing_left=nodes["missing_go_to_left"].astype(np.int64),
        left=np.where(leaf, np.arange(at), nodes["left"]).astype(np.int64),
        right=np.where(leaf, np.arange(at), nodes["right"]).astype(np.int64),
        value=np.where(leaf, nodes["value"], 0.0),
        roots=roots,
        base=np.array([float(np.ravel(model._baseline_prediction)[0]) for model in models]),
        typical=np.array([typical]),
    )


def evaluate(predictor: Predictor, trace: Trace, chosen: Ints, typical_s: float | None = None) -> EstimateEvaluation:
    """How good it is on jobs ``chosen: int64[n]`` that it has not seen, besides the usual estimates.

    The trace holds all that was submitted before them, too: their past counts. ``typical_s``: the median run time of
    what was learned; None: left out.
    """
    features = features_of(trace, float(predictor.forest.typical[0]))[chosen]
    seconds, run = predictor.predict(features), trace.duration[chosen]
    middle = seconds[:, predictor.quantiles.index(0.5)]
    limit = trace.limit[chosen]
    capped = np.fmin(middle, np.where(limit > 0, limit, np.nan))
    day = np.floor((trace.submit[chosen] + (trace.epoch or 0.0)) / DAY_S).astype(np.int64)
    estimates = {"predicted (median)": capped, "mean of last two": LastTwo().medians(trace)[chosen], "limit": limit}
    if typical_s is not None:
        estimates["median of all"] = np.full(len(chosen), typical_s)
    rows = [judged(name, values, run, day) for name, values in estimates.items()]
    plain = replace(predictor, shifts=(0.0,) * len(predictor.quantiles)).predict(features)
    return EstimateEvaluation(
        jobs=len(chosen), days=len(np.unique(day)), covered=_covered(seconds, run),
        uncalibrated_covered=_covered(plain, run), rows=tuple(row for row in rows if row is not None),
    )  # fmt: skip


def _covered(seconds: Floats, run: Floats) -> float | None:
    """The part of ``run: float64[jobs]`` between the outermost of ``seconds: float64[jobs, quantiles]``."""
    return float(((seconds[:, 0] <= run) & (run <= seconds[:, -1])).mean()) if len(run) else None


def judged(name: str, estimate: Floats, run: Floats, day: Ints) -> EstimateScore | None:
    """One estimate's figures; None where it says nothing of any job."""
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


def median_learned(trace: Trace, until: float) -> float:
    """The median run time of the jobs that `train` would learn from."""
    return float(np.median(trace.duration[ends_of(trace) <= until]))
