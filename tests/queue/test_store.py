"""The store: what goes in comes out; all or nothing; readers without a right to write."""

from __future__ import annotations

import fcntl
import math
import os
import random
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations, count, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.errors import GpuschedError
from gpusched.model.arrays import restricted_row
from gpusched.model.events import Event
from gpusched.model.healthchecks import CheckRecord
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import JobRecord, JobState, Preemptions
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState, Wiring
from gpusched.model.reservations import Reservation
from gpusched.queue import locks, private, promotions, rows
from gpusched.queue.lease import STANDBYS
from gpusched.queue.locks import connect_to_write, lock_holders
from gpusched.queue.overlaps import HeldGpus, overlaps
from gpusched.queue.promotions import Fallback, PolicyChange, Shadow, ShadowDifference
from gpusched.queue.reading import COPY_EVERY, CURRENT, PUBLISHED, current_stamp, open_to_read
from gpusched.queue.schema import FIRST_VERSION, MIGRATIONS, SCHEMA, SCHEMA_VERSION
from gpusched.queue.store import (
    ACTIVE_CONTROLLER,
    DATABASE,
    FailedLaunch,
    NodeRecord,
    RankRecord,
    Reader,
    RunRecord,
    Store,
    UsageRow,
)
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.imagined import inventory
from tests.queue.records import ID, job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create_or_open(tmp_path)
    yield store
    store.close()


SUMS = ("gpu_s", "energy_j", "energy_unknown_s", "util_s", "util_known_s", "idle_s")


def test_everything_comes_back_as_it_went_in(store: Store, tmp_path: Path) -> None:
    event = Event(time=NOW, kind="x", job_id=ID, node="n0", user="u", data={"a": [1, None, "é"]})
    reading = NodeReading(
        node="n0", time=NOW, containers=None,
        gpus=(Gpu(index=0, power_w=None, energy_j=1.25, links={1: 3}, processes=(GpuProcess(pid=1),)),),
    )  # fmt: skip
    record = NodeRecord(
        name="n0",
        state=NodeState.DOWN,
        failed_launches=(FailedLaunch(job="a", user="u"),),
        links={0: {1: 2}},
        reading=reading,
    )
    rank = RankRecord(job_id=ID, attempt=1, rank=0, node="n0", runtime="podman", gpus=(1, 2), exit_code=None)
    run = RunRecord(
        job_id=ID, attempt=1, user="u", partition="p", flavor=None, share=0.25, gpus=2, start_time=NOW, end_time=None,
        outcome=None, nodes={"n0": 2},
    )  # fmt: skip
    usage = UsageRow(bucket=300, node="n0", job_id=ID, user="u", partition="p", gpu_s=1.5, energy_j=2.5)
    with store.transaction():
        store.put_jobs([job()])
        store.append([event])
        store.put_nodes([record])
        store.put_ranks([rank])
        store.open_run(run)
        store.add_usage([usage, usage])
    reader = Reader.open(tmp_path)
    assert reader is not None
    assert reader.job(ID) == job()
    assert reader.events(job_id=ID) == reader.events(node="n0") == [event]
    assert reader.node_records() == {"n0": record}
    assert reader.ranks() == reader.ranks(job_id=ID) == [rank]
    assert reader.runs(NOW, NOW + 1) == [run]
    assert reader.usage(0) == [msgspec.structs.replace(usage, gpu_s=3.0, energy_j=5.0)]
    reader.close()
    # `gpusched check` asks this; SQLite takes a table for damaged whose key is not in its first columns.
    assert store._db.execute("PRAGMA quick_check").fetchall() == [("ok",)]


def test_old_usage_is_added_up_by_the_hour(tmp_path: Path) -> None:
    """Each sum by itself, per node and holder; what is newer than the border stays as fine as it is."""
    store = Store.create_or_open(tmp_path)
    figures = {f: 10.0**i for i, f in enumerate(SUMS)}
    rows = [
        UsageRow(bucket=bucket, node=node, job_id=job, user="u", partition="p", **figures)
        for bucket in (3600, 3900, 6900, 7200, 7500)
        for node, job in (("n0", "a"), ("n0", "b"), ("n1", "a"))
    ]
    with store.transaction():
        store.add_usage(rows)
        store.compact_usage(7500, 3600)
        store.compact_usage(7500, 3600)  # nothing is left to be added up
    found = {(r.bucket, r.node, r.job_id): r for r in store.usage(0)}
    assert {key[1:] for key in found} == {("n0", "a"), ("n0", "b"), ("n1", "a")}
    for (bucket, *_), row in found.items():
        times = {3600: 3, 7200: 1, 7500: 1}[bucket]
        assert {f: getattr(row, f) for f in SUMS} == {f: times * v for f, v in figures.items()}
        assert (row.user, row.partition) == ("u", "p")
    assert len(found) == 9
    store.close()


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    old = b'{"name":"n0","state":"DRAINED","drain_reason":"x","drained_by":"gpusched","launch_failures":["a","b"]}'
    store._db.execute("INSERT INTO nodes VALUES ('n0', ?)", (old,))
    record = store.node_records()["n0"]
    assert (record.drain_reason, record.failed_launches) == ("x", ())
    store.close()


def test_all_or_nothing(store: Store) -> None:
    def half() -> Iterator[JobRecord]:
        yield job()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), store.transaction():
        store.put_jobs(half())
    assert store.job(ID) is None
    with store.transaction():
        store.put_jobs([job("0123456789b")])
        with pytest.raises(ZeroDivisionError), store.savepoint():
            store.put_jobs(half())
        store.put_jobs([job("0123456789c")])
    assert [j.id for j in store.active()] == ["0123456789b", "0123456789c"]


def test_a_full_disk_in_the_middle_of_a_transaction_is_reported(store: Store) -> None:
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="full"), store.transaction():
        store.put_jobs(job(f"{n:011d}") for n in range(1000))
    assert store.counts() == {}
    store._db.execute("PRAGMA max_page_count = 1000000")
    with store.transaction():
        store.put_jobs([job()])
    assert store.counts() == {"RUNNING": 1}


def test_whether_anything_of_a_submission_is_left(store: Store) -> None:
    store.put_jobs([job(state=JobState.COMPLETED), job(f"{ID[:-1]}b_0", JobState.FAILED, array_id=f"{ID[:-1]}b")])
    store.put_jobs([job(f"{ID[:-1]}b_1", JobState.PENDING, array_id=f"{ID[:-1]}b")])
    assert [store.has_unended(j) for j in (ID, f"{ID[:-1]}b", f"{ID[:-1]}b_0", "nobody")] == [False, True, False, False]


def test_jobs_by_what_they_are(store: Store) -> None:
    ended = job("0123456789b", JobState.FAILED, end_time=NOW + 5, user="bob", submit_time=NOW + 2)
    waiting = job("0123456789c", JobState.PENDING, submit_time=NOW + 1)
    store.put_jobs([ended, job(), waiting])
    assert [j.id[-1] for j in store.jobs()] == ["a", "c", "b"]
    assert [j.id[-1] for j in store.jobs(limit=2)] == ["c", "b"]
    assert [j.id[-1] for j in store.jobs(user="bob")] == ["b"]
    assert [j.id[-1] for j in store.jobs(since=NOW + 6)] == ["a", "c"]
    assert store.counts() == {"FAILED": 1, "RUNNING": 1, "PENDING": 1}
    assert store.recently_ended(5) == [ended]
    assert store.matching("0123456789") == ["0123456789a", "0123456789b", "0123456789c"]


def tasks(array_id: str, state: JobState, *spans: tuple[int, int], **changes: object) -> JobRecord:
    """Tasks of an array that share a row."""
    return restricted_row(job(array_id, state, array_id=array_id, allocation=None, ending=None, **changes), spans)


def task(array_id: str, index: int, state: JobState, **changes: object) -> JobRecord:
    return job(f"{array_id}_{index}", state, array_id=array_id, array_index=index, **changes)


def test_an_array_counts_as_its_tasks_and_is_named_once(store: Store) -> None:
    waiting, ended = JobState.PENDING, JobState.COMPLETED
    store.put_jobs([
        job("0a", submit_time=NOW), tasks("0b", waiting, (2, 4), submit_time=NOW + 1),
        task("0b", 1, ended, user="bob", submit_time=NOW + 1, end_time=NOW + 9),
        task("0b", 5, JobState.RUNNING, submit_time=NOW + 1), job("0c", waiting, submit_time=NOW + 2),
        job("1a", waiting, user="bob", submit_time=NOW + 3, spec=spec(partition="other")),
    ])  # fmt: skip
    assert store.counts() == {"RUNNING": 2, "PENDING": 5, "COMPLETED": 1}
    assert store.counts(user="bob") == {"PENDING": 1, "COMPLETED": 1}
    assert store.counts(partition="p") == {"RUNNING": 2, "PENDING": 4, "COMPLETED": 1}
    assert store.counts(user="bob", partition="p") == {"COMPLETED": 1}
    assert store.matching("0") == ["0a", "0b", "0c"]
    assert (store.matching("0", limit=2), store.matching("0b_"), store.matching("2")) == (["0a", "0b"], ["0b"], [])
    assert store.neighbours("0b") == ["0a", "0c"]
    assert (store.neighbours("0a"), store.neighbours("1a")) == (["0b_1"], ["0c"])
    assert store.neighbours("09") == ["0a"], "an id that nothing has"
    names = ["0a", "0b_1", "0b_2", "0b_3", "0b_4", "0b_5", "0c", "1a"]
    assert [one.id for one in store.jobs()] == names
    assert [one.id for one in store.jobs(partition="p")] == names[:-1]
    for limit in range(1, 9):
        found = [one.id for one in store.jobs(limit=limit)]
        assert len(found) == limit
        assert set(found[-2:]) <= set(names)
        assert found[-1] == "1a"
    assert [one.id for one in store.jobs(states=[waiting], limit=3)] == ["0b_2", "0c", "1a"]
    assert [one.id for one in store.rows(limit=2, oldest=True)] == ["0a", "0b_1"]
    assert [one.id for one in store.rows(limit=2)] == ["0c", "1a"]
    assert [one.id for one in store.rows(user="bob", since=NOW + 9)] == ["0b_1", "1a"]
    assert [one.id for one in store.rows(user="bob", since=NOW + 9.1)] == ["1a"]
    left = [store.has_unended(name) for name in ("0b", "0b_1", "0b_3", "0b_5", "0b_9", "0c")]
    assert left == [True, False, True, True, False, True]


@pytest.mark.parametrize(("at_once", "by_id"), [(1, 99), (3, 99), (7, 6), (8, 7), (500, 7), (500, 6)])
def test_many_tasks_are_found_however_many_are_asked_for_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, at_once: int, by_id: int
) -> None:
    monkeypatch.setattr(rows, "_AT_ONCE", at_once)
    monkeypatch.setattr(rows, "_MAX_BY_ID", by_id)
    states = [JobState.COMPLETED, JobState.FAILED, JobState.RUNNING] * 3
    store.put_jobs([task("0a", index, state, spec=spec(name=str(index))) for index, state in enumerate(states)])
    assert [one.spec.name for one in store.rows_of("0a")] == [str(index) for index in range(9)]
    assert [one.spec.name for one in store.rows_of("0a_[1-7,20]")] == [str(index) for index in range(1, 8)]
    ended = {index: index % 3 == 0 for index in range(9) if index % 3 < 2}
    assert store.completed_tasks("0a", range(12)) == ended
    assert store.completed_tasks("0a", [8, 4, 3]) == {4: False, 3: True}
    assert store.completed_tasks("0a", []) == {}


def test_a_row_of_tasks_is_split_as_they_are_written_and_one_by_one_where_it_is_scattered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_SHARED_SPANS", 3)
    store.put_jobs([tasks("0a", JobState.PENDING, (0, 9))])
    for index, spans in ((4, ["0a_[0-3,5-9]"]), (7, ["0a_[0-3,5-6,8-9]"])):
        store.put_jobs([task("0a", index, JobState.RUNNING)])
        assert [one.id for one in store.pending_rows()] == spans
    store.put_jobs([tasks("0a", JobState.PENDING, (8, 9), reason="r")])
    assert [(one.id, one.reason) for one in store.pending_rows()] == [("0a_[0-3,5-6]", ""), ("0a_[8-9]", "r")]
    assert store.job("0a_5") is not None
    assert [store.job(name) for name in ("0a_10", "0a", "0b_1")] == [None] * 3
    store.put_jobs([task("0a", 2, JobState.RUNNING)])
    assert [one.id for one in store.pending_rows()] == [f"0a_{index}" for index in (0, 1, 3, 5, 6, 8, 9)]
    assert len(store.jobs_of_array("0a")) == 10


def test_events_that_are_counted_are_of_so_many_jobs_of_a_partition(store: Store) -> None:
    (node, *_) = inventory().nodes
    other = msgspec.structs.replace(node, partition="q")
    store.put_nodes([NodeRecord(name="n0", declared=other), NodeRecord(name="n1")])
    store.put_jobs([tasks("0a", JobState.PENDING, (0, 3)), job("b", submit_time=NOW - 5)])
    told: list[tuple[str, str | None, str | None, dict[str, object]]] = [
        ("submitted", "0a", None, {"tasks": "0-3"}), ("submitted", "b", None, {"tasks": "1", "count": 7}),
        ("node_down", None, "n0", {}), ("node_down", None, "n9", {}), ("gpu_lost", None, "n1", {}),
        ("noise", "b", None, {}), ("ended", "gone", None, {"partition": "r", "to": "FAILED"}),
        ("ended", "b", "n0", {"start": NOW, "attempt": 2}),
    ]  # fmt: skip
    store.append(Event(time=NOW + n, kind=k, job_id=j, node=on, data=data) for n, (k, j, on, data) in enumerate(told))
    found = store.counted_events(0, 99)
    assert [(one.seq, one.kind, one.partition, one.submit_time, one.jobs) for one in found] == [
        (1, "submitted", "p", None, 4), (2, "submitted", "p", NOW - 5, 7), (3, "node_down", "q", None, 1),
        (4, "node_down", "", None, 1), (5, "gpu_lost", "", None, 1), (7, "ended", "r", None, 1),
        (8, "ended", "p", NOW - 5, 1),
    ]  # fmt: skip
    assert [one.time - NOW for one in found] == [0, 1, 2, 3, 4, 6, 7]
    assert [(one.data.to, one.data.attempt, one.data.start) for one in found[5:]] == [("FAILED", 1, None), ("", 2, NOW)]
    assert [one.seq for one in store.counted_events(2, 3)] == [3, 4, 5]


def test_lines_of_events_name_their_jobs_and_receivers_have_positions(store: Store) -> None:
    store.put_jobs([task("0a", 7, JobState.RUNNING, spec=spec(name="train")), job("b", user="bob")])
    store.set_meta("cluster_id", "c")
    store.append([
        Event(time=0.5, kind="k", job_id="0a"), Event(time=1.0, kind="k", job_id="b", user="eve", data={"x": 1}),
        Event(time=2.0, kind="k", node="n0"),
    ])  # fmt: skip
    first, second, third = store.event_lines(0, 9)
    assert (first.time, first.cluster, first.job, first.name) == ("1970-01-01T00:00:00.500Z", "c", "0a", "train")
    assert (first.user, first.partition) == (job().user, "p")
    assert (second.user, second.data, second.unix_s) == ("eve", {"x": 1}, 1.0)
    assert (third.job, third.name, third.user, third.partition, third.node) == (None, None, None, None, "n0")
    assert store.event_lines(1, 1) == [second]
    assert store.event_positions() == {}
    for name, seq in (("a", 7), ("a", 9), ("b", 1), ("b", None)):
        store.put_event_position(name, seq)
    store.set_meta("event_positions", "3")
    assert store.event_positions() == {"a": 9}


def test_small_tables_keep_what_is_said_of_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_beliefs([JobClassEstimate(kind="a"), JobClassEstimate(kind="b")])
    known = store.beliefs()
    assert store.beliefs() is known
    store.put_beliefs([JobClassEstimate(kind="b", shapes=())])
    assert (store.beliefs()["a"] is known["a"], store.belief("b"), store.belief("x")) == (True, known["b"], None)
    assert store.believes_anything()
    easy = PolicySpec(name="easy")
    monkeypatch.setattr(promotions, "KEPT_DIFFERENCES", 2)
    for n, name in enumerate(("p", "q", "p", "p")):
        store.add_policy_change(
            PolicyChange(time=NOW + n, partition=name, user="ann", act="promote", reason=str(n), spec=easy)
        )
        store.add_difference(ShadowDifference(partition=name, time=NOW + n, live={}, shadow={"j": ("n0",)}))
    assert [change.reason for change in store.policy_changes()] == ["0", "1", "2", "3"]
    assert [(change.seq, change.reason) for change in store.policy_changes("p", limit=2)] == [(3, "2"), (4, "3")]
    assert {name: change.reason for name, change in store.live_changes().items()} == {"p": "3", "q": "1"}
    assert [getattr(store.policy_change(seq), "reason", None) for seq in (2, 9)] == ["1", None]
    assert [[one.time - NOW for one in store.differences(name)] for name in "pqr"] == [[2, 3], [1], []]
    assert [one.time - NOW for one in store.differences("p", limit=1)] == [3]
    store.forget_differences("p")
    assert [len(store.differences(name)) for name in "pq"] == [0, 1]
    assert store.fallbacks() == {}
    fallback = Fallback(partition="p", policy="gist", version="1", fallback="easy", why="late", since=NOW)
    store.put_fallbacks([fallback])
    assert store.fallbacks() == {"p": fallback}
    assert fallback.line == "p: gist cannot decide (late); falling back to easy"
    checks = [CheckRecord(node=node, check=check, began=NOW) for node, check in (("n1", "a"), ("n0", "b"), ("n0", "a"))]
    store.put_check_records(checks)
    store.shift_checks(5.0)
    assert [(one.node, one.check, one.began, one.ended) for one in store.check_records()] == [
        ("n0", "a", NOW + 5, None), ("n0", "b", NOW + 5, None), ("n1", "a", NOW + 5, None)
    ]  # fmt: skip
    store.drop_check_records(checks[:2])
    assert [store.check_record("n0", check) is None for check in "ab"] == [False, True]
    held = [Reservation(name="r", nodes=("n0",), begin=begin, end=begin + 9) for begin in (NOW, NOW + 5, NOW + 99)]
    store.put_reservation(held[0], NOW)
    store.put_reservation(held[1], NOW + 8)
    assert store.reservations(NOW) == (held[1],), "what has not ended is replaced"
    store.put_reservation(held[2], NOW + 14)
    assert store.reservations(NOW) == (held[1], held[2]), "what has ended is kept"
    assert [len(store.reservations(NOW + at)) for at in (13.9, 14)] == [2, 1]
    store.put_reservation(msgspec.structs.replace(held[0], name="a"), NOW)
    assert [one.name for one in store.reservations(NOW)] == ["a", "r", "r"]


def test_the_last_that_ended_come_last(store: Store) -> None:
    cancelled = tasks("0b", JobState.CANCELLED, (0, 2), end_time=NOW + 2, start_time=None)
    store.put_jobs([
        cancelled, job("0a", JobState.FAILED, end_time=NOW + 3), job("0c", JobState.COMPLETED, end_time=NOW + 1), job(),
        job("0d", JobState.NODE_FAIL, end_time=NOW + 4),
    ])  # fmt: skip
    ends = ["0c", "0b", "0b", "0b", "0a", "0d"]
    for limit in (1, 2, 3, 9):
        assert [one.id.partition("_")[0] for one in store.recently_ended(limit)] == ends[-limit:]
    assert len({one.id for one in store.recently_ended(9)}) == 6
    assert [one.id for one in store.rows_recently_ended(3)] == ["0b_[0-2]", "0a", "0d"]
    assert [one.id for one in store.ended_runs()] == ["0c", "0a"], "of what ran until its own end"
    assert [one.id for one in store.ended_runs(limit=1)] == ["0a"]
    assert [one.id for one in store.ended_runs(until=NOW + 1)] == ["0c"]
    assert store.ended_runs(until=NOW + 0.9) == []


def test_events_of_a_task_are_those_of_its_array_that_concern_it_too(store: Store) -> None:
    told = [("x", None), ("x", "0-3"), ("x", "4,7"), ("x_7", None), ("x_8", "7"), ("y", None)]
    for name, span in told:
        store.append([Event(time=NOW, kind="k", job_id=name, data={"tasks": span} if span else {})])

    def found(job_id: str, **limit: int) -> list[int]:
        events = store.events(job_id=job_id, **limit)
        return [told.index((event.job_id or "", event.data.get("tasks"))) for event in events]

    assert [found(name) for name in ("x_7", "x_2", "x_8", "x", "y")] == [[0, 2, 3], [0, 1], [0, 4], [0, 1, 2], [5]]
    assert found("x", limit=2) == [1, 2]
    assert [len(store.events()), len(store.events(limit=4)), store.events(node="n0")] == [6, 4, []]


def test_numbers_of_events_and_what_ended_since(store: Store) -> None:
    assert (store.latest_event(), store.ended_since(0)) == (0, (0, []))
    store.append([
        Event(time=NOW, kind=kind, job_id=name)
        for kind, name in (("ended", "a"), ("running", "b"), ("refused_command", "c"), ("ended", None), ("ended", "a"))
    ])  # fmt: skip
    assert [store.ended_since(number) for number in (0, 1, 5)] == [(5, ["a", "c"]), (5, ["c", "a"]), (5, [])]
    store.append_after_gap(Event(time=NOW, kind="rebuilt"), 100)
    assert store.latest_event() == 105


def test_energy_is_that_of_the_jobs_of_which_any_was_measured(store: Store) -> None:
    store.put_jobs([job("a"), job("b"), job("c", JobState.COMPLETED), job("d")])
    parts = [("a", 0, 5.0, 9.0), ("a", 300, 5.0, 0.0), ("b", 0, 5.0, 5.0), ("c", 0, 5.0, 0.0), ("", 0, 5.0, 0.0)]
    store.add_usage([
        UsageRow(bucket=bucket, node="n0", job_id=name, user="u", partition="p", gpu_s=gpu_s, energy_j=2.0,
                 energy_unknown_s=unknown) for name, bucket, gpu_s, unknown in parts
    ])  # fmt: skip
    assert store.energy_of_jobs() == {"a": 4.0}
    assert [store.job_energy(name) for name in "abcd"] == [4.0, None, 2.0, None]


def test_preempted_jobs_that_wait_again(store: Store) -> None:
    stopped = Preemptions(count=1, times=(NOW,))
    store.put_jobs([
        job("a", JobState.PENDING, preemptions=stopped), job("b", JobState.RUNNING, preemptions=stopped),
        job("c", JobState.PENDING, reason='"preemptions":{'),
        job("d", JobState.PENDING, preemptions=stopped, user="bob", spec=spec(partition="other")),
    ])  # fmt: skip
    assert store.preempted_pending() == 2
    assert [store.preempted_pending(user="bob"), store.preempted_pending(partition="p")] == [1, 1]
    assert store.preempted_pending(user="bob", partition="p") == 0


def test_nodes_with_a_reading_and_those_that_left_with_something_on_them(store: Store) -> None:
    reading = NodeReading(node="n0", time=NOW, containers=())
    records = [NodeRecord(name="n0", reading=reading), NodeRecord(name="n1", left=True), NodeRecord(name="n2")]
    store.put_nodes(records)
    assert store.node_readings() == {"n0": reading}
    assert store.left_nodes() == records[1:2]
    assert (store.node_record("n1"), store.node_record("n9")) == (records[1], None)
    ranks = [RankRecord(job_id=ID, attempt=1, rank=r, node=f"n{r}", runtime="podman", gpus=()) for r in (0, 1)]
    store.put_ranks([*ranks, msgspec.structs.replace(ranks[0], job_id="b")])
    assert (store.nodes_of_ranks(), store.ranks(job_id=ID)) == ({"n0", "n1"}, ranks)
    store.remove_rank(ranks[0])
    assert [(rank.job_id, rank.rank) for rank in store.ranks()] == [(ID, 1), ("b", 0)]


def test_a_command_file_that_was_applied_is_known_until_it_may_be_forgotten(store: Store) -> None:
    store.mark_applied("a", NOW)
    store.mark_applied("b", NOW + 1)
    store.forget_applied(NOW)
    assert [store.was_applied(name) for name in "abc"] == [True, True, False]
    store.mark_applied("a", NOW + 5)
    store.forget_applied(NOW + 2)
    assert [store.was_applied(name) for name in "ab"] == [True, False]


def test_reads_of_one_moment_do_not_see_what_is_written_meanwhile(store: Store, tmp_path: Path) -> None:
    reader = Reader.open(tmp_path)
    assert reader is not None
    with reader.one_moment():
        assert reader.counts() == {}
        with reader.one_moment():
            store.put_jobs([job()])
        assert reader.counts() == {}
    assert reader.counts() == {"RUNNING": 1}
    with pytest.raises(ZeroDivisionError), reader.one_moment():
        raise ZeroDivisionError
    store.put_jobs([job("b")])
    assert reader.counts() == {"RUNNING": 2}
    assert reader.lag_s() == 0.0
    reader.close()


def test_a_reader_of_a_copy_goes_on_to_the_next_one_and_knows_how_late_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, published = Store.create_or_open(tmp_path), tmp_path / PUBLISHED
    store.set_meta(COPY_EVERY, "2.5")
    published.mkdir()
    (published / CURRENT).symlink_to("1.db")

    def publish(number: int) -> None:
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(tmp_path / DATABASE, published / f"{number}.db")
        os.utime(published / f"{number}.db", (NOW, NOW + number))
        link = published / "link"
        link.symlink_to(f"{number}.db")
        link.replace(published / CURRENT)

    publish(1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    reader = Reader.open(tmp_path)
    assert reader is not None
    first = reader.data_version()
    store.put_jobs([job()])
    assert (reader.data_version(), reader.counts(), reader.lag_s()) == (first, {}, 2.5)
    publish(2)
    assert reader.data_version() != first
    assert reader.counts() == {"RUNNING": 1}
    (published / CURRENT).unlink()
    assert (reader.data_version() != first, reader.counts()) == (True, {"RUNNING": 1}), "what is open can be read"
    reader.close()
    store.close()


def test_attempts_in_a_time_overlap_it_and_parts_of_a_hot_one_are_in_order(store: Store) -> None:
    def ran(name: str, begin: float, end: float | None) -> None:
        run = RunRecord(job_id=name, attempt=1, user="u", partition=name, flavor=None, share=1, gpus=1,
                        start_time=begin, end_time=None, outcome=None, nodes={"n0": 1})  # fmt: skip
        store.open_run(run)
        if end is not None:
            store.close_run(name, 1, end, JobState.PENDING, worked_until=end - 1)

    for name, begin, end in (
        ("a", NOW - 9, NOW), ("b", NOW - 9, NOW + 1), ("c", NOW + 9, None), ("d", NOW + 10, None),
        ("e", NOW - 99, None), ("h", NOW + 2, NOW + 4), ("h", NOW + 4, NOW + 6), ("h", NOW + 6, None),
    ):  # fmt: skip
        ran(name, begin, end)
    found = [(run.job_id, run.start_time - NOW) for run in store.runs(NOW, NOW + 10)]
    assert found == [("e", -99), ("b", -9), ("h", 2), ("h", 4), ("h", 6), ("c", 9)]
    parts = [(part.start_time, part.end_time, part.worked_until) for part in store.runs_of_attempt("h", 1)]
    assert parts == [(NOW + 2, NOW + 4, NOW + 3), (NOW + 4, NOW + 6, NOW + 5), (NOW + 6, None, None)]
    assert store.runs_of_attempt("h", 2) == []
    starts = {name: start - NOW for name, start in store.first_starts().items()}
    assert starts == {"a": -9, "b": -9, "c": 9, "d": 10, "e": -99, "h": 2}


def test_usage_by_job_and_by_user_is_the_sum_of_its_rows(store: Store) -> None:
    rows = [
        UsageRow(bucket=bucket, node=node, job_id=name, user=name and "ann", partition="p",
                 **{f: 10.0**i for i, f in enumerate(UsageRow.__struct_fields__[5:])})
        for bucket in (300, 600, 900, 1200) for node, name in (("n0", "a"), ("n0", ""), ("n1", "a"))
    ]  # fmt: skip
    store.add_usage(rows)
    assert len(store.usage(300, 1200)) == 9
    by_job = {(row.node, row.job_id): row for row in store.usage_by_job(600, 1200)}
    assert by_job.keys() == {("n0", "a"), ("n0", ""), ("n1", "a")}
    for row in by_job.values():
        assert msgspec.structs.astuple(row)[5:] == tuple(2 * 10.0**i for i in range(8))
        assert row.bucket == 600
    bins = {(one.bin, one.user): tuple(one)[2:] for one in store.usage_sums(600, 900)}
    assert bins == {
        (at, user): tuple(n * 10.0**i for i in range(8))
        for at, user, n in ((0, "ann", 2), (0, "", 1), (900, "ann", 4), (900, "", 2))
    }
    assert [row.bucket for row in store.usage_of_job("a")] == [300, 300, 600, 600, 900, 900, 1200, 1200]


@pytest.mark.parametrize("seed", range(2))
def test_recent_use_is_an_integral_that_may_be_asked_for_at_any_time(store: Store, seed: int) -> None:
    """Summed from one change on a node to the next. While two attempts share a GPU, each has half of it."""
    rng, half_life = random.Random(seed), 5000.0
    attempts = list[tuple[str, str, str, float, float | None, tuple[int, ...], bool]]()
    for node in range(30):
        shares = node % 3 > 0
        for gpus in ((0, 1), (1, 2), (3,)) if shares else ((0,), (1, 2), (3,)):
            begin = rng.uniform(-15_000, 9000)
            end = begin + rng.uniform(1, 9000) if rng.random() < 0.7 else None
            attempts.append((f"n{node}", rng.choice("ab"), rng.choice(["", "g"]), begin, end, gpus, shares))
    with store.transaction():
        for number, (node, user, group, begin, end, gpus, shares) in enumerate(attempts):
            run = RunRecord(
                job_id=str(number), attempt=1, user=user, partition="p", flavor=None, share=0.1, gpus=len(gpus),
                start_time=begin, end_time=None, outcome=None, nodes={node: len(gpus)}, group=group,
                shareable={node: gpus} if shares else {},
            )  # fmt: skip
            store.open_run(run)
            if end is not None:
                store.close_run(str(number), 1, end, JobState.COMPLETED)
    times = (9000.0, 7200.0, 7199.0, 10_800.0, 12_345.0, 12_345.0, 3.0, 14_400.0)
    for now, since in (*((now, -8000.0) for now in times), (14_400.0, 2800.0)):
        wanted = dict[str, float]()
        for node, user, group, begin, end, gpus, _ in attempts:
            begin, end = max(begin, since), min(now if end is None else end, now)
            near = [other for other in attempts if other[0] == node]
            borders = {begin, end, *(at for other in near for at in other[3:5] if at is not None and begin < at < end)}
            for a, b in pairwise(sorted(borders)) if begin < end else ():
                used = (0.5 ** ((now - b) / half_life) - 0.5 ** ((now - a) / half_life)) * half_life / math.log(2)
                here = [other for other in near if other[3] <= a and (other[4] is None or other[4] >= b)]
                parts = sum(1 / sum(gpu in other[5] for other in here) for gpu in gpus)
                wanted[user + group] = wanted.get(user + group, 0.0) + used * parts
        found = store.gpu_seconds_by_user(since, half_life, now, lambda user, group: user + group)
        assert {who: gpu_s for who, gpu_s in found.items() if gpu_s} == pytest.approx(wanted)


def test_an_attempt_is_closed_once(store: Store) -> None:
    run = RunRecord(
        job_id=ID, attempt=1, user="u", partition="p", flavor=None, share=1, gpus=1, start_time=NOW, end_time=None,
        outcome=None, nodes={},
    )  # fmt: skip
    store.open_run(run)
    store.close_run(ID, 1, NOW - 5, JobState.COMPLETED)
    store.close_run(ID, 1, NOW + 50, JobState.FAILED)
    (closed,) = store.runs(NOW - 10, NOW + 100) or [run]
    assert closed.end_time in (None, NOW)
    assert store.gpu_seconds_by_user(NOW - 10, 3600, NOW + 100).get("u", 0) == 0


def test_ended_attempts_have_the_gpus_of_their_start(store: Store) -> None:
    """Of those that began and ended since; of one that is pulled for long its event lies before that."""
    since = NOW - 100
    jobs = [job("a", user="ann", spec=spec(name="train")), job("b_1", array_id="b", user="bob", end_time=NOW)]
    store.put_jobs([*jobs, job("old", state=JobState.COMPLETED, end_time=since), job("open", end_time=None)])

    def ran(name: str, attempt: int, begin: float, end: float | None, **nodes: int) -> None:
        store.open_run(
            RunRecord(
                job_id=name, attempt=attempt, user="ann", partition="p", flavor=None, share=0.1, gpus=1,
                start_time=begin, end_time=None, outcome=None, nodes=nodes,
            )
        )  # fmt: skip
        if end is not None:
            store.close_run(name, attempt, end, JobState.FAILED if attempt == 1 else JobState.COMPLETED)

    ran("a", 1, since + 3, since + 4, n0=2)
    ran("a", 2, since + 1, NOW, n0=1, n1=1)
    ran("b_1", 1, since + 2, NOW, n1=1)
    ran("old", 1, since + 1, since + 1, n0=1)
    ran("open", 1, since + 1, None, n0=1)
    ran("open", 2, since, NOW, n0=1)
    ran("gone", 1, since + 1, NOW, n0=1)

    def starting(at: float, name: str, attempt: int, **nodes: list[int]) -> Event:
        return Event(time=at, kind="starting", job_id=name, data={"attempt": attempt, "nodes": nodes})

    day = 86400.0
    store.append([
        starting(since - day + 1, "a", 1, n0=[2, 3]), starting(since, "a", 2, n0=[0]),
        starting(since - day, "b_1", 1, n1=[7]), starting(since, "b_1", 2, n1=[6]),
        Event(time=since, kind="starting", job_id="b_1", data={"attempt": 1}),
        Event(time=since, kind="starting", job_id="b_1", data={"nodes": {"n1": [5]}}),
        Event(time=since, kind="launched", job_id="b_1", data={"attempt": 1, "nodes": {"n1": [4]}}),
    ])  # fmt: skip
    found = [
        (one.job_id, one.attempt, one.user, one.name, one.array_id, one.start_time - since, one.outcome, one.gpus)
        for one in store.ended_attempts(since)
    ]
    named = jobs[1].spec.name
    assert found == [
        ("a", 2, "ann", "train", None, 1, "COMPLETED", {"n0": (0,), "n1": ()}),
        ("b_1", 1, "bob", named, "b", 2, "FAILED", {"n1": ()}),
        ("a", 1, "ann", "train", None, 3, "FAILED", {"n0": (2, 3)}),
    ]


def test_starts_of_a_policy_in_a_partition_and_a_time(store: Store) -> None:
    other = job("b", spec=spec(partition="other"))
    store.put_jobs([job("a"), other])
    data = {"policy": "easy", "nodes": {"n0": [1], "n1": []}}
    store.append([
        Event(time=NOW + 2, kind="starting", job_id="a", data=data),
        Event(time=NOW, kind="starting", job_id="a", data=data),
        Event(time=NOW + 3, kind="starting", job_id="a", data=data),
        Event(time=NOW - 1, kind="starting", job_id="a", data=data),
        Event(time=NOW, kind="starting", job_id="a", data=data | {"policy": "gist"}),
        Event(time=NOW, kind="starting", job_id="a", data={"nodes": {}}),
        Event(time=NOW, kind="running", job_id="a", data=data),
        Event(time=NOW, kind="starting", job_id="b", data=data),
        Event(time=NOW, kind="starting", job_id="gone", data=data),
    ])  # fmt: skip
    nodes = ("n0", "n1")
    assert store.starts_by("easy", "p", NOW, NOW + 3) == [("a", NOW + 2, nodes), ("a", NOW, nodes)]


def test_standbys_are_named_once_there_was_one(store: Store) -> None:
    store.set_meta(ACTIVE_CONTROLLER, "h1")
    assert (store.standbys(), store.misses_standby()) == ("", False)
    store.set_meta(STANDBYS, "h2, h3")
    assert (store.standbys(), store.misses_standby()) == ("the controller of h1 is active; standby: h2, h3", False)
    store.set_meta(STANDBYS, "")
    assert (store.standbys(), store.misses_standby()) == (
        "the controller of h1 is active; no standby is running", True
    )  # fmt: skip


def test_a_damaged_wiring_is_unknown_and_read_again() -> None:
    for text in (b"{", b'{"gpus": 7}', b""):
        assert NodeRecord(name="n0", wired=msgspec.Raw(text)).wiring is None
    assert NodeRecord(name="n0", wired=msgspec.Raw(b'{"gpus": []}')).wiring == Wiring()


def test_without_anybody_to_ask_a_lock_is_waited_for_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count(100, 7)
    monkeypatch.setattr(locks, "_SLICE_S", 0.001)
    monkeypatch.setattr(locks.time, "monotonic", lambda: float(next(seconds)))
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(connect_to_write(tmp_path / "db", None)) as db:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                db.execute("BEGIN IMMEDIATE")
            assert next(seconds) == 142, "it was given up at 35"
            other.execute("ROLLBACK")
            db.execute("BEGIN IMMEDIATE")


def test_who_asks_decides_about_each_kind_of_lock(tmp_path: Path) -> None:
    """Here one that waiting does not help: another has written since this transaction began to read."""
    waited: list[float] = []
    with (
        closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as other,
        closing(connect_to_write(tmp_path / "db", lambda seconds: bool(waited.append(seconds)))) as db,
    ):
        other.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (n);")
        db.execute("BEGIN")
        db.execute("SELECT * FROM t").fetchall()
        other.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(sqlite3.OperationalError, match="locked") as raised:
            db.execute("INSERT INTO t VALUES (2)")
        assert raised.value.sqlite_errorcode == sqlite3.SQLITE_BUSY_SNAPSHOT
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            db.execute("SELECT * FROM u")
    assert len(waited) == 1


def test_a_script_that_waited_for_a_lock_begins_anew(tmp_path: Path) -> None:
    waited: list[float] = []

    def waiting(seconds: float) -> bool:
        waited.append(seconds)
        if seconds >= 0:
            other.execute("ROLLBACK")
        return True

    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(connect_to_write(tmp_path / "db", waiting)) as db:
            db.executescript("BEGIN; CREATE TABLE t (n); INSERT INTO t VALUES (1); COMMIT;")
            assert db.execute("SELECT count(*) FROM t").fetchone() == (1,)
            with pytest.raises(sqlite3.OperationalError, match="no such table"):
                db.executescript("BEGIN; DELETE FROM t; DELETE FROM u;")
            assert not db.in_transaction
            assert db.execute("SELECT count(*) FROM t").fetchone() == (1,)
    assert waited[1:] == [-1.0]


def test_of_the_kernels_list_of_locks_those_of_the_file_and_of_processes_that_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for one has none; of one of another user, or one that has ended, the number is known."""
    path = tmp_path / DATABASE
    path.touch()
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    lines = [
        f"1: POSIX  ADVISORY  WRITE 4194305 {device}:{status.st_ino} 1073741825 1073741825",
        f"1: -> POSIX  ADVISORY  WRITE 4194306 {device}:{status.st_ino} 1073741825 1073741825",
        f"2: FLOCK  ADVISORY  WRITE 4194307 {device}:{status.st_ino} 0 EOF",
        f"3: POSIX  ADVISORY  WRITE 4194308 {device}:{status.st_ino + 1} 1073741825 1073741825",
        f"4: OFDLCK ADVISORY  READ 4194309 {device}:{status.st_ino} 0 EOF",
        f"5: POSIX  ADVISORY  READ 4194305 {device}:{status.st_ino} 1073741824 1073741824",
        f"6: POSIX  ADVISORY  READ 0 {device}:{status.st_ino} 1073741824 1073741824",
        "",
    ]
    real = Path.read_text
    text = "\n".join(lines)
    monkeypatch.setattr(Path, "read_text", lambda self: text if self == Path("/proc/locks") else real(self))
    who = ["process 4194305", "process 4194309", "an unknown process"]
    assert lock_holders(path) == [f"{one} on {path}" for one in who]


def test_while_a_reader_has_it_open_a_store_keeps_its_journal_and_changes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state folder that was moved to a network filesystem, where a WAL must not be."""
    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs([job()])
    journals, reader = list[str](), Reader.open(tmp_path)
    assert reader is not None
    monkeypatch.setattr(private, "lacks_shared_memory", lambda _: True)
    for _ in range(2):
        with closing(Store.create_or_open(tmp_path)) as store:
            journals.append(store._db.execute("PRAGMA journal_mode").fetchone()[0])
            store.append([Event(time=NOW, kind="noted")])
        reader.close()
    assert journals == ["wal", "delete"]
    monkeypatch.setattr(private, "lacks_shared_memory", lambda _: False)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(GpuschedError, match="cannot be opened for writing"):
            Store.create_or_open(tmp_path)


def test_recent_use_decays_by_half_lives(store: Store) -> None:
    """With a half-life of an hour, an hour of a GPU that ends now counts as (1 - 1/2) / ln 2 hours."""
    runs = {
        "open": (2, NOW - 7200, None),  # looked at for an hour only
        "past": (1, NOW - 3600, NOW - 1800),
        "both": (4, NOW - 1800, NOW + 50),
        "long ago": (8, NOW - 9000, NOW - 3600),
        "to come": (8, NOW, NOW + 60),
    }
    for user, (gpus, start, end) in runs.items():
        run = RunRecord(
            job_id=user, attempt=1, user=user, partition="p", flavor=None, share=1, gpus=gpus, start_time=start,
            end_time=None, outcome=None, nodes={},
        )  # fmt: skip
        store.open_run(run)
        if end is not None:
            store.close_run(user, 1, end, JobState.COMPLETED)
    store.open_run(msgspec.structs.replace(run, job_id="more", user="past", gpus=1, start_time=NOW - 3600))
    hour, half = 3600 / math.log(2), 0.5**0.5
    found = store.gpu_seconds_by_user(NOW - 3600, 3600.0, NOW)
    assert found == {
        "open": pytest.approx(2 * hour * 0.5, abs=0.01),
        "past": pytest.approx(hour * (half - 0.5) + hour * 0.5, abs=0.01),
        "both": pytest.approx(4 * hour * (1 - half), abs=0.01),
    }


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 9), st.integers(0, 9)), max_size=12)
)
def test_who_shared_a_gpu_with_whom(attempts: list[tuple[set[int], int, int]]) -> None:
    held = {n: HeldGpus({"n": gpus}, begin, end) for n, (gpus, begin, end) in enumerate(attempts)}
    found = {frozenset((a, b)): (gpus, begin, end) for a, b, gpus, begin, end in overlaps(held)}
    expected = {}
    for (a, one), (b, other) in combinations(held.items(), 2):
        gpus, begin, end = attempts[a][0] & attempts[b][0], max(one.begin, other.begin), min(one.end, other.end)
        if gpus and begin < end:
            expected[frozenset((a, b))] = len(gpus), begin, end
    assert found == expected


def test_attempts_that_were_not_there_at_once_are_not_compared() -> None:
    """Of 100,000 short ones on a few GPUs all pairs were, in every report, and in the controller once an hour."""
    looked_up = 0

    class Counting(dict[int, HeldGpus]):
        def __getitem__(self, key: int) -> HeldGpus:
            nonlocal looked_up
            looked_up += 1
            return super().__getitem__(key)

    held = Counting({n: HeldGpus({"n": (0,)}, n, n + 1.5) for n in range(2000)})
    assert len(list(overlaps(held))) == 1999
    assert looked_up < 20 * len(held)


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path).close()
    db = sqlite3.connect(tmp_path / DATABASE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(GpuschedError, match="version 99") as raised:
        Store.create_or_open(tmp_path, term=7)
    assert raised.value.exit_code == 78, "systemd does not start it again"
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'term'").fetchone() is None, "its term is not claimed"


@pytest.mark.parametrize("content", [b"not a database, but long enough to be looked at" * 99, b"SQLite format 3\0"])
def test_a_broken_database_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / DATABASE).write_bytes(content)
    with pytest.raises(GpuschedError, match="cannot be opened for writing"):
        Store.create_or_open(tmp_path)


def test_no_database_yet_is_none(tmp_path: Path) -> None:
    assert Reader.open(tmp_path) is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_other_users_open_none_of_its_files() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest closes its own to other users
        state, opened = Path(folder) / "state", Path(folder) / "opened"
        store = Store.create_or_open(state)
        store.put_jobs([job()])
        shutil.copytree(state, opened)  # as a crash leaves it: all is in the WAL
        store.close()
        for file in (Path(folder), opened, *opened.iterdir()):
            file.chmod(0o755)
        again = Store.create_or_open(opened)
        again.put_jobs([job("0123456789b")])
        assert again.counts() == {"RUNNING": 2}
        assert {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in opened.iterdir()} == {
            DATABASE: "0o600", f"{DATABASE}-shm": "0o600", f"{DATABASE}-wal": "0o600",
        }  # fmt: skip
        assert _as_another_user(opened) == 3
        again.close()


def _as_another_user(state: Path) -> int:
    """How reading goes: 0 it does, 3 it is one line that it may not be."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(54321)
            os.setuid(54321)
            Reader.open(state)
            os._exit(0)
        except GpuschedError as error:
            os._exit(3 if "no permission to read" in error.line() and "settings.shared" in error.line() else 4)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lock_is_waited_for_in_slices_and_its_holder_named(tmp_path: Path) -> None:
    program = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
    program += "db.execute('BEGIN IMMEDIATE'); print(flush=True); sys.stdin.read()"
    waited: list[float] = []
    named: list[str] = []

    def waiting(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            named.extend(lock_holders(tmp_path / DATABASE))
            assert holder.stdin is not None
            holder.stdin.close()
        return True

    store = Store.create_or_open(tmp_path, waiting)
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / DATABASE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    store.append(Event(time=n, kind="noted") for n in range(3))
    assert holder.wait() == 0
    holder.stdout.close()
    assert waited[-1] == -1.0
    assert [event.time for event in store.events()] == [0, 1, 2], "each once, though it began anew"
    (line,) = named
    assert line.startswith(f"process {holder.pid} (python")
    assert line.endswith(f"on {tmp_path / DATABASE}-shm")
    store.close()


@pytest.mark.parametrize(
    ("file", "byte", "shared", "blocks"),
    [
        ("-shm", 120, False, True), ("-shm", 122, True, True), ("-shm", 123, True, False), ("-shm", 123, False, True),
        ("", 0x40000000, True, True), ("", 0x40000001, True, True), ("", 0x40000002, True, False),
        ("", 0x40000002, False, True),
    ],
)  # fmt: skip
def test_readers_of_a_store_are_not_called_what_its_writer_waits_for(
    tmp_path: Path, file: str, byte: int, shared: bool, blocks: bool
) -> None:
    """The bytes that they lock are in SQLite's wal.c and os_unix.c."""
    path = tmp_path / f"{DATABASE}{file}"
    path.touch()
    (told, tell), (ended, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_SH if shared else fcntl.LOCK_EX, 1, byte)
        os.write(tell, b"!")
        os.read(ended, 1)
        os._exit(0)
    os.read(told, 1)
    found = lock_holders(tmp_path / DATABASE)
    os.close(end)
    os.waitpid(pid, 0)
    for descriptor in (told, tell, ended):
        os.close(descriptor)
    assert [line.partition(" (")[0] for line in found] == ([f"process {pid}"] if blocks else [])
    assert all(line.endswith(f"on {path}") for line in found)


def test_ones_own_lock_is_not_waited_for_and_one_of_nobodys_is(tmp_path: Path) -> None:
    """A lock by the description of an open file has no process."""
    with (tmp_path / DATABASE).open("w+") as file, (tmp_path / "other").open("w+") as other:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 0x40000001)
        fcntl.lockf(other, fcntl.LOCK_EX, 1, 0x40000001)
        assert lock_holders(tmp_path / DATABASE) == []
        fcntl.lockf(file, fcntl.LOCK_UN)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0x40000001, 1, 0))
        assert lock_holders(tmp_path / DATABASE) == [f"an unknown process on {tmp_path / DATABASE}"]


@pytest.mark.parametrize("times", [4, 5])
def test_a_copy_that_is_replaced_as_it_is_opened_is_looked_for_again_up_to_five_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    Store.create_or_open(tmp_path).close()
    (tmp_path / PUBLISHED).mkdir()
    shutil.copy(tmp_path / DATABASE, tmp_path / PUBLISHED / "6.db")
    (tmp_path / PUBLISHED / CURRENT).symlink_to("6.db")
    removed = [str(tmp_path / PUBLISHED / f"{number}.db") for number in range(6 - times, 6)]
    real = os.path.realpath
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(os.path, "realpath", lambda path: removed.pop(0) if removed else real(path))
    if times == 5:
        with pytest.raises(FileNotFoundError):
            open_to_read(tmp_path)
        assert removed == []
        return
    opened = open_to_read(tmp_path)
    assert opened.stamp == current_stamp(tmp_path)
    opened.db.close()


def test_a_read_only_user_reads_a_store_that_nobody_has_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite opens a WAL database without a right to write only if it may assume that nobody else writes."""
    state, asked = tmp_path / "50%?#", list[str]()
    store = Store.create_or_open(state)
    store.put_jobs([job()])
    store.close()
    real = sqlite3.connect

    class Shut:
        def execute(self, _: str) -> None:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error

        def close(self) -> None:
            asked.append("closed")

    def connect(name: str, **more: object) -> object:
        asked.append(name.partition("?")[2])
        return real(name, **more) if "immutable" in name else Shut()  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3, "connect", connect)
    reader = Reader.open(state)
    assert reader is not None
    assert reader.counts() == {"RUNNING": 1}
    reader.close()
    assert asked == ["mode=ro", "closed", "mode=ro&immutable=1"]
    (state / f"{DATABASE}-wal").touch()
    with pytest.raises(GpuschedError, match="cannot be read: unable to open database file"):
        Reader.open(state)
    assert asked[3:] == ["mode=ro", "closed"], "somebody has it open"


def test_a_reader_sees_when_another_has_written(store: Store, tmp_path: Path) -> None:
    reader = Reader.open(tmp_path)
    assert reader is not None
    before = reader.data_version()
    assert reader.data_version() == before
    store.put_jobs([job()])
    assert reader.data_version() != before
    reader.close()


def test_jobs_that_ask_for_the_same_share_it(store: Store, tmp_path: Path) -> None:
    large = spec(env={f"V{n}": "x" * 100_000 for n in range(9)})
    tasks = [job(f"{ID}_{n}", JobState.PENDING, array_id=ID, array_index=n, spec=large) for n in range(300)]
    other = job("0123456789b", JobState.PENDING, user="bob")
    with store.transaction():
        store.put_jobs([*tasks, other])
    read = store.pending()
    assert sorted(read, key=lambda j: j.array_index or 0)[-300:][-1] == tasks[-1]
    assert len({id(j.spec) for j in read}) == 2, "in memory, too"
    again = msgspec.structs.replace(read[0], message="waits")
    store.put_jobs([again])
    assert store.job(again.id) == again
    assert store.waiting_of_users().keys() == {"älice", "bob"}
    count, size = store.waiting_of_users()["älice"]
    assert count == 300
    assert 900_000 < size < 1_200_000
    assert sum(f.stat().st_size for f in tmp_path.glob("gpusched.db*")) < 4_000_000  # 576 MB while each had its own


def test_the_room_of_a_large_transaction_is_given_back(store: Store) -> None:
    assert store._db.execute("PRAGMA journal_size_limit").fetchone() == (16 << 20,)


def test_small_tasks_are_small(store: Store, tmp_path: Path) -> None:
    tasks = (
        JobRecord(id=f"{ID}_{n}", array_id=ID, array_index=n, user="u", uid=7, spec=spec(), state=JobState.PENDING,
            submit_time=NOW)
        for n in range(2000)
    )  # fmt: skip
    with store.transaction():
        store.put_jobs(tasks)
    store.close()
    assert (tmp_path / DATABASE).stat().st_size < 2000 * 550


OLD_KINDS = {
    "agent_out": "agent_disabled", "agent_back": "agent_enabled", "foretelling_failed": "start_prediction_failed",
}  # fmt: skip


def as_version(state: Path, jobs: list[JobRecord], version: int) -> None:
    """A store as an earlier version wrote it."""
    db = sqlite3.connect(state / DATABASE)
    for step in (SCHEMA, *MIGRATIONS[: version - FIRST_VERSION]):
        db.executescript(step)
    new = Store.create_or_open(state / "new")
    new.put_jobs(jobs)
    for table in ("specs", "jobs"):
        rows = new._db.execute(f"SELECT * FROM {table}").fetchall()
        db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    new.close()
    db.execute("INSERT INTO meta VALUES ('cluster_id', 'abcdefgh')")
    columns = "job_id, attempt, user, partition, share, gpus, start_time, end_time, allocation"
    values = "'old', 1, 'u', 'p', 1, 1, ?, ?, '{}'"
    if version >= 16:
        columns, values = f"{columns}, span", f"{values}, 0"
    db.execute(f"INSERT INTO runs ({columns}) VALUES ({values})", (NOW - 9, NOW - 5))
    values = "300, 'n', 'old', 'u', 'p', 9, 8, 1, 7, 6, 5" + (", 0, 5" if version >= 19 else "")
    db.execute(f"INSERT INTO usage VALUES ({values})")
    for kind in OLD_KINDS if version < 14 else OLD_KINDS.values():
        db.execute("INSERT INTO events (time, kind, data) VALUES (?, ?, '{}')", (NOW - 7, kind))
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()


def test_renamed_keys_of_an_earlier_version_are_read_and_migrated(tmp_path: Path) -> None:
    as_version(tmp_path, [job()], 14)
    shape = '{"gpu_type":"A100","unit":"steps","gpus":8,"most":4,"nodes":2,"racks":1}'
    kind = '"kind":"ann/\\"most\\":"'  # the name of a job may look like the key
    speed = f'{{"job_id":"j",{kind},"shape":{shape},"log_pace":1.5,"gpus":[["n1",0]]}}'
    estimate = f'{{{kind},"shapes":[{{"shape":{shape},"logs":[[1.5,1.0]],"count":1,"best":1.5}}]}}'
    db = sqlite3.connect(tmp_path / DATABASE)
    db.execute("INSERT INTO paces (data) VALUES (?)", (speed.encode(),))
    db.execute("INSERT INTO beliefs VALUES ('ann/\"most\":', ?)", (estimate.encode(),))
    spec = PolicySpec(name="p", placement_wait_s=7.0)
    shadow = Shadow(partition="p", spec=spec, since=NOW, by="u")
    change = PolicyChange(time=NOW, partition="p", user="u", act="promote", reason="", spec=spec)
    for table, data in (("shadows", shadow), ("policy_changes", change)):
        old = msgspec.json.encode(data).replace(b"placement_wait_s", b"place_wait_s")
        db.execute(f"INSERT INTO {table} (partition, data) VALUES ('p', ?)", (old,))
    db.commit()
    db.close()
    reader = Reader.open(tmp_path)
    assert reader is not None
    name = 'ann/"most":'
    (pace,), before = reader.paces(), reader.beliefs()  # before the new controller has begun
    assert (pace.kind, pace.shape.max_gpus_per_node, before[name].shapes[0].shape) == (name, 4, pace.shape)
    assert reader.belief(name) == before[name]
    store = Store.create_or_open(tmp_path)
    for opened in (store, reader):
        assert (opened.paces(), opened.beliefs(), opened.belief(name)) == ([pace], before, before[name])
    assert store.shadows()["p"].spec.placement_wait_s == 7.0
    assert store.policy_changes("p")[0].spec.placement_wait_s == 7.0
    reader.close()
    store.close()


def test_a_store_of_a_version_that_is_too_early_is_left_alone(tmp_path: Path) -> None:
    as_version(tmp_path, [job()], FIRST_VERSION)
    db = sqlite3.connect(tmp_path / DATABASE)
    db.execute(f"PRAGMA user_version = {FIRST_VERSION - 1}")
    db.close()
    before = (tmp_path / DATABASE).read_bytes()
    for use in (Reader.open, Store.create_or_open):
        with pytest.raises(GpuschedError, match=rf"has version {FIRST_VERSION - 1}; the earliest that can be opened"):
            use(tmp_path)
    assert (tmp_path / DATABASE).read_bytes()[100:] == before[100:], "but for SQLite's own header"


@pytest.mark.parametrize("version", range(FIRST_VERSION, SCHEMA_VERSION))
def test_a_store_of_an_earlier_version_is_read_and_taken_over(tmp_path: Path, version: int) -> None:
    jobs = [job(), job("0123456789b", JobState.PENDING)]
    as_version(tmp_path, jobs, version)
    reader = Reader.open(tmp_path)
    assert reader is not None
    assert reader.jobs() == jobs, "before the new controller has begun"
    (old,) = reader.runs(0.0, NOW)
    assert (old.end_time, old.worked_until) == (NOW - 5, None)
    (usage,) = reader.usage(0)
    assert (usage.idle_s, usage.idle_energy_j, usage.idle_energy_unknown_s) == (5, 0, 5), "nobody measured it"
    assert [tuple(row)[-3:] for row in reader.usage_sums(0, 300)] == [(5, 0, 5)]
    assert reader.usage_of_job("old") == [usage]
    store = Store.create_or_open(tmp_path)
    assert store.usage(0) == [usage]
    assert store.runs(0.0, NOW) == reader.runs(0.0, NOW) == [old]
    assert store.jobs() == reader.jobs() == jobs
    assert store.waiting_of_users()["älice"][0] == 1
    assert [event.kind for event in store.events()] == list(OLD_KINDS.values())
    changed = msgspec.structs.replace(jobs[1], message="waits")
    store.put_jobs([changed])
    assert store.jobs() == reader.jobs() == [jobs[0], changed]
    reader.close()
    store.close()


def test_up_to_when_an_attempt_worked_is_kept_and_goes_with_the_clock(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    run = RunRecord(
        job_id=ID, attempt=1, user="u", partition="p", flavor=None, share=1, gpus=1, start_time=NOW, end_time=None,
        outcome=None, nodes={},
    )  # fmt: skip
    for attempt, until in ((1, NOW + 7), (2, NOW - 1), (3, None)):
        store.open_run(msgspec.structs.replace(run, attempt=attempt))
        store.close_run(ID, attempt, NOW + 9, JobState.PENDING, until)
    assert [one.worked_until for one in store.runs(0.0, NOW + 10)] == [NOW + 7, NOW, None], "not before its start"
    store.shift_rows(100.0, NOW)
    assert [one.worked_until for one in store.runs(0.0, NOW + 110)] == [NOW + 107, NOW + 100, None]
    store.close()


def test_a_statement_that_cannot_be_committed_leaves_no_transaction(tmp_path: Path) -> None:
    """With a rollback journal, as on network filesystems, a reader can keep a commit waiting for too long."""
    path = tmp_path / "a.db"
    with closing(connect_to_write(path, lambda _: False)) as db, closing(sqlite3.connect(path)) as reader:
        db.execute("CREATE TABLE a (b)")
        db.fence = lambda _: None
        reader.execute("BEGIN")
        assert reader.execute("SELECT * FROM a").fetchall() == []
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            db.execute("INSERT INTO a VALUES (1)")
        assert not db.in_transaction


def test_a_store_that_this_user_may_not_read_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.create_or_open(tmp_path).close()
    monkeypatch.setattr(os, "access", lambda *_, effective_ids=False: not effective_ids)
    with pytest.raises(PermissionError, match=rf"another user, and no copy of it is in {tmp_path / PUBLISHED}"):
        open_to_read(tmp_path)
