"""Metrics of a replay: times, use, waste and fairness. For definitions and sources see `Metrics`."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.compiled.arrays import Floats, Ints
from gpusched.sim.power import J_PER_KWH, PowerModel, power_model
from gpusched.sim.result import ReplayResult
from gpusched.study.timeline import Parts, Runs, paired_runs, parts_of, run_seconds, runs_of

SLOWDOWN_THRESHOLD_S = 10.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a user, or of a group (partition, virtual cluster, queue), in a replay."""

    name: str
    jobs: int
    gpu_hours: float
    mean_jct_s: float
    mean_wait_s: float
    mean_bounded_slowdown: float


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one replay, over the jobs that ended; None where there are none.

    Attributes:
        jobs: Jobs that ended. infeasible: Jobs that can never run on this pool, left out of everything.
        unfinished: Jobs that could run and never ended. killed: Ended by their limit before their work was done.
        mean_jct_s...: Job completion time: end - submission.
        mean_wait_s...: What of it the job did not run; for a job that was never cut, start - submission.
        mean_bounded_slowdown...: max(1, JCT / max(run time, 10 s)) (Feitelson et al., JSSPP 1997).
        recorded_mean_wait_s: Mean wait in the source, of the jobs for which it is recorded.
        wait_error: Their mean wait here over that, less 1: how well the replay predicts the source's own scheduler,
            if the policy is that scheduler's.
        makespan_s: Last end - first submission.
        utilization: Eq. 4 of Narantuya et al. (CMC 2022) as `gpusched power` has it: the sum of dominant share times
            run time, over the time from a partition's first start to the last end; partitions weighted by GPUs.
        gpu_hours_utilization: GPU seconds held over GPU seconds there were from first submission to last end.
        arrival_utilization: The same from first to last submission, without the tail in which the pool runs dry.
        fragmentation: Of the free GPU time, the part that a job drawn at random from the trace could not have used
            because its node had fewer free GPUs than the job needs on one node: Weng et al., "Beware of Fragmentation"
            (ATC 2023), F_n(M) for whole GPUs, averaged over nodes and time. None where jobs held parts of GPUs.
        energy_kwh: All nodes, from first submission to last end, by the power model (`gpusched.sim.power`).
        inefficient_energy_kwh: Rated kW x hours x (1 - utilization), by partition, as the paper has it.
        jain: Jain's index of users' mean bounded slowdowns (of groups' where no users are known): 1 is all alike
            (Jain, Chiu, Hawe, DEC-TR-301, 1984).
        restarts: Runs that were cut.
        users, groups: By user and by group, most GPU hours first.
    """

    jobs: int
    infeasible: int
    unfinished: int
    killed: int
    restarts: int
    mean_jct_s: float | None = None
    median_jct_s: float | None = None
    p95_jct_s: float | None = None
    p99_jct_s: float | None = None
    mean_wait_s: float | None = None
    median_wait_s: float | None = None
    p95_wait_s: float | None = None
    p99_wait_s: float | None = None
    mean_bounded_slowdown: float | None = None
    median_bounded_slowdown: float | None = None
    p95_bounded_slowdown: float | None = None
    p99_bounded_slowdown: float | None = None
    recorded_mean_wait_s: float | None = None
    wait_error: float | None = None
    makespan_s: float | None = None
    utilization: float | None = None
    gpu_hours_utilization: float | None = None
    arrival_utilization: float | None = None
    fragmentation: float | None = None
    gpu_hours: float = 0.0
    energy_kwh: float | None = None
    inefficient_energy_kwh: float | None = None
    jain: float | None = None
    users: tuple[Holder, ...] = ()
    groups: tuple[Holder, ...] = ()


class JobTimes(NamedTuple):
    """``float64[jobs]`` in the trace's order, seconds; NaN where the job did not end."""

    jct: Floats
    wait: Floats
    run: Floats
    slowdown: Floats


def job_times(result: ReplayResult) -> JobTimes:
    """Return JCT, wait, run time and bounded slowdown of every job."""
    jct = result.end - result.trace.submit
    run = run_seconds(result)
    slowdown = np.maximum(1.0, jct / np.maximum(run, SLOWDOWN_THRESHOLD_S))
    return JobTimes(jct, np.maximum(jct - run, 0.0), run, slowdown)


def metrics_of(result: ReplayResult, power: PowerModel | None = None, whole: ReplayResult | None = None) -> Metrics:
    """Return all metrics of one replay; ``power`` None: the paper's rated figures.

    ``whole``: the same replay with the jobs present when it begins. What they hold until the last end is not free.
    """
    ran = result.ran
    counts: dict[str, Any] = {
        "jobs": int(ran.sum()),
        "infeasible": len(result.infeasible),
        "unfinished": len(ran) - int(ran.sum()) - len(result.infeasible),
        "killed": int((result.killed & ran).sum()),
        "restarts": int(result.restarts.sum()),
    }
    if not ran.any():
        return Metrics(**counts)
    times, runs, parts = job_times(result), runs_of(result), parts_of(result)
    held = _within(parts_of(whole or result), float(result.trace.submit[ran].min()), float(runs.end.max()))
    figures: dict[str, Any] = {}
    for name, values in (("jct_s", times.jct), ("wait_s", times.wait), ("bounded_slowdown", times.slowdown)):
        figures |= _spread(name, values[ran])
    users, groups = holders(result, times, "user"), holders(result, times, "group")
    slowdowns = np.array([h.mean_bounded_slowdown for h in users or groups])
    return msgspec.structs.replace(
        Metrics(**counts),
        **figures,
        **_against_recorded(result, times),
        **_use(result, runs, whole or result, held, power or power_model(result.pool)),
        gpu_hours=float((parts.gpus * (parts.end - parts.start)).sum()) / 3600,
        fragmentation=fragmentation(result, held),
        jain=jain(slowdowns) if len(slowdowns) else None,
        users=users,
        groups=groups,
    )


def _spread(name: str, values: Floats) -> dict[str, float | None]:
    found = (values.mean(), *np.percentile(values, [50, 95, 99]))
    return {f"{what}_{name}": float(value) for what, value in zip(("mean", "median", "p95", "p99"), found, strict=True)}


def _against_recorded(result: ReplayResult, times: JobTimes) -> dict[str, float | None]:
    known = result.ran & np.isfinite(result.trace.wait)
    if not known.any():
        return {}
    recorded, here = float(result.trace.wait[known].mean()), float(times.wait[known].mean())
    return {"recorded_mean_wait_s": recorded, "wait_error": here / recorded - 1 if recorded > 0 else None}


def _within(parts: Parts, first: float, last: float) -> Parts:
    return parts._replace(start=np.clip(parts.start, first, last), end=np.clip(parts.end, first, last))


def _use(
    result: ReplayResult, runs: Runs, whole: ReplayResult, parts: Parts, power: PowerModel
) -> dict[str, float | None]:
    """Return makespan, utilizations and energies."""
    pool, submit = result.pool, result.trace.submit[result.ran]
    first, last = float(submit.min()), float(runs.end.max())
    span = last - first
    seconds = parts.end - parts.start
    held = np.bincount(parts.node, parts.gpus * seconds, len(pool)).astype(np.float64)
    gpus = max(pool.total_gpus, 1)
    arriving = float(submit.max()) - first
    early = np.clip(np.minimum(parts.end, first + arriving) - parts.start, 0.0, None)
    u = eq4(result, runs, whole)
    rated = np.bincount(pool.partition, power.busy_w, len(pool.partitions))
    wasted = rated * u.window_s * np.clip(1.0 - u.by_partition, 0.0, None)
    return {
        "makespan_s": span,
        "utilization": u.whole,
        "gpu_hours_utilization": float(held.sum()) / (gpus * span) if span > 0 else None,
        "arrival_utilization": float((parts.gpus * early).sum()) / (gpus * arriving) if arriving > 0 else None,
        "energy_kwh": power.energy_j(pool, held, span) / J_PER_KWH,
        "inefficient_energy_kwh": float(wasted.sum()) / J_PER_KWH,
    }


class Eq4(NamedTuple):
    """Utilization by Eq. 4: of all partitions; ``float64[partitions]`` of each; T of each in seconds (0: no start)."""

    whole: float | None
    by_partition: Floats
    window_s: Floats


def eq4(result: ReplayResult, runs: Runs | None = None, whole: ReplayResult | None = None) -> Eq4:
    """Return U = sum of lambda * tau / T by partition (Narantuya et al., CMC 2022, Eq. 2-4); see `Metrics`.

    ``whole``: See `metrics_of`; T is of the jobs of ``result``.
    """
    runs = runs or runs_of(result)
    pool, n = result.pool, len(result.pool.partitions)
    partition = pool.partition[runs.first_node]
    first = np.full(n, np.inf)
    np.minimum.at(first, partition, runs.start)
    last = runs.end.max(initial=0.0)
    window = np.where(np.isfinite(first), last - first, 0.0)
    held = runs if whole is None else runs_of(whole)
    whole = whole or result
    share, partition = dominant_share(whole), pool.partition[held.first_node]
    seconds = np.maximum(0.0, np.minimum(held.end, last) - np.maximum(held.start, first[partition]))
    area = np.bincount(partition, share[held.job] * held.size * seconds, n)
    for both in paired_runs(whole) if whole.shared == "pairs" else ():
        where = pool.partition[whole.nodes_of(both.job)[0]]
        lasted = max(0.0, min(both.end, last) - max(both.start, first[where]))
        area[where] -= min(share[both.job], share[both.mate]) * lasted
    weight = np.bincount(pool.partition, pool.gpus, n).astype(np.float64)
    if not weight.any():
        weight = np.bincount(pool.partition, minlength=n).astype(np.float64)
    capacity = float((weight * window).sum())
    by_partition = np.divide(area, window, out=np.zeros(n), where=window > 0)
    return Eq4(float((weight * area).sum()) / capacity if capacity > 0 else None, by_partition, window)


def dominant_share(result: ReplayResult) -> Floats:
    """Return lambda, a job's largest share of its partition's GPUs, cores, memory: ``float64[jobs]``; 0: never ran."""
    trace, pool = result.trace, result.pool
    parts = np.diff(result.part_offsets)
    ran = np.flatnonzero(result.ran & (parts > 0))
    partition = pool.partition[result.part_nodes[result.part_offsets[ran]]]
    share = np.zeros(len(ran))
    gpus = result.part_gpus[ran] * parts[ran]
    size = gpus / np.maximum(trace.gpus[ran], 1) if result.cut.part_gpus is not None else 1
    held = gpus if result.share is None else gpus * result.share[ran]
    columns = [(held, pool.gpus), (trace.cores[ran] * size, pool.cores)]
    for asked, has in (*columns, (trace.memory_mib[ran] * size, pool.memory_mib)):
        total = np.bincount(pool.partition, np.maximum(has, 0), len(pool.partitions))
        total[np.unique(pool.partition[has < 0])] = np.inf  # not modelled: never the dominant resource
        total[total == 0] = np.inf
        share = np.maximum(share, np.maximum(asked, 0) / total[partition])
    whole = np.zeros(len(trace))
    whole[ran] = share
    return whole


def fragmentation(result: ReplayResult, parts: Parts | None = None) -> float | None:
    """Return the fragmentation, see `Metrics`; None if no GPU was ever free."""
    if result.shared != "no" or result.share is not None:
        return None
    parts = parts or parts_of(result)
    pool = result.pool
    feasible = np.ones(len(result.trace), np.bool_)
    feasible[result.infeasible] = False
    needs = result.part_gpus[feasible]
    needs = needs[needs > 0]
    if not len(needs) or not len(parts.start):
        return None
    begin, end = float(result.trace.submit[result.ran].min()), float(parts.end.max())
    levels = np.arange(int(pool.gpus.max()) + 1)
    unfit = 1.0 - np.searchsorted(np.sort(needs), levels, side="right") / len(needs)  # P(job needs more than f)
    nodes = np.arange(len(pool))
    # Free GPUs of every node as a step function: all at first, fewer while a part runs.
    at = np.concatenate([np.full(len(pool), begin), parts.start, parts.end])
    node = np.concatenate([nodes, parts.node, parts.node])
    change = np.concatenate([pool.gpus, -parts.gpus, parts.gpus])
    order = np.lexsort((at, node))
    at, node, change = at[order], node[order], change[order]
    total = np.cumsum(change)
    base = np.concatenate([[0], np.cumsum(pool.gpus)[:-1]])  # after its last event each node has all its GPUs free
    free = np.clip(total - base[node], 0, levels[-1])
    until = np.where(np.append(node[1:] != node[:-1], True), end, np.append(at[1:], end))
    free_s = free * np.maximum(until - at, 0.0)
    everything = float(free_s.sum())
    return float((free_s * unfit[free]).sum()) / everything if everything > 0 else None


def _gpu_seconds(result: ReplayResult, times: JobTimes) -> Floats:
    """Return the GPU seconds that each job held, ``float64[jobs]``."""
    if result.shared == "no" and result.share is None and result.cut.part_gpus is None:
        return times.run * (result.part_gpus * np.diff(result.part_offsets))
    parts = parts_of(result)
    return np.bincount(parts.job, parts.gpus * (parts.end - parts.start), len(result.trace)).astype(np.float64)


def jain(values: Floats) -> float:
    """Return (sum of x)^2 / (n * sum of x^2): 1 if all are equal, 1/n if one has everything."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def holders(result: ReplayResult, times: JobTimes, by: str) -> tuple[Holder, ...]:
    """Return figures by ``user`` or ``group``, most GPU hours first, without jobs of unknown owners."""
    trace = result.trace
    index: Ints = getattr(trace, by)
    names: tuple[str, ...] = getattr(trace, f"{by}s")
    rows = np.flatnonzero(result.ran & (index >= 0))
    index, n = index[rows], len(names)
    count = np.bincount(index, minlength=n)
    hours = np.bincount(index, _gpu_seconds(result, times)[rows], n) / 3600
    means = [np.bincount(index, v[rows], n) / np.maximum(count, 1) for v in (times.jct, times.wait, times.slowdown)]
    found = [
        Holder(
            name=names[i],
            jobs=int(count[i]),
            gpu_hours=float(hours[i]),
            mean_jct_s=float(means[0][i]),
            mean_wait_s=float(means[1][i]),
            mean_bounded_slowdown=float(means[2][i]),
        )
        for i in np.flatnonzero(count).tolist()
    ]
    return tuple(sorted(found, key=lambda h: (-h.gpu_hours, h.name)))
