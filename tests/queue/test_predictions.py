"""Forecasts in the store, and stores from before there were any."""

from __future__ import annotations

from pathlib import Path

from gpusched.model.jobs import JobState
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import Prediction
from gpusched.queue.snapshots import recently_finished
from gpusched.queue.store import RunRecord, Store
from tests.builders import spec
from tests.controller.applying import NOW
from tests.queue.records import job


def test_the_first_prediction_of_a_job_counts_and_meets_its_start(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    store.put_jobs([job("a", JobState.RUNNING), job("b", JobState.PENDING), job("c", JobState.CANCELLED)])
    assert store.unpredicted() == (1, ["b"])
    first = [Prediction(j, "p", NOW, NOW + 60, NOW + 50, None, NOW + 99) for j in "abc"]
    store.put_predictions(first)
    store.put_predictions([p._replace(made=NOW + 5, median=NOW) for p in first])
    assert store.unpredicted() == (1, [])
    earlier = RunRecord(job_id="a", attempt=1, user="u", partition="p", flavor=None, share=1, gpus=1,
    start_time=NOW - 9,
                  end_time=None, outcome=None, nodes={})  # fmt: skip
    store.open_run(earlier)  # an attempt before the forecast: the job was requeued
    assert store.predicted_starts(NOW, NOW + 1)[0].started is None
    store.open_run(
        RunRecord(
            **{**{f: getattr(earlier, f) for f in earlier.__struct_fields__}, "attempt": 2, "start_time": NOW + 70}
        )
    )
    found = {f.prediction.job_id: f for f in store.predicted_starts(NOW, NOW + 1)}
    assert [f.prediction for f in found.values()] == first
    assert (found["a"].started, found["a"].waits) == (NOW + 70, False)
    assert (found["b"].started, found["b"].waits) == (None, True)
    assert (found["c"].started, found["c"].waits) == (None, False)
    assert store.predicted_starts(NOW + 1, NOW + 9) == []
    store.close()


def test_run_times_are_learned_of_ended_jobs_unless_a_node_or_the_scheduler_cut_them_short(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    wide = spec(nodes=3, gpus_per_node=2, cores_per_node=5, memory_mib_per_node=70)
    ends = (JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY, JobState.CANCELLED,
            JobState.NODE_FAIL, JobState.PREEMPTED, JobState.RUNNING)  # fmt: skip
    for n, state in enumerate(ends):
        end = None if state is JobState.RUNNING else NOW + 100 + n
        times = {"submit_time": NOW - n, "start_time": NOW + 10, "end_time": end}
        store.put_jobs([job(f"j{n}", state, spec=wide, attempt=2, **times)])
    for n in range(3):  # of the latest that ended, so that they would crowd out those that ran
        store.put_jobs([job(f"never{n}", JobState.CANCELLED, start_time=None, end_time=NOW + 500 + n)])
    assert recently_finished(store, {"p": PolicySpec(name="x")}) == ()
    found = recently_finished(store, {"q": PolicySpec(name="y"), "p": PolicySpec(name="x", agent="rltune")})
    times = {(NOW - n, NOW + 100 + n, 90.0 + n) for n in range(5)}
    assert [j.ran_s for j in store.ended_runs(3)] == [92.0, 93.0, 94.0]
    assert {(f.submit_time, f.end_time, f.ran_s) for f in found} == times
    sizes = {(f.nodes, f.gpus, f.cores, f.memory_mib, f.partition, f.attempt) for f in found}
    assert sizes == {(3, 6, 15, 210, "p", 2)}
    store.close()
