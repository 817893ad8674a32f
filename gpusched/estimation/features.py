"""Run times estimated at submission, compiled: a job's features then, and two estimators.

Past run times are kept by key: a job's user, its user and GPUs, and so on (`KEYS`). Only jobs that have ended count, so
an estimate uses nothing that was not known when the job was submitted.

Without trees the estimate is the mean of the user's last two run times. Gradient-boosted trees learn, in logarithms,
how a job differs from its anchor, the running mean of the first of its keys with an ended job. Run times drift
by factors from week to week; differences from what the same user ran last drift far less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints, Records, filled
from gpusched.model.interference import name_pattern

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

KEYS = ("user and name", "user and GPUs", "user", "name", "group and GPUs", "group")  # finest first
STATIC = ("log2 GPUs", "nodes", "log cores per GPU", "log MiB per GPU", "limit", "hour", "weekday", "milli")
OF_KEY = ("last", "mean of last two", "mean", "spread", "ended", "log seconds since")
FEATURES = ("anchor", *STATIC, *(f"{key}: {what}" for key in KEYS for what in OF_KEY))

DAY_S, HOUR_S = 86400.0, 3600.0
ANCHOR, LIMIT = 0, 1 + STATIC.index("limit")  # places in a row of features
_MOST_COUNTED = 10.0  # more adds little, and would reveal to the trees how late in the trace it is
_KEPT = 0.7  # of the running mean and spread, when one more job has ended

NO_HISTORY_S = 3600.0  # estimate for a job without a limit whose user has no ended jobs

# What has ended under a key: how many, the last two run times, the running mean and mean deviation of their logarithms,
# and when the last did.
PAST = np.dtype([("ended", np.int64)] + [(name, np.float64) for name in ("last", "before", "mean", "spread", "when")])


class Forest(NamedTuple):
    """Trees for several quantiles.

    Attributes:
        feature: ``int64[nodes]``: the feature that a node tests; -1: a leaf.
        threshold: ``float64[nodes]``: values up to it go left. missing_left: ``int64[nodes]``: whether NaN does.
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


class PastRunTimes(NamedTuple):
    """The run times known to a replay as it proceeds.

    Attributes:
        past: ``PAST[keys]``, changed as jobs end. keys: ``int64[jobs, n]``: index into ``past``, -1: not known.
        limit: ``float64[jobs]``: what an estimate is at most; infinite: the job has none.
        static: ``float64[jobs, STATIC]``; None: the mean of the last two goes without features.
        typical: See `Forest`. row: ``float64[FEATURES]``: room for one job's features.
        forest: The trees; None: the mean of the last two, and nothing of trees is compiled.
        quantile: Which of their quantiles is expected.
    """

    past: Records
    keys: Ints
    limit: Floats
    static: Floats | None
    typical: float
    row: Floats
    forest: Forest | None
    quantile: int


def of_owners(trace: Trace) -> PastRunTimes:
    """Return the past of each user, or of each group if the trace has no users; jobs without either share one."""
    owner = trace.user if (trace.user >= 0).any() else trace.group
    keys = np.where(owner >= 0, owner, owner.max(initial=-1) + 1).reshape(-1, 1)
    return PastRunTimes(_new_past(keys), keys, time_limits(trace), None, 0.0, np.zeros(0), None, 0)


def of_all_keys(trace: Trace, typical: float, forest: Forest | None = None, quantile: int = 0) -> PastRunTimes:
    """Return the past of all `KEYS`; see `PastRunTimes`."""
    keys, row = keys_of(trace), np.zeros(len(FEATURES))
    return PastRunTimes(_new_past(keys), keys, time_limits(trace), static_of(trace), typical, row, forest, quantile)


def time_limits(trace: Trace) -> Floats:
    """Return the time limits, ``float64[jobs]``; infinite: none."""
    return np.where(trace.limit > 0, trace.limit, np.inf)


def _new_past(keys: Ints) -> Records:
    return filled(PAST, int(keys.max(initial=-1)) + 1)


def static_of(trace: Trace) -> Floats:
    """Return each job's own features, ``float64[jobs, STATIC]``; NaN: unknown. Hours are UTC."""
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
    """Return ``int64[jobs, KEYS]``: jobs of equal keys share a number; -1 where a part of the key is unknown.

    Digits in names count as the same: ``train-17`` and ``train-18`` are two runs of one thing.
    """
    names: dict[str, int] = {}
    same = np.array([names.setdefault(name_pattern(name), len(names)) for name in trace.models] + [-1], np.int64)
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
    """Record that a job with these keys, ``int64[n]``, ended after so many seconds."""
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
        of["last"] = seconds
        of["when"] = now
        of["ended"] += 1


@jit
def mean_of_last_two(past: Records, key: int) -> float:
    """Return the estimate of a key with ended jobs (Tsafrir, Etsion, Feitelson, IEEE TPDS 18(6), 2007)."""
    of = past[key]
    return float(of["last"] if of["ended"] == 1 else 0.5 * (of["last"] + of["before"]))


@jit
def features_now(past: Records, static: Floats, keys: Ints, typical: float, now: float, row: Floats) -> None:
    """Fill in the features at ``now`` of a job with this ``static`` and these keys: ``row: float64[FEATURES]``.

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
            row[at] = np.log(max(of["last"], 1.0)) - anchor
            row[at + 1] = np.log(max(mean_of_last_two(past, keys[k]), 1.0)) - anchor
            row[at + 2] = of["mean"] - anchor
            row[at + 3] = of["spread"]
            row[at + 4] = min(_MOST_COUNTED, float(of["ended"]))
            row[at + 5] = np.log(1.0 + max(0.0, now - of["when"]))
        at += 6


@jit
def predict(forest: Forest, quantile: int, row: Floats) -> float:
    """Return the logarithm of seconds that one quantile's trees predict for ``row: float64[FEATURES]``."""
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
def fill_rows(known: PastRunTimes, submit: Floats, end: Floats, seconds: Floats, by_end: Ints, rows: Floats) -> None:
    """Fill in every job's features at its submission, ``rows: float64[jobs, FEATURES]``.

    Without features: its estimate, ``float64[jobs, 1]``. ``submit: float64[jobs]`` ascends; ``end: float64[jobs]``,
    infinite: it never counts as past; ``seconds: float64[jobs]``: how long each ran; ``by_end: int64[jobs]``: the jobs
    in order of their ends. Nothing ``known`` has ended yet.
    """
    done = 0
    for job in range(submit.size):
        while done < by_end.size and end[by_end[done]] <= submit[job]:
            note_end(known.past, known.keys[by_end[done]], seconds[by_end[done]], end[by_end[done]])
            done += 1
        _fill_row(known.static, known, job, submit[job], rows[job])


@jit
def _fill_row(static: Floats | None, known: PastRunTimes, job: int, now: float, row: Floats) -> None:
    if static is None:
        row[0] = expected_run_s(known, job, now)
    else:
        features_now(known.past, static[job], known.keys[job], known.typical, now, row)


@jit
def predict_all(forest: Forest, rows: Floats, logs: Floats) -> None:
    """Fill in `predict` for every row and quantile: ``logs: float64[jobs, quantiles]``."""
    for job in range(rows.shape[0]):
        for quantile in range(logs.shape[1]):
            logs[job, quantile] = predict(forest, quantile, rows[job])


@jit
def expected_run_s(known: PastRunTimes, job: int, now: float) -> float:
    """Return the expected run time of a job submitted now, in seconds, at most its limit."""
    return float(min(_uncapped_s(known.forest, known.static, known, job, now), known.limit[job]))


@jit
def _uncapped_s(forest: Forest | None, static: Floats | None, known: PastRunTimes, job: int, now: float) -> float:
    """Return the estimate; ``forest`` is an argument so that without one no trees are compiled."""
    if forest is None or static is None:
        key, limit = known.keys[job, 0], known.limit[job]
        if known.past[key]["ended"] > 0:
            return mean_of_last_two(known.past, key)
        return float(limit if np.isfinite(limit) else NO_HISTORY_S)
    features_now(known.past, static[job], known.keys[job], known.typical, now, known.row)
    return float(max(1.0, np.exp(predict(forest, known.quantile, known.row))))
