"""The lease and its terms: one holder, whatever the clocks say; and the store, which an earlier term cannot write."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gpusched.errors import GpuschedError
from gpusched.model.events import Event
from gpusched.queue import private
from gpusched.queue.lease import (
    LEASE,
    STANDBYS,
    ControllerLease,
    LeaseHolder,
    RenewalWatch,
    Superseded,
    adopt,
    announce_standby,
    claim,
    decoded_lease,
    highest_term,
    next_term,
    read_lease,
)
from gpusched.queue.store import DATABASE, Store


def lease(term: int) -> ControllerLease:
    return ControllerLease(pid=1, started="1", boot_id="b", term=term, host="h")


def claimed(state: Path, term: int) -> LeaseHolder:
    holder = claim(state, term)
    assert holder is not None
    return holder


def test_a_lease_that_does_not_change_is_stale_by_the_watchers_own_clock() -> None:
    clock = [100.0]
    watch = RenewalWatch(15.0, lambda: clock[0])
    seen = []
    contents = (b"1", b"2", b"2", b"2", b"torn", b"3", b"3")
    for clock[0], content in zip((100, 114, 128.9, 129, 130, 144, 159), contents, strict=True):
        seen.append(watch.is_stale(content))
    assert seen == [False, False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("before", "stored", "term"),
    [(None, 0, 1000), (lease(7), 7, 8), (lease(2000), 2000, 2001), (lease(7), 6, 1000), (None, 2000, 2001),
     (lease(2000), 0, 2001), (lease(7), 2000, 2001), (lease(7), 8, 1000), (None, 2001, 2002)],
)  # fmt: skip
def test_terms_only_grow_also_where_lease_or_store_was_lost(
    before: ControllerLease | None, stored: int, term: int
) -> None:
    assert next_term(before, stored, 1000.9) == term


def test_a_lease_that_is_torn_or_missing_is_none(tmp_path: Path) -> None:
    assert (highest_term(tmp_path), read_lease(tmp_path)) == (0, None)
    whole = msgspec.json.encode(lease(7))
    assert decoded_lease(whole) == lease(7)
    for content in (b"", whole[:-1], b"[]", b"{}", b"\xff"):
        assert decoded_lease(content) is None, content


def test_of_many_that_claim_a_term_one_gets_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [holder for holder in pool.map(lambda _: claim(tmp_path, 5), range(32)) if holder is not None]
    assert len(found) == 1
    assert claim(tmp_path, 5) is None
    claimed(tmp_path, 7)
    assert claim(tmp_path, 6) is None, "a slow one whose term is over"


def test_a_superseded_holder_notices_and_does_not_renew(tmp_path: Path) -> None:
    old = claimed(tmp_path, 5)
    old.renew()
    found = read_lease(tmp_path)
    assert found is not None
    assert (found.term, found.beat, found.pid, found.is_alive_here()) == (5, 1, os.getpid(), True)
    new = claimed(tmp_path, 6)
    with pytest.raises(Superseded, match=rf"{os.uname().nodename}, pid {os.getpid()} took over \(term 6\)"):
        old.renew()
    assert os.listdir(tmp_path / LEASE) == ["6"]
    old.release()  # whatever it still writes is its own
    new.check()
    found = read_lease(tmp_path)
    assert found is not None
    assert (found.term, found.released) == (6, False)
    again = adopt(tmp_path, msgspec.structs.replace(found, released=True))
    assert (again.term, read_lease(tmp_path)) == (6, msgspec.structs.replace(found, beat=1))


def test_the_holder_of_the_lease_sees_the_standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("gpusched.queue.lease.RenewalWatch", lambda s: RenewalWatch(s, lambda: clock[0]))
    holder = claimed(tmp_path, 1)
    holder.renew()
    assert holder.standbys == ()
    for clock[0], beat, seen in ((1.0, 1, True), (10.0, 2, True), (24.0, 2, True), (26.0, 2, False)):
        announce_standby(tmp_path, beat)
        holder.renew()
        assert holder.standbys == ((os.uname().nodename,) if seen else ()), clock
    (tmp_path / STANDBYS / f"{os.uname().nodename}.{os.getpid()}").unlink()
    holder.renew()
    assert holder.standbys == ()


def test_a_standby_that_ends_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, read_bytes = claimed(tmp_path, 1), Path.read_bytes
    (tmp_path / STANDBYS).mkdir()
    for number in range(4):
        (tmp_path / STANDBYS / f"login{number}.7").touch()

    def vanished(path: Path) -> bytes:
        if path.name == next((tmp_path / STANDBYS).iterdir()).name:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", vanished)
    holder.renew()
    assert len(holder.standbys) == 3


def test_an_earlier_term_commits_nothing(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path).close()  # as earlier versions left it: without a term
    old = Store.create_or_open(tmp_path, term=5)
    old.set_meta("key", "before")
    new = Store.create_or_open(tmp_path, term=6)
    event = Event(time=1.0, kind="controller_started", data={})
    who = rf"{os.uname().nodename}, pid {os.getpid()} took over \(term 6\)"
    with pytest.raises(Superseded, match=who), old.transaction():
        old.set_meta("key", "in a transaction")
    with pytest.raises(Superseded):
        old.set_meta("key", "alone")
    with pytest.raises(Superseded):
        old.append([event])
    with pytest.raises(Superseded):
        old.forget_applied(1e12)
    assert (new.meta("key"), new.events()) == ("before", [])
    assert not old._db.in_transaction, "it holds no lock"
    new.append([event])
    with pytest.raises(Superseded):
        Store.create_or_open(tmp_path, term=5)
    assert old.meta("key") == "before", "it may read"
    Store.create_or_open(tmp_path, term=6).set_meta("key", "restarted")
    for store in (old, new):
        store.close()


def test_a_transaction_that_is_open_ends_before_another_term_begins(tmp_path: Path) -> None:
    old = Store.create_or_open(tmp_path, term=5)
    with old.transaction():
        with pytest.raises(GpuschedError, match="locked"):
            Store.create_or_open(tmp_path, lambda waited: waited < 0, term=6)
        old.set_meta("key", "whole")
    new = Store.create_or_open(tmp_path, term=6)
    assert new.meta("key") == "whole"
    for store in (old, new):
        store.close()


@pytest.mark.parametrize(
    ("kind", "journal"),
    [("nfs4", "delete"), ("fuse.glusterfs", "delete"), ("fuse", "delete"), ("fuse.sshfs", "delete"), ("ext4", "wal")],
)
def test_on_a_network_filesystem_the_journal_needs_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, journal: str
) -> None:
    device, mounts = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 0:0 / /proc rw - proc proc rw\n"
        f"23 1 {os.major(device)}:{os.minor(device)} / /home rw,relatime shared:1 - {kind} host:/x rw\n"
    )
    Store.create_or_open(tmp_path).close()  # it may have been made elsewhere
    found = private.lacks_shared_memory
    monkeypatch.setattr(private, "lacks_shared_memory", lambda folder: found(folder, mounts))
    Store.create_or_open(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == (journal,)
    assert not found(tmp_path / "nowhere", mounts)
