"""The bounds hold for every policy and for the optimum, and the optimum is one."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.limits import Limits, Quotas
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.study.bounds import bounds_of
from gpusched.study.study import PlannedReplay, Scenario, run_all
from tests.sim.optimum import exact_optimum
from tests.sim.worlds import engine_inputs, trace_of, workloads

tiny = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([0.25, 1.0, 2.0, 4.0]), st.sampled_from([1, 2, 4])),
    min_size=1,
    max_size=5,
)


POLICIES = ("fifo", "sjf-oracle-skip", "sjf-oracle+easy", "srtf", "las", "drf-users")


@given(workloads(failing=False), st.sampled_from(POLICIES))
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


whole = st.lists(
    st.tuples(st.integers(0, 6).map(float), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 4])),
    min_size=1,
    max_size=7,
)


@given(whole)
@settings(max_examples=80, deadline=None)
def test_the_bounds_are_as_tight_as_they_say(rows):
    """Each of the three and the makespan's, counted here unit by unit on one machine that does 4 GPU seconds a second.

    All run times are multiples of 4 s, so that each job's work is a whole number of units of 1 s on that machine.
    """
    rows.sort()
    trace, pool = trace_of([r[0] for r in rows], [4.0 * r[1] for r in rows], [r[2] for r in rows]), Pool.uniform(1, 4)
    release, size = [int(r[0]) for r in rows], [r[1] * r[2] for r in rows]

    def by(key):
        """The slots in which each job is served, the released one of least ``key(job, left)`` first."""
        slots, left, now = {i: [] for i in range(len(rows))}, list(size), 0
        while any(left):
            ready = [i for i in range(len(rows)) if left[i] and release[i] <= now]
            if ready:
                one = min(ready, key=lambda i: (key(i, left[i]), i))
                left[one] -= 1
                slots[one].append(now)
            now += 1
        return slots

    srpt = by(lambda i, left: left)
    smith = by(lambda i, left: size[i])
    alone = sum(4.0 * r[1] for r in rows)
    shortest = sum(slots[-1] + 1 - release[i] for i, slots in srpt.items())
    halves = sum(sum(t + 0.5 for t in slots) / size[i] + 2.0 * rows[i][1] - release[i] for i, slots in smith.items())
    bounds = bounds_of(trace, pool)
    assert bounds.mean_jct_s * len(rows) == pytest.approx(max(alone, shortest, halves))
    ends = [max(r[0] + 4.0 * r[1] for r in rows), *(slots[-1] + 1 for slots in srpt.values())]
    assert bounds.makespan_s == pytest.approx(max(ends) - release[0])


def test_each_of_the_three_bounds_wins_somewhere():
    pool = Pool.uniform(1, 4)
    assert bounds_of(trace_of([0], [8], [1]), pool).mean_jct_s == 8.0  # no faster than alone
    assert bounds_of(trace_of([0, 0], [8, 8], [4, 4]), pool).mean_jct_s == 12.0  # one after the other: 8 and 16
    # four jobs of one GPU and one of four, 8 s each: half of the work on average is done 4 s before the last end
    many = bounds_of(trace_of([0] * 5, [8.0] * 5, [1, 1, 1, 1, 4]), pool)
    assert many.mean_jct_s == pytest.approx((1 + 3 + 5 + 7 + 12) / 5 + 4)
    assert many.makespan_s == pytest.approx(16.0)
    late = bounds_of(trace_of([0, 100, 100], [8.0] * 3, [4, 4, 4]), pool)
    assert late.makespan_s == pytest.approx(116.0), "work cannot be done before it is there"


def test_a_dependency_releases_at_the_earliest_end_of_what_it_waits_for():
    trace = trace_of([0, 1, 2], [10, 5, 1], [1, 1, 1], depends_on=[-1, 0, 1])
    found = bounds_of(trace, Pool.uniform(1, 4))
    assert found.mean_jct_s == pytest.approx((10 + 14 + 14) / 3)
    assert found.makespan_s == 16.0
    without = bounds_of(trace_of([0, 1, 2], [10, 5, 1], [9, 1, 1], depends_on=[-1, 0, -1]), Pool.uniform(1, 4))
    assert (without.jobs, without.mean_jct_s) == (1, 1.0), "what waits for a job that cannot run cannot either"


def test_each_partition_serves_its_own_jobs_only():
    pool = Pool.of([NodeSpec(4, partition="p"), NodeSpec(8, partition="q")])
    trace = trace_of([0] * 4, [16, 16, 8, 8], [4, 4, 8, 8])
    trace = dataclasses.replace(trace, group=np.array([0, 0, 1, 1]), groups=("p", "q"))
    assert bounds_of(trace, pool) == ((16 + 32 + 8 + 16) / 4, 32.0, 4), "one after the other"


def test_with_limits_a_job_runs_no_longer_than_its_own():
    trace = trace_of([0], [10], [4], limit=[6])
    assert bounds_of(trace, Pool.uniform(1, 4)).mean_jct_s == 10.0
    assert bounds_of(trace, Pool.uniform(1, 4), limits=True) == (6.0, 6.0, 1)


def test_the_optimum_is_for_few():
    with pytest.raises(ValueError, match="at most 8"):
        exact_optimum(trace_of([0] * 9, [1] * 9, [1] * 9), Pool.uniform(1, 8))


def test_bounds_are_of_the_jobs_that_the_figures_are_of():
    trace, pool = trace_of([0.0, 0.0], [1000.0, 10.0], [8, 1], user=[0, 0]), Pool.uniform(1, 8)
    trace = dataclasses.replace(trace, users=("ann",))
    scenario = Scenario(trace, pool, power_model(pool), quotas=QuotaSet(Quotas(each=Limits(gpus=4))))
    (outcome,) = run_all([PlannedReplay(scenario, policy_by_name("fifo"))])
    assert (outcome.metrics.jobs, outcome.metrics.infeasible, outcome.metrics.mean_jct_s) == (1, 1, 10.0)
    assert outcome.bounds == (10.0, 10.0, 1)
