"""The copy of the store for other users: what it costs in files, a disk without room, readers that hold old ones."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.controller import publishing
from gpusched.controller.publishing import Publisher
from gpusched.model.notices import Notices, Receiver
from gpusched.model.resources import EventSettings
from gpusched.model.units import format_memory
from gpusched.queue import reading
from gpusched.queue.lastgood import LAST_GOOD, Declared, kept_declarations, store_declared
from gpusched.queue.locks import LockWait, LockWaitingConnection, connect_to_write
from gpusched.queue.reading import CURRENT, DATABASE, PUBLISHED
from gpusched.queue.store import Reader, Store
from tests.controller.imagined import inventory
from tests.logged import messages


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    def connect(path: Path, waiting: LockWait | None) -> LockWaitingConnection:
        db = connect_to_write(path, waiting)
        db.execute("PRAGMA secure_delete=OFF")  # as SQLite's own default is; some distributions have another
        return db

    monkeypatch.setattr("gpusched.queue.store.connect_to_write", connect)
    store = Store.create_or_open(tmp_path)
    yield store
    store.close()


class Site:
    """A publisher that copies on request: its thread polls once an hour."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(publishing, "POLL_S", 3600.0)
        monkeypatch.setattr(os, "geteuid", lambda: 54321)  # readers are another user
        self.folder, self._caplog = state / PUBLISHED, caplog
        self.publisher = Publisher(state)
        self.publisher.start()

    @property
    def said(self) -> list[str]:
        return messages(self._caplog)

    def numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.db"))


@pytest.fixture
def site(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Site]:
    site = Site(tmp_path, monkeypatch, caplog)
    yield site
    site.publisher.withdraw()
    assert not site.folder.exists()


def test_a_copy_is_made_only_of_what_changed_and_readers_go_on_with_it(
    store: Store, site: Site, tmp_path: Path
) -> None:
    reader = Reader.open(tmp_path)
    assert reader is not None
    seen = reader.data_version()
    site.publisher.publish()
    assert (site.numbers(), reader.meta("x"), reader.data_version()) == ([1], None, seen)
    for text in "abc":
        store.set_meta("x", text)
        site.publisher.publish()
    assert site.numbers() == [3, 4], "the one before is kept for who is just opening it"
    assert (site.folder / CURRENT).readlink() == Path("4.db")
    assert reader.meta("x") is None
    assert reader.data_version() != seen
    assert (reader.meta("x"), reader.lag_s() > 0) == ("c", True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM meta")
    reader.close()
    assert sorted(os.listdir(site.folder)) == ["3.db", "4.db", CURRENT]


def test_published_copies_lack_urls_and_options_of_receivers(store: Store, site: Site, tmp_path: Path) -> None:
    """Earlier ones included: they are secrets, and all users can read the copies."""
    url = "https://chat.example.org/T0K3N"
    receivers = (*[Receiver(webhook=url)] * 200, Receiver(notifier="pager", options={"key": "T0K3N"}))  # whole pages
    events = msgspec.structs.replace(inventory().settings, events=EventSettings(webhook=url))
    declared = msgspec.structs.replace(inventory(), notices=Notices(to=receivers, smtp="mail"), settings=events)
    for kept in (Declared(declared, {}), Declared(msgspec.structs.replace(declared, notices=Notices(smtp="mail")), {})):
        store_declared(store, kept)
        site.publisher.publish()
        assert b"T0K3N" not in (site.folder / CURRENT).read_bytes()
        with contextlib.closing(Reader.open(tmp_path) or pytest.fail("none is there")) as reader:
            found = kept_declarations(reader)
        assert found is not None
        assert (found.inventory.notices, found.inventory.partitions) == (Notices(smtp="mail"), inventory().partitions)
    store.set_meta(LAST_GOOD, "garbled")
    site.publisher.publish()
    assert (tmp_path / DATABASE).stat().st_mode & 0o777 == 0o600


def test_a_start_removes_what_a_killed_one_left(store: Store, site: Site, tmp_path: Path) -> None:
    site.publisher.stop()
    for name in ("7.db", "9.part", "9.part-journal", "link.part"):
        (site.folder / name).write_text("half")
    store.set_meta("x", "new")
    site.publisher.start()
    assert site.numbers() == [7, 8]
    reader = Reader.open(tmp_path)
    assert reader is not None
    assert reader.meta("x") == "new"
    reader.close()
    assert not list(site.folder.glob("*.part*"))


@pytest.mark.parametrize(("left_mib", "copies"), [(15, [1]), (17, [1, 2])])
def test_a_copy_leaves_the_writer_16_mib_of_the_disk(
    store: Store, site: Site, monkeypatch: pytest.MonkeyPatch, left_mib: int, copies: list[int]
) -> None:
    store.set_meta("x", "new")
    (pages,), (size,) = (store._db.execute(f"PRAGMA {of}").fetchone() for of in ("page_count", "page_size"))
    monkeypatch.setattr(publishing, "_free", lambda _: pages * size + (left_mib << 20))
    with site.publisher._reporting():
        site.publisher.publish()
    assert site.numbers() == copies


def test_without_room_the_old_copy_stays(
    store: Store, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "RESERVED_BYTES", 1 << 60)
    store.set_meta("x", "new")
    for _ in range(2):
        with site.publisher._reporting():
            site.publisher.publish()
    (line,) = site.said
    assert line.startswith("cannot make a new copy of the store for other users")
    assert f"{format_memory((1 << 40) + 1)} are needed" in line
    assert site.numbers() == [1]
    monkeypatch.undo()
    site.publisher.publish()
    assert site.numbers() == [1, 2]


def test_a_copy_that_breaks_off_leaves_nothing(store: Store, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    store.set_meta("x", "new")
    monkeypatch.setattr(Publisher, "_link_current", full)
    with site.publisher._reporting():
        site.publisher.publish()
    assert "disk is full" in site.said[0]
    assert (site.folder / CURRENT).readlink() == Path("1.db")
    monkeypatch.undo()
    site.publisher.publish()
    assert (site.folder / CURRENT).readlink() != Path("1.db")


def test_open_old_copies_do_not_fill_the_disk(store: Store, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MAX_HELD", 2)
    held = []
    for number in range(6):
        held.append((site.folder / CURRENT).open("rb"))
        store.set_meta("x", str(number))
        site.publisher.publish()
    sizes = [os.fstat(file.fileno()).st_size for file in held]
    assert sizes[:3] == [0] * 3
    assert all(sizes[3:])
    for file in held:
        file.close()
    store.set_meta("x", "end")
    site.publisher.publish()
    assert site.publisher._held == []


def test_a_copy_may_be_replaced_while_it_is_opened(
    store: Store, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = reading._connected, list[str]()

    def replaced(path: Path, mode: str) -> sqlite3.Connection:
        if not path.is_relative_to(tmp_path):  # another thread of this process, which watches another store
            return real(path, mode)
        opened.append(path.name)
        if len(opened) == 1:
            for text in "ab":
                store.set_meta("x", text)
                site.publisher.publish()
        return real(path, mode)

    monkeypatch.setattr(reading, "_connected", replaced)
    reader = Reader.open(tmp_path)
    assert reader is not None
    assert (opened, reader.meta("x")) == (["1.db", "3.db"], "b")
    reader.close()


def test_a_start_that_fails_is_made_up_for(store: Store, site: Site) -> None:
    site.publisher.withdraw()
    site.folder.touch()
    site.publisher.start()
    assert len(site.said) == 1
    site.folder.unlink()
    site.publisher.publish()
    assert site.numbers() == [1]
