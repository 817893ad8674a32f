"""The program against the greedy answer, against trying everything, and against the clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpusched.mapping.classes import simplified
from gpusched.mapping.greedy import greedy
from gpusched.mapping.milp import GAP, solve
from gpusched.mapping.problem import Answer, Problem, faults, value_of
from tests.mapping.instances import best_of_all, busy_cluster, instance


def test_a_thousand_instances_are_sound_and_never_below_greedy() -> None:
    rng = np.random.default_rng(0)
    better = 0
    for number in range(1000):
        problem = instance(rng, nodes=int(rng.integers(1, 12)), jobs=int(rng.integers(1, 16)))
        first = greedy(problem)
        assert faults(problem, first.nodes) == [], number
        answer = solve(problem, first, budget_s=10)
        assert faults(problem, answer.nodes) == [], number
        assert answer.value == pytest.approx(value_of(problem, answer.nodes))
        assert answer.value >= first.value - 1e-9, number
        assert answer.note == "", number
        assert answer.gap is not None
        assert answer.gap <= 2 * GAP, number
        better += answer.value > first.value + 1e-6
    assert better > 250  # else there was nothing to find


def test_small_instances_are_solved_to_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    for number in range(120):
        problem = instance(rng, nodes=int(rng.integers(1, 5)), jobs=int(rng.integers(1, 5)), kinds=2)
        best = best_of_all(problem)
        first = greedy(problem)
        answer = solve(problem, first, budget_s=10)
        assert answer.value == pytest.approx(best, abs=GAP * max(1.0, abs(best)) + 1e-6), number
        assert first.bound is not None
        assert first.bound >= best - 1e-6, number
        assert answer.bound is not None
        assert answer.bound >= best - 1e-6, number


def test_what_must_start_starts() -> None:
    """One node; the first job must stay though the second would be worth more."""
    problem = instance(np.random.default_rng(2), nodes=1, jobs=2, kinds=1)
    room = np.array([[2, 99, 999]])
    problem = dataclasses.replace(
        problem, rooms=room, late_rooms=room, total=np.array([2]), kind=np.zeros(1, np.int64), parts=np.ones(2, int),
        need=np.array([[2, 1, 1], [2, 1, 1]]), mask=np.full(2, -1), late=np.zeros(2, bool), cap=np.full(3, np.inf),
        gain=np.array([[0.5], [1.5]]), bonus=np.array([0.1, 0.0]),
    )  # fmt: skip
    first = greedy(problem)
    assert first.nodes == ((0,), ())
    assert solve(problem, first).nodes == ((), (0,))
    kept = dataclasses.replace(problem, must=np.array([True, False]))
    assert solve(kept, first).nodes == ((0,), ())


def test_gangs_of_one_shape_share_nodes_but_never_with_themselves() -> None:
    """Two gangs of two halves on two nodes: each node takes a half of both."""
    base = instance(np.random.default_rng(3), nodes=2, jobs=2, kinds=1)
    room = np.array([[4, 99, 999], [4, 99, 999]])
    problem = dataclasses.replace(
        base, rooms=room, late_rooms=room, total=np.array([4, 4]), kind=np.zeros(2, np.int64), parts=np.full(2, 2),
        need=np.array([[2, 1, 1], [2, 1, 1]]), mask=np.full(2, -1), late=np.zeros(2, bool), cap=np.full(3, np.inf),
        gain=np.array([[1.0], [1.0]]), bonus=np.zeros(2),
    )  # fmt: skip
    nothing = Answer(nodes=((), ()), value=0.0)
    answer = solve(problem, nothing)
    assert sorted(map(sorted, answer.nodes)) == [[0, 1], [0, 1]]
    assert faults(problem, answer.nodes) == []


def test_cores_are_left_out_only_where_they_cannot_bind() -> None:
    rng = np.random.default_rng(4)
    assert not simplified(busy_cluster(rng, 10, 20)).need[:, 1:].any()
    problem = busy_cluster(rng, 10, 20)
    problem.rooms[3] = (4, 1, 4 * 64_000)  # foreign work has its cores
    assert simplified(problem).need[:, 1].any()
    assert not simplified(problem).need[:, 2].any()


@pytest.mark.parametrize("budget_s", [0.001, 0.02])
def test_out_of_time_the_best_so_far_counts_and_the_gap_is_told(budget_s: float) -> None:
    problem = busy_cluster(np.random.default_rng(5))
    first = greedy(problem)
    answer = solve(problem, first, budget_s=budget_s)
    assert faults(problem, answer.nodes) == []
    assert answer.value >= first.value
    assert answer.gap is not None
    assert answer.gap <= 2 * GAP or answer.note == "ended by time limit reached"


def test_a_search_bound_gives_the_same_answer_every_time() -> None:
    problem = busy_cluster(np.random.default_rng(6), nodes=30, jobs=60)
    answers = [solve(problem, greedy(problem), budget_s=60, max_nodes=5) for _ in range(2)]
    assert answers[0].nodes == answers[1].nodes
    assert answers[0].value > greedy(problem).value


def test_too_many_ways_to_fill_a_node_leave_the_greedy_answer() -> None:
    rng = np.random.default_rng(7)
    jobs = 60
    problem = busy_cluster(rng, nodes=10, jobs=jobs)
    need = np.column_stack((rng.integers(1, 4, jobs), rng.integers(1, 20, jobs), rng.integers(1, 9999, jobs)))
    problem = dataclasses.replace(problem, need=need, parts=np.ones(jobs, np.int64))
    answer = solve(problem, greedy(problem), budget_s=10)
    assert answer.solver == "greedy"
    assert answer.note == "more than 6000 ways to fill the nodes"


def test_nothing_to_place() -> None:
    rng = np.random.default_rng(8)
    problem: Problem = instance(rng, nodes=3, jobs=3)
    problem.rooms[:, 0] = -1
    answer = solve(problem, greedy(problem))
    assert answer.nodes == ((), (), ())
    assert answer.gap == 0
