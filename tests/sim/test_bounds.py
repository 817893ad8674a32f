"""The bounds hold for every policy and for the optimum, and the optimum is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import UsageError
from gpusched.sim.bounds import bounds_of, exact_optimum
from gpusched.sim.cluster import Pool
from gpusched.sim.engine import replay
from tests.sim.worlds import engine_inputs, trace_of, workloads

tiny = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([1, 2, 4])),
    min_size=1,
    max_size=5,
)


@given(workloads(failing=False), st.sampled_from(["fifo", "sjf-oracle-skip", "sjf-oracle+easy", "srtf", "las", "drf"]))
@settings(max_examples=80, deadline=None)
def test_no_schedule_is_below_the_bounds(world, policy):
    trace, pool = engine_inputs(*world[:2])
    result = replay(trace, pool, policy)
    bounds = bounds_of(trace, pool)
    ran = np.isfinite(result.end)
    assert bounds.jobs == ran.sum()
    if bounds.jobs:
        assert (result.end - trace.submit)[ran].mean() >= bounds.mean_jct_s * (1 - 1e-12)
        assert result.end[ran].max() - trace.submit[ran].min() >= bounds.makespan_s * (1 - 1e-12)


@given(tiny, st.sampled_from([(1, 4), (2, 2), (2, 4)]))
@settings(max_examples=40, deadline=None)
def test_the_optimum_lies_between_the_bound_and_every_list_schedule(rows, size):
    rows.sort()
    trace, pool = trace_of(*zip(*rows, strict=True)), Pool.uniform(*size)
    optimum, bound = exact_optimum(trace, pool), bounds_of(trace, pool)
    assert optimum.mean_jct_s >= bound.mean_jct_s * (1 - 1e-12)
    for policy, placement in itertools.product(("fifo", "sjf-oracle-skip", "smallest-skip"), ("best-fit", "worst-fit")):
        result = replay(trace, pool, policy, placement=placement)
        assert optimum.mean_jct_s <= (result.end - trace.submit).mean() + 1e-12
    assert np.mean(np.array(optimum.start) + trace.duration - trace.submit) == pytest.approx(optimum.mean_jct_s)


def test_waiting_can_be_best():
    """A long job that arrives first had better wait for the two short ones that come just after it."""
    trace = trace_of([0, 1, 1], [100, 1, 1], [4, 4, 4])
    optimum = exact_optimum(trace, Pool.uniform(1, 4))
    assert optimum.start == (3.0, 1.0, 2.0)
    assert optimum.mean_jct_s == pytest.approx((103 + 1 + 2) / 3)
    assert bounds_of(trace, Pool.uniform(1, 4)).mean_jct_s == pytest.approx((102 + 1 + 2) / 3)


def test_srpt_is_the_optimum_where_nothing_is_lost_to_shape():
    """Whole-pool jobs that may be preempted: SRTF's replay is the bound itself."""
    rng = np.random.default_rng(4)
    trace = trace_of(np.sort(rng.random(300) * 1000), rng.random(300) * 8, np.full(300, 8))
    result = replay(trace, Pool.uniform(1, 8), "srtf")
    assert (result.end - trace.submit).mean() == pytest.approx(bounds_of(trace, Pool.uniform(1, 8)).mean_jct_s)


def test_the_optimum_is_for_few():
    with pytest.raises(UsageError, match="at most 8"):
        exact_optimum(trace_of([0] * 9, [1] * 9, [1] * 9), Pool.uniform(1, 8))
