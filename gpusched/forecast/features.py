"""Run times predicted at submission, compiled: what is known of a job then, and trees of gradient boosting over it.

Past run times are kept by key: a job's user, its user and GPUs, and so on (`KEYS`). Only jobs that have ended count, so
a prediction uses nothing that was not known when the job was submitted. Everything is in logarithms of seconds.

What is learned is how a job differs from its anchor, the running mean of the first of its keys under which anything has
ended. Run times drift by factors from week to week; differences from what the same user ran last drift far less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.interference import pattern_of
from gpusched.sched.state import Floats, Ints, Records, filled
from gpusched.traces.trace import Trace

KEYS = ("user and name", "user and GPUs", "user", "name", "group and GPUs", "group")  # finest first
STATIC = ("log2 GPUs", "nodes", "log cores per GPU", "log MiB per GPU", "limit", "hour", "weekday", "milli")
OF_KEY = ("last", "mean of last two", "mean", "spread", "ended", "log seconds since")
FEATURES = ("anchor", *STATIC, *(f"{key}: {what}" for key in KEYS for what in OF_KEY))

DAY_S, HOUR_S = 86400.0, 3600.0
ANCHOR, LIMIT = 0, 1 + STATIC.index("limit")  # places in a row of features
_MOST_COUNTED = 10.0  # more past than that says little more, and would tell the trees how late it is
_KEPT = 0.7  # of the running mean and spread, when one more job has ended

# What has ended under a key: how many, the last two run times, their running mean and mean deviation (in logarithms),
# and when the last did.
PAST = np.dtype([("ended", np.int64)] + [(name, np.float64) for name in ("last", "before", "mean", "spread", "when")])


class Forest(NamedTuple):
    """Trees for several quantiles.

    Attributes:
        feature: ``int64[nodes]``: what a node asks of; -1: a leaf.
        threshold: ``float64[nodes]``: at most that goes left. missing_left: ``int64[nodes]``: where NaN goes.
        left, right: ``int64[nodes]``. value: ``float64[nodes]``: of leaves.
        roots: ``int64[quantiles, trees]``. base: ``float64[quantiles]``: what the trees' values are added to.
        typical: ``float64[1]``: the anchor of a job without a past.
    """

    feature: Ints
    threshold: Floats
    missing_left: Ints
    left: Ints
    right: Ints
    value: Floats
    roots: Ints
    base: Floats
    typical: Floats


class Forecast(NamedTuple):
    """Predictions in a replay.

    Attributes:
        forest: The trees. quantile: Which of their quantiles is expected.
        static: ``float64[jobs, STATIC]``. keys: ``int64[jobs, KEYS]``: index into ``past``, -1: not known.
        past: ``PAST[keys]``, changed as jobs end. row: ``float64[FEATURES]``: room for one job's features.
    """

    forest: Forest
    quantile: int
    static: Floats
    keys: Ints
    past: Records
    row: Floats


def forecast_of(forest: Forest, quantile: int, trace: Trace) -> Forecast:
    """For a replay of ``trace`` from its beginning: nothing has ended yet."""
    keys = keys_of(trace)
    return Forecast(forest, quantile, static_of(trace), keys, new_past(keys), np.zeros(len(FEATURES)))


def new_past(keys: Ints) -> Records:
    """Nothing has ended."""
    return filled(PAST, int(keys.max(initial=-1)) + 1)


def static_of(trace: Trace) -> Floats:
    """``float64[jobs, STATIC]``: what is known of a job by itself; NaN: unknown. Hours are UTC."""
    gpus = np.maximum(trace.gpus, 1).astype(np.float64)
    at = trace.submit + (trace.epoch or 0.0)

    def log_share(values: Ints) -> Floats:
        return np.log(np.where(values > 0, values, np.nan) / gpus)

    limit = np.where(trace.limit > 0, trace.limit, np.nan)
    return np.column_stack(
        (
            np.log2(trace.gpus + 1.0),
            trace.nodes.astype(np.float64),
            log_share(trace.cores),
            log_share(trace.memory_mib),
            np.log(limit),
            at % DAY_S // HOUR_S,
            (at // DAY_S + 3) % 7,  # 1970-01-01 was a Thursday; 0 is Monday
            trace.gpu_milli.astype(np.float64),
        )
    )


def keys_of(trace: Trace) -> Ints:
    """``int64[jobs, KEYS]``: jobs of equal keys share one number; -1 where a part of the key is not known.

    Digits in names count as the same: ``train-17`` and ``train-18`` are two runs of one thing.
    """
    names: dict[str, int] = {}
    same = np.array([names.setdefault(pattern_of(name), len(names)) for name in trace.models] + [-1], np.int64)
    name = same[trace.model]
    any_user = trace.user if (trace.user >= 0).any() else np.full(len(trace), -1, np.int64)
    parts: tuple[tuple[Ints, ...], ...] = (
        (any_user, name), (any_user, trace.gpus), (any_user,), (name,), (trace.group, trace.gpus), (trace.group,),
    )  # fmt: skip
    keys = np.full((len(trace), len(KEYS)), -1, np.int64)
    first = 0
    for column, of in enumerate(parts):
        known = np.all([part >= 0 for part in of], axis=0)
        if known.any():
            distinct, index = np.unique(np.column_stack(of)[known], axis=0, return_inverse=True)
            keys[known, column] = first + index.reshape(-1)
            first += len(distinct)
    return keys


@jit
def note_end(past: Records, keys: Ints, seconds: float, now: float) -> None:
    """A job with these keys, ``int64[KEYS]``, has ended after that many seconds."""
    log = np.log(max(seconds, 1.0))
    for k in range(keys.size):
        if keys[k] < 0:
            continue
        of = past[keys[k]]
        if of["ended"] == 0:
            of["mean"], of["spread"] = log, 0.0
        else:
            of["spread"] = _KEPT * of["spread"] + (1.0 - _KEPT) * abs(log - of["mean"])
            of["mean"] = _KEPT * of["mean"] + (1.0 - _KEPT) * log
        of["before"] = of["last"]
        of["last"] = log
        of["when"] = now
        of["ended"] += 1


@jit
def features_now(past: Records, static: Floats, keys: Ints, typical: float, now: float, row: Floats) -> None:
    """What is known at ``now`` of a job with this ``static`` and these keys: ``row: float64[FEATURES]``, in place.

    Past run times and the limit stand there as differences from the anchor (``typical`` where nothing has ended).
    """
    anchor = typical
    for k in range(keys.size - 1, -1, -1):
        if keys[k] >= 0 and past[keys[k]]["ended"] > 0:
            anchor = past[keys[k]]["mean"]
    row[ANCHOR] = anchor
    at = 1 + static.size
    row[1:at] = static
    row[LIMIT] -= anchor
    row[at:] = np.nan
    for k in range(keys.size):
        if keys[k] >= 0 and past[keys[k]]["ended"] > 0:
            of = past[keys[k]]
            row[at] = of["last"] - anchor
            row[at + 1] = of["last"] - anchor
            if of["ended"] > 1:
                row[at + 1] = np.log(0.5 * (np.exp(of["last"]) + np.exp(of["before"]))) - anchor
            row[at + 2] = of["mean"] - anchor
            row[at + 3] = of["spread"]
            row[at + 4] = min(_MOST_COUNTED, float(of["ended"]))
            row[at + 5] = np.log(1.0 + max(0.0, now - of["when"]))
        at += 6


@jit
def predict(forest: Forest, quantile: int, row: Floats) -> float:
    """The logarithm of seconds that one quantile's trees say of ``row: float64[FEATURES]``."""
    total = row[ANCHOR] + forest.base[quantile]
    for tree in range(forest.roots.shape[1]):
        node = forest.roots[quantile, tree]
        while forest.feature[node] >= 0:
            x = row[forest.feature[node]]
            left = forest.missing_left[node] != 0 if np.isnan(x) else x <= forest.threshold[node]
            node = forest.left[node] if left else forest.right[node]
        total += forest.value[node]
    return float(total)


@jit
def walk(
    submit: Floats, end: Floats, seconds: Floats, static: Floats, keys: Ints, past: Records, by_end: Ints,
    typical: float, rows: Floats,
) -> None:  # fmt: skip
    """The features of every job at its submission, ``rows: float64[jobs, FEATURES]``, in place.

    ``submit: float64[jobs]`` ascends; ``end: float64[jobs]``, infinite: it never counts as past; ``seconds:
    float64[jobs]``: how long each ran; ``by_end: int64[jobs]``: the jobs in order of their ends. In ``past`` nothing
    has ended yet. The others: see `Forecast`, and `Forest`.
    """
    done = 0
    for job in range(submit.size):
        while done < by_end.size and end[by_end[done]] <= submit[job]:
            note_end(past, keys[by_end[done]], seconds[by_end[done]], end[by_end[done]])
            done += 1
        features_now(past, static[job], keys[job], typical, submit[job], rows[job])


@jit
def predict_all(forest: Forest, rows: Floats, logs: Floats) -> None:
    """`predict` for every row and quantile: ``logs: float64[jobs, quantiles]``, in place."""
    for job in range(rows.shape[0]):
        for quantile in range(logs.shape[1]):
            logs[job, quantile] = predict(forest, quantile, rows[job])


@jit
def expected_run_s(forecast: Forecast, job: int, now: float, limit: float) -> float:
    """The run time that is expected of a job that is submitted now, in seconds, at most its limit."""
    features_now(forecast.past, forecast.static[job], forecast.keys[job], forecast.forest.typical[0], now, forecast.row)
    seconds = np.exp(predict(forecast.forest, forecast.quantile, forecast.row))
    return float(max(1.0, min(seconds, limit)))
