"""The program against the greedy answer, against trying everything, and against the clock."""

from __future__ import annotations

import dataclasses
import re
import time
from importlib.metadata import version
from types import SimpleNamespace

import highspy
import numpy as np
import pytest

from gpusched.sched.mapping.classes import (
    TooManyPatterns,
    check_ways,
    job_classes,
    node_classes,
    patterns_of,
    shapes_of,
    simplified,
)
from gpusched.sched.mapping.milp import DISCARDED, GAP, MilpSearch, SearchLimits, solve
from gpusched.sched.mapping.problem import MappingSolution, Problem, faults, part_of, value_of
from gpusched.sched.mapping.program import InconsistentAnswer, check
from gpusched.sched.mapping.queue import MappingReport, summary
from tests.sched.mapping.instances import best_of_all, busy_cluster, greedily, instance
from tests.strategies import examples

AMPLE_S = 120.0  # of a busy machine's clock; it takes milliseconds
FOOLED = [541, 849]  # instances that HiGHS 1.16.0 answers wrongly


def test_instances_are_solved_soundly_and_never_below_greedy() -> None:
    """Where an answer of HiGHS fails a check the greedy one counts: 1.16.0 gives two such answers, others none."""
    rng = np.random.default_rng(0)
    better, tried, discarded = 0, 0, []
    for number in range(1000):
        problem = instance(rng, nodes=int(rng.integers(1, 12)), jobs=int(rng.integers(1, 16)))
        if number not in FOOLED and number % 4 >= examples(1):
            continue
        tried += 1
        first = greedily(problem)
        assert faults(problem, first.nodes) == [], number
        answer = solve(problem, first, budget_s=AMPLE_S)
        assert faults(problem, answer.nodes) == [], number
        if answer.note.startswith(DISCARDED):
            assert (answer.nodes, answer.bound, answer.solver) == (first.nodes, first.bound, "greedy")
            discarded.append(number)
            continue
        assert answer.value == pytest.approx(value_of(problem, answer.nodes))
        assert answer.value >= first.value - 1e-9, number
        assert answer.note == "", number
        assert answer.gap is not None
        assert answer.gap <= 2 * GAP, number
        better += answer.value > first.value + 1e-6
    assert better > tried / 4  # else there was nothing to find
    assert discarded == (FOOLED if version("highspy") == "1.16.0" else [])


def test_small_instances_are_solved_to_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    for number in range(120):
        problem = instance(rng, nodes=int(rng.integers(1, 5)), jobs=int(rng.integers(1, 5)), kinds=2)
        best = best_of_all(problem)
        first = greedily(problem)
        answer = solve(problem, first, budget_s=AMPLE_S)
        assert answer.value == pytest.approx(best, abs=GAP * max(1.0, abs(best)) + 1e-6), number
        assert first.bound is not None
        assert first.bound >= best - 1e-6, number
        assert answer.bound is not None
        assert answer.bound >= best - 1e-6, number


def test_jobs_that_must_start_start() -> None:
    """One node; the first job must stay though the second would be worth more."""
    problem = instance(np.random.default_rng(2), nodes=1, jobs=2, kinds=1)
    room = np.array([[2, 99, 999]])
    problem = dataclasses.replace(
        problem, resources=room, late_resources=room, total=np.array([2]), kind=np.zeros(1, np.int64),
        parts=np.ones(2, int), need=np.array([[2, 1, 1], [2, 1, 1]]), mask=np.full(2, -1), late=np.zeros(2, bool),
        cap=np.full(3, np.inf), gain=np.array([[0.5], [1.5]]), bonus=np.array([0.1, 0.0]),
    )  # fmt: skip
    first = greedily(problem)
    assert first.nodes == ((0,), ())
    assert solve(problem, first).nodes == ((), (0,))
    kept = dataclasses.replace(problem, must=np.array([True, False]))
    assert solve(kept, first).nodes == ((0,), ())


def test_gangs_of_one_shape_share_nodes_but_never_with_themselves() -> None:
    """Two gangs of two halves on two nodes: each node takes a half of both."""
    base = instance(np.random.default_rng(3), nodes=2, jobs=2, kinds=1)
    room = np.array([[4, 99, 999], [4, 99, 999]])
    problem = dataclasses.replace(
        base, resources=room, late_resources=room, total=np.array([4, 4]), kind=np.zeros(2, np.int64),
        parts=np.full(2, 2), need=np.array([[2, 1, 1], [2, 1, 1]]), mask=np.full(2, -1), late=np.zeros(2, bool),
        cap=np.full(3, np.inf), gain=np.array([[1.0], [1.0]]), bonus=np.zeros(2),
    )  # fmt: skip
    nothing = MappingSolution(nodes=((), ()), value=0.0)
    answer = solve(problem, nothing)
    assert sorted(map(sorted, answer.nodes)) == [[0, 1], [0, 1]]
    assert faults(problem, answer.nodes) == []


def test_cores_are_left_out_only_where_they_cannot_bind() -> None:
    rng = np.random.default_rng(4)
    assert not simplified(busy_cluster(rng, 10, 20)).need[:, 1:].any()
    problem = busy_cluster(rng, 10, 20)
    problem.resources[3] = (4, 1, 4 * 64_000)  # foreign work has its cores
    assert simplified(problem).need[:, 1].any()
    assert not simplified(problem).need[:, 2].any()


@pytest.mark.parametrize("budget_s", [0.001, 0.02])
def test_out_of_time_the_best_so_far_counts_and_the_gap_is_reported(budget_s: float) -> None:
    problem = busy_cluster(np.random.default_rng(5))
    first = greedily(problem)
    answer = solve(problem, first, budget_s=budget_s)
    assert faults(problem, answer.nodes) == []
    assert answer.value >= first.value
    assert answer.gap is not None
    assert answer.gap <= 2 * GAP or answer.note == "stopped: time limit reached"


def test_a_search_bound_gives_the_same_answer_every_time() -> None:
    problem = busy_cluster(np.random.default_rng(6), nodes=30, jobs=60)
    answers = [solve(problem, greedily(problem), budget_s=60, max_nodes=5) for _ in range(2)]
    assert answers[0].nodes == answers[1].nodes
    assert answers[0].value > greedily(problem).value


def test_with_too_many_ways_to_fill_the_nodes_fewer_jobs_are_optimised() -> None:
    """Every job is of its own shape, so the jobs are halved until the program is small enough; the rest go greedily."""
    rng = np.random.default_rng(7)
    jobs = 60
    problem = busy_cluster(rng, nodes=10, jobs=jobs)
    need = np.column_stack((rng.integers(1, 4, jobs), rng.integers(1, 20, jobs), rng.integers(1, 9999, jobs)))
    problem = dataclasses.replace(problem, need=need, parts=np.ones(jobs, np.int64))
    first = greedily(problem)
    answer = solve(problem, first, budget_s=0.5)
    assert faults(problem, answer.nodes) == []
    assert answer.value >= first.value
    assert answer.note.startswith("only the first 15 of 60 jobs optimised")
    assert answer.bound == first.bound, "what is best for some of the jobs says nothing of all"


def test_a_program_that_takes_too_long_to_make_is_made_of_fewer_jobs() -> None:
    problem = busy_cluster(np.random.default_rng(9), nodes=30, jobs=120)
    first = greedily(problem)
    search = MilpSearch(problem, first, SearchLimits(time.perf_counter() + 30, work=400))
    search.run()
    answer = search.best()
    assert answer.note.startswith("only the first ")
    assert faults(problem, answer.nodes) == []
    assert answer.value >= first.value
    hopeless = MilpSearch(problem, first, SearchLimits(time.perf_counter() + 30, work=1))
    hopeless.run()
    assert (hopeless.best().nodes, hopeless.best().solver) == (first.nodes, "greedy")


def test_ways_are_counted_as_they_are_made() -> None:
    rng = np.random.default_rng(10)
    for _ in range(40):
        problem = simplified(instance(rng, nodes=6, jobs=10, largest=8))
        nodes, shapes = node_classes(problem), shapes_of(job_classes(problem))
        ways = len(patterns_of(problem, nodes, shapes))
        check_ways(nodes, shapes, ways)
        if ways:
            with pytest.raises(TooManyPatterns):
                check_ways(nodes, shapes, ways - 1)


def test_the_rest_of_the_jobs_is_a_problem_on_what_the_others_leave() -> None:
    rng = np.random.default_rng(11)
    for _ in range(40):
        problem = instance(rng, nodes=6, jobs=10)
        whole = greedily(problem)
        some = np.sort(rng.choice(10, 5, replace=False))
        left = part_of(problem, whole.nodes, some)
        answer = greedily(left)
        nodes = list(whole.nodes)
        for job, where in zip(some, answer.nodes, strict=True):
            nodes[job] = where
        assert faults(problem, tuple(nodes)) == []
        mine = value_of(left, tuple(whole.nodes[job] for job in some))
        assert value_of(problem, tuple(nodes)) - whole.value == pytest.approx(answer.value - mine)


def test_nothing_to_place() -> None:
    rng = np.random.default_rng(8)
    problem: Problem = instance(rng, nodes=3, jobs=3)
    problem.resources[:, 0] = -1
    answer = solve(problem, greedily(problem))
    assert answer.nodes == ((), (), ())
    assert answer.gap == 0


@pytest.fixture
def solved() -> tuple[object, highspy.Highs]:
    """A knapsack, and HiGHS at its answer: 2 of x and 1 of y, worth 7."""
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = 2, 1
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_, model.col_lower_, model.col_upper_ = np.array([2.0, 3.0]), np.zeros(2), np.array([2.0, 9.0])
    model.row_lower_, model.row_upper_ = np.array([-np.inf]), np.array([4.0])
    model.integrality_ = [highspy.HighsVarType.kInteger] * 2
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array([0, 2], np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = np.array([0, 1], np.int32), np.array([1.0, 2.0])
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(model)
    solver.run()
    return model, solver


STATUS = highspy.HighsModelStatus


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"status": STATUS.kInfeasible}, "status 'Infeasible' of a program that has a solution"),
        ({"primal_solution_status": 0}, "optimal, but without a solution"),
        ({"column": [2.0]}, "its solution is not made of numbers"),
        ({"column": [np.nan, 1.0]}, "its solution is not made of numbers"),
        ({"column": [1.0, 1.5]}, "its solution is not in whole numbers"),
        ({"column": [3.0, 0.0]}, "its solution breaks the bounds of a variable"),
        ({"column": [2.0, 2.0]}, "its solution breaks the bounds of a row"),
        ({"objective_function_value": 7.1}, "its solution is worth 7, not 7.1 as it says"),
        ({"mip_dual_bound": 6.5}, "its solution is worth 7, over its own bound of 6.5"),
        ({"mip_dual_bound": 7.5}, "it calls a value of 7 optimal, with a bound of 7.5"),
        ({"mip_dual_bound": np.nan}, "its solution is worth 7, over its own bound of nan"),
    ],
)
def test_an_answer_that_cannot_be_true_is_doubted(
    solved: tuple[object, highspy.Highs], wrong: dict[str, object], said: str
) -> None:
    model, solver = solved
    check(highspy, model, solver, GAP)
    info, solution = solver.getInfo(), solver.getSolution()
    for name, value in wrong.items():
        if name == "column":
            solution.col_value = value
        elif name != "status":
            setattr(info, name, value)
    lying = SimpleNamespace(
        getModelStatus=lambda: wrong.get("status", STATUS.kOptimal), getInfo=lambda: info, getSolution=lambda: solution,
        modelStatusToString=solver.modelStatusToString,
    )  # fmt: skip
    with pytest.raises(InconsistentAnswer, match=f"^{re.escape(said)}$"):
        check(highspy, model, lying, GAP)


@pytest.mark.parametrize(
    ("field", "lie", "said"),
    [
        ("objective_function_value", 99.0, "its solution is worth .*, not 99 as it says"),
        ("mip_dual_bound", -5.0, "its solution is worth .*, over its own bound of -5"),
    ],
)
def test_after_a_false_answer_the_greedy_one_counts_with_a_remark(
    monkeypatch: pytest.MonkeyPatch, field: str, lie: float, said: str
) -> None:
    """As HiGHS 1.16.0 does: the last search's solution is sound, and the value that it states is not its own."""
    problem = busy_cluster(np.random.default_rng(6), nodes=30, jobs=60)
    first = greedily(problem)
    assert solve(problem, first, budget_s=AMPLE_S, max_nodes=5).value > first.value
    real = highspy.Highs.getInfo

    def get_info(solver: highspy.Highs) -> object:
        info = real(solver)
        if solver.getOptionValue("solve_relaxation")[1] is False:
            setattr(info, field, lie)
        return info

    monkeypatch.setattr(highspy.Highs, "getInfo", get_info)
    answer = solve(problem, first, budget_s=AMPLE_S, max_nodes=5)
    assert (answer.nodes, answer.value, answer.bound) == (first.nodes, first.value, first.bound)
    assert re.fullmatch(f"{DISCARDED}: {said}", answer.note)
    line = summary([MappingReport(60, 9, answer.value, first.value, 0.5, answer.solver, answer.note)])
    assert line.endswith(f"({answer.note})")
