"""Quantiles made to keep what they say, by jobs later than what was learned from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.agents.predictor import calibrate as calibrating
from gpusched.agents.predictor import train as predict
from gpusched.agents.predictor.calibrate import calibrate, shift_of
from gpusched.estimation.features import Forest
from gpusched.estimation.predictor import ends_of
from tests.agents.habits import DATA, EPOCH, FAST, Cli, cli, habits

DAY_S = 86400.0
__all__ = ["cli"]  # a fixture
LEVELS = (0.1, 0.5, 0.9)
SMALL = predict.BoostingSettings(trees=25, jobs_per_leaf=5)


def constant(seconds: float) -> Forest:
    """Every quantile is the same, for every job without a past."""
    leaf, zero = np.zeros(1, np.int64), np.zeros(1)
    return Forest(
        feature=leaf - 1, threshold=zero, missing_left=leaf, left=leaf, right=leaf, value=zero,
        roots=np.zeros((3, 1), np.int64), base=np.zeros(3), typical=np.array([np.log(seconds)]),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(100, 400), st.sampled_from([0.1, 0.9]), st.integers(0, 2**32 - 1))
def test_where_all_have_ended_it_is_the_quantile(jobs: int, level: float, seed: int) -> None:
    rest = np.random.default_rng(seed).normal(size=jobs)
    shift = shift_of(level, rest, np.ones(jobs, np.bool_))
    part = (rest <= shift).mean()
    # on the outer side of the level, by at most two jobs: that is what CQR's n + 1 comes to
    assert (level <= part <= level + 2 / jobs) if level > 0.5 else (level - 1 / jobs <= part <= level)


def test_jobs_that_still_run_count_as_at_least_so_long() -> None:
    """True run times are known; half are only seen until a time of their own. Leaving these out is far too short."""
    rng = np.random.default_rng(3)
    true, until = rng.normal(size=20_000), rng.normal(0.7, 1.0, 20_000)
    ended = true <= until
    seen = np.minimum(true, until)
    for level in (0.1, 0.9):
        assert shift_of(level, seen, ended) == pytest.approx(np.quantile(true, level), abs=0.07)
    assert shift_of(0.9, seen[ended], ended[ended]) < np.quantile(true, 0.9) - 0.3


def test_shifts_are_found_on_jobs_later_than_what_was_learned_from() -> None:
    trace = habits()
    trace = replace(trace, user=np.full(len(trace), -1), model=np.full(len(trace), -1), users=(), models=())
    asked: list[float] = []

    def fit(until: float) -> Forest | None:
        asked.append(until)
        return constant(600.0) if len(asked) > 1 else None

    until = 10 * DAY_S
    found = calibrate(trace, until, LEVELS, fit)
    seen = trace.submit[trace.submit < until]
    assert asked == [seen[int(part * len(seen))] for part in calibrating.EDGES[:-1]]
    assert found.jobs == int((seen >= asked[1]).sum())
    assert found.shifts[0] < found.shifts[1] == 0.0 < found.shifts[2]


def test_too_few_later_jobs_shift_nothing() -> None:
    trace = habits(120)
    assert calibrate(trace, float(trace.submit[-1]), LEVELS, lambda until: constant(60.0)) == ((0.0, 0.0, 0.0), 0)
    assert calibrate(trace, -1.0, LEVELS, lambda until: constant(60.0)) == ((0.0, 0.0, 0.0), 0)


def test_nothing_later_is_looked_at() -> None:
    trace, until = habits(), 10 * DAY_S
    duration = trace.duration.copy()
    open_ = ends_of(trace) > until
    duration[open_] = np.maximum(duration[open_], until - trace.submit[open_] + 1.0) * 3.0
    later = replace(trace, duration=duration)
    one, other = (predict.train(t, until=until, settings=SMALL) for t in (trace, later))
    assert one.shifts == other.shifts
    assert one.shifts != (0.0, 0.0, 0.0)
    assert int(one.about["calibration_jobs"]) > 500


def test_quantiles_keep_what_they_say_better() -> None:
    trace = habits(3000, seed=5, epoch=EPOCH)
    made = predict.train(trace, until=10 * DAY_S, settings=SMALL)
    found = predict.evaluate(made, trace, np.flatnonzero(trace.submit > 10 * DAY_S))
    assert found.covered is not None
    assert found.uncalibrated_covered is not None
    assert abs(found.covered - 0.8) < abs(found.uncalibrated_covered - 0.8)
    assert found.covered == pytest.approx(0.8, abs=0.06)
    seconds = made.of(trace)
    assert (np.diff(seconds, axis=1) >= 0).all()


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_on_weeks_of_a_public_trace_not_seen(cli: Cli) -> None:
    """Philly's 11cb48: 66 % of the run times after 16 October lay between the quantiles as learned; 80 % are meant."""
    out = str(cli.folder / "p.safetensors")
    words = (str(DATA / "philly_2017.csv.gz"), "--vc", "11cb48", "--format", "philly-csv")
    cli.predict("--train", "--trace", *words, "--until", "2017-10-16", "--out", out, "--hold-out", "0", **FAST)
    found = cli.predict(*words, "--model", out, **FAST)["evaluation"]
    assert found["uncalibrated_covered"] < 0.7
    assert 0.75 < found["covered"] < 0.88
