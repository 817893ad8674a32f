"""The optimum of small instances, by enumeration: what the bounds and every policy's schedule are held against."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from gpusched.sim.pool import Demand, Pool, demand_of
from gpusched.traces.trace import Trace


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
        ValueError: More than 8 jobs, a dependency, or a job that can never run.
    """
    demand = demand_of(trace, pool)
    if len(trace) > _MOST_JOBS or (demand.shape < 0).any() or (trace.depends_on >= 0).any():
        raise ValueError(f"the optimum is found for at most {_MOST_JOBS} jobs that can all run, without dependencies")
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
        self._whole = list(zip(*(c.tolist() for c in demand.resources.columns), strict=True))
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
        """Return what distinguishes nodes from ``time`` on: the size, and what still runs there."""
        return (self._whole[node], tuple(j for j, s, nodes in placed if node in nodes and s + self._duration[j] > time))
