"""The payload's place on the disk of a home that many nodes share."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gpusched.nodes.payload import bootstrap, child, gpus
from tests.testbed.waiting import wait_until

FILES = {"a.py": "A = 1\n", "sub/b.py": "B = 2\n", "sub/c.py": "C = 'ü'\n"}


def is_whole(folder: Path) -> bool:
    there = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    return there == FILES | {"ok": "a.py\nsub/b.py\nsub/c.py\n"}


def test_files_are_put_in_place_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "probe-1"
    assert bootstrap.install(str(folder), FILES)
    assert is_whole(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.listdir(folder.parent) == ["probe-1"]


def test_a_folder_that_is_whole_is_the_same_one_afterwards(tmp_path: Path) -> None:
    """A process that reads it, even half-way, goes on."""
    folder = tmp_path / "probe-1"
    bootstrap.install(str(folder), FILES)
    before = [(p, p.stat().st_ino) for p in sorted(folder.rglob("*"))]
    (folder / "sub" / "__pycache__").mkdir()
    assert bootstrap.install(str(folder), FILES)
    assert [(p, p.stat().st_ino) for p in sorted(folder.rglob("*"))] == before


@pytest.mark.parametrize("spoil", ["file", "emptied", "folder", "no ok", "link"])
def test_only_damaged_files_are_replaced(tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "probe-1"
    if spoil == "file":
        folder.write_text("")
    elif spoil == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        bootstrap.install(str(folder), FILES)
        kept = (folder / "a.py").stat().st_ino
        if spoil == "emptied":
            (folder / "sub/b.py").write_text("")
        elif spoil == "folder":
            (folder / "sub/c.py").unlink()
            (folder / "sub/c.py").mkdir()
        else:
            (folder / "ok").unlink()
    assert bootstrap.install(str(folder), FILES)
    assert is_whole(folder)
    assert spoil in ("file", "link") or (folder / "a.py").stat().st_ino == kept


def test_another_node_that_is_faster_keeps_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found nothing; ours comes to its rename when the other has done all and is reading."""
    folder, rename = tmp_path / "probe-1", os.rename
    made: list[int] = []

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        assert bootstrap.install(str(folder), FILES)
        made.append((folder / "sub" / "b.py").stat().st_ino)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert bootstrap.install(str(folder), FILES)
    assert made == [(folder / "sub" / "b.py").stat().st_ino]
    assert is_whole(folder)
    assert os.listdir(tmp_path) == ["probe-1"]


def test_nodes_that_mend_the_same_folder_never_take_it_from_a_reader(tmp_path: Path) -> None:
    """Once it is whole it stays so, however many others still think that it is not."""
    folder = tmp_path / "probe-1"
    bootstrap.install(str(folder), FILES)
    for _ in range(8):
        (folder / "sub/b.py").write_text("spoilt")
        threads = [threading.Thread(target=bootstrap.install, args=(str(folder), FILES)) for _ in range(4)]
        for thread in threads:
            thread.start()
        whole = False
        while any(thread.is_alive() for thread in threads):
            texts = [(folder / name).read_text() for name in FILES]
            assert not whole or texts == list(FILES.values())
            whole = texts == list(FILES.values())
        for thread in threads:
            thread.join()
        assert is_whole(folder)


def test_versions_lie_beside_each_other_until_unused(tmp_path: Path) -> None:
    from gpusched.nodes.payload import main

    for name, age_days in (("probe-old", 31), ("probe-used", 31), ("probe-fresh", 29), ("other", 99)):
        (tmp_path / name).mkdir()
        then = time.time() - age_days * 86400
        os.utime(tmp_path / name, (then, then))
    main.keep_fresh(str(tmp_path / "probe-used"))
    bootstrap.install(str(tmp_path / "probe-new"), FILES)
    assert sorted(os.listdir(tmp_path)) == ["other", "probe-fresh", "probe-new", "probe-used"]


def test_another_node_that_removes_the_same_old_version_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was there when the folder was listed; both share this home."""
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["probe-gone", *listed(path)])
    assert bootstrap.install(str(tmp_path / "probe-new"), FILES), "it is of use"


def test_children_that_hang_in_the_driver_are_not_joined_by_ever_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does not end them: each reading left one more, for as long as the driver hung."""
    monkeypatch.setattr(gpus.attempts, "default_root", lambda cluster_id, node: str(tmp_path))
    monkeypatch.setattr(gpus, "messages", lambda only, want_links, request: iter(lambda: time.sleep(60), 1))
    monkeypatch.setattr(child.os, "kill", lambda pid, signal: None)
    monkeypatch.setattr(gpus, "MOST_STUCK", 2)
    monkeypatch.setattr(gpus, "READ_LIMIT_S", 0.1)
    pids: list[int] = []
    try:
        for expected in ("NVML did not answer in 0 s", "NVML did not answer in 0 s", "2 earlier readings hang"):
            reading = gpus.GpuReadout({"deadline_s": 0.0})
            pids += [reading.child.pid] if reading.child is not None else []
            assert expected in str(reading.collect()["gpu_error"])
        assert len(pids) == 2
    finally:
        monkeypatch.undo()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    monkeypatch.setattr(gpus.attempts, "default_root", lambda cluster_id, node: str(tmp_path))
    reading = gpus.GpuReadout({"deadline_s": 0.0})
    assert reading.child is not None, "they are gone"
    reading.child.kill()


# -- what the child that reads GPUs has found by the time it is asked --------------------------------------------------


def test_an_answer_that_lies_ready_is_taken_when_the_engine_took_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"count": 2, "driver_version": "1"}, {"gpu": {"index": 0}}, {"gpu": {"index": 1}}]
    monkeypatch.setattr(gpus, "messages", lambda only, want_links, request: iter(found))
    monkeypatch.setattr(gpus, "READ_LIMIT_S", 0.0)
    reading = gpus.GpuReadout({"deadline_s": 0.0})
    wait_until(lambda: os.waitid(os.P_PID, reading.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    answer = reading.collect()
    assert answer["gpus"] == [{"index": 0}, {"index": 1}]
    assert answer["gpu_error"] is None
