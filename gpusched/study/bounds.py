"""Lower bounds on mean JCT and makespan for any schedule.

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

Each is taken per partition, and the largest of the three there; each profile of MIG slices is a partition, and of GPUs
that are cut on demand nothing is proven. A job's release is its submission, or, with a dependency, the earliest that
what it waits for can end. Restarts, failures and drains only make schedules worse.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import compiled_if_long, jit
from gpusched.sched.heaps import Heap, new_heap, pop, push
from gpusched.sched.state import Floats
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.pool import Demand, Pool, demand_of
from gpusched.sim.slicing import split_replay
from gpusched.traces.trace import Trace


class Bounds(NamedTuple):
    """Lower bounds over the jobs that can run on the pool; None where none can, or nothing is proven.

    Attributes:
        mean_jct_s: No schedule has a smaller mean of end - submit. makespan_s: Nor a smaller last end - first submit.
        jobs: How many jobs that is over.
    """

    mean_jct_s: float | None = None
    makespan_s: float | None = None
    jobs: int = 0


def bounds_of(trace: Trace, pool: Pool, *, limits: bool = False) -> Bounds:
    """Return the bounds for one trace on one pool; ``limits``: whether time limits kill, as in `replay`."""
    if pool.cuttable:
        return Bounds()  # GPUs are in several queues' rows
    trace, pool, _, _ = split_replay(trace, pool, ReplayOptions())
    demand = demand_of(trace, pool)
    duration = np.where((trace.duration > trace.limit) & limits, trace.limit, trace.duration)
    can_run, release = _released(trace, demand, duration)
    runs = np.flatnonzero(can_run)
    if not len(runs):
        return Bounds()
    total, end = 0.0, 0.0
    partition = demand.queue[demand.shape[runs]]
    for part in np.unique(partition):
        jobs = runs[partition == part]
        jobs = jobs[np.argsort(release[jobs], kind="stable")]
        gpus = float(pool.gpus[pool.partition == part].sum())
        work = (trace.gpus[jobs] * duration[jobs]).astype(np.float64)
        wait = float((release[jobs] - trace.submit[jobs]).sum())
        total += wait + compiled_if_long(partial(_flow, release[jobs], duration[jobs], work, gpus))
        end = max(end, _last_end(release[jobs], duration[jobs], work, gpus))
    return Bounds(total / len(runs), end - float(trace.submit[runs].min()), len(runs))


def _released(trace: Trace, demand: Demand, duration: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Return which jobs can run, ``bool[jobs]``, and each one's earliest start, ``float64[jobs]``."""
    can_run, release = demand.shape >= 0, trace.submit.astype(np.float64, copy=True)
    for job in np.flatnonzero(trace.depends_on >= 0).tolist():
        before = int(trace.depends_on[job])  # an earlier row, so that its own are known
        can_run[job] &= can_run[before]
        release[job] = max(release[job], release[before] + float(duration[before]))
    return can_run, release


def _flow(release: Floats, duration: Floats, work: Floats, gpus: float) -> float:
    """Return the largest of the three bounds on the sum of end - release; jobs in order of release."""
    alone = float(duration.sum())
    if gpus <= 0:
        return alone
    srpt = float(serve(release, work / gpus, new_heap(len(work) + 1), True))
    busy = float(serve(release, work / gpus, new_heap(len(work) + 1), False))
    return max(alone, srpt, busy + alone / 2 - float(release.sum()))


def _last_end(release: Floats, duration: Floats, work: Floats, gpus: float) -> float:
    """Return a bound on the last end: of any job alone, and of all work after any release at full speed."""
    latest = float((release + duration).max())
    if gpus <= 0:
        return latest
    rest = np.cumsum(work[::-1])[::-1]
    return max(latest, float((release + rest / gpus).max()))


@jit
def serve(release: Floats, size: Floats, heap: Heap, by_left: bool) -> float:
    """Serve jobs on one machine of speed 1, preemptively, always the one of least work; ``release`` ascends.

    ``by_left``: least work left, and the sum of flow times is returned; else least whole work, and the sum of mean busy
    times (a job without size counts its release). ``heap``: empty.
    """
    left = size.copy()
    jobs, at, now, total = release.size, 0, 0.0, 0.0
    while at < jobs or heap.size[0] > 0:
        if heap.size[0] == 0:
            now = max(now, release[at])
        while at < jobs and release[at] <= now:
            push(heap, size[at], at)
            at += 1
        job = pop(heap)
        done = left[job]
        # Serve until the job is done or the next release, which may bring a job of less work.
        stopped = at < jobs and now + done > release[at]
        if stopped:
            done = release[at] - now
        left[job] -= done
        if stopped:
            push(heap, left[job] if by_left else size[job], job)
        if by_left:
            total += 0.0 if stopped else now + done - release[job]
        elif size[job] > 0:
            total += (done / size[job]) * (now + 0.5 * done)
        else:
            total += release[job]
        now = release[at] if stopped and by_left else now + done
    return total
