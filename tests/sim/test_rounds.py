"""Rounds: when decisions are made, and what is done by then."""

from __future__ import annotations

import numpy as np
import pytest

from gpusched.sim.rounds import NOW, SLOT_BY_SLOT, EngineRun, Rounds, set_rate


def decisions(arrival: list[float], work: float, rounds: Rounds) -> tuple[list[float], list[float]]:
    """The times of all decisions, each of which lets all active jobs go on at rate 1, and the ends."""
    run, times = EngineRun(np.array(arrival), np.full(len(arrival), work), rounds), []
    while run.next_round():
        times.append(float(run.progress.time[NOW]))
        for job in run.active:
            if run.progress.rate[job] == 0.0:
                set_rate(run.progress, job, 1.0, 5.0)
    assert not run.progress.restarts.any()
    return times, run.end.tolist()


def test_decisions_follow_arrivals_and_ends_and_are_apart() -> None:
    rounds = Rounds(60.0, 300.0)
    assert decisions([7.0], 700.0, rounds) == ([7.0, 307.0, 607.0], [707.0])
    # The second comes 10 s after a decision, and waits 50 s; the first ends at 100, a decision follows at 120.
    assert decisions([0.0, 10.0], 100.0, rounds) == ([0.0, 60.0, 120.0], [100.0, 160.0])
    # While nobody is there nothing is decided, and who comes is looked at at once, if that is late enough.
    assert decisions([0.0, 90.0], 20.0, rounds) == ([0.0, 90.0], [20.0, 110.0])
    assert decisions([0.0, 30.0], 20.0, rounds) == ([0.0, 60.0], [20.0, 80.0])


def test_slots_begin_at_whole_numbers_and_a_job_ends_within_its_last() -> None:
    times, ends = decisions([0.5, 4.2], 1.5, SLOT_BY_SLOT)
    assert times == [1.0, 2.0, 5.0, 6.0]
    assert ends == [2.5, 6.5]


def test_a_restart_may_outlast_a_round_and_a_stopped_job_goes_on_later() -> None:
    run = EngineRun(np.zeros(1), np.full(1, 4.0), SLOT_BY_SLOT)
    progress = run.progress

    def after(rate: float | None = None) -> tuple[float, int]:
        if rate is not None:
            set_rate(progress, 0, rate, 2.5)
        assert run.next_round()
        return float(progress.done[0]), int(progress.restarts[0])

    after()
    assert after(1.0) == (1.0, 0)  # it had done nothing yet: that takes no time
    assert after(2.0) == (1.0, 1)
    assert after() == (1.0, 1)
    assert after() == pytest.approx((2.0, 1))
    assert after(0.0) == pytest.approx((2.0, 1))
    assert after(1.0) == pytest.approx((2.0, 2))
    while run.next_round():
        pass
    assert run.end[0] == pytest.approx(9.5)  # from 5 on 2.5 of restart, then 2
