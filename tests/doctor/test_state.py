"""The examination of the state folder."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpusched.doctor.findings import Finding
from gpusched.doctor.state import examine_state, known_nodes
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import DATABASE, Reader, Store

NOW = 1_000_000.0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    Inbox(folder).create()
    store = Store.create_or_open(folder)
    store.set_meta("heartbeat", str(NOW - 3))
    store.close()
    return folder


def examine(state: Path) -> dict[str, Finding]:
    return {f.check: f for f in examine_state(state, 5.0, NOW)}


def wrong(state: Path) -> dict[str, str]:
    return {f.check: f.status for f in examine(state).values() if f.status != "ok"}


def test_a_state_that_is_well(state: Path) -> None:
    before = (state / DATABASE).read_bytes()
    assert wrong(state) == {}
    assert set(examine(state)) == {"folder", "disk", "permissions", "database", "controller"}
    assert (state / DATABASE).read_bytes() == before
    assert len(known_nodes(state).cluster_id) > 5


def test_no_state_yet(tmp_path: Path) -> None:
    assert wrong(tmp_path / "a/b") == {}
    assert not (tmp_path / "a").exists()
    assert known_nodes(tmp_path / "a/b").cluster_id == "check"
    (tmp_path / "file").touch()
    assert wrong(tmp_path / "file") == {"folder": "fail"}
    (tmp_path / "empty").mkdir()
    assert wrong(tmp_path / "empty") == {"controller": "warn"}


def test_a_controller_that_is_gone(state: Path) -> None:
    (found,) = [f for f in examine_state(state, 5.0, NOW + 100) if f.check == "controller"]
    assert (found.status, found.message) == ("warn", "last seen 103 s ago")
    assert "gpusched controller" in found.hint


@pytest.mark.parametrize("folder", ["secrets", "programs/1000"])
def test_open_to_others(state: Path, folder: str) -> None:
    secrets = state / folder
    secrets.mkdir(mode=0o700, parents=True)
    (secrets / "a.json").touch(0o600)
    assert wrong(state) == {}
    (secrets / "a.json").chmod(0o644)
    assert wrong(state) == {"permissions": "fail"}
    assert str(secrets / "a.json") in examine(state)["permissions"].message
    (secrets / "a.json").chmod(0o600)
    (state / "inbox/new").chmod(0o777)
    assert wrong(state) == {"permissions": "fail"}
    (state / "inbox/new").chmod(0o3733)
    assert wrong(state) == {}
    state.chmod(0o777)
    assert wrong(state) == {"permissions": "fail"}


@pytest.mark.parametrize("name", ["secrets", "secrets/j.json", f"{DATABASE}-wal", "inbox/tmp"])
def test_files_that_vanish_meanwhile_hide_no_finding(
    state: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with secrets ends, say, between the listing of their folder and its look at the file."""
    (state / "secrets").mkdir(mode=0o700)
    (state / "secrets/j.json").touch(mode=0o600)
    with closing(Store.create_or_open(state)):  # which has a -wal
        expected = set(examine(state))
        real, gone = Path.stat, state / name
        seen = list[Path]()

        def vanish(path: Path, **how: bool) -> os.stat_result:
            if path == gone:  # a check for existence has seen it
                seen.append(path)
                if len(seen) > (path.name != "j.json"):
                    raise FileNotFoundError(2, "No such file or directory", str(path))
            return real(path, **how)

        monkeypatch.setattr(Path, "stat", vanish)
        assert set(examine(state)) == expected
    assert seen


def test_a_store_that_is_moved_away_meanwhile(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "open", lambda state: None)  # after the database was examined
    assert wrong(state) == {"controller": "warn"}


def test_a_database_that_others_can_lock(state: Path) -> None:
    assert "permissions" not in wrong(state)
    (state / DATABASE).chmod(0o644)
    found = examine(state)["permissions"]
    assert (found.status, found.hint) == ("warn", "restart the controller, which closes it")
    assert str(state / DATABASE) in found.message


def test_a_damaged_database(state: Path) -> None:
    path = state / DATABASE
    data = bytearray(path.read_bytes())
    data[8192:12288] = os.urandom(4096)
    path.write_bytes(data)
    assert wrong(state)["database"] == "fail"
    path.write_bytes(b"not a database at all" * 100)
    assert examine(state)["database"].status == "fail"
    path.write_bytes(b"")
    assert examine(state)["database"].status == "fail"


def test_a_newer_database(state: Path) -> None:
    db = sqlite3.connect(state / DATABASE)
    db.execute("PRAGMA user_version=99")
    db.close()
    assert "version 99" in examine(state)["database"].message
