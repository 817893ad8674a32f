"""Verification of HiGHS's answers, recomputed from the program it was given."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusched.sched.state import Floats

FEASIBLE = 2  # HiGHS's word for a solution that keeps all constraints
SLACK = 1e-5  # of a value, a row or a bound, in parts of it (of 1, where that is smaller): ten times what HiGHS allows
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
