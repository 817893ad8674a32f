"""gpusched's own store as a trace."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpusched.errors import FileError, GpuschedError, NoHistory
from gpusched.model.jobs import Dependency, DependencyKind, Elastic, JobRecord, JobSpec, JobState, Resizes
from gpusched.model.progress import JobProgress
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.sim.resizing import elastic_of
from gpusched.sim.stepper import Stepper
from gpusched.study.study import scenario_of
from gpusched.traces import file as tracefile
from gpusched.traces.load import load
from gpusched.traces.readers.history import EARLIER_S, as_submitted, trace_of, window_of
from gpusched.traces.slicing import select
from gpusched.traces.trace import ProgressRecords

START = 1_790_000_000.0


def job(job_id: str, submit: float, state: JobState, end: float | None, **spec: object) -> JobRecord:
    wanted = {"name": "t", "partition": "A100", "nodes": 2, "gpus_per_node": 4, "cores_per_node": 8,
              "memory_mib_per_node": 1024, "time_limit_s": 600, **spec}  # fmt: skip
    return JobRecord(
        id=job_id, user=f"user-{job_id}", uid=1, spec=JobSpec(**wanted), state=state,  # type: ignore[arg-type]
        submit_time=START + submit, end_time=None if end is None else START + end,
    )  # fmt: skip


def run(store: Store, job_id: str, attempt: int, start: float, end: float | None, state: JobState) -> None:
    store.open_run(
        RunRecord(job_id=job_id, attempt=attempt, user="u", partition="A100", flavor=None, share=0.5, gpus=8,
            start_time=START + start, end_time=None, outcome=None, nodes={"n1": 4, "n2": 4})
    )  # fmt: skip
    if end is not None:
        store.close_run(job_id, attempt, START + end, state)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    store = Store.create_or_open(folder)
    after = (Dependency(DependencyKind.AFTERANY, "a"),)
    store.put_jobs([
        job("a", 0, JobState.COMPLETED, 130, preemptible=True), job("b", 5, JobState.TIMEOUT, 700, dependencies=after),
        job("c", 6, JobState.CANCELLED, 7), job("d", 8, JobState.RUNNING, None), job("e", 9, JobState.FAILED, 60,
        partition="V100", begin_time=START + 20, gpu_types=("V100", "T4")),
    ])  # fmt: skip
    run(store, "a", 1, 10, 40, JobState.PREEMPTED)
    run(store, "a", 2, 60, 130, JobState.COMPLETED)
    run(store, "b", 1, 140, 700, JobState.TIMEOUT)
    run(store, "d", 1, 10, None, JobState.RUNNING)
    run(store, "e", 1, 25, 60, JobState.FAILED)
    store.close()
    return folder


def test_history(state: Path) -> None:
    trace = load(state)
    assert trace.ids == ("a", "b", "e")
    assert trace.epoch == START
    assert trace.preemptible is not None
    assert trace.preemptible.tolist() == [True, False, False]
    assert trace.submit.tolist() == [0.0, 5.0, 20.0]  # e from its begin time on
    assert trace.duration.tolist() == [100.0, 560.0, 35.0]  # both attempts of a
    assert trace.wait.tolist() == [10.0, 135.0, 5.0]
    assert trace.gpus.tolist() == [8, 8, 8]
    assert trace.nodes.tolist() == [2, 2, 2]
    assert trace.cores.tolist() == [16, 16, 16]
    np.testing.assert_array_equal(trace.limit, [600.0] * 3)
    assert trace.depends_on.tolist() == [-1, 0, -1]
    assert (trace.gpu_type.tolist(), trace.gpu_types) == ([-1, -1, 0], ("V100|T4",))
    assert [trace.groups[i] for i in trace.group] == ["A100", "A100", "V100"]
    assert trace.notes == ("1 job that never ran is excluded",)
    assert load(state / "gpusched.db").ids == trace.ids
    assert load(state, vc="V100").ids == ("e",)


def test_lists_of_nodes_spread_own_waits_and_whole_nodes_are_in_the_history(state: Path) -> None:
    store = Store.create_or_open(state)
    specs: tuple[dict[str, object], ...] = (
        {"nodelist": ("n1", "n2"), "exclude": ("n3",), "max_spread": "rack", "placement_wait_s": 60, "exclusive": True},
        {"max_spread": "any", "max_nodes": 4, "nodes": 1, "gpus_per_node": 8},
        {"nodes": 1, "max_spread": "server", "placement_wait_s": 60, "exclude": ("n1", "n2")},
    )
    for number, spec in enumerate(specs, start=6):
        store.put_jobs([job(str(number), number, JobState.COMPLETED, 90, **spec)])
        run(store, str(number), 1, 30, 90, JobState.COMPLETED)
    trace = trace_of(store, name="own", since=START + 6)
    store.close()
    tracefile.write(state / "t.gpusched.npz", trace)
    for found in (trace, load(state / "t.gpusched.npz")):
        assert found.ids == ("6", "7", "8", "e")
        columns = (
            found.nodelist, found.exclude, found.max_nodes, found.one_rack, found.placement_wait, found.nodes,
            found.exclusive,
        )  # fmt: skip
        assert [None if of is None else of.tolist() for of in columns] == [
            [0, -1, -1, -1], [1, -1, 0, -1], [-1, 4, -1, -1], [True, False, False, False], [60, -1, -1, -1],
            [2, 0, 1, 2], [True, False, False, False],
        ]  # fmt: skip
        assert found.node_lists == ("n1|n2", "n3")
        assert found.ran_on is not None
        assert found.ran_on.tolist() == [0, 0, 0, 0], "all ran there"
    plain = trace_of(Store.create_or_open(state), name="own", until=START + 6)
    assert not plain.spreads
    assert plain.nodelist is plain.exclusive is None


def test_jobs_in_slices_are_in_the_history_and_in_its_replays(state: Path) -> None:
    store = Store.create_or_open(state)
    store.put_jobs([job("s", 30, JobState.COMPLETED, 90, profile="1g.10gb", nodes=1, gpus_per_node=2)])
    run(store, "s", 1, 30, 90, JobState.COMPLETED)
    trace = trace_of(store, name="own")
    store.close()
    assert (trace.ids, trace.profiles) == (("a", "b", "e", "s"), ("1g.10gb",))
    assert trace.profile is not None
    assert (trace.profile.tolist(), trace.gpus.tolist()) == ([-1, -1, -1, 0], [8, 8, 8, 2])
    replayed = scenario_of(trace, nodes=2, power=power_model)
    assert replayed.trace.ids == trace.ids
    result = replay(replayed.trace, replayed.pool, "easy")
    assert result.ran.all()
    assert result.start[3] == 85.0, "GPUs are free at 55 s, and one is cut in half a minute"


def test_jobs_that_run_the_same_are_known_by_it(tmp_path: Path) -> None:
    runs: dict[str, dict[str, object]] = {
        "a": {"script": "train"}, "b": {"script": "train"}, "c": {"command": ("train",)}, "d": {},
    }  # fmt: skip
    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs([job(name, 0, JobState.COMPLETED, 20, **what) for name, what in runs.items()])
        for name in runs:
            run(store, name, 1, 10, 20, JobState.COMPLETED)
        trace = trace_of(store, name="t")
    assert trace.command is not None
    assert trace.command.tolist() == [0, 0, 1, -1]


def test_a_window_begins_with_what_ran_and_waited_then(state: Path) -> None:
    """From 100 s on: a and d run since 60 and 10 s, d to the end of the window; b waits, and f comes later."""
    store = Store.create_or_open(state)
    store.put_jobs([msgspec.structs.replace(found, start_time=START + start)
                    for name, start in (("a", 60), ("b", 140), ("d", 10)) if (found := store.job(name))])  # fmt: skip
    store.put_jobs([job("f", 150, JobState.COMPLETED, 300)])
    run(store, "f", 1, 200, 300, JobState.COMPLETED)
    trace, before = window_of(store, name="w", since=START + 100, until=START + 1000)
    store.close()
    assert (trace.ids, before) == (("a", "d", "b", "f"), 3)
    assert trace.arrivals.tolist() == pytest.approx([0.0, 0.0, EARLIER_S, 50.0 + EARLIER_S], abs=1e-6)
    assert (trace.submit + 100 - EARLIER_S).tolist() == pytest.approx([0.0, 8.0, 5.0, 150.0], abs=1e-6), "as they were"
    assert trace.epoch == START + 100 - EARLIER_S
    assert trace.duration.tolist() == [30.0, 900.0, 560.0, 100.0]
    assert trace.wait.tolist() == [10.0, 2.0, 135.0, 50.0]
    assert trace.limit.tolist() == [600.0 - 40, 600.0 - 90, 600.0, 600.0]
    tracefile.write(state / "w.gpusched.npz", trace)
    assert tracefile.read(state / "w.gpusched.npz").arrivals.tolist() == trace.arrivals.tolist()
    one = replace(select(trace, np.array([1, 2])), user=np.array([0, 1]), users=("ann", "bob"))
    pool = Pool.of([NodeSpec(4)] * 2)
    result = replay(one, pool, "fairshare", half_life_s=3600.0, usage={"ann": 10.0})
    assert result.start.tolist() == [0.0, 900.0], "d has its GPUs, though ann has used more than bob, who waits"


def test_a_job_of_a_window_that_first_started_after_it_has_its_later_run(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    store.put_jobs([job("a", 10, JobState.COMPLETED, 90), job("b", 50, JobState.COMPLETED, 400)])
    run(store, "a", 1, 20, 90, JobState.COMPLETED)
    run(store, "b", 1, 300, 400, JobState.COMPLETED)
    trace, before = window_of(store, name="w", since=START, until=START + 100)
    store.close()
    assert (trace.ids, before) == (("a", "b"), 0)
    assert trace.duration.tolist() == [70.0, 100.0]
    assert trace.wait.tolist() == [10.0, 250.0]


def test_a_window_reads_nothing_of_what_was_over_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every night all jobs that ever were took gigabytes of memory."""
    read: set[str] = set()
    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs([
            job("old", 0, JobState.COMPLETED, 20), job("long", 30, JobState.COMPLETED, 150),
            job("new", 110, JobState.COMPLETED, 150),
        ])  # fmt: skip
        for name, start, end in (("old", 10, 20), ("long", 40, 150), ("new", 120, 150)):
            run(store, name, 1, start, end, JobState.COMPLETED)
            store.put_progress([JobProgress(job_id=name, attempt=1, gpus=8, step=1.0)])

        def noted(name: str, key: str) -> None:
            real = getattr(store, name)
            monkeypatch.setattr(store, name, lambda *a: [read.add(getattr(x, key)) or x for x in real(*a)])

        for query, key in (("_jobs_of", "id"), ("_runs", "job_id"), ("_progress", "job_id")):
            noted(query, key)
        trace, before = window_of(store, name="w", since=START + 100, until=START + 200)
        assert (trace.ids, before, read) == (("long", "new"), 1, {"long", "new"})
        assert trace_of(store, name="t", since=START + 100).ids == ("new",)
        assert read == {"long", "new"}


def test_priorities_and_limits_of_arrays_are_in_the_history_in_windows_and_in_files(tmp_path: Path) -> None:
    """A limit that no task can meet is none; what waited when a window begins comes after what ran."""
    store, done = Store.create_or_open(tmp_path), JobState.COMPLETED
    tasks = [msgspec.structs.replace(job(f"{array}_{i}", 40, done, 90), array_id=array, array_index=i)
             for array in "xy" for i in range(3)]  # fmt: skip
    store.put_jobs([
        msgspec.structs.replace(job("a", 0, done, 90), priority=-4),
        msgspec.structs.replace(job("b", 1, done, 90), priority=7), *tasks,
    ])  # fmt: skip
    store.set_meta("array_limit:x", "2")
    store.set_meta("array_limit:y", "3")
    for name, start in (("a", 10), ("b", 60), *((task.id, 70) for task in tasks)):
        run(store, name, 1, start, 90, done)
    windows = [window_of(store, name="w", since=START + since, until=START + 95) for since in (2, 20)]
    store.close()
    for (trace, before), later in zip(windows, (0.0, EARLIER_S), strict=True):  # a runs from 10 s on
        assert (trace.ids[:2], before) == (("a", "b"), 2)
        assert trace.arrivals[:2].tolist() == [0.0, later]
        assert trace.priority is not None
        assert trace.priority.tolist() == [-4, 7, *[0] * 6]
    tracefile.write(tmp_path / "t.gpusched.npz", load(tmp_path))
    for found in (load(tmp_path), load(tmp_path / "t.gpusched.npz"), select(windows[0][0], np.arange(8))):
        assert found.array is not None
        assert found.array_limit is not None
        assert found.priority is not None
        assert found.priority.tolist() == [-4, 7, *[0] * 6]
        assert found.array_limit.tolist() == [-1, -1, 2, 2, 2, -1, -1, -1]
        assert len(set(found.array[2:5].tolist())) == 1


def test_slurms_jobs_of_one_second_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    ids = ["100", "36", "36_10", "36_2", "9"]
    store = Store.create_or_open(tmp_path)
    store.put_jobs([job(one, 0, JobState.COMPLETED, 40) for one in ids])
    for one in ids:
        run(store, one, 1, 10, 40, JobState.COMPLETED)
    expected = ("9", "36", "36_2", "36_10", "100")
    assert trace_of(store, name="h").ids == expected
    assert tuple(one.id for one in store.rows()) == expected
    store.close()


def test_since_is_in_and_until_is_not(state: Path) -> None:
    store = Store.create_or_open(state)
    for since, until, ids in ((0, 5, "a"), (0, 6, "ab"), (5, 20, "b"), (5, 21, "be"), (20, 99, "e")):
        trace = trace_of(store, name="w", since=START + since, until=START + until)
        assert "".join(trace.ids) == ids
    with pytest.raises(NoHistory):
        trace_of(store, name="w", since=START + 21)
    store.close()


def test_of_several_that_a_job_waits_for_the_last_to_end_is_kept(tmp_path: Path) -> None:
    def after(*names: str, kind: DependencyKind = DependencyKind.AFTEROK) -> tuple[Dependency, ...]:
        return tuple(Dependency(kind, name) for name in names)

    done = JobState.COMPLETED
    array = [msgspec.structs.replace(job(f"x_{i}", 3, done, 90 - 9 * i), array_id="x", array_index=i) for i in (0, 1)]
    jobs = [
        job("a", 0, done, 50), job("b", 1, done, 70), *array, job("c", 4, done, 99, dependencies=after("a", "b")),
        job("d", 5, done, 99, dependencies=after("x")), job("e", 6, done, 99, dependencies=after("b")),
        job("f", 7, done, 99, dependencies=after("a", kind=DependencyKind.AFTER)),
        job("g", 8, done, 99, dependencies=after("gone")), job("h", 9, done, 99, dependencies=after("z")),
        job("z", 10, done, 99),
    ]  # fmt: skip
    store = Store.create_or_open(tmp_path)
    store.put_jobs(jobs)
    for one in jobs:
        run(store, one.id, 1, 40, (one.end_time or 0.0) - START, done)
    trace = trace_of(store, name="w")
    store.close()
    named = {
        job_id: trace.ids[row] for job_id, row in zip(trace.ids, trace.depends_on.tolist(), strict=True) if row >= 0
    }
    assert named == {"c": "b", "d": "x_0", "e": "b"}, "h would wait for a later one"
    assert trace.notes == ("4 jobs' dependencies were simplified or dropped",)


def test_an_array_that_waited_for_an_array_takes_no_time_by_their_product() -> None:
    done, tasks = JobState.COMPLETED, range(8000)
    after = (Dependency(DependencyKind.AFTEROK, "x"),)
    first = [msgspec.structs.replace(job(f"x_{i}", 0, done, i), array_id="x", array_index=i) for i in tasks]
    then = [msgspec.structs.replace(job(f"y_{i}", 1, done, 9000), array_id="y") for i in tasks]
    then = [msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, dependencies=after)) for one in then]
    begin = time.process_time()
    trace = as_submitted([*first, *then])
    assert time.process_time() - begin < 8  # it took half a minute
    assert {trace.ids[row] for row in trace.depends_on.tolist() if row >= 0} == {"x_7999"}


def test_a_pending_job_has_the_run_time_of_its_last_attempt_or_none() -> None:
    jobs = [
        msgspec.structs.replace(job("b", 5, JobState.COMPLETED, 60), start_time=START + 50),
        job("a", 5, JobState.PENDING, None, memory_mib_per_node=1024, gpus_per_node=3),
        msgspec.structs.replace(job("c", 0, JobState.COMPLETED, 9), start_time=START + 9),
        job("d", 6, JobState.CANCELLED, 9),
    ]  # fmt: skip
    trace = as_submitted(jobs)
    assert (trace.ids, trace.epoch, trace.submit.tolist()) == (("c", "a", "b", "d"), START, [0.0, 5.0, 5.0, 6.0])
    assert trace.duration.tolist() == [0.001, 1.0, 10.0, 1.0]
    assert trace.wait.tolist() == [9.0, np.inf, 45.0, np.inf]
    assert (trace.memory_mib.tolist(), trace.gpus.tolist()) == ([2048] * 4, [8, 6, 8, 8])


def test_no_store_and_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(GpuschedError, match=r"there is no gpusched\.db"):
        load(tmp_path / "gpusched.db", "history")
    Store.create_or_open(tmp_path / "empty").close()
    with pytest.raises(GpuschedError, match="no job has run and ended"):
        load(tmp_path / "empty")


# Reported progress, and the sizes that jobs had

SIZES = Elastic(sizes=(2, 4, 8), base_gpus=2, base_cores=4, base_memory_mib=512)


def resized(
    store: Store, job_id: str, *attempts: tuple[int, float, float, float | None], pace: dict[int, float]
) -> JobRecord:
    """A job that was submitted at 0: its attempts (GPUs, start, end, when work ended), and its pace at each size."""
    step, last, cost, ran = 0.0, len(attempts), 0.0, 0.0
    for n, (gpus, start, end, until) in enumerate(attempts, 1):
        outcome = JobState.COMPLETED if n == last else JobState.PENDING
        store.open_run(
            RunRecord(job_id=job_id, attempt=n, user="u", partition="A100", flavor=None, share=0.5, gpus=gpus,
                start_time=START + start, end_time=None, outcome=None, nodes={"n1": gpus})
        )  # fmt: skip
        store.close_run(job_id, n, START + end, outcome, None if until is None else START + until)
        seen = JobProgress(job_id=job_id, attempt=n, gpus=gpus)
        if pace:
            seen = seen.with_step(step, 1000.0, None, START + start + 1)
            step += pace[gpus] * ((end if until is None else until) - start)
            seen = seen.with_step(step, 1000.0, None, seen.first_at + (step - seen.first_step) / pace[gpus])  # type: ignore[operator]
            store.put_progress([seen])
        if n < last:
            cost, ran = cost + attempts[n][1] - (end if until is None else until), ran + end - start
    resizes = Resizes(count=last - 1, costs_s=cost, measured=last - 1, had_s=ran) if last > 1 else None
    found = msgspec.structs.replace(
        job(job_id, 0, JobState.COMPLETED, attempts[-1][2], nodes=1, gpus_per_node=attempts[-1][0], elastic=SIZES),
        start_time=START + attempts[-1][1], resizes=resizes,
    )  # fmt: skip
    store.put_jobs([found])
    return found


PACE = {2: 1.0, 4: 1.5, 8: 1.8}
LIFE = ((2, 10.0, 110.0, 104.0), (8, 120.0, 180.0, 176.0), (4, 190.0, 250.0, None))


def test_a_job_that_had_several_sizes_has_its_work_at_its_base_size_by_its_own_pace(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    resized(store, "r", *LIFE, pace=PACE)
    resized(store, "s", (4, 20.0, 80.0, None), pace={})
    store.put_jobs([job("x", 1, JobState.COMPLETED, 101)])
    run(store, "x", 1, 1, 101, JobState.COMPLETED)
    trace = trace_of(store, name="w")
    store.close()
    assert trace.ids == ("r", "s", "x")
    assert trace.gpus.tolist() == [2, 2, 8]
    assert (trace.cores.tolist(), trace.memory_mib.tolist(), trace.nodes.tolist()) == (
        [4, 4, 16],
        [512, 512, 2048],
        [0, 0, 2],
    )
    work = 94 + 56 * 1.8 + 60 * 1.5
    assert trace.duration.tolist() == pytest.approx([work, 60 * 2**0.8, 100.0], rel=1e-12)
    progress = trace.progress
    assert progress is not None
    np.testing.assert_allclose(progress.steps, [work, np.nan, np.nan])
    np.testing.assert_array_equal(progress.cost_s, [(16 + 14) / 2, np.nan, np.nan])
    assert progress.cooldown_s.tolist() == [600.0, 600.0, 0.0]
    assert progress.sizes(0) == pytest.approx(PACE)
    assert list(progress.sizes(1)) == [2, 4, 8]
    assert (progress.speeds(1), list(progress.sizes(2))) == ({}, [8])
    assert (progress.run_job.tolist(), progress.run_gpus.tolist()) == ([0, 0, 0, 1, 2], [2, 8, 4, 4, 8])
    assert progress.run_after_s.tolist() == [10.0, 120.0, 190.0, 20.0, 0.0]
    assert progress.run_s.tolist() == [94.0, 56.0, 60.0, 60.0, 100.0]
    assert "1 job reported progress; 2 resizable" in trace.notes[-1]


def test_work_that_was_not_saved_or_was_made_twice_counts_once(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    store.put_jobs([job("n", 0, JobState.COMPLETED, 300, nodes=1, gpus_per_node=4), job("o", 0, JobState.TIMEOUT, 300)])
    for name in "no":
        run(store, name, 1, 0, 100, JobState.NODE_FAIL)
        run(store, name, 2, 110, 300, JobState.COMPLETED)
    first = (
        JobProgress(job_id="n", attempt=1, gpus=4).with_step(0, 280, None, START).with_step(100, 280, None, START + 100)
    )
    again = JobProgress(job_id="n", attempt=2, gpus=4).with_step(90, 280, None, START + 110)
    store.put_progress([first, again.with_step(280, 280, None, START + 300)])
    trace = trace_of(store, name="w")
    store.put_progress([msgspec.structs.replace(first, parts=((8, 50.0, 10.0),))])  # a hot job's earlier size
    resized = trace_of(store, name="w")
    store.close()
    assert trace.duration.tolist() == [280.0, 290.0], "a job without reports has all that it ran"
    assert resized.duration.tolist() == trace.duration.tolist()


def test_a_window_takes_what_is_left_of_the_work(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    resized(store, "r", *LIFE, pace=PACE)
    store.put_jobs([job("x", 201, JobState.COMPLETED, 260)])
    run(store, "x", 1, 210, 260, JobState.COMPLETED)
    trace, before = window_of(store, name="w", since=START + 200, until=START + 1000)
    store.close()
    assert (trace.ids, before) == (("r", "x"), 1)
    assert trace.duration.tolist() == pytest.approx([50 * 1.5, 50.0])
    assert trace.limit.tolist() == [600.0 - 100 - 60 - 10, 600.0]
    assert trace.progress is not None
    assert list(trace.progress.sizes(0)) == [2, 4, 8]


def test_reported_progress_goes_with_its_job_and_into_files(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "state")
    resized(store, "r", *LIFE, pace=PACE)
    store.put_jobs([job("x", 1, JobState.COMPLETED, 101)])
    run(store, "x", 1, 1, 101, JobState.COMPLETED)
    store.close()
    trace = load(tmp_path / "state")
    only = select(trace, np.array([False, True]))
    assert only.progress is not None
    assert (only.progress.sizes(0).keys(), only.progress.run_job.tolist()) == ({8}, [0])
    tracefile.write(tmp_path / "t.gpusched.npz", trace)
    kept = load(tmp_path / "t.gpusched.npz")
    assert trace.progress is not None
    assert kept.progress is not None
    for field in fields(ProgressRecords):
        np.testing.assert_array_equal(getattr(kept.progress, field.name), getattr(trace.progress, field.name))
    for change in (
        {"size_job": trace.progress.size_job[::-1]},
        {"steps_per_s": trace.progress.steps_per_s * 0},
        {"steps": trace.progress.steps[:1]},
    ):
        tracefile.write(tmp_path / "b.npz", replace(trace, progress=replace(trace.progress, **change)))
        with pytest.raises(FileError, match="progress"):
            tracefile.read(tmp_path / "b.npz")


def test_ranks_that_join_and_leave_go_into_the_trace_and_into_files(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "state")
    hot = resized(store, "h", *LIFE, pace=PACE)
    assert hot.spec.elastic is not None
    elastic = msgspec.structs.replace(hot.spec.elastic, rank_gpus=1)
    store.put_jobs([msgspec.structs.replace(hot, spec=msgspec.structs.replace(hot.spec, elastic=elastic))])
    resized(store, "s", (4, 20.0, 80.0, None), pace={})
    store.close()
    trace = load(tmp_path / "state")
    assert trace.progress is not None
    assert trace.progress.rank_gpus is not None
    assert (trace.progress.rank_gpus.tolist(), trace.nodes.tolist()) == ([1, 0], [2, 0]), "base 2 is two ranks"
    tracefile.write(tmp_path / "t.gpusched.npz", trace)
    kept = load(tmp_path / "t.gpusched.npz")
    assert kept.progress is not None
    np.testing.assert_array_equal(kept.progress.rank_gpus, trace.progress.rank_gpus)
    last = select(kept, np.array([False, True])).progress
    assert last is not None
    assert last.rank_gpus is not None
    assert last.rank_gpus.tolist() == [0]
    uneven = replace(trace.progress, rank_gpus=np.array([3, 0]))
    tracefile.write(tmp_path / "b.npz", replace(trace, progress=uneven))
    with pytest.raises(FileError, match="whole ranks"):
        tracefile.read(tmp_path / "b.npz")


def test_a_replay_at_the_recorded_sizes_takes_what_was_recorded(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    resized(store, "r", *LIFE, pace=PACE)
    store.close()
    trace = load(tmp_path)
    pool = Pool.uniform(1, 8)
    stepper = Stepper(trace, pool, ReplayOptions(elastic=elastic_of(trace)))
    stepper.advance()
    progress = trace.progress
    assert progress is not None
    for gpus, seconds in zip(progress.run_gpus.tolist(), progress.run_s.tolist(), strict=True):
        if stepper.waiting():
            stepper.start(0)
        else:
            stepper.resize(0, gpus)
            seconds += progress.cost_s[0]
        if gpus != 4:
            assert stepper.advance(stepper.now + seconds)
    while stepper.advance():
        pass
    assert stepper.result("as recorded").end.tolist() == [pytest.approx(250.0 - 10, abs=1e-9)]


def test_replays_under_a_policy_that_chooses_sizes_go_by_it_and_others_by_the_base_size(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    resized(store, "r", *LIFE, pace=PACE)
    store.close()
    trace, pool = load(tmp_path), Pool.uniform(1, 8)
    assert replay(trace, pool, "easy").end.tolist() == trace.duration.tolist()
    assert replay(trace, pool, "elastic").end.tolist() == [pytest.approx(trace.duration[0] / 1.8)]
    assert replay(trace, Pool.uniform(1, 4), "elastic").end.tolist() == [pytest.approx(trace.duration[0] / 1.5)]
