"""The greedy answer: jobs in queue order, each on the most valuable GPU type and its best fitting nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpusched.sched.mapping.problem import Flags, MappingSolution, Nodes, Problem, node_cost, value_of
from gpusched.sched.state import Ints

Takes = Callable[[int, Nodes], bool]


def greedy(problem: Problem, *, head_blocks: bool = False, takes: Takes | None = None) -> tuple[Nodes, ...]:
    """Return each job's nodes; empty: it waits. No job is placed where that is worth nothing.

    ``head_blocks``: the first job that does not start ends it; ``takes``: asked before a job starts on nodes; where it
    says no the job is tried on the next GPU type.
    """
    search = _GreedyState(problem, takes)
    nodes: list[Nodes] = []
    for job in range(len(problem)):
        nodes.append(search.place(job))
        if head_blocks and not nodes[-1]:
            break
    return (*nodes, *((),) * (len(problem) - len(nodes)))


def first_answer(problem: Problem, nodes: tuple[Nodes, ...]) -> MappingSolution:
    """Wrap a greedy placement as a solution, for a solver to improve."""
    return MappingSolution(
        nodes=nodes, value=value_of(problem, nodes), bound=_upper_bound(problem), note="not optimised"
    )


def _upper_bound(problem: Problem) -> float:
    """Return an upper bound: the total value of all jobs, each alone on the empty cluster."""
    best = np.where(np.isnan(problem.gain), -np.inf, problem.gain).max(1, initial=-np.inf) + problem.bonus
    # filling a node up can be worth something by itself: it leaves no useless GPUs
    most = problem.resources[:, 0].max(initial=0)
    left = max((problem.left_over(free) for free in range(int(most) + 1)), default=0.0)
    return float(np.maximum(best, 0.0).sum()) + problem.frag_cost * left * int((problem.resources[:, 0] > 0).sum())


class _GreedyState:
    """The resources as jobs are placed; a request that failed once will not fit later either."""

    def __init__(self, problem: Problem, takes: Takes | None) -> None:
        self._problem, self._takes = problem, takes
        self._resources, self._late = problem.resources.copy(), problem.late_resources.copy()
        self._cap = problem.cap.copy()
        self._failed: set[tuple[object, ...]] = set()

    def place(self, job: int) -> Nodes:
        """Place the job and return its nodes; empty if it does not start."""
        p = self._problem
        gpus = int(p.parts[job] * p.need[job, 0])
        if gpus > self._cap[p.user[job]]:
            return ()
        request = (int(p.parts[job]), *p.need[job].tolist(), int(p.mask[job]), bool(p.late[job]))
        gains = p.gain[job]
        kinds = sorted(np.flatnonzero(~np.isnan(gains)).tolist(), key=lambda k: -gains[k])
        open_to = [(k, p.kind == k, float(gains[k])) for k in kinds if (request, k) not in self._failed]
        if p.parts[job] > 1 and (request, -1) not in self._failed and p.mixes(job):
            open_to = [(-1, np.ones(len(p.kind), np.bool_), float(np.nanmin(gains)))]
        for kind, of_kind, gain in open_to:
            where = self._fitting(job, of_kind)
            if not where:
                self._failed.add((request, kind))
            elif gain + float(p.bonus[job]) - self._cost(job, where) > 0 and (
                self._takes is None or self._takes(job, where)
            ):
                self._take(job, where, gpus)
                return where
        return ()

    def _fitting(self, job: int, of_kind: Flags) -> Nodes:
        """Return the nodes with least left over (GPUs, then cores, then memory); empty if there are too few."""
        p, need = self._problem, self._problem.need[job]
        fits = of_kind & p.usable(job) & (self._resources >= need).all(1)
        if p.late[job]:
            fits &= (self._late >= need).all(1)
        rows: Ints = np.flatnonzero(fits)
        if len(rows) < p.parts[job]:
            return ()
        left = self._resources[rows]
        best = rows[np.lexsort((rows, left[:, 2], left[:, 1], left[:, 0]))[: p.parts[job]]]
        return tuple(best.tolist())

    def _cost(self, job: int, where: Nodes) -> float:
        p, gpus = self._problem, int(self._problem.need[job, 0])
        before = [
            (int(p.resources[n, 0]), int(p.total[n]), int(p.resources[n, 0] - self._resources[n, 0])) for n in where
        ]
        return sum(
            node_cost(p, free, total, taken + gpus) - (node_cost(p, free, total, taken) if taken else 0.0)
            for free, total, taken in before
        )

    def _take(self, job: int, where: Nodes, gpus: int) -> None:
        p, rows = self._problem, list(where)
        self._resources[rows] -= p.need[job]
        if p.late[job]:
            self._late[rows] -= p.need[job]
        self._late[rows] = np.minimum(self._late[rows], self._resources[rows])
        self._cap[p.user[job]] -= gpus
