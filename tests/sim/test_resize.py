"""Elastic jobs: capacity, work conserved whatever becomes of them, and what the metrics count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import UsageError
from gpusched.sim.engine.build import Outage, ReplayOptions, ResizableJobs
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.resizing import TargetSize, elastic_of
from gpusched.sim.result import EVENT_KINDS, RESIZED
from gpusched.sim.stepper import Stepper
from gpusched.study.metrics import metrics_of
from gpusched.study.timeline import parts_of
from tests.sim.sized_worlds import with_progress
from tests.sim.worlds import trace_of
from tests.strategies import among

SPEED = {1: 1.0, 2: 2.0, 4: 2.0, 8: 4.0}  # of model m on A, closest together; half of it over several nodes
RATES = Rates(
    profiles=Profiles(
        series={
            ("m", kind): Series(
                {(g, n): v * by / (1 if n == 1 else 2) for g, v in SPEED.items() for n in (1, 2)}, "nodes"
            )
            for kind, by in (("A", 1.0), ("B", 0.5))
        },
        recorded_on={"m": "A"},
    )
)


def elastic_trace(submit, duration, gpus, **columns):
    jobs = len(submit)
    return replace(trace_of(submit, duration, gpus, **columns), model=np.zeros(jobs, np.int64), models=("m",))


def stepper_of(trace, pool, **options):
    jobs = len(trace)
    elastic = ResizableJobs(least=np.ones(jobs, np.int64), most=np.full(jobs, 8))
    return Stepper(trace, pool, ReplayOptions(rates=RATES, elastic=elastic, **options))


def test_a_job_goes_at_the_speed_of_its_size_and_its_work_is_kept():
    stepper = stepper_of(elastic_trace([0], [40], [1]), Pool.uniform(2, 8, gpu_type="A"), restart_s=3.0)
    assert stepper.advance()
    assert stepper.start(0)
    assert stepper.advance(until=10.0)
    assert stepper.resize(0, 2)  # 30 s of work left, restart until 13
    assert stepper.advance(until=18.0)
    assert stepper.resize(0, 8)  # 20 left at 18; restart until 21, at 4
    assert not stepper.advance() or not stepper.advance()
    result = stepper.result("x")
    assert result.end.tolist() == [26.0]
    assert result.restarts.tolist() == [2]
    assert (result.cut.start.tolist(), result.cut.end.tolist()) == ([0.0, 10.0], [10.0, 18.0])
    assert result.cut.part_gpus.tolist() == [1, 2]
    assert result.part_gpus.tolist() == [8]
    assert [EVENT_KINDS[k] for k in result.events.kind] == ["START", "RESIZED", "START", "RESIZED", "START", "END"]


def test_metrics_count_the_sizes_held():
    stepper = stepper_of(elastic_trace([0], [40], [1]), Pool.uniform(1, 8, gpu_type="A"))
    stepper.advance()
    stepper.start(0)
    stepper.advance(until=20.0)
    stepper.resize(0, 8)
    while stepper.advance():
        pass
    metrics = metrics_of(stepper.result("x"))
    assert metrics.makespan_s == 25.0
    held = 20 * 1 + 5 * 8
    assert metrics.gpu_hours == pytest.approx(held / 3600)
    assert metrics.gpu_hours_utilization == pytest.approx(held / (8 * 25))
    assert metrics.utilization == pytest.approx(held / (8 * 25))
    idle, busy = 8 * 3500 / 8 / 2, 8 * 3500 / 8
    assert metrics.energy_kwh == pytest.approx((idle * 25 + (busy - idle) * held / 8) / 3.6e6)


def test_a_job_that_does_not_fit_goes_on_and_a_wrong_size_is_refused():
    stepper = stepper_of(elastic_trace([0, 0], [40, 40], [4, 4]), Pool.uniform(1, 8, gpu_type="A"))
    stepper.advance()
    assert stepper.start(0)
    with pytest.raises(UsageError, match="only just started"):
        stepper.resize(0, 8)
    assert stepper.start(1)
    stepper.advance(until=1.0)
    assert not stepper.resize(0, 8)
    with pytest.raises(UsageError, match="may have 1 to 8 GPUs"):
        stepper.resize(0, 9)
    with pytest.raises(UsageError, match="not free, or not what it needs"):
        stepper.resize(0, 8, [0])
    assert stepper.resize(0, 2)
    assert stepper.free_gpus.tolist() == [2]
    rigid = Stepper(elastic_trace([0], [1], [1]), Pool.uniform(1, 8))
    rigid.advance()
    with pytest.raises(UsageError, match="no jobs are elastic"):
        rigid.resize(0, 2)


def test_without_figures_speed_is_linear_only_if_declared():
    trace = trace_of([0], [40], [2])
    bounds = {"least": np.array([1]), "most": np.array([8])}
    stepper = Stepper(trace, Pool.uniform(1, 8), ReplayOptions(elastic=ResizableJobs(**bounds, linear=True)))
    stepper.advance()
    assert stepper.resize(0, 8)  # before it has started
    assert stepper.start(0)
    stepper.advance()
    assert stepper.now == 10.0
    stepper = Stepper(trace, Pool.uniform(1, 8), ReplayOptions(elastic=ResizableJobs(**bounds)))
    stepper.advance()
    with pytest.raises(UsageError, match="was not measured"):
        stepper.resize(0, 8)


def alone(trace, pool, size, **options):
    """When the one job of a trace ends that is resized before it starts, and what the result says of it."""
    elastic = ResizableJobs(least=np.array([1]), most=np.array([64]), linear=True)
    stepper = Stepper(trace, pool, ReplayOptions(elastic=elastic, **options))
    stepper.advance()
    assert stepper.resize(0, size)
    assert stepper.start(0)
    stepper.advance()
    return stepper.now, stepper.result("x").notes[-1]


class Thirsty:
    """As fast as it has cores, up to 4 for each GPU; twice as fast with 100 MiB for each GPU."""

    def at(self, gpus, cores, memory_mib):
        return min(4.0, (cores or 1e9) / gpus) * (2.0 if (memory_mib or 0) >= 100 * gpus else 1.0)


def test_it_goes_by_its_cores_and_memory():
    trace = replace(elastic_trace([0], [40], [2]), cores=np.array([4]), memory_mib=np.array([100]))
    pool = Pool.of([NodeSpec(8, 32, 1600, "A")] * 2)
    rates = replace(RATES, profiles=replace(RATES.profiles, sensitivity={"m": Thirsty()}))
    as_recorded, note = alone(trace, pool, TargetSize(2, 4, 100), rates=rates)
    assert as_recorded == 40.0
    assert "after resizes" not in note, "at its own size it goes as recorded"
    assert alone(trace, pool, TargetSize(2, 8, 100), rates=rates)[0] == 20.0
    assert alone(trace, pool, TargetSize(2, 8, 200), rates=rates)[0] == 10.0
    assert alone(trace, pool, TargetSize(2, 2, 100), rates=rates)[0] == 80.0
    # Eight GPUs on one node are twice as fast as two, with four times the cores and memory in proportion.
    assert alone(trace, pool, 8, rates=rates)[0] == 20.0
    assert alone(trace, pool, TargetSize(8, 32), rates=rates)[0] == 10.0
    # Spread over two nodes it is half as fast.
    end, note = alone(trace, pool, TargetSize(8, 16, 400, 2), rates=rates)
    assert end == 40.0
    assert note == "speeds after resizes: 1 measured"


def test_where_no_trace_says_how_many_cores_they_are_in_proportion_to_the_nodes():
    trace, pool = elastic_trace([0], [40], [2]), Pool.of([NodeSpec(8, 16, 1600, "A")])
    rates = replace(RATES, profiles=replace(RATES.profiles, sensitivity={"m": Thirsty()}))
    assert alone(trace, pool, TargetSize(2, 2), rates=rates)[0] == 80.0
    assert alone(trace, pool, TargetSize(2, 8), rates=rates)[0] == 20.0
    assert alone(trace, Pool.uniform(1, 8, gpu_type="A"), TargetSize(2, 2), rates=rates)[0] == 40.0, (
        "these have no cores"
    )


def test_sizes_that_were_not_measured_go_as_the_nearest_or_in_proportion():
    trace, pool = elastic_trace([0], [40], [2]), Pool.uniform(8, 8, gpu_type="A")
    assert alone(trace, pool, 16, rates=RATES) == (
        40.0, "speeds after resizes: 1 from the nearest measured size",
    )  # fmt: skip
    unknown = replace(trace, models=("unheard of",))
    assert alone(unknown, pool, 16, rates=RATES) == (
        5.0, "speeds after resizes: 1 in proportion to GPUs (not measured)",
    )  # fmt: skip


def test_a_job_that_asked_for_more_nodes_may_go_on_on_fewer():
    trace = replace(elastic_trace([0], [40], [4]), nodes=np.array([2]))
    stepper = stepper_of(trace, Pool.uniform(2, 8, gpu_type="A"))
    stepper.advance()
    assert stepper.resize(0, TargetSize(4, nodes=1))
    assert stepper.start(0, [1])
    assert stepper.parts(0) == (1, 4)


def test_speeds_shown_to_a_policy_are_those_of_the_slowest_gpus():
    stepper = stepper_of(elastic_trace([0], [40], [1]), Pool.of([NodeSpec(8, gpu_type=t) for t in "AB"]))
    stepper.advance()
    assert [stepper.rate_at(0, gpus) for gpus in (1, 2, 8)] == [0.5, 1.0, 2.0]
    assert stepper.rate_at(0, TargetSize(2, nodes=2)) == 0.5
    assert stepper.start(0, [0])
    assert stepper.pace_of(0)[2] == 1.0, "it has not been resized by being asked for"
    with pytest.raises(UsageError, match="may have 1 to 8 GPUs"):
        stepper.rate_at(0, 9)


def test_speeds_shown_to_a_policy_are_those_that_the_job_reported():
    trace = with_progress(elastic_trace([0], [40], [4]), 1)
    trace = replace(trace, progress=replace(trace.progress, steps_per_s=1.0 + np.arange(len(trace.progress.size_gpus))))
    stepper = Stepper(trace, Pool.uniform(1, 8), ReplayOptions(elastic=elastic_of(trace)))
    stepper.advance()
    assert [stepper.rate_at(0, gpus) for gpus in (1, 3, 4, 8)] == [1 / 3, 2 / 3, 1.0, 4 / 3]


def test_a_restart_costs_what_it_does_for_the_model():
    trace = elastic_trace([0, 0], [40, 40], [1, 1])
    trace = replace(trace, model=np.array([0, 1]), models=("M (batch size 8)", "other"))
    stepper = stepper_of(trace, Pool.uniform(1, 8, gpu_type="A"), restart_s=3.0, restart_costs={"m": 7.0})
    stepper.advance()
    assert stepper.start(0)
    assert stepper.start(1)
    stepper.advance(until=10.0)
    stepper.preempt(0)
    stepper.preempt(1)
    assert stepper.start(0)
    assert stepper.start(1)
    while stepper.advance():
        pass
    result = stepper.result("x")
    assert result.end.tolist() == [47.0, 43.0]
    assert "restarts of 1 job cost as measured for their models; 1 others cost 3 s" in result.notes


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_work_is_conserved_and_no_gpu_held_twice(data):
    jobs = data.draw(st.integers(1, 8))
    sizes = st.sampled_from([1, 2, 4, 8])
    submit = sorted(data.draw(st.lists(st.integers(0, 20), min_size=jobs, max_size=jobs)))
    duration = data.draw(st.lists(st.integers(1, 40), min_size=jobs, max_size=jobs))
    trace = elastic_trace(submit, duration, data.draw(st.lists(sizes, min_size=jobs, max_size=jobs)))
    pool = Pool.of([NodeSpec(4, gpu_type=t) for t in data.draw(among("AA", "AAB", "ABBA"))])
    failures = [Outage(0, 15.0, 30.0)] if data.draw(st.booleans()) else []
    stepper = stepper_of(trace, pool, restart_s=0.5, failures=failures)
    more = True
    while more:
        more = stepper.advance(until=stepper.now + 4.0 if data.draw(st.booleans()) else np.inf)
        for job in stepper.running():
            if data.draw(st.integers(0, 3)) == 0 and stepper._world.sim.state[job]["start"] < stepper.now:
                stepper.resize(job, data.draw(sizes))
        for job in stepper.waiting():
            stepper.start(job)
    result = stepper.result("x")
    assert np.isfinite(result.end).all()
    parts = parts_of(result)
    for node in range(len(pool)):
        here = parts.node == node
        steps = sorted([(t, g) for t, g in zip(parts.start[here], parts.gpus[here], strict=True)]
                       + [(t, -g) for t, g in zip(parts.end[here], parts.gpus[here], strict=True)])  # fmt: skip
        assert max(np.cumsum([g for _, g in steps]), default=0) <= 4
    for job in range(jobs):
        assert work_done(result, pool, job) == pytest.approx(trace.duration[job], abs=1e-9)
        assert (result.events.kind[result.events.subject == job] == RESIZED).sum() <= result.restarts[job]


def work_done(result, pool, job):
    """Seconds of work at the recorded speed over a job's runs; what a failing node cut counts for nothing."""
    reference = SPEED[int(result.trace.gpus[job])]
    mine = [i for i in range(len(result.cut.job)) if result.cut.job[i] == job]
    runs = [
        (
            result.cut.start[i],
            result.cut.end[i],
            result.cut.part_nodes[result.cut.part_offsets[i] : result.cut.part_offsets[i + 1]],
            int(result.cut.part_gpus[i]),
        )
        for i in mine
    ]
    runs.append((result.last_start[job], result.end[job], result.nodes_of(job), int(result.part_gpus[job])))
    kinds = [EVENT_KINDS[k] for k, s in zip(result.events.kind, result.events.subject, strict=True) if s == job]
    ends = [kind for kind in kinds if kind in ("RESIZED", "NODE_FAIL", "END")]
    done = 0.0
    for at, ((start, end, nodes, gpus), how) in enumerate(zip(runs, ends, strict=True)):
        slow = 0.5 if any(pool.gpu_types[pool.gpu_type[n]] == "B" for n in nodes) else 1.0
        speed = SPEED[gpus * len(nodes)] * slow / (1 if len(nodes) == 1 else 2)
        seconds = max(0.0, end - start - (0.5 if at else 0.0))
        done = 0.0 if how == "NODE_FAIL" else done + seconds * speed / reference
    return done
