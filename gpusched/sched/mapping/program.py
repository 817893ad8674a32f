"""The variables and rows of the mixed-integer program; `milp` documents their meaning. And what checks its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpusched.sched.mapping.classes import (
    MAX_PATTERNS,
    JobClass,
    NodeClass,
    PartShape,
    Pattern,
    check_ways,
    job_classes,
    node_classes,
    patterns_of,
    shapes_of,
)
from gpusched.sched.mapping.problem import TOLERANCE, Nodes, Problem
from gpusched.sched.state import Floats

FEASIBLE = 2  # HiGHS's word for a solution that keeps all constraints
SLACK = 1e-5  # of a value, a row or a bound, in parts of it (of 1, where that is smaller): ten times what HiGHS allows
_NOTHING = 1e-3  # a reduced cost that small counts as none
_ENDS_WELL = ("kOptimal", "kTimeLimit", "kIterationLimit", "kSolutionLimit", "kInterrupt", "kObjectiveBound")


class InconsistentAnswer(Exception):
    """HiGHS's answer contradicts itself, its program or a known answer; the message says how."""


def check(module: Any, program: Any, solver: Any, gap: float | None) -> None:
    """Return status, feasibility, value and bound of ``solver``'s result for ``program``.

    Args:
        module: highspy.
        program: A ``HighsLp`` to be maximised that has a solution, rows one after the other.
        solver: ``Highs`` after its run.
        gap: What it had to prove, in parts of the value; None: it solved the relaxation.

    Raises:
        InconsistentAnswer: They do not go together.
    """
    status, optimal = solver.getModelStatus(), module.HighsModelStatus.kOptimal
    if status not in [getattr(module.HighsModelStatus, name) for name in _ENDS_WELL]:
        raise InconsistentAnswer(f"status {solver.modelStatusToString(status)!r} of a program that has a solution")
    info = solver.getInfo()
    if info.primal_solution_status != FEASIBLE:
        if status == optimal:
            raise InconsistentAnswer("optimal, but without a solution")
        return
    column = np.array(solver.getSolution().col_value, np.float64)
    if broken := _violated(module, program, column, gap is not None):
        raise InconsistentAnswer(broken)
    value, reported = float(np.dot(program.col_cost_, column)), float(info.objective_function_value)
    if not abs(value - reported) <= _slack(value):
        raise InconsistentAnswer(f"its solution is worth {value:.6g}, not {reported:.6g} as it says")
    if gap is None:
        return
    bound = float(info.mip_dual_bound)
    if not value <= bound + _slack(value):
        raise InconsistentAnswer(f"its solution is worth {value:.6g}, over its own bound of {bound:.6g}")
    if status == optimal and not bound - value <= gap * max(1.0, abs(value)) + _slack(value):
        raise InconsistentAnswer(f"it calls a value of {value:.6g} optimal, with a bound of {bound:.6g}")


def _slack(value: float) -> float:
    return SLACK * max(1.0, abs(value))


def _violated(module: Any, program: Any, column: Floats, whole: bool) -> str:
    """Return in words which constraint a solution violates; "" if none."""
    if len(column) != program.num_col_ or not np.isfinite(column).all():
        return "its solution is not made of numbers"
    if whole:
        entries = np.array([kind == module.HighsVarType.kInteger for kind in program.integrality_], np.bool_)
        if np.abs(column - np.rint(column))[entries].max(initial=0.0) > SLACK:
            return "its solution is not in whole numbers"
    matrix = program.a_matrix_
    row = np.repeat(np.arange(program.num_row_), np.diff(matrix.start_))
    sums = np.bincount(row, np.asarray(matrix.value_) * column[np.asarray(matrix.index_)], minlength=program.num_row_)
    for label, values, lower, upper in (
        ("a variable", column, program.col_lower_, program.col_upper_),
        ("a row", sums, program.row_lower_, program.row_upper_),
    ):
        slack = SLACK * np.maximum(1.0, np.abs(values))
        if ((values < np.array(lower) - slack) | (values > np.array(upper) + slack)).any():
            return f"its solution breaks the bounds of {label}"
    return ""


class LinearProgram:
    """The variables and rows of one problem.

    Raises:
        TooManyPatterns: It has more than ``most`` ways to fill nodes.
    """

    def __init__(self, problem: Problem, most: int = MAX_PATTERNS) -> None:
        self._problem = problem
        self.jobs: list[JobClass] = job_classes(problem)
        self.nodes: list[NodeClass] = node_classes(problem)
        counted = shapes_of(self.jobs)
        self.shapes: list[PartShape] = list(counted)
        check_ways(self.nodes, counted, most)
        self.patterns: list[Pattern] = patterns_of(problem, self.nodes, counted)
        self._place = {shape: i for i, shape in enumerate(self.shapes)}
        self.k: dict[tuple[int, int], int] = {}
        self.e: list[int] = []  # first of each job class
        self.z = 0
        self.u: dict[tuple[int, int], int] = {}
        self._columns: list[tuple[float, float, float, bool]] = []  # cost, least, most, whether in whole numbers
        self._rows: list[tuple[float, float, dict[int, float]]] = []
        self._variables()
        self._constraints()

    def _column(self, cost: float, upper: float, whole: bool, lower: float = 0.0) -> int:
        self._columns.append((cost, lower, upper, whole))
        return len(self._columns) - 1

    def _variables(self) -> None:
        p = self._problem
        for s, job_class in enumerate(self.jobs):
            for kind in job_class.kinds:
                gains = p.gain[job_class.jobs[0]]
                gain = float(np.nanmin(gains) if kind < 0 else gains[kind])
                self.k[s, kind] = self._column(gain, len(job_class.jobs), True)
        for job_class in self.jobs:
            self.e.append(len(self._columns))
            for job in job_class.jobs:
                self._column(float(p.bonus[job]), 1.0, False, lower=1.0 if p.must[job] else 0.0)
        self.z = len(self._columns)
        for pattern in self.patterns:
            self._column(-pattern.cost, len(self.nodes[pattern.node_class].nodes), True)
        for pattern in self.patterns:
            for shape, count in pattern.counts.items():
                if count > 1 and self.shapes[shape].parts > 1 and (shape, count) not in self.u:
                    self.u[shape, count] = self._column(0.0, 1.0, True)

    def _constraints(self) -> None:
        for s, node_class in enumerate(self.jobs):
            row = {self.k[s, kind]: 1.0 for kind in node_class.kinds}
            row.update((self.e[s] + r, -1.0) for r in range(len(node_class.jobs)))
            self._rows.append((0.0, 0.0, row))
        self._fill_rows()
        self._gang_rows()
        caps: dict[int, dict[int, float]] = {}
        for (s, _), column in self.k.items():
            node_class = self.jobs[s]
            if node_class.user >= 0:
                caps.setdefault(node_class.user, {})[column] = float(node_class.part[0][0] * node_class.part[3])
        self._rows += [(-np.inf, float(self._problem.cap[user]), row) for user, row in caps.items()]

    def _fill_rows(self) -> None:
        """Add the rows: nodes available; parts in the patterns equal parts of the jobs."""
        used: list[dict[int, float]] = [{} for _ in self.nodes]
        covered: list[dict[int, float]] = [{} for _ in self.shapes]
        for i, pattern in enumerate(self.patterns):
            used[pattern.node_class][self.z + i] = 1.0
            for shape, count in pattern.counts.items():
                covered[shape][self.z + i] = float(count)
        for (s, kind), column in self.k.items():
            shape = self._place[PartShape(*self.jobs[s].part, kind)]
            covered[shape][column] = -float(self.jobs[s].part[3])
        self._rows += [(-np.inf, float(len(n.nodes)), row) for n, row in zip(self.nodes, used, strict=True) if row]
        self._covering = range(len(self._rows), len(self._rows) + sum(map(bool, covered)))
        self._rows += [(0.0, 0.0, row) for row in covered if row]

    def _gang_rows(self) -> None:
        for (shape, count), column in self.u.items():
            started = {self.k[s, k]: -1.0 for s, k in self.k if PartShape(*self.jobs[s].part, k) == self.shapes[shape]}
            self._rows.append((-np.inf, 0.0, {column: float(count), **started}))
            for i, pattern in enumerate(self.patterns):
                if pattern.counts.get(shape) == count:
                    multiple = float(len(self.nodes[pattern.node_class].nodes))
                    self._rows.append((-np.inf, 0.0, {self.z + i: 1.0, column: -multiple}))

    def model(self, module: Any) -> Any:
        """Return the program as HiGHS takes it, row by row."""
        lp = module.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._columns), len(self._rows)
        lp.sense_ = module.ObjSense.kMaximize
        *figures, whole = zip(*self._columns, strict=True)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = map(np.array, figures)
        lp.row_lower_ = np.array([row[0] for row in self._rows])
        lp.row_upper_ = np.array([row[1] for row in self._rows])
        kinds = (module.HighsVarType.kContinuous, module.HighsVarType.kInteger)
        lp.integrality_ = [kinds[is_whole] for is_whole in whole]
        matrix = lp.a_matrix_
        matrix.format_ = module.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row[2]) for row in self._rows)]).astype(np.int32)
        matrix.index_ = np.array([column for row in self._rows for column in row[2]], np.int32)
        matrix.value_ = np.array([value for row in self._rows for value in row[2].values()])
        return lp

    def near(self, module: Any, values: Sequence[float], duals: Sequence[float]) -> Any:
        """Return the `model` restricted to the neighbourhood of the relaxation's solution; see `milp`.

        Rounded down, the patterns' parts of a gang's shape need not come out even: here there may be more parts than
        the jobs take. `nodes_of` leaves them.
        """
        lp = self.model(module)
        filled = slice(self.z, self.z + len(self.patterns))
        whole = np.floor(np.array(values)[filled] + TOLERANCE)
        useful = np.abs(np.array(duals)[filled]) <= _NOTHING
        free = np.array([any((shape, n) in self.u for shape, n in p.counts.items()) for p in self.patterns], np.bool_)
        lower, upper = (np.array(bounds) for bounds in list(zip(*self._columns, strict=True))[1:3])
        lower[filled] = np.where(free, 0.0, whole)
        upper[filled] = np.where(useful, upper[filled], whole)
        lp.col_lower_, lp.col_upper_ = lower, upper
        most = np.array([row[1] for row in self._rows])
        most[self._covering] = np.inf
        lp.row_upper_ = most
        return lp

    def rounded(self, values: Sequence[float]) -> list[float]:
        """Round the relaxation's solution down to whole numbers; for `nodes_of`."""
        return [float(value) for value in np.floor(np.array(values) + TOLERANCE)]

    def column_of(self, nodes: tuple[Nodes, ...]) -> list[float]:
        """Return a solution as values of the variables."""
        column = [0.0] * len(self._columns)
        filled: dict[int, dict[int, int]] = {}
        kinds = self._problem.kind
        for s, job_class in enumerate(self.jobs):
            for r, job in enumerate(job_class.jobs):
                if not nodes[job]:
                    continue
                kind = job_class.kinds[0] if job_class.kinds[0] < 0 else int(kinds[nodes[job][0]])
                column[self.k[s, kind]] += 1.0
                column[self.e[s] + r] = 1.0
                shape = self._place[PartShape(*job_class.part, kind)]
                for node in nodes[job]:
                    counts = filled.setdefault(node, {})
                    counts[shape] = counts.get(shape, 0) + 1
        where = {(p.node_class, frozenset(p.counts.items())): i for i, p in enumerate(self.patterns)}
        class_of = {node: c for c, job_class in enumerate(self.nodes) for node in job_class.nodes}
        for node, counts in filled.items():
            column[self.z + where[class_of[node], frozenset(counts.items())]] += 1.0
            for shape, count in counts.items():
                if (shape, count) in self.u:
                    column[self.u[shape, count]] = 1.0
        return column

    def nodes_of(self, column: Sequence[float]) -> tuple[Nodes, ...]:
        """Return the nodes of each job: parts are dealt out node by node, so that gang members get distinct nodes.

        Of values that are not a solution (rounded down): as many of the jobs as there are parts for.
        """
        parts_of: list[list[int]] = [[] for _ in self.shapes]
        left = [list(job_class.nodes) for job_class in self.nodes]
        for i, pattern in enumerate(self.patterns):
            for _ in range(round(column[self.z + i])):
                node = left[pattern.node_class].pop(0)
                for shape, count in pattern.counts.items():
                    parts_of[shape] += [node] * count
        gangs: list[list[Nodes]] = []
        for job_class, parts in zip(self.shapes, parts_of, strict=True):
            # equal nodes are adjacent, so a stride of `jobs` gives each gang distinct nodes as long as no node has more
            # parts than there are gangs; rounded values may break that, and such gangs are dropped
            jobs = len(parts) // job_class.parts
            spread = [tuple(parts[j::jobs][: job_class.parts]) for j in range(jobs)]
            gangs.append([gang for gang in spread if len(set(gang)) == job_class.parts])
        nodes: list[Nodes] = [()] * len(self._problem)
        for s, group in enumerate(self.jobs):
            waiting = iter(group.jobs)
            gains = self._problem.gain[group.jobs[0]]
            for kind in sorted(group.kinds, key=lambda t: 0.0 if t < 0 else -gains[t]):
                for _ in range(round(column[self.k[s, kind]])):
                    if gang := gangs[self._place[PartShape(*group.part, kind)]]:
                        nodes[next(waiting)] = gang.pop(0)
        return tuple(nodes)
