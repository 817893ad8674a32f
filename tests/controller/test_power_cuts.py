"""Losses by a power cut: files that the controller counts on must be on the disk before their originals go."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpusched.cluster.logfiles import log_file
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.model import commands as c
from tests.builders import spec
from tests.controller.applying import NOW, InboxWorld, fresh_id


class Disk:
    """Knows what was synced: files by their content, folders by the names that they had then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, set[str]] = {}
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            names = os.listdir(descriptor) if os.path.isdir(f"/proc/self/fd/{descriptor}") else []
            self._synced[os.fstat(descriptor).st_ino] = set(names)

        monkeypatch.setattr(os, "fsync", fsync)

    def lost(self, folder: Path, name: str) -> list[str]:
        """Return the files below ``folder/name`` that a power cut would take."""
        path = folder / name
        found = [] if name in self._synced.get(folder.stat().st_ino, ()) else [str(path)]
        if path.is_dir():
            return found + [lost for entry in path.iterdir() for lost in self.lost(path, entry.name)]
        return found if path.stat().st_ino in self._synced else [*found, f"{path} (content)"]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_command_is_on_the_disk_before_its_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: bool
) -> None:
    disk, world, sjf = Disk(monkeypatch), InboxWorld(tmp_path), BUILT_IN / "sjf.yaml"
    removed: list[str] = []
    remove = world.inbox.remove

    def watched(name: str) -> None:
        for folder in ("secrets", "programs", "policies"):
            assert disk.lost(world.state, folder) == []
        removed.append(name)
        remove(name)

    monkeypatch.setattr(world.inbox, "remove", watched)
    world.lay(c.Submit(time=NOW, id=fresh_id(NOW), spec=spec(secret_names=("S",)), secrets={"S": "x"}))
    world.lay(c.Submit(time=NOW, id=fresh_id(NOW), spec=spec(function="f"), program="p"))
    world.lay(c.ShadowOn(time=NOW, partition="p", path=str(sjf), version=load_policy(sjf).version))
    sync, fails = world.secrets.sync, [OSError(errno.EIO, "Input/output error")] * one_by_one

    def broken_once() -> None:
        if fails:
            raise fails.pop()
        sync()

    monkeypatch.setattr(world.secrets, "sync", broken_once)
    world.apply_inbox()
    world.store.close()
    assert len(removed) == 3


def test_output_is_on_the_disk_before_it_is_removed_from_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "logs/job/1.0.log"
    with log_file(path, ()) as file:
        file.write(b"all of it")
    assert (disk.lost(tmp_path / "logs", "job"), path.read_bytes()) == ([], b"all of it")
