from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.result import END, PAIRED, START, Events, ReplayResult
from gpusched.study.metrics import dominant_share, eq4, fragmentation, jain, job_times, metrics_of
from gpusched.study.study import result_without
from gpusched.study.timeline import binned_mean, parts_of
from tests.study.build import Job, gist_pool, result_of


def test_times_of_a_plain_job() -> None:
    m = metrics_of(result_of([Job(0, 5, 105, gpus=8), Job(10, 110, 115, gpus=8)]))
    assert (m.jobs, m.mean_jct_s, m.median_jct_s) == (2, 105.0, 105.0)
    assert m.mean_wait_s == (5 + 100) / 2
    # max(1, JCT / max(run, 10)): 105 / 100, and 105 / 10 since 5 s of run time are below the threshold
    assert m.mean_bounded_slowdown == pytest.approx((1.05 + 10.5) / 2)
    assert m.makespan_s == 115.0


def test_a_slowdown_is_never_below_one() -> None:
    assert metrics_of(result_of([Job(0, 0, 1)])).mean_bounded_slowdown == 1.0


def test_percentiles_are_between_ranks() -> None:
    m = metrics_of(result_of([Job(0, 0, s) for s in range(1, 102)]))
    assert (m.median_jct_s, m.p95_jct_s, m.p99_jct_s) == (51.0, 96.0, 100.0)


def test_a_preempted_job_waits_again_and_its_lost_work_is_no_wait() -> None:
    times = job_times(result_of([Job(0, 50, 80, cut=((10, 20, 1),))]))
    assert (times.jct[0], times.run[0], times.wait[0]) == (80.0, 40.0, 40.0)


def test_jobs_that_cannot_run_are_counted_and_left_out() -> None:
    m = metrics_of(result_of([Job(0, 0, 10), Job(0, 0, 0, nodes=())]))
    assert (m.jobs, m.infeasible, m.unfinished, m.mean_jct_s) == (1, 1, 0, 10.0)


def test_jobs_that_could_run_and_never_ended_are_counted_apart() -> None:
    result = result_of([Job(0, 0, 10), Job(0, 0, 0, nodes=()), *[Job(0, 0, 0, nodes=())] * 3])
    few = dataclasses.replace(result, infeasible=np.array([1]), infeasible_why=("no",))
    m = metrics_of(few)
    assert (m.jobs, m.infeasible, m.unfinished) == (1, 1, 3)


def test_waits_are_set_against_those_recorded_of_the_same_jobs() -> None:
    result = result_of([Job(0, 30, 40), Job(0, 0, 10), Job(0, 90, 99), Job(0, 0, 0, nodes=())])
    trace = dataclasses.replace(result.trace, wait=np.array([20.0, 5.0, np.nan, 1000.0]))
    m = metrics_of(dataclasses.replace(result, trace=trace))
    assert (m.recorded_mean_wait_s, m.wait_error) == (12.5, pytest.approx(15 / 12.5 - 1))
    assert m.mean_wait_s == 40, "of all"
    none = metrics_of(dataclasses.replace(result, trace=dataclasses.replace(trace, wait=np.zeros(4))))
    assert (none.recorded_mean_wait_s, none.wait_error) == (0.0, None)
    assert metrics_of(result).recorded_mean_wait_s is None


def test_nothing_ran_is_unknown_not_zero() -> None:
    m = metrics_of(result_of([Job(0, 0, 0, nodes=())]))
    assert (m.jobs, m.mean_jct_s, m.utilization, m.energy_kwh) == (0, None, None, None)


def test_utilization_begins_with_the_first_start_and_gpu_hours_with_the_first_submission() -> None:
    m = metrics_of(result_of([Job(0, 100, 200, gpus=8)], Pool.uniform(1, 8)))
    assert m.utilization == 1.0
    assert m.gpu_hours_utilization == 0.5
    assert m.gpu_hours == pytest.approx(800 / 3600)


def test_eq4_takes_the_dominant_share() -> None:
    pool = Pool.of([NodeSpec(8, 64, -1)])
    whole = eq4(result_of([Job(0, 0, 10, gpus=2, cores=64)], pool)).whole
    assert whole == 1.0


def shares(result: ReplayResult, **trace: object) -> list[float]:
    return dominant_share(dataclasses.replace(result, trace=dataclasses.replace(result.trace, **trace))).tolist()


def test_of_a_job_that_held_fewer_gpus_than_it_asked_for_the_rest_counts_likewise() -> None:
    """2 of 4 GPUs, so half of its cores and memory."""
    result = result_of([Job(0, 0, 10, gpus=4, cores=64)], Pool.of([NodeSpec(8, 64, 100)]))
    cut = dataclasses.replace(result.cut, part_gpus=np.zeros(0, np.int64))
    fewer = dataclasses.replace(result, part_gpus=np.array([2]), cut=cut)
    assert shares(fewer) == [0.5]
    assert shares(fewer, cores=np.array([16])) == [0.25]
    assert shares(fewer, memory_mib=np.array([120])) == [0.6]
    assert shares(result) == [1.0]


def test_resources_unknown_to_the_pool_are_never_dominant() -> None:
    def share(*nodes: NodeSpec, gpus: int = 1, **trace: int) -> float:
        result = result_of([Job(0, 0, 10, gpus=gpus)], Pool.of(list(nodes)))
        (found,) = shares(result, **{k: np.array([v]) for k, v in trace.items()})
        return found

    assert share(NodeSpec(8, 10, 100), NodeSpec(8, 30, 100), cores=30, memory_mib=100) == 0.75
    assert share(NodeSpec(8, 10, 100), NodeSpec(8, 30, 100), cores=30, memory_mib=160) == 0.8
    assert share(NodeSpec(8, 10, 100), NodeSpec(8, 30, -1), cores=1, memory_mib=100) == 1 / 16
    assert share(NodeSpec(8, -1, 100), NodeSpec(8, 30, 100), cores=30) == 1 / 16
    assert share(NodeSpec(8, 10, 100), NodeSpec(0, 10, 100), gpus=4) == 0.5
    assert share(NodeSpec(0, 10, -1), NodeSpec(0, 10, -1), gpus=0, cores=5) == 0.25
    assert share(NodeSpec(8, 10, 100), NodeSpec(8, 10, 100, partition="b"), cores=5, memory_mib=1) == 0.5


def test_two_on_one_gpu_hold_a_half_of_it_each() -> None:
    result = result_of([Job(0, 0, 10, gpus=8), Job(0, 0, 3600, gpus=4)], Pool.uniform(1, 8))
    halves = dataclasses.replace(result, share=np.array([0.5, 0.5]))
    assert shares(halves) == [0.5, 0.25]


def test_pairs_on_the_same_gpus_count_once_while_they_are_together() -> None:
    """Both hold all 8 GPUs, the second from 4 to 8 beside the first, of which 10 s are held in all."""
    result = result_of([Job(0, 0, 10, gpus=8), Job(0, 4, 8, gpus=8)], Pool.uniform(1, 8))
    events = Events(
        time=np.array([0.0, 4.0, 4.0, 8.0, 10.0]), kind=np.array([START, PAIRED, START, END, END], np.uint8),
        subject=np.array([0, 0, 1, 1, 0]),
    )  # fmt: skip
    pairs = dataclasses.replace(result, shared="pairs", events=events)
    assert eq4(pairs).whole == 1.0
    assert metrics_of(pairs).gpu_hours == pytest.approx(80 / 3600)
    assert metrics_of(pairs).fragmentation is None
    small = dataclasses.replace(pairs, part_gpus=np.array([8, 4]))
    assert eq4(small).whole == 1.0, "the smaller of the two is not counted twice"
    idle = dataclasses.replace(pairs, pool=Pool.uniform(2, 8))
    assert eq4(idle).whole == 0.5
    assert [u.gpu_hours for u in metrics_of(pairs).users] == [pytest.approx(80 / 3600)]


def test_a_job_that_shared_with_an_excluded_job_counts_alone() -> None:
    """The first job waited when the replay began; it joined the other one's GPUs from 4 to 8."""
    result = result_of([Job(0, 4, 8, gpus=8), Job(0, 0, 10, gpus=8)], Pool.uniform(1, 8))
    events = Events(
        time=np.array([0.0, 4.0, 4.0, 8.0, 10.0]), kind=np.array([START, PAIRED, START, END, END], np.uint8),
        subject=np.array([1, 1, 0, 0, 1]),
    )  # fmt: skip
    rest = result_without(dataclasses.replace(result, shared="pairs", events=events), 1)
    assert metrics_of(rest).gpu_hours == pytest.approx(80 / 3600)


def test_eq4_weighs_partitions_by_gpus() -> None:
    pool = Pool.of([NodeSpec(8, partition="a"), NodeSpec(4, partition="b")])
    jobs = [Job(0, 0, 10, gpus=8, nodes=(0,)), Job(0, 0, 10, gpus=1, nodes=(1,))]
    assert eq4(result_of(jobs, pool)).whole == pytest.approx((8 + 1) / 12)


def test_the_papers_inefficient_energy() -> None:
    """Two DGX A100 at U = 0.62 over 720 h: 13 kW x 720 h x 0.38 = 3557 kWh (CMC 2022, section 5)."""
    hours = 3600.0
    jobs = [Job(0, 0, 720 * hours, nodes=(0,), gpus=8), Job(0, 0, 0.24 * 720 * hours, nodes=(1,), gpus=8)]
    m = metrics_of(result_of(jobs, gist_pool()))
    assert m.utilization == pytest.approx(0.62)
    assert m.inefficient_energy_kwh == pytest.approx(3556.8)
    assert m.energy_kwh == pytest.approx(13 * 720 * (0.5 + 0.5 * 0.62))


def test_inefficient_energy_begins_with_the_first_start() -> None:
    """Half of a server of 6.5 kW, for the 100 s from its first start on; the 100 s before are nobody's waste."""
    pool = Pool.of([NodeSpec(8, 256, 1 << 20, "A100", "A100", "dgx1")])
    m = metrics_of(result_of([Job(0, 100, 200, gpus=4)], pool))
    assert m.inefficient_energy_kwh == pytest.approx(6.5 * 100 / 3600 * 0.5)


def test_arrival_utilization_ends_with_the_last_submission() -> None:
    """8 of 16 GPUs from 0 to 100, and 16 from 120 to 170; the last job came at 50: neither the rest nor it counts."""
    m = metrics_of(result_of([Job(0, 0, 100, gpus=8), Job(50, 120, 170, (0, 1), gpus=8)]))
    assert m.arrival_utilization == pytest.approx(0.5)
    assert m.gpu_hours_utilization == pytest.approx((800 + 800) / (16 * 170))
    assert metrics_of(result_of([Job(5, 5, 100)])).arrival_utilization is None


def test_jain() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    jobs = [Job(0, 0, 10, user="ann"), Job(0, 20, 30, user="bob")]  # slowdowns 1 and 3
    m = metrics_of(result_of(jobs))
    assert m.jain == pytest.approx(16 / (2 * 10))
    assert [(u.name, u.jobs, u.mean_wait_s) for u in m.users] == [("ann", 1, 0.0), ("bob", 1, 20.0)]
    assert [u.gpu_hours for u in m.users] == [pytest.approx(10 / 3600)] * 2
    assert [(u.mean_jct_s, u.mean_bounded_slowdown) for u in m.users] == [(10.0, 1.0), (30.0, 3.0)]


JOBS = st.lists(
    st.builds(
        lambda at, wait, run, nodes, gpus: Job(at, at + wait, at + wait + run, tuple(sorted(nodes)), gpus),
        st.integers(0, 30), st.integers(0, 20), st.integers(1, 20),
        st.sets(st.integers(0, 2), min_size=1, max_size=3), st.integers(1, 2),
    ), min_size=1, max_size=4,
)  # fmt: skip


@given(JOBS.filter(lambda jobs: len(jobs) > 1))
@settings(deadline=None, max_examples=60)
def test_jobs_present_at_the_beginning_hold_gpus_and_count_for_nothing_else(jobs: list[Job]) -> None:
    pool, rest = Pool.uniform(3, 8), jobs[1:]
    whole = result_of(jobs, pool)
    m = metrics_of(result_without(whole, 1), whole=whole)
    begin, end = min(int(j.submit) for j in rest), max(int(j.end) for j in rest)
    free_s = lost_s = held_s = used_s = 0.0
    for second in range(begin, end):
        for node in range(3):
            held = sum(j.gpus for j in jobs if node in j.nodes and j.start <= second < j.end)
            unfit = sum(j.gpus > 8 - held for j in rest) / len(rest)
            free_s, lost_s, held_s = free_s + 8 - held, lost_s + (8 - held) * unfit, held_s + held
            used_s += held if second >= min(j.start for j in rest) else 0
    span, window = end - begin, end - min(j.start for j in rest)
    assert m.fragmentation == (pytest.approx(lost_s / free_s) if free_s else None)
    assert m.gpu_hours_utilization == pytest.approx(held_s / (24 * span))
    assert m.energy_kwh == pytest.approx(3.5 / 3600 * (3 * span + held_s / 8) / 2)
    assert m.utilization == pytest.approx(used_s / (24 * window))
    assert m.gpu_hours == pytest.approx(sum((j.end - j.start) * j.gpus * len(j.nodes) for j in rest) / 3600)
    assert m.jobs == len(rest)


@given(JOBS)
@example([Job(0, 0, 10, (0,), 5), Job(0, 0, 10, (1,), 1)])  # of three free GPUs, and of seven
@settings(deadline=None, max_examples=60)
def test_fragmentation_and_means_equal_a_count_second_by_second(jobs: list[Job]) -> None:
    pool = Pool.uniform(3, 8)  # at most 4 jobs of 2 GPUs per node: never over capacity
    result = result_of(jobs, pool)
    begin, end = min(int(j.submit) for j in jobs), max(int(j.end) for j in jobs)
    free_s = lost_s = held_s = 0.0
    for second in range(begin, end):
        for node in range(3):
            held = sum(j.gpus for j in jobs if node in j.nodes and j.start <= second < j.end)
            unfit = sum(j.gpus > 8 - held for j in jobs) / len(jobs)
            free_s, lost_s, held_s = free_s + 8 - held, lost_s + (8 - held) * unfit, held_s + held
    assert fragmentation(result) == pytest.approx(lost_s / free_s)
    m = metrics_of(result)
    assert m.gpu_hours_utilization == pytest.approx(held_s / (24 * (end - begin)))
    parts = parts_of(result)
    edges = np.linspace(begin - 3.0, end + 3.0, 8)
    means = binned_mean(parts.start, parts.end, parts.gpus, edges)
    assert float((means * np.diff(edges)).sum()) == pytest.approx(held_s)
    for i in range(7):
        area = sum(j.gpus * len(j.nodes) * max(0.0, min(j.end, edges[i + 1]) - max(j.start, edges[i])) for j in jobs)
        assert means[i] == pytest.approx(area / (edges[i + 1] - edges[i]))


def test_free_gpus_that_no_waiting_size_can_use_are_fragments() -> None:
    # 2 of 8 GPUs are free while everybody needs 6: all that is free is a fragment
    assert fragmentation(result_of([Job(0, 0, 10, gpus=6)], Pool.uniform(1, 8))) == 1.0
    assert fragmentation(result_of([Job(0, 0, 10, gpus=8)], Pool.uniform(1, 8))) is None
    # 1 is free, which one of the two sizes could use
    assert fragmentation(result_of([Job(0, 0, 10, gpus=6), Job(1, 0, 10, gpus=1)], Pool.uniform(1, 8))) == 0.5


def test_killed_are_those_of_what_ran() -> None:
    result = result_of([Job(0, 0, 10), Job(0, 0, 10), Job(0, 0, 0, nodes=())])
    result.killed[:] = (True, False, True)
    assert (metrics_of(result).killed, metrics_of(result).jobs) == (1, 2)


def test_a_users_figures_are_over_all_his_jobs_and_the_largest_users_come_first() -> None:
    jobs = [Job(0, 0, 10), Job(0, 10, 40, gpus=2), Job(0, 0, 100, user="bob"), Job(0, 0, 70, user="al")]
    m = metrics_of(result_of(jobs))
    assert [u.name for u in m.users] == ["bob", "al", "ann"]
    ann = m.users[2]
    assert (ann.jobs, ann.gpu_hours) == (2, pytest.approx(70 / 3600))
    assert (ann.mean_jct_s, ann.mean_wait_s) == (25.0, 5.0)
    assert ann.mean_bounded_slowdown == pytest.approx((1 + 40 / 30) / 2)
