"""Workloads generated from a description: the same description and seed give the same trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gpusched.errors import UsageError
from gpusched.model.slicetables import gpus_counted
from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.trace import Floats, Ints, Trace
from gpusched.traces.workload import RequestedTimes, RunTime, Workload

WEEK_S = 7 * 86400
_HOUR_S = 3600.0
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday
_REDRAWS = 8


def generate(workload: Workload, seed: int = 0) -> Trace:
    """Generate ``workload.jobs`` jobs, the first submitted at or after its start (time 0).

    Arrivals are a Poisson process with a rate by hour and weekday; a burst is one arrival of several jobs.

    Raises:
        UsageError: It asks for a load, and no job has GPUs.
    """
    rng = np.random.default_rng(seed)
    count = workload.jobs
    arrival, offset = _bursts(workload, rng)
    first_of = np.concatenate(([0], np.flatnonzero(np.diff(arrival)) + 1))[arrival]  # the job with the same traits
    size_index = _weighted(rng, np.array([s.share for s in workload.sizes]), count)[first_of]
    gpus = np.array([s.gpus for s in workload.sizes], np.int64)[size_index]
    duration = _durations(workload, rng, size_index)
    used = gpus * np.array([gpus_counted(1, s.profile) for s in workload.sizes])[size_index]
    submit = _arrival_times(workload, rng, int(arrival[-1]) + 1, float(np.sum(used * duration)))[arrival] + offset
    names: dict[str, tuple[Ints, tuple[str, ...]]] = {}
    if workload.users:
        ranks = np.arange(1, workload.users + 1, dtype=np.float64)
        users = _weighted(rng, ranks**-workload.user_zipf, count)[first_of]
        names["user"] = users, tuple(f"u{i}" for i in range(1, workload.users + 1))
    if workload.groups:
        groups = _weighted(rng, np.array([w for _, w in workload.groups]), count)[first_of]
        names["group"] = groups, tuple(name for name, _ in workload.groups)
    limit = None if workload.limits is None else _limits(workload.limits, rng, duration)
    order = np.argsort(submit, kind="stable")
    columns = {} if limit is None else {"limit": limit[order]}
    trace = assemble(
        name=f"{workload.name}, seed {seed}", epoch=workload.start, ids=tuple(map(str, range(1, count + 1))),
        submit=submit[order], duration=duration[order], gpus=gpus[order], columns=columns,
        names={column: (index[order], words) for column, (index, words) in names.items()},
    )  # fmt: skip
    if not any(size.profile for size in workload.sizes):
        return trace
    profile, profiles = intern([size.profile for size in workload.sizes])
    return replace(trace, profile=profile[size_index[order]], profiles=profiles)


def _weighted(rng: np.random.Generator, weights: Floats, count: int) -> Ints:
    """Draw indices by weight."""
    borders = np.cumsum(weights / weights.sum())
    borders[-1] = 1.0
    return np.searchsorted(borders, rng.random(count), side="right").astype(np.int64)


# Arrivals


def _bursts(workload: Workload, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Return each job's arrival number (ascending from 0) and its delay after that arrival."""
    count, share, size = workload.jobs, workload.burst_share, workload.burst_size
    if share <= 0 or size <= 1:
        return np.arange(count), np.zeros(count)
    of_bursts = (share / size) / (share / size + 1 - share)  # part of the arrivals that are bursts
    sizes = np.where(rng.random(count) < of_bursts, rng.geometric(1 / size, count), 1)
    arrivals = int(np.searchsorted(np.cumsum(sizes), count)) + 1
    arrival = np.repeat(np.arange(arrivals), sizes[:arrivals])[:count]
    later = np.diff(arrival, prepend=-1) == 0
    return arrival, np.where(later, rng.exponential(workload.burst_within_s, count), 0.0)


def _arrival_times(workload: Workload, rng: np.random.Generator, arrivals: int, gpu_s: float) -> Floats:
    """Return arrival times in seconds, ascending: unit-rate arrivals mapped through the week's cumulative rate."""
    if workload.per_hour is not None:
        jobs_per_s = workload.per_hour / _HOUR_S
    elif gpu_s > 0:
        jobs_per_s = workload.jobs * (workload.load or 1.0) * workload.load_gpus / gpu_s
    else:
        raise UsageError(f"{workload.name}: no job has GPUs", "give arrivals.per_hour instead of a load")
    mean_gap = workload.jobs / arrivals / jobs_per_s
    even = np.cumsum(rng.exponential(mean_gap, arrivals))
    if workload.load is not None:  # the span of the arrivals decides the load: no chance in it
        even *= mean_gap * arrivals / even[-1]
    weights = np.outer(workload.weekdays, workload.hours).ravel()
    if np.all(weights == weights[0]):
        return even
    hours = np.arange(len(weights) + 1) * _HOUR_S
    cumulated = np.concatenate(([0.0], np.cumsum(weights / weights.mean()))) * _HOUR_S
    into_week = (workload.start + _EPOCH_WEEKDAY * 86400) % WEEK_S
    bent = even + float(np.interp(into_week, hours, cumulated))
    week, rest = np.divmod(bent, WEEK_S)
    hour = np.clip(np.searchsorted(cumulated, rest, side="right") - 1, 0, len(weights) - 1)
    rate = weights[hour] / weights.mean()  # above 0: an hour without arrivals holds no time that can be drawn
    times: Floats = week * WEEK_S + hours[hour] + (rest - cumulated[hour]) / np.where(rate > 0, rate, 1) - into_week
    return times


# Run times and limits


def _durations(workload: Workload, rng: np.random.Generator, size_index: Ints) -> Floats:
    duration = np.empty(len(size_index))
    own = np.array([size.run_time is not None for size in workload.sizes])
    for index, size in enumerate(workload.sizes):
        if size.run_time is not None:
            of_size = np.flatnonzero(size_index == index)
            duration[of_size] = run_times(size.run_time, rng, len(of_size))
    rest = np.flatnonzero(~own[size_index])
    duration[rest] = run_times(workload.run_time, rng, len(rest))
    return duration


def run_times(run_time: RunTime, rng: np.random.Generator, count: int) -> Floats:
    """Draw run times from their distribution, rounded to the millisecond."""
    highest = min(run_time.maximum_s, run_time.tail_from_s) if run_time.tail_share > 0 else run_time.maximum_s
    seconds = _below(run_time, rng, count, highest)
    in_tail = np.flatnonzero(rng.random(count) < run_time.tail_share)
    if len(in_tail):  # a Pareto cut off at the maximum, by the inverse of its distribution
        reach = 1 - (run_time.tail_from_s / max(run_time.maximum_s, run_time.tail_from_s)) ** run_time.tail_alpha
        seconds[in_tail] = run_time.tail_from_s * (1 - reach * rng.random(len(in_tail))) ** (-1 / run_time.tail_alpha)
    return np.maximum(np.round(np.clip(seconds, run_time.minimum_s, run_time.maximum_s), 3), 0.001)


def _below(run_time: RunTime, rng: np.random.Generator, count: int, highest: float) -> Floats:
    """Draw from the mixture; redraw values above ``highest`` a few times."""
    weights, medians, sigmas = (np.array(column) for column in zip(*run_time.parts, strict=True))
    seconds = np.full(count, np.inf)
    again = np.arange(count)
    for _ in range(_REDRAWS):
        part = _weighted(rng, weights, len(again))
        seconds[again] = medians[part] * np.exp(sigmas[part] * rng.standard_normal(len(again)))
        again = again[seconds[again] > highest]
        if not len(again):
            break
    below: Floats = np.minimum(seconds, highest)
    return below


def _limits(limits: RequestedTimes, rng: np.random.Generator, duration: Floats) -> Floats:
    menu = np.array(limits.menu_s)
    over = np.maximum(1.0, limits.over_median * np.exp(limits.over_sigma * rng.standard_normal(len(duration))))
    holds = np.searchsorted(menu, duration * over)
    too_short = (rng.random(len(duration)) < limits.exceeded) & (duration > menu[0])
    shorter = np.maximum(np.searchsorted(menu, duration) - 1, 0)
    chosen: npt.NDArray[np.intp] = np.where(too_short, shorter, np.minimum(holds, len(menu) - 1))
    # no entry is long enough: what it runs, rounded up to the longest entry's multiples
    longest: Floats = menu[-1] * np.ceil(duration / menu[-1])
    asked: Floats = np.where(~too_short & (menu[chosen] < duration), longest, menu[chosen])
    return asked
