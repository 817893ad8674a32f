"""Where the state folder is, and how its files are written."""

import os
from pathlib import Path

import pytest

from gpusched.config import paths


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GPUSCHED_STATE", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(paths, "SHARED_STATE", tmp_path / "shared")
    return tmp_path


def test_state_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.state_folder() == home / ".local/state/gpusched"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert paths.state_folder() == home / ".local/state/gpusched"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert paths.state_folder() == home / "xdg/gpusched"
    (home / "shared").mkdir()
    assert paths.state_folder() == home / "xdg/gpusched"
    (home / "shared/inbox").mkdir()
    assert paths.state_folder() == home / "shared"
    monkeypatch.setenv("GPUSCHED_STATE", "~/mine")
    assert paths.state_folder() == home / "mine"


def test_config_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.config_folder() == home / ".config/gpusched"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    assert paths.config_folder() == home / "xdg/gpusched"


def test_each_of_two_writers_of_a_file_has_a_draft_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync, synced = tmp_path / "weights", os.fsync, list[int]()

    def interrupted(file: int) -> None:
        synced.append(file)
        if len(synced) == 1:
            paths.write_atomic(path, b"the other one's, which is longer")
        fsync(file)

    monkeypatch.setattr(paths.os, "fsync", interrupted)
    paths.write_atomic(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert len(synced) == 2

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paths.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        paths.write_atomic(path, b"more")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("weights", b"ours")]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Run by root, with /dev/null, it would leave a machine without one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    paths.write_atomic(pipe, b"page")
    assert (os.read(reader, 99), pipe.is_fifo()) == (b"page", True)
    os.close(reader)
