"""Fits a workload description to a trace: `gpusched trace fit` writes it, `gpusched trace generate` reads it."""

from __future__ import annotations

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.slicetables import gpus_counted
from gpusched.model.units import count_of
from gpusched.traces.slicing import span_s
from gpusched.traces.trace import Floats, Ints, Trace
from gpusched.traces.workload import HOURS, WEEKDAYS, RequestedTimes, RunTime, SizeClass, Workload

_DAY_S, _HOUR_S = 86400.0, 3600.0
_MONDAY = 4 * _DAY_S  # 1970-01-05
_DEFAULT_START = 1767571200.0  # Monday 2026-01-05
_MIN_SIZE_JOBS = 50  # a size with fewer jobs uses the run times of all
_MAX_OWN_SIZES = 8  # sizes with run times of their own: those with the most GPU seconds
_POINTS = 4000  # quantiles that a mixture is fitted to
_EM_ROUNDS = 200  # at most
_TAIL = 0.05  # fraction of the jobs in the Pareto tail
_MENU = 12  # distinct time limits that are kept
_MAX_BURST_GAP_S = 60.0


def fit(trace: Trace) -> Workload:
    """Return a workload with the trace's rate, cycles, bursts, sizes, run times, limits and users.

    Sizes with many jobs and the most GPU seconds get run times of their own, others those of all jobs. Run times are a
    mixture of up to three lognormals (EM, chosen by BIC) below the 95th percentile, and above it a Pareto tail with the
    mean of the trace's tail.

    Raises:
        UsageError: The trace has fewer than ten jobs, or all were submitted at once.
    """
    if len(trace) < 10 or span_s(trace) <= 0:
        raise UsageError(
            f"{trace.name}: {count_of(len(trace), 'job')} in {span_s(trace):.0f} s: too few to fit", "use more"
        )
    share, size, within = _bursts(trace)
    users = len(np.unique(trace.user[trace.user >= 0]))
    hours, weekdays = _cycles(trace)
    return Workload(
        name=f"like {trace.name}",
        jobs=len(trace),
        start=_DEFAULT_START if trace.epoch is None else trace.epoch + float(trace.submit[0]),
        per_hour=(len(trace) - 1) / span_s(trace) * _HOUR_S,
        hours=hours,
        weekdays=weekdays,
        burst_share=share,
        burst_size=size,
        burst_within_s=within,
        sizes=_sizes(trace),
        run_time=fit_run_time(trace.duration),
        limits=_limits(trace),
        users=users,
        user_zipf=_zipf(trace) if users else 1.0,
        groups=_groups(trace),
    )


def _sizes(trace: Trace) -> tuple[SizeClass, ...]:
    profile = np.full(len(trace), -1, np.int64) if trace.profile is None else trace.profile
    # A size is a number of GPUs, or of MIG slices of one profile (-1: whole GPUs).
    both = np.stack((trace.gpus, profile))
    kinds, index, counts = np.unique(both, axis=1, return_inverse=True, return_counts=True)
    index = index.reshape(-1)
    names = [(*trace.profiles, "")[i] for i in kinds[1].tolist()]  # -1 takes the last name, ""
    counted = np.array([gpus_counted(1, name) for name in names])
    work = np.bincount(index, trace.gpus * trace.duration) * counted * (counts >= _MIN_SIZE_JOBS)
    own = set(np.argsort(-work, kind="stable")[:_MAX_OWN_SIZES].tolist())
    return tuple(
        SizeClass(
            gpus=size,
            share=float(counts[i] / len(trace)),
            run_time=fit_run_time(trace.duration[index == i]) if i in own and counts[i] >= _MIN_SIZE_JOBS else None,
            profile=names[i],
        )
        for i, size in enumerate(kinds[0].tolist())
    )


# Run times


def fit_run_time(durations: Floats) -> RunTime:
    """Fit lognormals below the 95th percentile, and a Pareto tail above it given enough jobs."""
    ordered = np.sort(durations)
    lowest, highest = float(ordered[0]), float(ordered[-1])
    tail = max(int(len(ordered) * _TAIL), 1)
    border = float(ordered[-tail - 1]) if len(ordered) > tail else highest
    has_tail = tail >= 10 and border < highest
    # Fewer than ten jobs give no reliable tail: the mixture covers them then.
    body = ordered[:-tail] if has_tail else ordered
    alpha = _alpha(ordered[-tail:], border, highest) if has_tail else 0.0
    return RunTime(
        parts=_mixture(np.log(body)), minimum_s=lowest, maximum_s=highest, tail_alpha=alpha,
        tail_share=tail / len(ordered) if has_tail else 0.0, tail_from_s=border if has_tail else 0.0,
    )  # fmt: skip


def _alpha(tail: Floats, border: float, highest: float) -> float:
    """Return the exponent with which a Pareto from ``border``, truncated at ``highest``, has the tail's mean.

    The mean is kept since the load depends on it. It decreases with the exponent, so bisection finds it.
    """
    goal = float(np.mean(tail)) / border
    reach = np.log(highest / border)
    low, high = 1e-3, 100.0
    for _ in range(60):
        alpha = (low + high) / 2
        mean = alpha * -np.expm1((1 - alpha) * reach) / ((alpha - 1) * -np.expm1(-alpha * reach))
        low, high = (alpha, high) if mean > goal else (low, alpha)
    return low


def _mixture(logs: Floats) -> tuple[tuple[float, float, float], ...]:
    """Fit one to three lognormals (weight, median, sigma), by BIC on quantiles of the sorted ``logs``."""
    points = logs if len(logs) <= _POINTS else np.quantile(logs, (np.arange(_POINTS) + 0.5) / _POINTS)
    best: tuple[float, tuple[Floats, Floats, Floats]] | None = None
    for parts in (1, 2, 3):
        found, likelihood = _em(points, parts)
        bic = (3 * parts - 1) * np.log(len(points)) - 2 * likelihood
        if best is None or bic < best[0]:
            best = (bic, found)
        if len(points) < 20 * parts:
            break
    assert best is not None
    weights, means, sigmas = best[1]
    return tuple(
        (float(w), float(np.exp(m)), float(s)) for w, m, s in zip(weights, means, sigmas, strict=True) if w > 1e-4
    )


def _em(points: Floats, parts: int) -> tuple[tuple[Floats, Floats, Floats], float]:
    """Fit a mixture of normals by expectation maximisation, initialised deterministically at quantiles."""
    means = np.quantile(points, (np.arange(parts) + 0.5) / parts)
    sigmas = np.full(parts, max(float(points.std()), 0.05))
    weights = np.full(parts, 1 / parts)
    likelihood = -np.inf
    for _ in range(_EM_ROUNDS):
        deviation = (points[:, None] - means) / sigmas
        density = weights * np.exp(-0.5 * deviation**2) / (sigmas * np.sqrt(2 * np.pi))
        total = np.maximum(density.sum(axis=1), 1e-300)
        before, likelihood = likelihood, float(np.log(total).sum())
        if likelihood - before < 1e-6 * abs(likelihood):
            break
        # Expectation: how much of each point belongs to each part. Maximisation: each part's moments, so weighted. The
        # bounds keep a part from vanishing, or from shrinking onto one point, where the likelihood is infinite.
        belongs = density / total[:, None]
        mass = np.maximum(belongs.sum(axis=0), 1e-12)
        weights = mass / len(points)
        means = (belongs * points[:, None]).sum(axis=0) / mass
        sigmas = np.maximum(np.sqrt((belongs * (points[:, None] - means) ** 2).sum(axis=0) / mass), 0.02)
    return (weights, means, sigmas), likelihood


# Arrivals


def _cycles(trace: Trace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return relative arrival rates by hour and by weekday; flat without a calendar or enough time."""
    hours, weekdays = np.ones(HOURS), np.ones(WEEKDAYS)
    if trace.epoch is not None:
        times = trace.submit + trace.epoch - _MONDAY
        if span_s(trace) >= 2 * _DAY_S:
            hours = _per_time(times, _HOUR_S, HOURS)
        if span_s(trace) >= 14 * _DAY_S:
            weekdays = _per_time(times, _DAY_S, WEEKDAYS)
    return tuple(map(float, hours)), tuple(map(float, weekdays))


def _per_time(times: Floats, slot_s: float, slots: int) -> Floats:
    """Return the arrival rate of each slot of the cycle within the span, normalised to mean 1."""
    first, last = float(times[0]), float(times[-1])
    counts = np.bincount((times // slot_s).astype(np.int64) % slots, minlength=slots)
    # The trace covers some slots of the cycle more often than others, and its first and last one only in part.
    cycles = (last - first) // (slots * slot_s)  # whole ones cover all alike
    last -= cycles * slots * slot_s
    edges = np.arange(first // slot_s, last // slot_s + 1)
    seen = np.minimum((edges + 1) * slot_s, last) - np.maximum(edges * slot_s, first)
    observed = np.bincount(edges.astype(np.int64) % slots, seen, minlength=slots) + cycles * slot_s
    rate: Floats = np.divide(counts, observed, out=np.zeros(slots), where=observed > 0)
    rate /= rate.mean()
    return rate


def _bursts(trace: Trace) -> tuple[float, float, float]:
    """Return (fraction of jobs, mean size, mean delay after the first in s) of bursts of three or more jobs.

    A burst has one user (one group, if users are unknown) and one number of GPUs. Its gaps are at most a minute and at
    most a twentieth of the mean gap between such jobs; otherwise a busy user would be one long burst.
    """
    owner = trace.user if np.any(trace.user >= 0) else trace.group
    order = np.lexsort((trace.submit, trace.gpus, owner))
    kind = np.stack((owner[order], trace.gpus[order]))
    same = np.concatenate(([False], np.all(kind[:, 1:] == kind[:, :-1], axis=0)))
    kinds = np.cumsum(~same) - 1  # index of each job's owner and size
    mean_gap = span_s(trace) / np.bincount(kinds)[kinds]
    gaps = np.diff(trace.submit[order], prepend=-np.inf)
    joined = same & (gaps <= np.minimum(_MAX_BURST_GAP_S, mean_gap / 20))
    runs: Ints = (np.cumsum(~joined) - 1).astype(np.int64)  # index of its run of small gaps
    sizes = np.bincount(runs)
    bursts = sizes >= 3
    jobs = int(sizes[bursts].sum())
    if not jobs:
        return 0.0, 1.0, 60.0
    starts = trace.submit[order][np.flatnonzero(~joined)]
    later = joined & bursts[runs]
    within = float(np.mean(trace.submit[order][later] - starts[runs[later]]))
    return jobs / len(trace), jobs / int(bursts.sum()), max(within, 0.001)


# Limits and users


def _limits(trace: Trace) -> RequestedTimes | None:
    known = np.isfinite(trace.limit) & (trace.limit > 0)
    if np.count_nonzero(known) < 10:
        return None
    limit, duration = trace.limit[known], trace.duration[known]
    values, counts = np.unique(limit, return_counts=True)
    usual = values[np.argsort(-counts, kind="stable")[: _MENU - 1]]
    held = limit >= duration
    logs = np.log(limit[held] / duration[held]) if held.any() else np.zeros(1)
    return RequestedTimes(
        menu_s=tuple(map(float, np.unique([*usual, values[-1]]))), exceeded=float(1 - held.mean()),
        over_median=float(np.exp(np.median(logs))), over_sigma=float(logs.std()),
    )  # fmt: skip


def _zipf(trace: Trace) -> float:
    """Fit Zipf's exponent of the jobs per user, by least squares on logarithms, over users with more than two jobs."""
    counts = np.sort(np.bincount(trace.user[trace.user >= 0]))[::-1]
    counts = counts[counts > 2]
    if len(counts) < 3:
        return 1.0
    return float(max(0.0, -np.polyfit(np.log(np.arange(1, len(counts) + 1)), np.log(counts), 1)[0]))


def _groups(trace: Trace) -> tuple[tuple[str, float], ...]:
    if not np.any(trace.group >= 0):
        return ()
    counts = np.bincount(trace.group[trace.group >= 0], minlength=len(trace.groups))
    return tuple((name, float(count)) for name, count in zip(trace.groups, counts, strict=True) if count)
