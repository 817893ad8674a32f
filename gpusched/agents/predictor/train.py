"""Training and evaluation of run-time predictors: gradient boosting (scikit-learn) on ended jobs.

Quantile regression on the logarithm of the run time, by histogram gradient boosting (Ke et al., LightGBM, NeurIPS 2017,
as in scikit-learn), calibrated by `calibrate`. Evaluated on days after the training data, against the mean of the
user's last two run times (Tsafrir, Etsion, Feitelson, IEEE TPDS 18(6), 2007), the limit, and the median of the training
data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gpusched import __version__
from gpusched.agents.common.torch_ import require
from gpusched.agents.predictor.calibrate import calibrate
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
    """The accuracy of one estimate of run times on the held-out jobs.

    Attributes:
        estimate: Its name. jobs: Number of jobs evaluated (those with a limit, for the limit).
        log_error: Mean of |ln(estimate / run time)|: 0.69 is off by a factor of 2. low, high: its 95 % interval over
            days, resampled with replacement; None with fewer than five days.
        bias: Mean of ln(estimate / run time); above 0: too long.
        under, over: Fractions of the jobs estimated too short, and more than twice too long.
        within_2: Fraction within a factor of 2.
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
        jobs: Number of jobs. days: Number of days on which they were submitted.
        covered: Fraction of run times between the 10 and the 90 % quantile; uncalibrated_covered: without shifts.
        rows: Estimate by estimate.
    """

    jobs: int
    days: int
    covered: float | None
    uncalibrated_covered: float | None
    rows: tuple[EstimateScore, ...]


class TrainedPredictor(msgspec.Struct, frozen=True, kw_only=True):
    """The saved predictor, and its accuracy on held-out jobs (None: none held out)."""

    path: str
    jobs: int
    seconds: float
    evaluation: EstimateEvaluation | None
    notes: tuple[str, ...]


def train(trace: Trace, *, until: float, seed: int = 0, settings: BoostingSettings | None = None) -> Predictor:
    """Train a predictor on the jobs ended by ``until`` (seconds on the trace's clock).

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

    shifts, calibration_jobs = calibrate(trace, until, QUANTILES, earlier)
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
    """Fit the trees of all quantiles to the jobs ended by ``until``.

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
    rows[:, ANCHOR] = np.nan  # the overall level of run times drifts; only differences are learned
    used = np.flatnonzero([len(np.unique(column[~np.isnan(column)])) > 1 for column in rows.T])
    trees = []
    for quantile in QUANTILES:
        model = boosting(
            loss="quantile", quantile=quantile, max_iter=settings.trees, max_leaf_nodes=settings.leaves,
            learning_rate=settings.learning_rate, min_samples_leaf=settings.jobs_per_leaf, early_stopping=False,
            random_state=seed,
        )  # fmt: skip
        with limits(limits=1, user_api="openmp"):  # on a busy machine, more threads wait for one another
            trees.append(model.fit(rows[:, used], target))
    return forest_of(trees, used, typical)


def forest_of(models: list[Any], used: Ints, typical: float) -> Forest:
    """Convert scikit-learn's trees to arrays with the same predictions; ``used``: the features they were fitted on."""
    node_arrays: list[np.ndarray[Any, Any]] = []
    roots = np.zeros((len(models), len(models[0]._predictors)), np.int64)
    at = 0
    for quantile, model in enumerate(models):
        for number, (tree,) in enumerate(model._predictors):
            roots[quantile, number] = at
            nodes = tree.nodes.copy()
            inner = nodes["is_leaf"] == 0
            nodes["left"][inner] += at
            nodes["right"][inner] += at
            node_arrays.append(nodes)
            at += len(nodes)
    nodes = np.concatenate(node_arrays)
    leaf = nodes["is_leaf"] != 0
    largest = np.finfo(np.float64).max
    return Forest(
        feature=np.where(leaf, -1, used[nodes["feature_idx"]]).astype(np.int64),
        threshold=np.clip(np.where(leaf, 0.0, nodes["num_threshold"]), -largest, largest),
        missing_left=nodes["missing_go_to_left"].astype(np.int64),
        left=np.where(leaf, np.arange(at), nodes["left"]).astype(np.int64),
        right=np.where(leaf, np.arange(at), nodes["right"]).astype(np.int64),
        value=np.where(leaf, nodes["value"], 0.0),
        roots=roots,
        base=np.array([float(np.ravel(model._baseline_prediction)[0]) for model in models]),
        typical=np.array([typical]),
    )


def evaluate(predictor: Predictor, trace: Trace, chosen: Ints, typical_s: float | None = None) -> EstimateEvaluation:
    """Evaluate the predictor and the usual estimates on jobs ``chosen: int64[n]`` that it was not trained on.

    The trace also holds all jobs submitted before them, which are inputs. ``typical_s``: the median run time of the
    training data; None: not compared.
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
    rows = [score_estimate(name, values, run, day) for name, values in estimates.items()]
    plain = replace(predictor, shifts=(0.0,) * len(predictor.quantiles)).predict(features)
    return EstimateEvaluation(
        jobs=len(chosen), days=len(np.unique(day)), covered=_covered(seconds, run),
        uncalibrated_covered=_covered(plain, run), rows=tuple(row for row in rows if row is not None),
    )  # fmt: skip


def _covered(seconds: Floats, run: Floats) -> float | None:
    """Return the fraction of ``run: float64[jobs]`` between the outer of ``seconds: float64[jobs, quantiles]``."""
    return float(((seconds[:, 0] <= run) & (run <= seconds[:, -1])).mean()) if len(run) else None


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


def training_median(trace: Trace, until: float) -> float:
    """Return the median run time of the training data of `train`."""
    return float(np.median(trace.duration[ends_of(trace) <= until]))
