"""The mapping as a mixed-integer program in HiGHS (Huangfu, Hall 2018), begun with the greedy answer.

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
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.mapping.classes import TooMany, simplified
from gpusched.mapping.problem import TOLERANCE, Answer, Problem, faults, value_of
from gpusched.mapping.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

GAP = 1e-4  # in parts of the value; proven this close counts as best
_OUT_OF_TIME = "ended by time limit reached"
_BETTER, _FEASIBLE = 1e-9, 2
_PUNCTUAL, _TO_BUILD_S = 0.85, 0.01  # HiGHS looks at the clock now and then; the program must be built, too


def highs() -> Any:
    """The highspy module.

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


def solve(problem: Problem, start: Answer, *, budget_s: float = 0.2, max_nodes: int | None = None) -> Answer:
    """An answer that is worth at least as much as ``start``.

    Args:
        problem: What to answer.
        start: A sound answer; it is the first incumbent, and what comes back where nothing better is found.
        budget_s: HiGHS is stopped after it; the best incumbent is the answer then.
        max_nodes: HiGHS is stopped after so many nodes of the search tree: with a budget that does not bind, the same
            answer on every run.

    Raises:
        UsageError: HiGHS is not installed.
    """
    if start.bound is not None and start.bound <= start.value + TOLERANCE:
        return Answer(nodes=start.nodes, value=start.value, bound=start.value, solver="greedy")
    module = highs()
    try:
        program = Program(simplified(problem))
    except TooMany as error:
        return Answer(nodes=start.nodes, value=start.value, bound=start.bound, note=str(error))
    if not program.patterns:
        return Answer(nodes=start.nodes, value=start.value, bound=start.value)
    best, bound, note = start.nodes, start.bound if start.bound is not None else np.inf, ""
    value = start.value
    for run in _runs(module, program, start, _Limits(budget_s, max_nodes)):
        bound = min(bound, run.bound)
        note = run.note
        if run.column is not None:
            nodes = program.nodes_of(run.column)
            found = value_of(problem, nodes)
            if found > value + _BETTER and not faults(problem, nodes):
                best, value = nodes, found
        if bound - value <= GAP * max(1.0, abs(value)):
            note = ""
            break
    solver = "greedy" if best is start.nodes else "milp"
    return Answer(nodes=best, value=value, bound=max(bound, value), solver=solver, note=note)


class Deadline:
    """`solve` within one decision: all its calls together, and what is done between them, keep to the budget.

    Args:
        budget_s: From now on.

    Raises:
        UsageError: HiGHS is not installed.
    """

    def __init__(self, budget_s: float) -> None:
        highs()
        self._end = time.perf_counter() + budget_s

    def __call__(self, problem: Problem, start: Answer) -> Answer:
        """See `solve`; without time left, ``start``."""
        left = _PUNCTUAL * (self._end - time.perf_counter()) - _TO_BUILD_S
        if left <= 0:
            return replace(start, note=_OUT_OF_TIME)
        return solve(problem, start, budget_s=left)


class _Limits(NamedTuple):
    budget_s: float
    max_nodes: int | None


class _Run(NamedTuple):
    column: list[float] | None
    bound: float
    note: str


def _runs(module: Any, program: Program, start: Answer, limits: _Limits) -> Iterator[_Run]:
    """The relaxation; then the program near its solution, which is small; then, in the time left, all of it.

    Near: at least the whole nodes that the relaxation fills by each pattern, and more only by patterns whose reduced
    cost is about nothing. A good incumbent comes of it within milliseconds, of programs that HiGHS as it comes has not
    rounded after a second.
    """
    model = program.model(module)
    solver = _solver(module, limits.budget_s, None)
    solver.setOptionValue("solve_relaxation", True)
    solver.passModel(model)
    solver.run()
    spent = solver.getRunTime()
    if solver.getModelStatus() != module.HighsModelStatus.kOptimal:
        yield _Run(None, np.inf, _OUT_OF_TIME)
        return
    solution, bound = solver.getSolution(), float(solver.getInfo().objective_function_value)
    yield _Run(None, bound, _OUT_OF_TIME)
    lower, upper = model.col_lower_, model.col_upper_
    model.col_lower_, model.col_upper_ = program.near(solution.col_value, solution.col_dual, lower, upper)
    run, took = _run(module, model, None, _Limits(0.7 * (limits.budget_s - spent), limits.max_nodes))
    yield run._replace(bound=np.inf)
    if spent + took < limits.budget_s:
        first = run.column if run.column is not None else program.column_of(start.nodes)
        model.col_lower_, model.col_upper_ = lower, upper
        yield _run(module, model, first, _Limits(limits.budget_s - spent - took, limits.max_nodes))[0]


def _solver(module: Any, budget_s: float, max_nodes: int | None) -> Any:
    """HiGHS on one thread: a decision may not take the login node's cores, and threads cost more than they win."""
    solver = module.Highs()
    options: dict[str, Any] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(budget_s, 0.001),
        "mip_rel_gap": GAP,
        "mip_heuristic_run_feasibility_jump": False,  # it looks at the clock too seldom
    }
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    for name, value in options.items():
        solver.setOptionValue(name, value)
    return solver


def _run(module: Any, model: Any, first: list[float] | None, limits: _Limits) -> tuple[_Run, float]:
    """One run of HiGHS, and the seconds it took."""
    solver = _solver(module, *limits)
    solver.passModel(model)
    if first is not None:
        solution = module.HighsSolution()
        solution.col_value = first
        solver.setSolution(solution)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    best = status == module.HighsModelStatus.kOptimal
    note = "" if best else f"ended by {solver.modelStatusToString(status).lower()}"
    column = list(solver.getSolution().col_value) if info.primal_solution_status == _FEASIBLE else None
    bound = float(info.mip_dual_bound)
    return _Run(column, bound if np.isfinite(bound) else np.inf, note), float(solver.getRunTime())
