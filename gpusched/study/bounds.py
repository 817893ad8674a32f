"""What no schedule can beat: lower bounds on mean JCT and makespan, and the optimum of small instances.

**The relaxation.** A job with g GPUs and run time d is w = g d of work, available from its release r on; a pool is
M GPUs. Whatever a schedule does, preemptive or not, at every instant the GPUs at work are at most M, and job j gets at
most g_j of them. Drop the second condition, nodes, cores and memory: what is left is one machine of speed M that may
be shared. Every real schedule is feasible there with the same completion times, so its optimum is a lower bound.

**SRPT.** On one machine, serving the least remaining work first leaves, at every instant, the fewest jobs unfinished
among all schedules, shared ones too (Schrage, Operations Research 16, 1968). The integral of unfinished jobs is the sum
of flow times, so mean JCT >= that of SRPT with work w at speed M.

**Mean busy time.** Let B_j be the mean time of j's work, the integral of t x_j(t) / w_j dt, x_j its GPUs. Since
x_j <= g_j, its work cannot be done later than in the last d_j seconds before its end C_j, so C_j >= B_j + d_j / 2.
On one machine the sum of B_j is least if at every instant the released job of least (whole) work is served (Goemans,
Queyranne, Schulz, Skutella, Wang, SIAM J. Discrete Mathematics 15(2), 2002: Smith's rule, preemptively, here with unit
weights). So mean JCT >= mean(B_j + d_j / 2 - r_j) of that schedule. It wins at moderate load, SRPT at high load.

**Itself.** No job is faster than its own run time: mean JCT >= mean d.

Each is taken per partition, and the largest of the three there. A job's release is its submission, or, with a
dependency, the earliest that what it waits for can end. Restarts, failures and drains only make schedules worse.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.sched.heaps import Heap, new_heap, pop, push
from gpusched.sched.state import Floats
from gpusched.sim.pool import Demand, Pool, demand_of
from gpusched.traces.trace import Trace


class Bounds(NamedTuple):
    """Lower bounds over the jobs that can run on the pool.

    Attributes:
        mean_jct_s: No schedule has a smaller mean of end - submit. makespan_s: Nor a smaller last end - first submit.
        jobs: How many jobs that is over.
    """

    mean_jct_s: float
    makespan_s: float
    jobs: int


def bounds_of(trace: Trace, pool: Pool, *, limits: bool = False) -> Bounds:
    """The bounds for one trace on one pool; NaN where no job can run.

    Args:
        trace: The jobs.
        pool: The nodes.
        limits: Whether time limits kill, as in `replay`.
    """
    demand = demand_of(trace, pool)
    duration = np.where((trace.duration > trace.limit) & limits, trace.limit, trace.duration)
    release = _releases(trace, duration)
    can_run = _can_run(trace, demand)
    runs = np.flatnonzero(can_run)
    if not len(runs):
        return Bounds(float("nan"), float("nan"), 0)
    total, end = 0.0, 0.0
    partition = demand.queue[demand.shape[runs]]
    for part in np.unique(partition):
        jobs = runs[partition == part]
        jobs = jobs[np.argsort(release[jobs], kind="stable")]
        gpus = float(pool.gpus[pool.partition == part].sum())
        work = (trace.gpus[jobs] * duration[jobs]).astype(np.float64)
        wait = float((release[jobs] - trace.submit[jobs]).sum())
        total += wait + _flow(release[jobs], duration[jobs], work, gpus)
        end = max(end, _last_end(release[jobs], duration[jobs], work, gpus))
    return Bounds(total / len(runs), end - float(trace.submit[runs].min()), len(runs))


def _can_run(trace: Trace, demand: Demand) -> npt.NDArray[np.bool_]:
    can_run = demand.shape >= 0
    for job in np.flatnonzero(trace.depends_on >= 0).tolist():
        before = job
        while before >= 0 and can_run[job]:
            can_run[job] &= demand.shape[before] >= 0
            before = int(trace.depends_on[before])
    return can_run


def _releases(trace: Trace, duration: Floats) -> Floats:
    """The earliest that each job can start, ``float64[jobs]``."""
    release = trace.submit.astype(np.float64, copy=True)
    for job in np.flatnonzero(trace.depends_on >= 0).tolist():
        chain, before = [job], int(trace.depends_on[job])
        while before >= 0:
            chain.append(before)
            before = int(trace.depends_on[before])
        end = -np.inf
        for one in reversed(chain):
            release[job] = max(float(trace.submit[one]), end)
            end = release[job] + float(duration[one])
    return release


def _flow(release: Floats, duration: Floats, work: Floats, gpus: float) -> float:
    """The largest of the three bounds on the sum of end - release; jobs in order of release."""
    alone = float(duration.sum())
    if gpus <= 0:
        return alone
    srpt = float(srpt_flow(release, work / gpus, new_heap(len(work) + 1)))
    busy = float(smith_busy(release, work / gpus, new_heap(len(work) + 1)))
    return max(alone, srpt, busy + alone / 2 - float(release.sum()))


def _last_end(release: Floats, duration: Floats, work: Floats, gpus: float) -> float:
    """The last end is no sooner than any job alone, nor than all work from any release on at full speed."""
    latest = float((release + duration).max())
    if gpus <= 0:
        return latest
    rest = np.cumsum(work[::-1])[::-1]
    return max(latest, float((release + rest / gpus).max()))


@jit
def srpt_flow(release: Floats, size: Floats, heap: Heap) -> float:
    """Sum of flow times of preemptive SRPT on one machine of speed 1; ``release`` ascending; ``heap`` empty."""
    left = size.copy()
    jobs, at, now, flow = release.size, 0, 0.0, 0.0
    while at < jobs or heap.size[0] > 0:
        if heap.size[0] == 0:
            now = max(now, release[at])
        while at < jobs and release[at] <= now:
            push(heap, left[at], at)
            at += 1
        job = pop(heap)
        if at < jobs and now + left[job] > release[at]:
            left[job] -= release[at] - now
            now = release[at]
            push(heap, left[job], job)
        else:
            now += left[job]
            flow += now - release[job]
    return flow


@jit
def smith_busy(release: Floats, size: Floats, heap: Heap) -> float:
    """Sum of mean busy times, serving the released job of least whole size; a job without size counts its release."""
    left = size.copy()
    jobs, at, now, busy = release.size, 0, 0.0, 0.0
    while at < jobs or heap.size[0] > 0:
        if heap.size[0] == 0:
            now = max(now, release[at])
        while at < jobs and release[at] <= now:
            push(heap, size[at], at)
            at += 1
        job = pop(heap)
        done = left[job]
        if at < jobs and now + done > release[at]:
            done = release[at] - now
            push(heap, size[job], job)
        if size[job] > 0:
            busy += (done / size[job]) * (now + 0.5 * done)
        else:
            busy += release[job]
        left[job] -= done
        now += done
    return busy


class Optimum(NamedTuple):
    """A best schedule without preemption: mean JCT, seconds, and each job's start."""

    mean_jct_s: float
    start: tuple[float, ...]


_MOST_JOBS = 8


def exact_optimum(trace: Trace, pool: Pool) -> Optimum:
    """The least mean JCT without preemption, by enumeration; waiting though a job fits is among the choices.

    In order of their starts, every job is tried next on every set of nodes, at the earliest time from the last start
    on at which it fits there: of the best schedules, one is such. Branches that the bound above cuts off are left out.

    Raises:
        UsageError: More than 8 jobs, a dependency, or a job that can never run.
    """
    demand = demand_of(trace, pool)
    if len(trace) > _MOST_JOBS or (demand.shape < 0).any() or (trace.depends_on >= 0).any():
        raise UsageError(f"the optimum is found for at most {_MOST_JOBS} jobs that can all run, without dependencies")
    search = _Search(trace, demand)
    search.extend([], -np.inf, 0.0)
    return Optimum(search.best / max(len(trace), 1), tuple(search.start))


Placed = tuple[int, float, tuple[int, ...]]


class _Search:
    """Depth first, over who starts next and where."""

    def __init__(self, trace: Trace, demand: Demand) -> None:
        self.best, self.start = np.inf, [0.0] * len(trace)
        self._submit, self._duration = trace.submit.tolist(), trace.duration.tolist()
        requests, shape = demand.requests, demand.shape.tolist()
        self._needs = [(int(requests.gpus[s]), int(requests.cores[s]), int(requests.memory[s])) for s in shape]
        self._whole = list(zip(*(c.tolist() for c in demand.resources), strict=True))
        self._sets = []
        for s in shape:
            mask = int(requests.mask[s])
            rows = [n for n in range(requests.lo[s], requests.hi[s]) if mask < 0 or demand.masks[mask, n]]
            self._sets.append(list(itertools.combinations(rows, int(requests.parts[s]))))

    def extend(self, placed: list[Placed], last: float, flow: float) -> None:
        """``placed``: (job, start, nodes) so far; ``last``: the last start; ``flow``: the sum of their JCTs."""
        todo = [j for j in range(len(self._submit)) if all(j != p[0] for p in placed)]
        if not todo:
            if flow < self.best:
                self.best = flow
                for job, start, _ in placed:
                    self.start[job] = start
            return
        least = sum(max(self._submit[j], last) + self._duration[j] - self._submit[j] for j in todo)
        if flow + least >= self.best:
            return
        for job in todo:
            tried = set()
            for nodes in self._sets[job]:
                start = self._earliest(job, nodes, placed, last)
                key = (start, tuple(sorted(self._state(n, placed, start) for n in nodes)))
                if start < np.inf and key not in tried:
                    tried.add(key)
                    jct = start + self._duration[job] - self._submit[job]
                    self.extend([*placed, (job, start, nodes)], start, flow + jct)

    def _earliest(self, job: int, nodes: tuple[int, ...], placed: list[Placed], last: float) -> float:
        first = max(self._submit[job], last)
        ends = sorted(s + self._duration[j] for j, s, _ in placed)
        for time in [first, *(e for e in ends if e > first)]:
            if all(self._fits(job, node, placed, time) for node in nodes):
                return float(time)
        return np.inf

    def _fits(self, job: int, node: int, placed: list[Placed], time: float) -> bool:
        held = [self._needs[j] for j, s, nodes in placed if node in nodes and s + self._duration[j] > time]
        return all(sum(h[kind] for h in held) + self._needs[job][kind] <= self._whole[node][kind] for kind in range(3))

    def _state(self, node: int, placed: list[Placed], time: float) -> tuple[object, ...]:
        """What tells a node from another from ``time`` on: its size and what still runs on it."""
        return (self._whole[node], tuple(j for j, s, nodes in placed if node in nodes and s + self._duration[j] > time))
