"""A damaged database: rows that cannot be read are found and set aside; nobody else's jobs wait for it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.errors import GpuschedError
from gpusched.model.jobs import JobState
from gpusched.model.reservations import Reservation
from gpusched.queue import damage
from gpusched.queue.damage import DatabaseDamaged, disk_error, unreadable
from gpusched.queue.promotions import Shadow
from gpusched.queue.repair import set_aside_damaged
from gpusched.queue.store import NodeRecord, RankRecord, Reader, RunRecord, Store
from tests.controller.applying import NOW, InboxWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    """A store with a row of each kind that a controller reads in its cycles."""
    world = InboxWorld(tmp_path)
    for state in ("RUNNING", "PENDING", "COMPLETED"):
        world.put(world.submit(name=state), JobState(state))
    world.submit(array=tuple(range(9)))
    (running,) = world.store.active()
    world.store.put_nodes([NodeRecord(name="n0")])
    world.store.put_ranks([RankRecord(job_id=running.id, attempt=1, rank=0, node="n0", runtime="podman", gpus=(0,))])
    run = RunRecord(
        job_id=running.id, attempt=1, user="root", partition="p", flavor=None, share=0.1, gpus=1, start_time=NOW,
        end_time=None, outcome=None, nodes={"n0": 1},
    )  # fmt: skip
    world.store.open_run(run)
    world.store.put_reservation(Reservation(name="r", nodes=("n0",), begin=NOW, end=NOW + 9), NOW)
    world.store.put_shadow(Shadow(partition="p", spec=next(iter(policies().values())), since=NOW, by="ann"))
    world.store.set_meta("heartbeat", str(NOW))
    yield world
    world.store.close()


def policies() -> dict[str, object]:
    from gpusched.config.policies import BUILT_IN, load_policy

    return {"p": load_policy(BUILT_IN / "easy.yaml")}


READS = {
    "jobs": lambda store: store.jobs(),
    "specs": lambda store: store.jobs(),
    "nodes": lambda store: store.node_records(),
    "ranks": lambda store: store.ranks(),
    "runs": lambda store: store.runs(0.0, NOW * 2),
    "reservations": lambda store: store.reservations(NOW),
    "shadows": lambda store: store.shadows(),
    "events": lambda store: store.events(),
    "meta": lambda store: store.number("heartbeat", 0.0),
}
GARBAGE = (b"", b"\x00\xff" * 20, b"[]", b'{"id":7}', None, 7, "text", b'{"a":' * 2000)


@pytest.mark.parametrize("table", READS)
def test_garbage_in_any_row_is_one_clear_error_and_is_set_aside(world: InboxWorld, table: str) -> None:
    store = world.store
    column = {"runs": "allocation", "meta": "value"}.get(table, "data")
    assert not list(unreadable(store._db))
    where = "WHERE key = 'heartbeat'" if table == "meta" else ""
    for garbage in GARBAGE:
        if garbage is None or (table == "meta" and garbage in (7, b"", "text")):
            continue
        store._db.execute("SAVEPOINT test")
        store._db.execute(f"UPDATE {table} SET {column} = ? {where}", (garbage,))
        if next(unreadable(store._db), None) is None:
            READS[table](store)  # it is what it might have been
        else:
            with pytest.raises(DatabaseDamaged, match="the database is damaged: row "):
                READS[table](store)
        store._db.execute("ROLLBACK TO test")
        store._db.execute("RELEASE test")
    store._db.execute(f"UPDATE {table} SET {column} = ? {where}", (GARBAGE[1],))
    found = set_aside_damaged(store, NOW)
    assert {row.table for row in found} == ({"jobs", "specs"} if table == "specs" else {table})
    READS[table](store)
    assert set_aside_damaged(store, NOW) == [], "all of it"
    events = [event for event in store.events() if event.kind == "row_set_aside"]
    assert len(events) == len(found)
    assert all(event.data["was"] for event in events)
    if table in ("jobs", "specs"):
        jobs = store.jobs()
        assert sorted(job.state for job in jobs) == ["COMPLETED", *["FAILED"] * 11]
        assert {job.user for job in jobs} == {"root"}
        assert "set aside: its row" in jobs[0].message
        assert store.runs(0.0, NOW * 2)[0].end_time == NOW
        again = world.submit(name="PENDING")
        assert world.job(again).spec.name == "PENDING", "the same request can be made again"
    elif table == "nodes":
        assert store.node_records()["n0"].drain_reason is not None
    elif table == "ranks":
        (rank,) = store.ranks()
        assert (rank.gpus, rank.node) == ((0,), "n0"), "its GPUs stay taken"


def test_of_a_row_that_is_set_aside_64_kib_are_kept_and_a_rank_stays_on_an_unknown_node(world: InboxWorld) -> None:
    garbage = b'{"a":' * 20_000
    world.store._db.execute("DELETE FROM nodes")
    world.store._db.execute("UPDATE ranks SET data = ?", (garbage,))
    set_aside_damaged(world.store, NOW)
    (event,) = (event for event in world.store.events() if event.kind == "row_set_aside")
    assert event.data["was"]["data"] == garbage[: 64 * 1024].decode()
    (rank,) = world.store.ranks()
    assert (rank.node, rank.runtime, rank.gpus) == ("n0", "podman", (0,))


def test_a_job_of_a_user_who_is_gone_is_nobodys(world: InboxWorld) -> None:
    world.store._db.execute("UPDATE jobs SET data = x'00', user = 'no such user' WHERE state = 'RUNNING'")
    set_aside_damaged(world.store, NOW)
    assert [job.uid for job in world.store.jobs(user="no such user")] == [-1]


def test_a_page_that_is_garbage_is_one_clear_error(world: InboxWorld, tmp_path: Path) -> None:
    for number in range(300):
        world.store.append([msgspec.structs.replace(world.store.events()[0], data={"x": "y" * 900, "n": number})])
    world.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = tmp_path / "gpusched.db"
    world.store.close()
    content = bytearray(path.read_bytes())
    content[4096 * 40 : 4096 * 60] = b"\xa5" * (4096 * 20)
    path.write_bytes(content)
    world.store = Store.create_or_open(tmp_path)
    with pytest.raises(DatabaseDamaged) as error:
        world.store.events(limit=10**6)
    assert error.value.line() == "the database is damaged: database disk image is malformed; see 'gpusched check'"


def test_an_emptied_database_is_not_taken_for_a_new_one(world: InboxWorld, tmp_path: Path) -> None:
    """Its jobs would run on with nobody to end them, and their GPUs be foreign processes'."""
    job = world.submit()
    world.store.close()
    path = tmp_path / "gpusched.db"
    content = path.read_bytes()
    os.truncate(path, 0)
    (tmp_path / "logs" / job).mkdir(parents=True)
    for opened in (Store.create_or_open, Reader.open):
        with pytest.raises(GpuschedError, match="is empty, but jobs have run here"):
            opened(tmp_path)
    path.write_bytes(content)
    world.store = Store.create_or_open(tmp_path)
    assert world.store.job(job) is not None
    world.store.close()
    path.unlink()  # as the error says
    world.store = Store.create_or_open(tmp_path)
    assert world.store.job(job) is None


def test_a_database_that_was_about_to_be_made_is_made(tmp_path: Path) -> None:
    (tmp_path / "gpusched.db").touch()
    assert Reader.open(tmp_path) is None
    Store.create_or_open(tmp_path).close()


def test_a_full_disk_is_no_damage(world: InboxWorld) -> None:
    world.store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        world.store.append([msgspec.structs.replace(world.store.events()[0], data={"x": "y" * 10**6})])


def test_only_the_disks_errors_are_the_disks(tmp_path: Path) -> None:
    """Not those of a statement, also where the database is sound."""
    path = tmp_path / "db.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE t (a UNIQUE)")
        db.execute("INSERT INTO t VALUES (1)")
        db.execute("PRAGMA max_page_count = 1")
        statements = {"SELECT * FROM gone": False, "INSERT INTO t VALUES (1)": False,
                      "INSERT INTO t VALUES (zeroblob(99999))": True}  # fmt: skip
        for statement, of_the_disk in statements.items():
            with pytest.raises(sqlite3.Error) as failed:
                db.execute(statement)
            assert disk_error(path, failed.value) is (failed.value if of_the_disk else None), statement
    assert disk_error(path, sqlite3.OperationalError("made here")) is None
    assert disk_error(path, ValueError("malformed")) is None
    unread = sqlite3.OperationalError("disk I/O error")
    unread.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ  # an extended code
    assert disk_error(path, unread) is unread
    with pytest.raises(sqlite3.OperationalError) as missing:
        sqlite3.connect(tmp_path)
    assert disk_error(path, missing.value) is missing.value
    assert str(disk_error(path, sqlite3.DatabaseError("malformed"))) == "disk I/O error", "but the database is sound"
    for content in (b"", b"no database" * 999):
        path.write_bytes(content)
        assert disk_error(path, sqlite3.DatabaseError("malformed")) is None
    path.unlink()
    assert str(disk_error(path, sqlite3.DatabaseError("malformed"))) == "unable to open database file"


def test_what_cannot_be_copied_is_unknown_and_what_is_locked_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect = tmp_path / "db.sqlite", sqlite3.connect

    def impatient(name: str, **more: Any) -> sqlite3.Connection:
        db = connect(name, timeout=0.0, **more)
        if not name and full:
            db.execute("PRAGMA max_page_count = 1")
        return db

    with closing(connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE t (a)")
        monkeypatch.setattr(damage.sqlite3, "connect", impatient)
        full = True
        assert disk_error(path, sqlite3.DatabaseError("malformed")) is None
        full = False
        assert str(disk_error(path, sqlite3.DatabaseError("malformed"))) == "disk I/O error"
        db.execute("BEGIN EXCLUSIVE")
        assert str(disk_error(path, sqlite3.DatabaseError("malformed"))) == "database is locked"


def test_an_index_that_lacks_rows_is_damage_not_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE t (a)")
        db.execute("CREATE INDEX i ON t (a)")
        (index,) = db.execute("SELECT * FROM sqlite_schema WHERE name = 'i'")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("DELETE FROM sqlite_schema WHERE name = 'i'")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO t VALUES (1)")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", index)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        with pytest.raises(sqlite3.DatabaseError) as damaged:
            db.execute("DELETE FROM t WHERE rowid = 1")
        assert disk_error(path, damaged.value) is None
