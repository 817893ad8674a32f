"""Shared GPUs: what is held and counted, what is said, and what cannot be shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpusched.errors import UsageError
from gpusched.sim.engine.build import Options
from gpusched.sim.pool import Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import replay
from gpusched.sim.sharing import share_for
from gpusched.sim.stepper import Stepper
from gpusched.study.metrics import metrics_of
from gpusched.study.timeline import parts_of, together
from tests.sim.worlds import trace_of

RATES = Rates(
    profiles=Profiles(
        series={("m", "A"): Series({(1, 1): 8.0}, "nodes"), ("n", "A"): Series({(1, 1): 4.0}, "nodes")},
        beside={("m", "A", 1, "n"): 0.5, ("n", "A", 1, "m"): 1.0, ("m", "A", 1, "m"): 0.5},
        recorded_on={"m": "A", "n": "A"},
    )
)


def fractions(submit, duration, milli, **columns):
    trace = trace_of(submit, duration, [1] * len(submit), **columns)
    return replace(trace, gpu_milli=np.array(milli, np.int64))


def with_models(trace, models):
    return replace(trace, model=np.array(["mn".index(m) for m in models]), models=("m", "n"))


def test_fractions_fill_a_gpu_and_are_counted_as_such():
    trace = fractions([0, 0, 0, 0], [10, 10, 10, 10], [500, 400, 100, 1])
    shared = replay(trace, Pool.uniform(1, 1), "fifo", share="fractions")
    assert shared.end.tolist() == [10, 10, 10, 20]
    metrics = metrics_of(shared)
    assert metrics.gpu_hours_utilization == pytest.approx((1000 + 1) / 2000)
    assert metrics.utilization == pytest.approx((1000 + 1) / 2000)
    assert metrics.fragmentation is None
    assert "4 jobs hold only the requested part of one" in shared.notes[0]
    whole = replay(trace, Pool.uniform(1, 1), "fifo")
    assert whole.end.tolist() == [10, 20, 30, 40]
    assert whole.notes == ("4 jobs that request part of a GPU hold a whole one",)
    assert share_for("auto", trace) == "fractions"
    assert share_for("auto", trace_of([0], [1], [1])) == "no"


def test_whole_jobs_never_share_and_best_fit_is_by_gpu():
    trace = fractions([0, 0, 1, 1, 2], [9, 9, 9, 9, 9], [600, 300, 350, 1000, 100])
    result = replay(trace, Pool.uniform(1, 2), "fifo-skip", share="fractions")
    # 600, 300 and the last 100 fill one GPU until 11; 350 opens the other, which the whole job gets after it
    assert result.start.tolist() == [0, 0, 1, 10, 2]


def test_neighbours_slow_each_other_down_while_they_are_there():
    trace = with_models(fractions([0, 4], [10, 2], [500, 500]), "mn")
    result = replay(trace, Pool.uniform(1, 1, gpu_type="A"), "fifo", share="fractions", rates=RATES)
    assert result.end.tolist() == [11, 6]  # m does 1 of its seconds of work in the two that n is there
    assert not any("nothing measured says how" in note for note in result.notes)
    unknown = with_models(fractions([0, 4], [10, 2], [500, 500]), "nn")
    result = replay(unknown, Pool.uniform(1, 1, gpu_type="A"), "fifo", share="fractions", rates=RATES)
    assert result.end.tolist() == [10, 6]
    assert any(note.startswith("1 time a job shared a GPU") for note in result.notes)


def test_pairs_only_where_both_together_get_more_done():
    pool = Pool.uniform(1, 1, gpu_type="A")
    pair = with_models(trace_of([0, 1], [10, 4], [1, 1]), "mn")  # 0.5 + 1 > 1
    result = replay(pair, pool, "fifo", share="pairs", rates=RATES)
    assert result.start.tolist() == [0, 1]
    assert result.end.tolist() == [12, 5]
    assert together(result) == [(1, 0, 1.0, 5.0)]
    metrics = metrics_of(result)
    assert metrics.gpu_hours * 3600 == pytest.approx(12)
    assert metrics.utilization == pytest.approx(1.0)
    assert metrics.gpu_hours_utilization == pytest.approx(1.0)
    parts = parts_of(result)
    assert (parts.gpus * (parts.end - parts.start)).sum() == pytest.approx(12)
    turns = with_models(trace_of([0, 1], [10, 4], [1, 1]), "mm")  # 0.5 + 0.5 is no more than taking turns
    assert replay(turns, pool, "fifo", share="pairs", rates=RATES).start.tolist() == [0, 10]


def test_that_one_has_no_partner_says_nothing_of_the_next():
    trace = with_models(trace_of([0, 1, 1], [10, 4, 4], [1, 1, 1]), "mmn")
    result = replay(trace, Pool.uniform(1, 1, gpu_type="A"), "fifo-skip", share="pairs", rates=RATES)
    assert result.start[2] == 1.0


def test_a_gpu_of_two_comes_free_once_for_the_first_in_the_queue():
    """It needs all three, so not before the long one's end: the last one is over by then."""
    limit = [10, 100, 100, 21, 100, 50]
    trace = trace_of([0, 0, 0, 1, 2, 6], [10, 5, 90, 30, 10, 10], [1, 1, 1, 1, 3, 1], limit=limit)
    trace = replace(trace, model=np.array([0, -1, -1, 1, -1, -1]), models=("m", "n"))
    result = replay(trace, Pool.uniform(1, 3, gpu_type="A"), "fifo+easy", share="pairs", rates=RATES)
    assert result.start[[3, 5]].tolist() == [1.0, 6.0]


@pytest.mark.parametrize("policy", ["srtf", "fifo+conservative"])
def test_policies_that_know_no_shared_gpus_say_so(policy):
    trace = fractions([0, 0], [10, 10], [500, 500], limit=[20, 20])
    result = replay(trace, Pool.uniform(1, 1), policy, share="fractions")
    assert sorted(result.end.tolist()) == [10, 20]
    assert f"{policy} does not share GPUs: every job holds whole ones" in result.notes


def test_a_stepper_shares_too():
    stepper = Stepper(fractions([0] * 3, [5] * 3, [500] * 3), Pool.uniform(2, 1), Options(share="fractions"))
    assert stepper.advance()
    assert stepper.start(0, [1])
    assert stepper.fits(1) == (1,)
    assert stepper.start(1)
    assert stepper.free_gpus.tolist() == [1, 0]
    with pytest.raises(UsageError, match="not free"):
        stepper.start(2, [1])
    assert stepper.start(2)


def test_an_unknown_way_to_share_is_refused():
    with pytest.raises(UsageError, match="--share 'maybe' is not known"):
        share_for("maybe", trace_of([0], [1], [1]))
