from __future__ import annotations

import numpy as np
import pytest

from gpusched.sim.compare import DAY_S, compare
from gpusched.sim.result import Result
from tests.replay.build import Job, result_of


def _result(days: int, jct: np.ndarray, epoch: float | None = 0.0) -> Result:  # type: ignore[type-arg]
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
    assert jct_change.sure
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
    assert (change.relative, change.low, change.high, change.days, change.sure) == (-0.5, None, None, 4, False)


def test_days_are_those_of_the_calendar() -> None:
    jobs = [Job(h * 3600.0, h * 3600.0, h * 3600.0 + 10) for h in range(24)]
    assert compare(result_of(jobs), result_of(jobs))[0].days == 1
    late = result_of(jobs, epoch=20 * 3600.0)
    assert compare(late, late)[0].days == 2
