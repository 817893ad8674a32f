from __future__ import annotations

import numpy as np
import pytest

from gpusched.sim.result import ReplayResult
from gpusched.study.compare import DAY_S, MeanDifference, compare
from tests.study.build import Job, result_of


def _result(days: int, jct: np.ndarray, epoch: float | None = 0.0) -> ReplayResult:  # type: ignore[type-arg]
    per_day = len(jct) // days
    submits = [d * DAY_S + 60 * i for d in range(days) for i in range(per_day)]
    return result_of([Job(s, s, s + float(t)) for s, t in zip(submits, jct, strict=True)], epoch=epoch)


def test_a_constant_gain_is_sure_whatever_the_noise() -> None:
    """Paired: both replays get the same days, so the noise that they share cancels."""
    jct = np.random.default_rng(3).lognormal(6, 2, 200) + 200
    jct_change, wait_change, _ = compare(_result(20, jct), _result(20, jct - 100))
    assert jct_change.difference == pytest.approx(-100)
    assert jct_change.difference_low == pytest.approx(-100)
    assert jct_change.difference_high == pytest.approx(-100)
    assert jct_change.is_significant
    assert (jct_change.days, wait_change.relative) == (20, None)


def test_the_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(120):
        base = rng.exponential(1000, 300)
        (change, *_) = compare(
            _result(30, base), _result(30, base + rng.normal(50, 200, 300) + 700), seed=trial, resamples=400
        )
        assert change.difference_low is not None
        assert change.difference_high is not None
        hits += change.difference_low <= 750 <= change.difference_high
    assert 0.85 <= hits / 120 <= 1.0  # 95 % nominal; percentile intervals of 30 days are a little narrow


def test_equal_seeds_give_equal_intervals() -> None:
    rng = np.random.default_rng(1)
    a, b = _result(10, rng.exponential(100, 50)), _result(10, rng.exponential(100, 50))
    assert compare(a, b, seed=4) == compare(a, b, seed=4)
    assert compare(a, b, seed=4) != compare(a, b, seed=5)


def test_few_days_give_no_interval() -> None:
    change = compare(_result(4, np.full(8, 50.0)), _result(4, np.full(8, 25.0)))[0]
    assert (change.relative, change.low, change.high, change.days) == (-0.5, None, None, 4)
    assert not change.is_significant


def test_days_are_those_of_the_calendar() -> None:
    jobs = [Job(h * 3600.0, h * 3600.0, h * 3600.0 + 10) for h in range(24)]
    assert compare(result_of(jobs), result_of(jobs))[0].days == 1
    late = result_of(jobs, epoch=20 * 3600.0)
    assert compare(late, late)[0].days == 2


def test_the_interval_is_that_of_means_over_the_jobs_of_days_drawn() -> None:
    """Counted by hand, draw by draw: six days of unlike numbers of jobs, and one between them without any."""
    rng, jobs, other, days = np.random.default_rng(5), [], [], {0: 3, 1: 1, 2: 5, 4: 2, 5: 4, 6: 1}
    by_day: list[list[tuple[float, float]]] = []
    for day, count in days.items():
        by_day.append([])
        for i in range(count):
            at, a, b = day * 86400.0 + i, *(float(x) for x in rng.uniform(10, 1000, 2))
            jobs.append(Job(at, at, at + a))
            other.append(Job(at, at, at + b))
            by_day[-1].append((a, b))
    ratios, differences = [], []
    for times in np.random.default_rng(9).multinomial(6, np.full(6, 1 / 6), 40):
        drawn = [pair for day, often in zip(by_day, times, strict=True) for pair in day * int(often)]
        mean_a, mean_b = (sum(pair[side] for pair in drawn) / len(drawn) for side in (0, 1))
        ratios.append(mean_b / mean_a - 1)
        differences.append(mean_b - mean_a)
    change, waits, slower = compare(result_of(jobs), result_of(other), seed=9, resamples=40)
    assert (change.low, change.high) == pytest.approx(tuple(np.percentile(ratios, [2.5, 97.5])))
    assert (change.difference_low, change.difference_high) == pytest.approx(
        tuple(np.percentile(differences, [2.5, 97.5]))
    )
    assert change.relative == pytest.approx(change.other / change.base - 1)
    assert change.difference == change.other - change.base
    assert change.days == 6
    assert (waits.relative, waits.low, waits.high, waits.difference_low) == (None, None, None, 0.0)
    assert (slower.base, slower.relative, slower.low, slower.is_significant) == (1.0, 0.0, 0.0, False)


def test_sure_is_what_leaves_out_zero_on_either_side() -> None:
    fields = {"relative": None, "low": None, "high": None, "difference": 0.0, "days": 9, "base": 1.0, "other": 1.0}
    for low, high, sure in ((0.5, 2.0, True), (-2.0, -0.5, True), (-1.0, 1.0, False), (0.0, 1.0, False),
                            (-1.0, 0.0, False), (None, None, False)):  # fmt: skip
        change = MeanDifference(figure="jct_s", difference_low=low, difference_high=high, **fields)  # type: ignore[arg-type]
        assert change.is_significant is sure, (low, high)


def test_five_days_of_86400_seconds_are_enough_and_no_common_job_is_no_change() -> None:
    assert compare(_result(5, np.full(10, 50.0)), _result(5, np.full(10, 25.0)))[0].high == pytest.approx(-0.5)
    for submits, days in (([0.0, 86399.0], 1), ([0.0, 86400.0], 2)):
        same = result_of([Job(s, s, s + 10) for s in submits])
        assert compare(same, same)[0].days == days
    ran, other = result_of([Job(0, 0, 9), Job(0, 0, 0, ())]), result_of([Job(0, 0, 0, ()), Job(0, 0, 9)])
    assert compare(ran, other) == ()
