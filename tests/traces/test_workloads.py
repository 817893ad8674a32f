"""Slicing, scaling to a load, generating, fitting, figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import FileError, UsageError
from gpusched.traces import file as tracefile
from gpusched.traces.fitting import fit
from gpusched.traces.generate import generate
from gpusched.traces.load import load
from gpusched.traces.slicing import (
    gpu_seconds,
    nodes_for_load,
    of_whole_gpus,
    offered_load,
    parse_trace_time,
    scale_arrivals,
    select,
    slice_trace,
    span_s,
)
from gpusched.traces.statistics import stats_lines, trace_stats
from gpusched.traces.workload import RequestedTimes, RunTime, SizeClass, Workload, load_workload, workload_text
from tests.traces import samples
from tests.traces.comparing import assert_same

Put = Callable[[str, str], Path]
MONDAY = 1767571200.0  # 2026-01-05
PLAIN = Workload(
    jobs=20_000, start=MONDAY, per_hour=100.0, sizes=(SizeClass(gpus=1, share=3), SizeClass(gpus=8, share=1)),
    run_time=RunTime(parts=((1.0, 600.0, 1.0),)),
)  # fmt: skip


def test_slice(put: Put) -> None:
    trace = load(put("log.swf", samples.SWF))
    assert slice_trace(trace, since=5.0, until=6.0).ids == ("2",)
    assert slice_trace(trace, since="2001-09-09T01:46:45").ids == ("2", "3")
    assert slice_trace(trace, user="4").ids == ("2",)
    assert slice_trace(trace, jobs=2).depends_on.tolist() == [-1, 0]
    assert slice_trace(trace, since=1.0).depends_on.tolist() == [-1, -1]  # what it waited for is not there
    assert load(put("log.swf", samples.SWF), vc="1", since="6s").ids == ("3",)
    tracefile.check(select(trace, np.array([0, 2])))
    for wrong in ({"since": 99.0}, {"user": "9"}, {"vc": "x"}, {"since": "soon"}, {"until": "2001-99-99"}):
        with pytest.raises(UsageError):
            slice_trace(trace, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no calendar"):
        parse_trace_time(replace(trace, epoch=None), "2001-09-09")


def test_loads() -> None:
    trace = generate(PLAIN, 1)
    for load_ in (0.7, 0.9, 1.1):
        scaled = scale_arrivals(trace, 128, load_)
        assert offered_load(scaled, 128) == pytest.approx(load_)
        nodes = nodes_for_load(trace, 8, load_)
        assert offered_load(trace, 8 * nodes) == pytest.approx(load_, rel=0.6 / nodes)
    assert nodes_for_load(trace, 1, 1e6) == 8  # the largest job must fit
    with pytest.raises(UsageError):
        scale_arrivals(trace, 128, 0.0)
    with pytest.raises(UsageError):
        nodes_for_load(select(trace, np.array([0])), 8, 0.9)


def test_same_seed_same_trace() -> None:
    assert_same(generate(PLAIN, 7), generate(PLAIN, 7))
    assert not np.array_equal(generate(PLAIN, 7).submit, generate(PLAIN, 8).submit)


def test_plain_arrivals_are_poisson() -> None:
    trace = generate(replace(PLAIN, jobs=100_000), 3)
    gaps = np.diff(trace.submit)
    assert gaps.mean() == pytest.approx(36.0, rel=0.02)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    assert np.mean(trace.gpus == 1) == pytest.approx(0.75, abs=0.01)
    logs = np.log(trace.duration / 600.0)
    assert (logs.mean(), logs.std()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))


def test_cycles() -> None:
    hours = tuple(2.0 if 9 <= h < 17 else 0.5 for h in range(24))
    spec = replace(PLAIN, jobs=200_000, hours=hours, weekdays=(1, 1, 1, 1, 1, 0, 0.5), start=MONDAY + 100_000)
    trace = generate(spec, 2)
    clock = trace.submit + spec.start - MONDAY
    by_hour = np.bincount((clock // 3600).astype(int) % 24, minlength=24)
    assert by_hour[9:17].mean() / by_hour[:9].mean() == pytest.approx(4.0, rel=0.05)
    by_day = np.bincount((clock // 86400).astype(int) % 7, minlength=7)
    assert by_day[5] == 0
    assert by_day[6] / by_day[2] == pytest.approx(0.5, rel=0.15)
    assert span_s(trace) / 3600 * 100 == pytest.approx(200_000, rel=0.03)


def test_bursts() -> None:
    spec = replace(PLAIN, burst_share=0.5, burst_size=10.0, burst_within_s=30.0, users=20)
    trace = generate(spec, 5)
    assert len(trace) == spec.jobs
    gaps = np.diff(trace.submit)
    assert gaps.std() / gaps.mean() > 1.3
    assert span_s(trace) / 3600 * 100 == pytest.approx(spec.jobs, rel=0.1)
    assert len(trace.users) == 20


def test_an_asked_load_is_reached() -> None:
    trace = generate(replace(PLAIN, per_hour=None, load=0.9, load_gpus=400), 4)
    assert offered_load(trace, 400) == pytest.approx(0.9, rel=0.01)


def test_tail_and_limits() -> None:
    run_time = RunTime(parts=((1.0, 600.0, 1.0),), tail_share=0.05, tail_from_s=36000.0, tail_alpha=1.2, maximum_s=1e6)
    limits = RequestedTimes(menu_s=(3600.0, 86400.0), over_median=2.0, over_sigma=0.5, exceeded=0.1)
    trace = generate(replace(PLAIN, jobs=100_000, run_time=run_time, limits=limits), 6)
    tail = trace.duration > 36000.0
    assert tail.mean() == pytest.approx(0.05, abs=0.003)
    assert trace.duration.max() <= 1e6
    alpha = 1 / np.mean(np.log(trace.duration[tail & (trace.duration < 2e5)] / 36000.0))
    assert 1.2 < alpha < 3.0
    assert 0.0 < np.mean(trace.limit < trace.duration) < 0.1
    assert np.all((trace.limit % 3600) == 0)


def test_a_million_in_two_seconds() -> None:
    spec = replace(PLAIN, jobs=1_000_000, burst_share=0.3, burst_size=5.0, users=100,
                   limits=RequestedTimes(menu_s=(3600.0,)), hours=tuple(range(1, 25)))  # fmt: skip
    begin = time.process_time()
    generate(spec, 1)
    assert time.process_time() - begin < 2.0


@given(seed=st.integers(0, 2**31), share=st.floats(0, 1), size=st.floats(1, 50), jobs=st.integers(1, 300),
       weights=st.lists(st.floats(0, 10), min_size=24, max_size=24).filter(any))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_for(seed: int, share: float, size: float, jobs: int, weights: list[float]) -> None:
    spec = replace(PLAIN, jobs=jobs, burst_share=share, burst_size=size, users=3, hours=tuple(weights))
    trace = generate(spec, seed)
    assert len(trace) == jobs
    tracefile.check(trace)


def test_fit_finds_what_was_generated(tmp_path: Path) -> None:
    spec = replace(
        PLAIN, jobs=60_000, users=50, user_zipf=1.2, groups=(("a", 3.0), ("b", 1.0)),
        hours=tuple(1.0 + 0.9 * np.sin(np.arange(24) / 24 * 2 * np.pi)),
        limits=RequestedTimes(menu_s=(3600.0, 14400.0, 86400.0), exceeded=0.05),
    )  # fmt: skip
    path = tmp_path / "w.yaml"
    path.write_text(workload_text(fit(generate(spec, 1))))
    found = load_workload(path)
    assert found.per_hour == pytest.approx(100.0, rel=0.03)
    assert np.array(found.hours) == pytest.approx(np.array(spec.hours), abs=0.1)
    assert [(s.gpus, round(s.share, 1)) for s in found.sizes] == [(1, 0.7), (8, 0.3)] or found.sizes[0].share > 0.7
    assert found.users == 50
    assert found.user_zipf == pytest.approx(1.2, abs=0.2)
    assert found.limits is not None
    assert found.limits.menu_s[:3] == (3600.0, 14400.0, 86400.0)
    again = generate(found, 2)
    assert np.median(again.duration) == pytest.approx(600.0, rel=0.1)
    assert again.duration.mean() == pytest.approx(600.0 * np.exp(0.5), rel=0.1)


def test_times_that_no_log_has_take_no_memory_and_are_no_traceback(put: Put) -> None:
    def log(name: str, epoch: str, last: str, run: str) -> Path:
        rows = "".join(f"{n} {n * 60} 5 {run} 1 -1 -1 1 -1 -1 1 1 1 -1 1 -1 -1 -1\n" for n in range(1, 99))
        return put(name, f"; UnixStartTime: {epoch}\n{rows}99 {last} 5 100 1 -1 -1 1 -1 -1 1 1 1 -1 1 -1 -1 -1\n")

    assert np.mean(fit(load(log("late.swf", "0", "4e15", "100"))).hours) == pytest.approx(1)
    text = workload_text(fit(load(log("epoch.swf", "999999999999", "9999", "100"))))
    assert load_workload(put("epoch.yaml", text)).start == 32503680000.0  # of the year 3000
    assert load(log("long.swf", "0", "9999", "1e308"), "swf").ids == ("99",)


def test_fit_of_philly() -> None:
    trace = load(samples.real("philly_2017.csv.gz"))
    spec = fit(trace)
    made = [generate(spec, seed) for seed in range(5)]
    assert np.mean([gpu_seconds(t) for t in made]) == pytest.approx(gpu_seconds(trace), rel=0.25)
    assert np.mean([np.median(t.duration) for t in made]) == pytest.approx(np.median(trace.duration), rel=0.1)
    assert np.mean([span_s(t) for t in made]) == pytest.approx(span_s(trace), rel=0.05)


SLICED = replace(
    PLAIN, burst_share=0.5, burst_size=5.0, burst_within_s=36_000.0,  # so that bursts overlap
    sizes=(SizeClass(gpus=1, share=3), SizeClass(gpus=2, share=1, profile="3g.40gb")),
)  # fmt: skip


def test_slices_are_drawn_as_whole_gpus_are() -> None:
    whole, sliced = (generate(replace(SLICED, sizes=(SLICED.sizes[0], size))) for size in
                     (SizeClass(gpus=2, share=1), SLICED.sizes[1]))  # fmt: skip
    assert whole.profile is None
    assert sliced.profiles == ("3g.40gb",)
    assert sliced.profile is not None
    assert np.array_equal(sliced.profile, np.where(sliced.gpus == 2, 0, -1))
    assert_same(replace(sliced, profile=None, profiles=()), whole)
    # two halves of a GPU are one
    assert gpu_seconds(sliced) == pytest.approx(float(whole.duration.sum()))
    loaded = generate(replace(SLICED, burst_share=0.0, per_hour=None, load=0.8, load_gpus=16))
    assert offered_load(loaded, 16) == pytest.approx(0.8, rel=0.01)


def test_slices_go_into_files_descriptions_and_subsets(tmp_path: Path) -> None:
    trace = generate(replace(SLICED, jobs=1000))
    path, spec = tmp_path / "t.gpusched.npz", tmp_path / "w.yaml"
    tracefile.write(path, trace)
    assert_same(load(path), trace)
    spec.write_text(workload_text(fit(trace)))
    assert [(s.gpus, s.profile) for s in load_workload(spec).sizes] == [(1, ""), (2, "3g.40gb")]
    with pytest.raises(ValueError, match="MIG"):
        tracefile.check(replace(trace, profiles=("big",)))
    assert trace.profile is not None
    first = select(trace, np.arange(5))
    assert first.profile is not None
    assert first.profile.tolist() == trace.profile[:5].tolist()
    count = int((trace.profile >= 0).sum())
    stats = trace_stats(trace)
    assert stats["by_profile"] == {"3g.40gb": count}
    assert f"MIG slices  3g.40gb {count}" in stats_lines(stats)
    assert sum(stats["gpu_hours_by_gpus"].values()) == pytest.approx(stats["gpu_hours"])
    left = of_whole_gpus(trace)
    assert (left.profile, len(left), set(left.gpus.tolist())) == (None, 1000 - count, {1})
    assert left.notes[-1] == f"{count} jobs in MIG slices are excluded"
    assert of_whole_gpus(left) is left
    with pytest.raises(UsageError, match="all jobs are in MIG slices"):
        of_whole_gpus(select(trace, trace.profile >= 0))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("jobs: 5\narrivals: {per_hour: 1}\nsizes: [{gpus: 1, share: 1}]\n", "run_time: found nothing"),
        ("jobs: x\narrivals: {per_hour: 1}\nsizes: []\nrun_time: {}\n", r":1: jobs: found \"x\""),
        ("jobs: 1\narrivals: {}\nsizes: []\nrun_time: {}\n", r"arrivals: found neither"),
        ("jobs: 1\narrivals: {load: 1}\nsizes: []\nrun_time: {}\n", r"arrivals.gpus: found nothing"),
        ("jobs: 1\narrivals: {per_hour: 1, hours: [1, 2]}\nsizes: []\nrun_time: {}\n", "hours: found 2 weights"),
        (
            "jobs: 1\narrivals: {load: 1, gpus: 1}\nsizes: [{gpus: 1, share: 1, profile: big}]\nrun_time: {}\n",
            'profile: found "big", expected a MIG profile',
        ),
        ("jobs: 1\nsize: 2\n", r":2: size: found an unknown key, .*did you mean sizes"),
    ],
)
def test_wrong_descriptions(put: Put, text: str, error: str) -> None:
    with pytest.raises(FileError, match=error):
        load_workload(put("w.yaml", text))


def test_stats(put: Put) -> None:
    stats = trace_stats(load(put("pods.csv", samples.OPENB)))
    assert (stats["jobs"], stats["rejected"], stats["shared_gpu_jobs"]) == (4, 1, 1)
    assert stats["gpus"] == {"0": 0.25, "1": 0.5, "8": 0.25}
    assert stats["gpu_hours"] == pytest.approx(sum(stats["gpu_hours_by_gpus"].values()))
    assert stats["rejected_why"] == {"a pod that was scheduled": 1}
    assert any(line.startswith("rejected") for line in stats_lines(stats))
    single = trace_stats(slice_trace(load(put("p.csv", samples.PHILLY_CSV)), jobs=1))
    assert single["load_gpus"] is None
    assert stats_lines(single)
