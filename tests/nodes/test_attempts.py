"""What is concluded from an attempt's folder, above all between two moments of writing it."""

from __future__ import annotations

from typing import Any

import pytest

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
