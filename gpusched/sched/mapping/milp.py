"""The mapping as a mixed-integer program in HiGHS (Huangfu, Hall 2018), started from the greedy answer.

    variables   k[s, t]  jobs of class s started on GPU type t          whole numbers
                e[s, r]  whether the r-th job of class s starts         0 .. 1; in order, since bonuses never rise
                z[c, p]  nodes of class c that are filled by pattern p  whole numbers
                u[h, a]  whether any node takes a parts of gang shape h 0 or 1
    maximise    sum gain k + sum bonus e - sum cost z
    subject to  sum_t k[s, t] = sum_r e[s, r]
                sum_p z[c, p] <= nodes of c
                parts of shape h in the patterns = parts of the jobs of that shape
                GPUs of a user's jobs <= the user's cap
                z[c, p] <= nodes of c * u[h, a] and a u[h, a] <= jobs of h     where p has a > 1 parts of gang shape h

The last keeps a gang's parts on distinct nodes: K gangs can be dealt out so whenever no node has more than K parts.

HiGHS is not taken at its word (decision 0046): its status, solution, value and bound must go together (`check`), its
value must be that of the mapping, counted by the problem's own rules, and its bound may not lie below a known answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.sched.mapping.classes import MAX_PATTERNS, TooManyPatterns, simplified
from gpusched.sched.mapping.greedy import greedy
from gpusched.sched.mapping.problem import MappingSolution, Nodes, Problem, faults, part_of, value_of
from gpusched.sched.mapping.program import FEASIBLE, SLACK, InconsistentAnswer, LinearProgram, check

GAP = 1e-4  # in parts of the value; proven this close counts as best
OUT_OF_TIME = "stopped: time limit reached"
DISCARDED = "the answer of HiGHS failed a check, so the greedy one is used"
_BETTER = 1e-9
_MIN_SEARCH_S = 0.002  # with less time than that nothing is begun
_MIN_JOBS, _MIN_WORK_FOR_RATE = 4, 1000
WORK_OF_JOB = 4  # what a job adds to the making of a program, in patterns


def highs() -> Any:
    """Return the highspy module.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import highspy
    except ImportError:
        raise UsageError(
            "place: milp needs HiGHS, which is not installed", "pip install 'gpusched-cluster[milp]'"
        ) from None
    return highspy


_worth = attrgetter("value")


class SearchLimits(NamedTuple):
    """The limits of a search.

    Attributes:
        end_s: When it ends, by ``clock``.
        max_nodes: HiGHS is stopped after so many nodes of the search tree; None: any number.
        work: What making the program may take, in patterns; see `WORK_OF_JOB`. Patterns are `MAX_PATTERNS` at the most.
    """

    end_s: float
    max_nodes: int | None = None
    work: float = np.inf
    clock: Callable[[], float] = time.perf_counter


def solve(
    problem: Problem, start: MappingSolution, *, budget_s: float = 0.2, max_nodes: int | None = None
) -> MappingSolution:
    """Return a solution that is worth at least as much as ``start``.

    Args:
        problem: What to answer.
        start: A sound answer; it is the first incumbent, and what comes back where nothing better is found.
        budget_s: Of HiGHS, which may check the clock late. `deadline.Deadline` does not wait.
        max_nodes: See `SearchLimits`: with a budget that does not bind, the same answer on every run.

    Raises:
        UsageError: HiGHS is not installed.
    """
    search = MilpSearch(problem, start, SearchLimits(time.perf_counter() + budget_s, max_nodes))
    search.run()
    return search.best()


class MilpSearch:
    """One problem's search: the relaxation, its rounding, a neighbourhood program, then the full program.

    Rounded: the whole nodes that the relaxation fills; the jobs that this leaves go greedily. Near: at least those
    nodes, and more only by patterns with a reduced cost near 0. Both find good incumbents within milliseconds, for
    programs that HiGHS with its defaults has not rounded after a second.

    One thread may `run` it while another asks for the `best` so far.

    ``start``: see `solve`. ``listen``: incumbents count while HiGHS runs, not only when it has ended.

    Attributes:
        work_per_s: How fast the program was made, see `SearchLimits`; None: not made, or too small to know.

    Raises:
        UsageError: HiGHS is not installed.
    """

    def __init__(self, problem: Problem, start: MappingSolution, limits: SearchLimits, *, listen: bool = False) -> None:
        self._module = highs()
        self._problem, self._start, self._limits, self._listen = problem, start, limits, listen
        self._jobs = len(problem)  # the first of them where that is not all
        self._incumbent: tuple[LinearProgram, list[float]] | None = None
        self._begin(OUT_OF_TIME)
        self.work_per_s: float | None = None

    def _begin(self, note: str) -> None:
        """Reset to ``start`` alone."""
        self._incumbent, self._best = None, self._start  # in this order: another thread may ask for the best
        self._bound = self._start.bound if self._start.bound is not None else np.inf
        self._part, self._note = "", note  # the words for a part of the jobs, and why it ended

    def run(self) -> None:
        """Search until optimal or out of time; if HiGHS's answer fails a check, keep ``start``."""
        try:
            self._search()
        except InconsistentAnswer as error:
            self._begin(f"{DISCARDED}: {error}")

    def _search(self) -> None:
        if self._proven():
            self._note = ""
            return
        program = self._program()
        if program is None:
            return
        if program.patterns:
            self._improve(program)
        else:
            self._bind(self._start.value)
        if self._proven() or not program.patterns:
            self._note = ""

    def best(self) -> MappingSolution:
        """Return the best solution so far."""
        incumbent, best = self._incumbent, self._best
        if incumbent is not None:
            best = max(best, self._found(*incumbent), key=_worth)
        return MappingSolution(
            nodes=best.nodes,
            value=best.value,
            bound=max(self._bound, best.value) if np.isfinite(self._bound) else None,
            solver="greedy" if best.nodes is self._start.nodes else "milp",
            note="; ".join(dict.fromkeys(words for words in (self._part, self._note) if words)),
        )

    def _proven(self) -> bool:
        value = self._best.value
        return self._bound - value <= GAP * max(1.0, abs(value))

    def _left_s(self) -> float:
        """Return the time left; 0: too little to begin anything."""
        left = self._limits.end_s - self._limits.clock()
        return left if left > _MIN_SEARCH_S else 0.0

    def _program(self) -> LinearProgram | None:
        """Build the program of all jobs, or of the first ones if there are too many patterns; None: impossible."""
        while (begin := self._limits.clock()) < self._limits.end_s - _MIN_SEARCH_S:
            most = min(MAX_PATTERNS, self._limits.work - WORK_OF_JOB * self._jobs)
            no_jobs: tuple[Nodes, ...] = ((),) * len(self._problem)
            try:
                program = LinearProgram(
                    simplified(part_of(self._problem, no_jobs, np.arange(self._jobs))), max(0, int(most))
                )
            except TooManyPatterns as error:
                if self._jobs <= _MIN_JOBS:
                    self._note = str(error)
                    return None
                self._jobs //= 2
                self._part = f"only the first {self._jobs} of {len(self._problem)} jobs optimised"
                continue
            took, work = self._limits.clock() - begin, len(program.patterns) + WORK_OF_JOB * self._jobs
            if work >= _MIN_WORK_FOR_RATE and took > 0:
                self.work_per_s = work / took
            return program
        return None

    def _improve(self, program: LinearProgram) -> None:
        model = program.model(self._module)
        if not (left := self._left_s()):
            return
        solver = self._solver(model, left)
        solver.setOptionValue("solve_relaxation", True)
        solver.run()
        check(self._module, model, solver, None)
        if solver.getModelStatus() != self._module.HighsModelStatus.kOptimal:
            return
        solution = solver.getSolution()
        # no whole solution beats the relaxation, so rounding it may already prove the answer optimal
        self._bind(float(solver.getInfo().objective_function_value))
        self._best = max(self._best, self._found(program, program.rounded(solution.col_value)), key=_worth)
        if self._proven():
            return
        near = program.near(self._module, solution.col_value, solution.col_dual)
        if left := self._left_s():
            self._run(program, near, self._solver(near, 0.7 * left), may_fail=True)
        if not self._proven() and (left := self._left_s()):
            # start HiGHS from the best known solution: what it then returns can only be better
            first = self._module.HighsSolution()
            first.col_value = program.column_of(self._best.nodes[: self._jobs])
            solver = self._solver(model, left)
            solver.setSolution(first)
            value = self._run(program, model, solver)
            info, status = solver.getInfo(), solver.getModelStatus()
            claimed = info.objective_function_value
            if info.primal_solution_status == FEASIBLE and not value >= claimed - SLACK:
                raise InconsistentAnswer(
                    f"its solution is worth {claimed:.6g} by its own account, but {value:.6g} as a mapping"
                )
            self._bind(float(info.mip_dual_bound))
            optimal = status == self._module.HighsModelStatus.kOptimal
            self._note = "" if optimal else f"stopped: {solver.modelStatusToString(status).lower()}"

    def _bind(self, bound: float) -> None:
        """Record an upper bound; one for a part of the jobs does not bound the whole.

        Raises:
            InconsistentAnswer: The best one so far is.
        """
        if self._part or not np.isfinite(bound):
            return
        if bound < self._best.value - SLACK * max(1.0, abs(bound)):
            raise InconsistentAnswer(
                f"its bound of {bound:.6g} lies below {self._best.value:.6g}, the value of a known mapping"
            )
        self._bound = min(self._bound, bound)

    def _solver(self, model: Any, budget_s: float) -> Any:
        """Return HiGHS on one thread: the login node's cores are shared, and threads cost more than they gain."""
        solver = self._module.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", budget_s)
        solver.setOptionValue("mip_rel_gap", GAP)
        solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)  # it checks the clock too seldom
        if self._limits.max_nodes is not None:
            solver.setOptionValue("mip_max_nodes", self._limits.max_nodes)
        solver.passModel(model)
        return solver

    def _run(self, program: LinearProgram, model: Any, solver: Any, may_fail: bool = False) -> float:
        """Run HiGHS to its end; return the mapping value of its best solution, or of ``start`` without one.

        ``may_fail``: the model need not have a solution.
        """
        if self._listen:
            solver.cbMipImprovingSolution += lambda event: self._store_incumbent(program, event.data_out.mip_solution)
        solver.run()
        if not (may_fail and solver.getModelStatus() == self._module.HighsModelStatus.kInfeasible):
            check(self._module, model, solver, GAP)
        found = self._start
        if solver.getInfo().primal_solution_status == FEASIBLE:
            found = self._found(program, list(solver.getSolution().col_value))
            self._best = max(self._best, found, key=_worth)
        self._incumbent = None
        return found.value

    def _store_incumbent(self, program: LinearProgram, column: Any) -> None:
        self._incumbent = (program, column.tolist())

    def _found(self, program: LinearProgram, column: list[float]) -> MappingSolution:
        """Return a solution, with the other starts, as one to the whole; ``start`` if invalid or worth less."""
        problem, start = self._problem, self._start
        nodes = [*program.nodes_of(column), *((),) * (len(problem) - self._jobs)]
        idle = np.array([job for job, where in enumerate(nodes) if not where], np.int64)
        for job, where in zip(idle, greedy(part_of(problem, tuple(nodes), idle)), strict=True):
            nodes[job] = where
        answer = tuple(nodes)
        value = value_of(problem, answer)
        kept = all(answer[job] for job in np.flatnonzero(problem.must))
        if value > start.value + _BETTER and kept and not faults(problem, answer):
            return MappingSolution(nodes=answer, value=value)
        return start
