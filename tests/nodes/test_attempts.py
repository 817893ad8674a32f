"""Conclusions from an attempt's folder, above all between two moments of writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusched.nodes.payload import attempts
from gpusched.nodes.payload.attempts import merge

NAME = "gpusched-0123456789a-1-0"
STAMPED = ["launcher.pid", "meta", "pid"]


def phase(**changes: Any) -> str:
    fact = {
        "meta": {"runtime": "process", "boot": "b"}, "same_boot": True, "new": False, "launcher": False, "pid": None,
        "pid_alive": False, "files": STAMPED, "started": None, "exit": None, "failed": None, "error": "",
    }  # fmt: skip
    (attempt,) = merge({NAME: fact | changes}, {}, "c")
    return str(attempt["phase"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"launcher": True}, "preparing"),
        ({"new": True, "files": ["meta"]}, "preparing"),
        ({"new": False, "files": ["meta"]}, "lost"),
        ({"launcher": True, "files": [*STAMPED, "ready"]}, "ready"),
        ({"launcher": True, "files": [*STAMPED, "ready", "go"]}, "ready"),  # its process is about to begin
        ({"launcher": True, "pid": 9, "pid_alive": True}, "running"),
        ({"pid": 9, "pid_alive": True}, "running"),
        ({"launcher": True, "pid": 9}, "running"),  # the launcher is about to write the exit code
        ({"new": True, "files": ["meta", "pid"], "pid": 9}, "running"),  # a short job, over before its launcher's stamp
        ({"new": True, "pid": 9}, "lost"),
        ({"pid": 9, "exit": "0 5"}, "exited"),
        ({"new": True, "files": ["meta"], "exit": "3 5", "pid": 9}, "exited"),
        ({"failed": "1"}, "failed"),
        ({"pid": 9, "same_boot": False}, "lost"),
    ],
)
def test_phases_of_a_process(changes: dict[str, Any], expected: str) -> None:
    assert phase(**changes) == expected


def test_what_is_written_between_the_look_and_the_engines_answer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """conmon writes `oom` just before the end that podman then reports: the first look at the folder has missed it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "gpusched-node" / "c" / "n" / NAME
    folder.mkdir(parents=True)
    (folder / "meta").write_text("runtime=podman\n")

    def podman(cluster_id: str, node: str) -> dict[str, dict[str, Any]]:
        (folder / "oom").touch()
        ended = {"id": "x", "state": "exited", "exit_code": 137, "pid": None, "error": "", "oom_killed": False}
        return {NAME: ended | {"started_at": None, "finished_at": None}}

    monkeypatch.setitem(attempts.ENGINES, "podman", podman)
    (attempt,), _, _ = attempts.list_attempts("c", "n", "podman")
    assert (attempt["phase"], attempt["oom_killed"]) == ("exited", True)


def test_a_launch_that_fails_while_its_folder_is_read_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta").touch()
    (tmp_path / "start.err").write_text("no such image\n")
    listed = attempts.os.listdir

    def before_it_failed(path: str) -> list[str]:
        found = listed(path)
        (tmp_path / "failed").write_text("125\n")
        return found

    monkeypatch.setattr(attempts.os, "listdir", before_it_failed)
    fact = attempts.read_folder(str(tmp_path))
    assert fact is not None
    assert (fact["failed"], fact["error"]) == ("125\n", "no such image")
