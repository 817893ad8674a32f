"""Run times that forecasts draw: the estimator's quantiles, given what has run so far, the same for jobs alike."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.estimation import quantiles as q
from gpusched.estimation.draws import fill_drawn
from gpusched.forecast.queue import QueueForecast
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import draws_of
from gpusched.model.jobs import JobRecord, JobState, Resizes
from gpusched.sched.state import Floats
from tests.sched.worlds import NOW, node, pending, running, snapshot

HOUR = 3600.0


def past(hours: list[float], user: str = "alice", **more: object) -> list[JobRecord]:
    """Ended jobs of the form of `pending`, one after the other."""
    found = []
    for i, ran_h in enumerate(hours):
        view, start = pending(f"{user}{i}", 1, limit=36_000, **more), NOW + (i - 100.0) * 12 * HOUR  # type: ignore[arg-type]
        found.append(JobRecord(id=view.id, user=user, uid=1, spec=view.spec, state=JobState.COMPLETED,
                               submit_time=start, start_time=start, end_time=start + ran_h * HOUR))  # fmt: skip
    return found


def drawn(known: q.RunTimes, job: int, had_s: float, levels: list[float]) -> Floats:
    found = np.empty((len(levels), 1))
    fill_drawn(known, np.array([job]), np.array([had_s]), np.array([levels]).T.copy(), found)
    return found[:, 0]


@given(st.lists(st.floats(1.0, 1e5), min_size=1, max_size=20), st.floats(0.0, 5e4), st.floats(-0.2, 0.2))
@settings(max_examples=30, deadline=None)
def test_a_level_s_draw_is_its_calibrated_quantile(ran: list[float], had_s: float, moved: float) -> None:
    known = q.new_run_times(np.zeros((len(ran) + 1, 1), np.int64), np.array([0.99]), np.full(len(ran) + 1, 1e5))
    for job, seconds in enumerate(ran):
        q.note_age(known, job, 0.0)
        q.note_end(known, job, seconds)
    known.level[:] = np.clip(known.level + moved, 0.01, 0.99)
    stated = np.zeros(len(q.QUANTILES))
    q.fill_quantiles(known, len(ran), had_s, stated)
    assert drawn(known, len(ran), had_s, list(q.QUANTILES)) == pytest.approx(stated)
    many = drawn(known, len(ran), had_s, np.linspace(0.0, 1.0, 101).tolist())
    assert (np.diff(many) >= 0).all()
    assert 0.999 * had_s <= many[0]
    assert many[-1] <= 1e5


def test_remaining_run_time_is_drawn_given_the_age() -> None:
    """Half of the past jobs ran for one hour, half for eight: after five hours it is one of the latter."""
    job, busy = pending("w", 1, limit=36_000), []
    for gpu, age in enumerate((60.0, 5 * HOUR)):
        one = running(f"r{gpu}", {"n": (gpu,)}, NOW - age + 10 * HOUR, user="alice")
        busy.append(msgspec.structs.replace(one, start_time=NOW - age, spec=job.spec))
    snap = snapshot([node("n")], [job], busy)
    sampler = RunTimeSampler(past([1.0, 8.0] * 30))
    waits, fresh, aged = sampler.draw(np.random.default_rng(0), snap, snap.pending, 1000).T / HOUR
    for short in (waits, fresh):
        assert 0.3 < np.mean(short < 2.0) < 0.6, "the latest, and the one that has run for long, were long"
    assert np.mean((aged > 1.0) & (aged < 5.0)) > 0.9
    assert aged.max() <= 5.0 + 1e-9


def test_at_most_what_the_limit_leaves_and_without_a_past_all_of_it() -> None:
    job = pending("w", 1, limit=36_000)
    resized = msgspec.structs.replace(job, id="r", resizes=Resizes(had_s=9 * HOUR))
    short = msgspec.structs.replace(job, id="s", spec=msgspec.structs.replace(job.spec, time_limit_s=1800))
    snap = snapshot([node("n")], [job, resized, short])
    left = RunTimeSampler(past([9.8] * 20)).draw(np.random.default_rng(0), snap, snap.pending, 200) / HOUR
    assert np.median(left[:, 0]) > 8.0
    assert 0.5 < np.median(left[:, 1]) <= left[:, 1].max() <= 1.0
    assert left[:, 2].max() == pytest.approx(0.5, abs=0.01)
    whole = RunTimeSampler([]).draw(np.random.default_rng(0), snap, snap.pending, 3) / HOUR
    assert whole.tolist() == [[10.0, 1.0, 0.5]] * 3


def test_jobs_alike_are_long_together() -> None:
    jobs = [pending(name, 1, limit=36_000, user=user) for name, user in (("a", "alice"), ("b", "alice"), ("c", "bob"))]
    snap = snapshot([node("n")], jobs)
    sampler = RunTimeSampler([*past([0.1, 0.5, 2.0, 5.0] * 5), *past([0.1, 0.5, 2.0, 5.0] * 5, user="bob")])
    first, alike, other = np.log(sampler.draw(np.random.default_rng(0), snap, jobs, 2000).T)
    assert np.corrcoef(first, alike)[0, 1] == pytest.approx(0.56, abs=0.08)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.1


def test_the_same_snapshot_gives_the_same_draws() -> None:
    snap = snapshot([node("n")], [pending("w", 1)], [running("r", {"n": (0,)}, NOW + HOUR)])
    ahead = QueueForecast(snap, half_life_s=1.0, tick_s=1.0)
    both = [draws_of(ahead, RunTimeSampler(past([0.2, 0.7])), 5) for _ in range(2)]
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one.lasts, other.lasts)
        np.testing.assert_array_equal(one.ends, other.ends)
    assert len({float(one.lasts[0]) for one in both[0]}) == 5
