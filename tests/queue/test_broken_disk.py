"""A store on a disk that fails: on FUSE, and with a rollback journal whose writer is amid a commit, or died there."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from gpusched.controller.rebuilding import _refuse_sound, rebuild
from gpusched.doctor.state import examine_state
from gpusched.errors import GpuschedError
from gpusched.model.events import Event
from gpusched.model.resources import BackupSettings
from gpusched.queue import private, reading
from gpusched.queue.backup import make_backup
from gpusched.queue.reading import DATABASE
from gpusched.queue.store import Reader, Store
from tests.controller.imagined import inventory
from tests.testbed.fuse import CHANGES, READS, SYNCS, WRITES, FuseMount

NOW = 1_800_000_000.0
BEFORE, AFTER = ["before"] * 300, ["after"] * 300
AMID_COMMIT = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size=4")  # pages of an open transaction are in the file
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE events SET kind = 'after', data = CAST('{' || hex(zeroblob(900)) || '}' AS BLOB)")
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def amid_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """A state folder whose writer is amid a commit of `AFTER`, or was killed there; it lasts for the test."""
    monkeypatch.setattr(private, "lacks_shared_memory", lambda _: True)
    writers: list[subprocess.Popen[bytes]] = []

    def begun(*, killed: bool) -> Path:
        store = Store.create_or_open(tmp_path / "state")
        store.append(Event(time=NOW, kind="before", data={"pad": "x" * 1700}) for _ in BEFORE)
        store.close()
        program = [sys.executable, "-c", AMID_COMMIT, str(tmp_path / "state" / DATABASE)]
        writer = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        writers.append(writer)
        assert writer.stdout is not None
        writer.stdout.readline()
        if killed:
            writer.kill()
            writer.wait()
        assert (tmp_path / "state" / f"{DATABASE}-journal").stat().st_size > 0
        return tmp_path / "state"

    yield begun
    for writer in writers:
        writer.kill()
        writer.communicate()


def kinds(reader: Reader | None) -> list[str]:
    assert reader is not None
    found = [event.kind for event in reader.events()]
    reader.close()
    return found


def test_after_a_kill_amid_a_commit_readers_see_what_was_before(amid_commit: Callable[..., Path]) -> None:
    state = amid_commit(killed=True)
    assert kinds(Reader.open(state)) == BEFORE
    assert kinds(Reader.open(state)) == BEFORE


def test_no_reader_sees_half_of_a_commit(
    amid_commit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, connect = amid_commit(killed=False), sqlite3.connect

    def impatient(name: str, **more: Any) -> sqlite3.Connection:
        return connect(name, **more | {"timeout": 0.0})

    monkeypatch.setattr(reading.sqlite3, "connect", impatient)
    with pytest.raises(GpuschedError, match="cannot be read: database is locked"):
        Reader.open(state)


def test_after_a_kill_amid_a_commit_a_backup_is_made(amid_commit: Callable[..., Path], tmp_path: Path) -> None:
    state = amid_commit(killed=True)
    made = make_backup(state, BackupSettings(to=str(tmp_path / "backups")), NOW)
    assert kinds(Reader.open(made.path)) == BEFORE


def test_after_a_kill_amid_a_commit_there_is_nothing_to_recover(amid_commit: Callable[..., Path]) -> None:
    state = amid_commit(killed=True)
    with pytest.raises(GpuschedError, match="nothing to recover"), rebuild(state, inventory(), None, "c"):
        pass
    assert kinds(Reader.open(state)) == BEFORE


def test_a_lost_databases_journal_is_not_left_beside_the_recovered_one(
    amid_commit: Callable[..., Path], tmp_path: Path
) -> None:
    state = amid_commit(killed=True)
    make_backup(state, BackupSettings(to=str(tmp_path / "backups")), NOW)
    (state / DATABASE).unlink()
    (state / f"{DATABASE}-journal").write_bytes(b"of the lost one")
    with rebuild(state, msgspec.structs.replace(inventory(), partitions=()), str(tmp_path / "backups")) as rebuilt:
        rebuilt.commit()
    assert not (state / f"{DATABASE}-journal").exists()
    assert kinds(Reader.open(state))[:300] == BEFORE


def test_an_earlier_versions_database_moves_to_a_new_file_without_half_a_commit(
    amid_commit: Callable[..., Path],
) -> None:
    state = amid_commit(killed=True)
    for file in state.glob(f"{DATABASE}*"):
        file.chmod(0o644)
    Store.create_or_open(state).close()
    assert kinds(Reader.open(state)) == BEFORE
    assert not [name for name in os.listdir(state) if "private" in name or "journal" in name]


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    for name in ("behind", "mounted"):
        (tmp_path / name).mkdir()
    try:
        mount = FuseMount(tmp_path / "behind", tmp_path / "mounted")
    except OSError as error:
        pytest.skip(f"{error.strerror} (needs root and /dev/fuse)")
    yield mount
    mount.close()


def test_what_was_accepted_stays_whatever_a_fuse_fails_to_read_write_or_sync(fuse: FuseMount) -> None:
    """EIO at drawn operations; the writer goes on, or is opened anew."""
    rng, state, accepted, tried = Random(7), fuse.mountpoint / "state", list[float](), set[float]()
    store: Store | None = Store.create_or_open(state)
    assert store is not None
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    failed = 0
    for number in range(60):
        fuse.fail(rng.choice((READS, WRITES, SYNCS, READS | WRITES | SYNCS)), rng.randrange(8), rng.choice((1, 2, 9)))
        tried.add(number)
        try:
            store = store or Store.create_or_open(state)
            store.append([Event(time=number, kind="noted", data={"pad": "x" * rng.randrange(9000)})])
            accepted.append(number)
        except (sqlite3.Error, OSError, GpuschedError):
            failed += 1
            if store is not None and rng.random() < 0.5:
                store.close()
                store = None
        fuse.heal()
        reader = Reader.open(state)
        assert reader is not None
        found = [event.time for event in reader.events()]
        reader.close()
        assert set(accepted) <= set(found) <= tried
        assert len(set(found)) == len(found)
    assert failed > 5
    if store is not None:
        store.close()


ALWAYS = 1 << 30


@pytest.mark.parametrize("what", [READS, WRITES, SYNCS, CHANGES])
@pytest.mark.parametrize("times", [1, 3, ALWAYS])
def test_each_operation_of_a_commit_may_fail(fuse: FuseMount, what: int, times: int) -> None:
    """One after the other, with a cache so small that the database is written before the commit."""
    state, accepted, tried = fuse.mountpoint / "state", set[float](), set[float]()
    store = Store.create_or_open(state)
    store._db.execute("PRAGMA cache_size = 4")
    for after in range(200):
        tried.add(after)
        fuse.fail(what, after, times)
        try:
            with store.transaction():
                store.append(Event(time=after, kind="noted", data={"pad": "x" * 3000}) for _ in range(4))
            accepted.add(after)
        except sqlite3.OperationalError:
            pass
        fuse.heal()
        reader = Reader.open(state)
        assert reader is not None
        assert reader._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = [event.time for event in reader.events()]
        reader.close()
        assert accepted <= set(found) <= tried
        assert all(found.count(one) == 4 for one in set(found))
        if {after - 2, after - 1, after} <= accepted:  # it has no more operations than that
            break
    else:
        pytest.fail("a commit has no end of operations")
    assert len(accepted) < len(tried) or what == READS
    store.close()


def test_each_sync_of_making_the_store_may_fail(fuse: FuseMount) -> None:
    """One that had its tables, and no cluster's id, could never be used."""
    whole = 0
    for after in range(200):
        state = fuse.mountpoint / str(after)
        state.mkdir()
        fuse.fail(SYNCS, after)
        try:
            Store.create_or_open(state, term=1).close()
            whole += 1
        except GpuschedError:
            whole = 0
        fuse.heal()
        with contextlib.closing(Store.create_or_open(state, term=2)) as store:
            assert store.meta("cluster_id")
            assert store._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if whole == 3:  # it has no more operations than that
            return
    pytest.fail("it has no end of operations")


def test_a_page_that_the_disk_does_not_give_is_not_called_damage(fuse: FuseMount) -> None:
    """SQLite calls it malformed, and a controller ended by that."""
    state = fuse.mountpoint / "state"
    with contextlib.closing(Store.create_or_open(state)) as store:
        store.append(Event(time=NOW, kind="noted", data={"pad": "x" * 3000}) for _ in range(300))
        store._db.execute("PRAGMA shrink_memory")
        os.close(os.open(state / DATABASE, os.O_RDONLY))  # by this the kernel forgets what it has of it
        fuse.fail(READS, 0, ALWAYS)
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
            store.events()
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"), store.transaction():
            store._db.execute("SELECT sum(length(data)) FROM events").fetchone()
        for opened in (Store.create_or_open, Reader.open):
            with pytest.raises(GpuschedError, match="disk I/O error"):
                opened(state)
        (database,) = [found for found in examine_state(state, 2.0, NOW) if found.check == "database"]
        assert "cannot be read: disk I/O error" in database.message
        assert "recover" not in database.hint
        with pytest.raises(GpuschedError, match="may be in order: disk I/O error"):
            _refuse_sound(state)
        fuse.heal()
        assert len(store.events()) == 300
