"""gpusched's own store as a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpusched.errors import GpuschedError
from gpusched.model.jobs import Dependency, DependencyKind, Job, JobSpec, JobState
from gpusched.queue.store import Run, Store
from gpusched.sim.traces import load
from gpusched.sim.traces.history import window_of

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
    assert trace.limit.tolist() == [600.0 - 40, 600.0 - 90, 600.0, 600.0]


def test_no_store_and_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(GpuschedError, match=r"there is no gpusched\.db"):
        load(tmp_path / "gpusched.db", "history")
    Store.create_or_open(tmp_path / "empty").close()
    with pytest.raises(GpuschedError, match="no job in it has run and ended"):
        load(tmp_path / "empty")
