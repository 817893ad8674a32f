"""gpusched's own store as a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpusched.errors import GpuschedError, NoHistory
from gpusched.model.jobs import Dependency, DependencyKind, Job, JobSpec, JobState
from gpusched.queue.store import Run, Store
from gpusched.traces.load import load
from gpusched.traces.readers.history import as_submitted, trace_of, window_of

START = 1_790_000_000.0


def job(job_id: str, submit: float, state: JobState, end: float | None, **spec: object) -> Job:
    wanted = {"name": "t", "partition": "A100", "nodes": 2, "gpus_per_node": 4, "cores_per_node": 8,
              "memory_mib_per_node": 1024, "time_limit_s": 600, **spec}  # fmt: skip
    return Job(
        id=job_id, user=f"user-{job_id}", uid=1, spec=JobSpec(**wanted), state=state,  # type: ignore[arg-type]
        submit_time=START + submit, end_time=None if end is None else START + end,
    )  # fmt: skip


def run(store: Store, job_id: str, attempt: int, start: float, end: float | None, state: JobState) -> None:
    store.open_run(
        Run(job_id=job_id, attempt=attempt, user="u", partition="A100", flavor=None, share=0.5, gpus=8,
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
        partition="V100", begin_time=START + 20),
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
    assert [trace.groups[i] for i in trace.group] == ["A100", "A100", "V100"]
    assert trace.notes == ("1 jobs ended without having run and are left out",)
    assert load(state / "gpusched.db").ids == trace.ids
    assert load(state, vc="V100").ids == ("e",)


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
    assert trace.submit.tolist() == [0.0, 0.0, 0.0, 50.0]
    assert trace.duration.tolist() == [30.0, 900.0, 560.0, 100.0]
    assert trace.wait.tolist() == [0.0, 0.0, 40.0, 50.0]
    assert trace.limit.tolist() == [600.0 - 40, 600.0 - 90, 600.0, 600.0]


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
    assert trace.notes == ("4 jobs have dependencies of which only the last to end is kept, or none",)


def test_what_waits_now_ran_as_long_as_its_last_attempt_or_not_yet() -> None:
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
    with pytest.raises(GpuschedError, match="no job in it has run and ended"):
        load(tmp_path / "empty")
