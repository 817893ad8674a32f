"""A job's progress from reading to reading: pace, what is left, attempts, clocks that are set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.progress import record_progress
from gpusched.model.jobs import Allocation, Elastic, JobRecord, JobSpec, JobState, NodeAllocation, Resizes
from gpusched.model.progress import JobProgress, speeds_of
from gpusched.model.readings import ContainerReading, NodeReading, ProgressReading, SavedReading
from gpusched.queue.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path)
    yield opened
    opened.close()


EMPTY = JobProgress(job_id="j", attempt=1, gpus=4)


def progress_of(*steps: tuple[float, float], of: float | None = 100.0) -> JobProgress:
    progress = EMPTY
    for step, at in steps:
        progress = progress.with_step(step, of, None, at)
    return progress


def test_pace_and_what_is_left() -> None:
    progress = progress_of((10, 100), (20, 105), (20, 107), (30, 110))
    assert progress.steps_per_s == 2.0
    assert progress.fraction == 0.3
    assert progress.end() == 110 + 70 / 2
    assert progress.left_s(120) == 25
    assert progress.left_s(1000) == 0
    assert (progress.first_step, progress.first_at) == (10, 100)


def test_a_single_report_gives_no_speed() -> None:
    assert progress_of((10, 100)).steps_per_s is None
    assert progress_of((10, 100)).left_s(100) is None
    assert progress_of((10, 100), (10, 200)).steps_per_s is None
    assert progress_of((10, 100), (20, 110), of=None).left_s(100) is None


def test_pace_is_that_of_late() -> None:
    slow = [(float(i), 100.0 * i) for i in range(20)]  # 0.01 steps a second for 1900 s
    fast = [(19.0 + i, 1900.0 + i) for i in range(1, 1300)]
    assert progress_of(*slow).steps_per_s == pytest.approx(0.01, abs=1e-12)
    assert progress_of(*slow, *fast, of=1e6).steps_per_s == pytest.approx(1.0, abs=1e-12)


def test_a_job_that_goes_back_to_what_it_saved_is_measured_anew() -> None:
    progress = progress_of((10, 100), (50, 110), (20, 120))
    assert (progress.step, progress.steps_per_s) == (20, None)
    assert progress.with_step(30, 100, None, 130).steps_per_s == 1.0


def test_a_file_older_than_the_last_does_not_turn_time_back() -> None:
    progress = progress_of((10, 100), (20, 110), (30, 105))
    assert progress.at == 110
    assert progress.steps_per_s == 2.0


def test_a_clock_that_was_set_changes_no_pace() -> None:
    progress = progress_of((10, 100), (20, 110))
    later = progress.shifted(3600).with_step(30, 100, None, 3720)
    assert later.steps_per_s == 1.0
    assert later.saved_at is None


def _job(attempt: int = 1) -> JobRecord:
    spec = JobSpec(name="n", partition="p", gpus_per_node=4, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60)
    parts = tuple(NodeAllocation(rank=r, node=f"n{r}", gpus=(0,), cores=1, memory_mib=1) for r in range(2))
    return JobRecord(
        id="j", user="u", uid=1, spec=spec, state=JobState.RUNNING, submit_time=0.0, start_time=40.0, attempt=attempt,
        allocation=Allocation("j", parts),
    )  # fmt: skip


def _seen(node: str, name: str, now: float, **fields: object) -> dict[str, NodeObservation]:
    container = ContainerReading(name=name, phase="running", **fields)  # type: ignore[arg-type]
    return {node: NodeObservation(began=now, result=NodeReading(node=node, time=now, containers=(container,)))}


def test_only_the_present_attempt_on_the_node_of_rank_0_counts(store: Store) -> None:
    store.put_jobs([_job(attempt=2)])
    said = ProgressReading(step=5, of=10, age_s=1)
    for node, name in (("n0", "gpusched-j-1-0"), ("n1", "gpusched-j-2-0"), ("n1", "gpusched-j-2-1")):
        record_progress(store, [_job(attempt=2)], _seen(node, name, 50.0, progress=said))
    assert store.progress_of_unended() == {}
    record_progress(store, [_job(attempt=2)], _seen("n0", "gpusched-j-2-0", 50.0, progress=said))
    ((found,),) = store.progress_of_unended().values()
    assert (found.step, found.at, found.attempt, found.gpus) == (5, 49.0, 2, 4)


def test_attempts_have_rows_of_their_own(store: Store) -> None:
    for attempt in (1, 2):
        store.put_jobs([_job(attempt)])
        name, said = f"gpusched-j-{attempt}-0", ProgressReading(step=5 * attempt, age_s=0)
        saved = SavedReading(step=4, age_s=2)
        record_progress(store, [_job(attempt)], _seen("n0", name, 50.0, progress=said, saved=saved))
    assert [(p.attempt, p.step, p.saved_step, p.saved_at) for p in store.progress_of_job("j")] == [
        (1, 5, 4, 48.0),
        (2, 10, 4, 48.0),
    ]


def test_a_bad_progress_file_is_reported_until_it_is_good_again(store: Store) -> None:
    store.put_jobs([_job()])
    look = ["x: bad", None]
    for error in look:
        record_progress(
            store, [_job()],
            _seen("n0", "gpusched-j-1-0", 59.0, job_file_error=error, saved=SavedReading(step=1, age_s=0)),
        )  # fmt: skip
        assert store.progress_of_unended()["j"][-1].trouble == (error or "")


def test_the_last_words_of_a_job_that_has_just_ended_go_on_with_its_earlier_ones(store: Store) -> None:
    for step, now in ((5, 50.0), (25, 60.0)):
        ended = {"state": JobState.COMPLETED, "end_time": now} if now == 60.0 else {}
        store.put_jobs([msgspec.structs.replace(_job(), **ended)])
        said = ProgressReading(step=step, age_s=0)
        record_progress(store, [_job()], _seen("n0", "gpusched-j-1-0", now, progress=said))
    (found,) = store.progress_of_job("j")
    assert (found.first_step, found.step, found.steps_per_s) == (5, 25, 2.0)
    assert store.progress_of_unended() == {}


def test_the_store_moves_with_the_clock(store: Store) -> None:
    store.put_jobs([_job()])
    store.put_progress([msgspec.structs.replace(progress_of((1, 10), (2, 20)), saved_at=5.0)])
    store.shift_rows(100.0, 0.0)
    found = store.progress_of_unended()["j"][-1]
    assert (found.at, found.since, found.first_at, found.saved_at) == (120.0, 110.0, 110.0, 105.0)


def test_files_of_an_earlier_attempt_do_not_count(store: Store) -> None:
    store.put_jobs([_job(attempt=2)])
    old, new = (ProgressReading(step=5, of=10, age_s=age) for age in (11.0, 10.0))
    record_progress(store, [_job(attempt=2)], _seen("n0", "gpusched-j-2-0", 50.0, progress=old))
    assert store.progress_of_unended() == {}
    record_progress(store, [_job(attempt=2)], _seen("n0", "gpusched-j-2-0", 50.0, progress=new))
    assert store.progress_of_unended()["j"][-1].first_at == 40.0


@pytest.mark.parametrize(("reports", "speeds"), [
    (((10, 50.0, 2, 2, None), (20, 55.0, 2, 1, 8), (21, 95.0, 1, 1, 8), (23, 97.0, 1, 1, None)), {8: 2.0, 4: 1.0}),
    (((10, 50.0, 1, 1, None), (20, 60.0, 1, 2, 4), (21, 90.0, 2, 2, None), (41, 100.0, 2, 2, None)), {4: 1.0, 8: 2.0}),
])  # fmt: skip
def test_the_pause_of_a_hot_resize_counts_at_no_size(
    store: Store, reports: tuple[tuple[int, float, int, int, int | None], ...], speeds: dict[int, float]
) -> None:
    """Else a job that just grew and lost a rank seems slow at that size, and does not grow again.

    ``reports``: step, time, nodes of its group and nodes that it has, and its GPUs before a resize under way.
    """
    elastic = Elastic(sizes=(4, 8), base_gpus=4, base_cores=1, base_memory_mib=1, cooldown_s=0, rank_gpus=4)
    for step, now, nodes, has, before in reports:
        spec = msgspec.structs.replace(_job().spec, elastic=elastic, nodes=has)
        job = msgspec.structs.replace(_job(), spec=spec, resizes=Resizes(before=before))
        store.put_jobs([job])
        said = ProgressReading(step=step, age_s=0, nodes=float(nodes))
        record_progress(store, [job], _seen("n0", "gpusched-j-1-0", now, progress=said))
    assert speeds_of(store.progress_of_job("j")) == speeds


def test_steps_so_small_that_their_pace_is_no_number_give_none() -> None:
    """A job may report anything: nothing may be divided by 0, here or by what chooses sizes."""
    progress = progress_of((0.0, 100), (5e-324, 110))
    assert (progress.steps_per_s, progress.end(), progress.left_s(120), speeds_of([progress])) == (None, None, None, {})
