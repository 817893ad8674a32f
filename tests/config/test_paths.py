"""Where the state folder is, and how its files are written."""

import os
from pathlib import Path

import pytest

from gpusched.config import paths
from gpusched.errors import UsageError, Warnings


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


@pytest.mark.skipif(os.getuid() != 0, reason="needs another account")
@pytest.mark.parametrize(("file", "link", "sudo", "used"), [
    (0, None, "", True), (12399, None, "", False), (12399, None, "12399", True), (12399, None, "12398", False),
    (0, 12399, "", False), (12399, 0, "", False),
])  # fmt: skip
def test_another_users_inventory_in_the_current_folder_is_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, file: int, link: int | None, sudo: str, used: bool
) -> None:
    """It may name commands that would be run with our rights, such as a ProxyCommand."""
    given: list[str] = []
    monkeypatch.setattr(Warnings, "given", set())
    monkeypatch.setattr(Warnings, "show", given.append)
    monkeypatch.delenv("GPUSCHED_INVENTORY", raising=False)
    monkeypatch.setenv("SUDO_UID", sudo)
    monkeypatch.setattr(paths, "SYSTEM_INVENTORY", home / "system.yaml")
    (home / "here").mkdir()
    monkeypatch.chdir(home / "here")
    there = home / "other.yaml" if link is not None else Path("inventory.yaml")
    for path in (there, home / "system.yaml"):
        path.write_text("partitions: {}\n")
    os.chown(there, file, -1)
    if link is not None:
        Path("inventory.yaml").symlink_to(there)
        os.lchown("inventory.yaml", link, -1)
    assert paths.find_inventory() == (Path("inventory.yaml") if used else home / "system.yaml")
    assert len(given) == (not used)
    assert used or "is another user's and not used; if you trust it, set GPUSCHED_INVENTORY" in given[0]
    (home / "system.yaml").unlink()
    if not used:
        with pytest.raises(UsageError, match="no inventory"):
            paths.find_inventory()


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


def test_special_files_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Run by root, with /dev/null, it would leave a machine without one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    paths.write_atomic(pipe, b"page")
    assert (os.read(reader, 99), pipe.is_fifo()) == (b"page", True)
    os.close(reader)
