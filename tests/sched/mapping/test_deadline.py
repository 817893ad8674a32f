"""The live decision's deadline, by a clock of our own: nothing is begun without time, nobody waits for what is late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import highspy
import numpy as np
import pytest

from gpusched.sched.mapping import deadline, milp
from gpusched.sched.mapping.deadline import STILL_BUSY, Deadline
from gpusched.sched.mapping.milp import OUT_OF_TIME, MilpSearch, SearchLimits, solve
from gpusched.sched.mapping.problem import MappingSolution, Problem, faults
from gpusched.sched.mapping.program import LinearProgram
from tests.sched.mapping.instances import busy_cluster, greedily

LONG_S = 60.0


@pytest.fixture
def problem() -> Problem:
    return busy_cluster(np.random.default_rng(20), nodes=24, jobs=60)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that searches which wait for it end; and no search is left to others."""
    event = threading.Event()
    yield event
    event.set()
    for thread in Deadline._left:
        thread.join()


class Clock:
    """Stands still but for one second, after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks, self.now = looks, 0.0

    def __call__(self) -> float:
        self.looks -= 1
        if self.looks == 0:
            self.now = 1.0
        return self.now


@pytest.mark.parametrize("looks", range(1, 14))
def test_whenever_time_ends_nothing_is_begun_after_it(
    problem: Problem, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, begun = Clock(looks), []
    real_run, real_program = highspy.Highs.run, milp.LinearProgram

    def run(solver: highspy.Highs) -> object:
        begun.append(clock.now)
        return real_run(solver)

    def program(*args: object) -> LinearProgram:
        begun.append(clock.now)
        return real_program(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(highspy.Highs, "run", run)
    monkeypatch.setattr(milp, "LinearProgram", program)
    first = greedily(problem)
    search = MilpSearch(problem, first, SearchLimits(end_s=0.5, clock=clock))
    search.run()
    answer = search.best()
    assert 1.0 not in begun
    assert faults(problem, answer.nodes) == []
    assert answer.value >= first.value
    assert answer.note in ("", OUT_OF_TIME)
    if looks == 1:
        assert begun == []
        assert answer.nodes == first.nodes


def test_without_time_there_is_no_search(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "MilpSearch", None)
    clock = Clock(2)
    answer = Deadline(0.2, clock)(problem, greedily(problem))
    assert (answer.nodes, answer.note) == (greedily(problem).nodes, OUT_OF_TIME)


def test_a_call_has_its_share_of_the_time_that_is_left(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []

    class Seen(MilpSearch):
        def __init__(
            self, problem: Problem, start: MappingSolution, limits: SearchLimits, *, listen: bool = False
        ) -> None:
            ends.append((limits.end_s, limits.work))
            super().__init__(problem, start, limits, listen=listen)

    monkeypatch.setattr(deadline, "MilpSearch", Seen)
    monkeypatch.setattr(Deadline, "work_per_s", 1000.0)
    question = Deadline(10.0, clock=lambda: 100.0)
    question(problem, greedily(problem), 0.25)
    share_s = 0.25 * (10 - 0.02)
    assert ends == [pytest.approx((100 + share_s - 0.01, share_s * 1000 * 0.5))]


def blocked(
    release: threading.Event, before: Callable[[MilpSearch], None] | None = None
) -> Callable[[MilpSearch], None]:
    """A search that HiGHS does not come back from."""

    def run(self: MilpSearch) -> None:
        if before is not None:
            before(self)
        release.wait()

    return run


def test_a_late_search_delays_no_decision(
    problem: Problem, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MilpSearch, "run", blocked(release))
    first = greedily(problem)
    for note in (OUT_OF_TIME, OUT_OF_TIME, STILL_BUSY):
        answer = Deadline(0.02)(problem, first)
        assert (answer.nodes, answer.note) == (first.nodes, note)
        assert answer.gap is not None
    release.set()
    monkeypatch.undo()
    assert Deadline(LONG_S)(problem, first).value > first.value


def test_a_late_search_answers_with_its_best_so_far(
    problem: Problem, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = greedily(problem)
    best = solve(problem, first, budget_s=LONG_S)
    assert best.value > first.value
    program = LinearProgram(problem)
    column = np.array(program.column_of(best.nodes))
    monkeypatch.setattr(MilpSearch, "run", blocked(release, lambda s: s._store_incumbent(program, column)))
    answer = Deadline(0.3)(problem, first)
    assert answer.value == pytest.approx(best.value)
    assert (answer.solver, answer.note) == ("milp", OUT_OF_TIME)


def test_incumbents_are_heard_while_highs_runs(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    real = MilpSearch._store_incumbent

    def hear(self: MilpSearch, program: LinearProgram, column: object) -> None:
        real(self, program, column)
        heard.append(self.best().value)

    monkeypatch.setattr(MilpSearch, "_store_incumbent", hear)
    monkeypatch.setattr(
        LinearProgram, "rounded", lambda self, values: [0.0] * len(values)
    )  # else there is nothing to better
    first = greedily(problem)
    answer = Deadline(LONG_S)(problem, first)
    assert heard
    assert first.value <= max(heard) <= answer.value + 1e-9


def test_an_error_on_the_search_s_thread_is_not_lost(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: MilpSearch) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(MilpSearch, "run", run)
    with pytest.raises(RuntimeError, match="a mistake"):
        Deadline(LONG_S)(problem, greedily(problem))


def test_decisions_side_by_side_count_their_late_searches_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one looks, and finds that all have ended, while this one waits for the first of them."""

    class Search:
        ended = False

        def is_alive(self) -> bool:
            return not self.ended

        def join(self, timeout: float) -> None:
            self.ended = True
            monkeypatch.setattr(Deadline, "_left", [])

    monkeypatch.setattr(Deadline, "_left", [Search() for _ in range(deadline._MAX_ABANDONED)])
    assert Deadline(1.0)._room(1.0)
