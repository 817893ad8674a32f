"""The output of podman and docker, as containers; in the forms of podman 3 and 4 and docker 20 and later."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched.nodes.payload import attempts, engines
from gpusched.nodes.payload.attempts import merge
from gpusched.nodes.payload.engines import EngineError, parse_docker, parse_podman
from gpusched.nodes.runtimes.listing import parse_listing
from gpusched.nodes.runtimes.shell import BOUNDED

# The payload forks, here beside the threads of the test runner.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
NAME = "gpusched-0123456789a-1-0"


def podman(**changes: Any) -> str:
    item = {
        "Id": "c1", "Names": ["other"], "Labels": {"gpusched.name": NAME}, "State": "Exited", "ExitCode": 3, "Pid": 0,
        "StartedAt": 1_700_000_000, "ExitedAt": 1_700_000_060,
    }  # fmt: skip
    return json.dumps([item | changes])


def docker(state: dict[str, Any], **changes: Any) -> str:
    known = {"Status": "Exited", "ExitCode": 0, "Pid": 0, "StartedAt": "2023-11-14T22:13:20.5Z",
             "FinishedAt": "0001-01-01T00:00:00Z", "OOMKilled": False, "Error": ""}  # fmt: skip
    item = {"Id": "d1", "Name": "/plain", "Config": {"Labels": {"gpusched.name": NAME}}, "State": known | state}
    return json.dumps([item | changes])


def test_podman() -> None:
    assert parse_podman(podman()) == {
        NAME: {
            "id": "c1", "state": "exited", "exit_code": 3, "pid": None, "started_at": 1_700_000_000.0,
            "finished_at": 1_700_000_060.0, "oom_killed": False, "error": "",
        }
    }  # fmt: skip
    running = parse_podman(podman(Pid=77, State="running", ExitedAt=-62135596800))[NAME]
    assert (running["pid"], running["state"], running["finished_at"]) == (77, "running", None)
    assert list(parse_podman(podman(Labels=None))) == ["other"]
    assert list(parse_podman(podman(Labels={}, Names="single"))) == ["single"]
    assert parse_podman("") == parse_podman("null") == parse_podman("{}") == {}


def test_podmans_out_of_memory_is_of_its_own_container() -> None:
    text = json.dumps([json.loads(podman())[0], json.loads(podman(Id="c2", Labels={}, Names=["two"]))[0]])
    found = parse_podman(text, "c1 false\nc2 true\n")
    assert {name: one["oom_killed"] for name, one in found.items()} == {NAME: False, "two": True}


def test_docker() -> None:
    assert parse_docker(docker({"Error": "no such device", "Pid": 5, "OOMKilled": True})) == {
        NAME: {
            "id": "d1", "state": "exited", "exit_code": 0, "pid": 5, "started_at": 1_700_000_000.5,
            "finished_at": None, "oom_killed": True, "error": "no such device",
        }
    }  # fmt: skip
    assert list(parse_docker(docker({}, Config={"Labels": {}}))) == ["plain"]
    assert list(parse_docker(docker({}, Config=None))) == ["plain"]
    assert parse_docker(docker({}, State=None))["gpusched-0123456789a-1-0"]["started_at"] is None
    assert parse_docker("[]") == parse_docker("") == {}


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2023-11-14T22:13:20Z", 1_700_000_000.0),
        ("2023-11-14T22:13:20.25+00:00", 1_700_000_000.25),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000.123456789),
        ("2023-11-14T22:13:20+00:00", 1_700_000_000.0),
        ("1970-01-01T00:00:00Z", None),
        ("soon", None),
        ("", None),
        (None, None),
        (0, None),
        (1.5, 1.5),
    ],
)
def test_times(said: Any, seconds: float | None) -> None:
    found = parse_docker(docker({"StartedAt": said}))[NAME]["started_at"]
    assert found == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


def test_output_that_is_not_json_is_reported_with_its_engine() -> None:
    with pytest.raises(EngineError, match="podman answered something that is not JSON: 'Error: x'"):
        parse_podman("Error: x")
    with pytest.raises(EngineError, match="docker answered"):
        parse_docker("Error: x")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo out; echo err >&2", "out\n"),
        ("printf '\\377'", "\ufffd"),
        ("head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero >&2", "x" * 300000),
        ("cat", ""),
        ("sed -n 's/^SigIgn:.*\\(.\\)...$/\\1/p' /proc/self/status", "0\n"),
        ("[ $(cut -d ' ' -f 6 /proc/$$/stat) = $$ ] && echo leads", "leads\n"),
        ("exec >&- 2>&-; sleep 0.1; exit 3", "sh: 3"),
        ("echo a; echo why >&2; exit 3", "sh: why"),
        ("kill -KILL $$", "sh: -9"),
    ],
)
def test_a_call_of_an_engine(script: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ENGINE_TIMEOUT_S", 600.0)
    try:
        found = engines.run_engine(["sh", "-c", script])
    except EngineError as error:
        found = str(error)
    assert found == said
    assert ":" not in said or engines.run_engine(["sh", "-c", script], allow_failure=True) in ("", "a\n")


def test_an_engine_that_is_not_there_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^/nowhere/podman: No such file or directory$"):
        engines.run_engine(["/nowhere/podman"])
    monkeypatch.setattr(engines, "ENGINE_TIMEOUT_S", 0.2)
    os.mkfifo(tmp_path / "held")
    with pytest.raises(EngineError, match=r"^sh did not answer within 0\.2 s$"):
        engines.run_engine(["sh", "-c", f"exec 9<>{tmp_path}/held; sleep 9999 & wait; "])
    with open(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)) as held:
        os.set_blocking(held.fileno(), True)
        assert held.read() == "", "its children have ended, too"
    monkeypatch.setattr(os, "setsid", signal.pause)  # on a busy node it may not lead its group yet
    with pytest.raises(EngineError, match="did not answer"):
        engines.run_engine(["true"])
    monkeypatch.setattr(os, "fork", none_left)
    with pytest.raises(EngineError, match=r"^podman: Resource temporarily unavailable$"):
        engines.run_engine(["podman"])


def none_left() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


Listing = tuple[list[dict[str, Any]], str | None]
DOCKER = """#!/bin/sh
[ "$1" != ps ] || { echo d1; exit; }
left=$(($(cat FOLDER/failures) - 1)) && echo "$left" >FOLDER/failures
[ "$left" -lt 0 ] || { echo '[]'; echo 'Error response from daemon: boom' >&2; exit 1; }
cat FOLDER/answer
"""


def by_python() -> Listing:
    return attempts.list_attempts("c", "n", "docker")[:2]


def by_sh() -> Listing:
    head = "CLUSTER_ID=c NODE=n RUNTIME=docker ROOT=\n"
    lister = BOUNDED + Path(attempts.__file__).with_name("attempts.sh").read_text()
    text = subprocess.run(["sh", "-s"], input=head + lister, text=True, capture_output=True, check=True).stdout
    return parse_listing(text, "c", "docker")


@pytest.mark.parametrize("listed", [by_python, by_sh])
def test_docker_that_cannot_report_containers_loses_none(
    listed: Callable[[], Listing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the engine unavailable because one was removed between the two calls: it is asked once more."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(engines, "ENGINE_TIMEOUT_S", 600.0)
    (tmp_path / "bin").mkdir()
    for name, text in (("docker", DOCKER), ("timeout", '#!/bin/sh\nshift 3 && exec "$@"\n')):
        (tmp_path / "bin" / name).write_text(text.replace("FOLDER", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "answer").write_text(docker({"Status": "running", "Pid": 7}))
    folder = tmp_path / "gpusched-node" / "c" / "n" / NAME
    folder.mkdir(parents=True)
    (folder / "meta").write_text("runtime=docker\n")
    (tmp_path / "failures").write_text("1\n")
    found, error = listed()
    assert ([one["phase"] for one in found], error) == (["running"], None)
    (tmp_path / "failures").write_text("100\n")
    found, error = listed()
    assert found == []
    assert error is not None
    assert "Error response from daemon: boom" in error


FACT: dict[str, Any] = {
    "meta": {"runtime": "podman", "boot": "b"}, "same_boot": True, "new": False, "launcher": False, "pid": None,
    "pid_alive": False, "files": ["meta"], "started": None, "exit": None, "failed": None, "error": "",
}  # fmt: skip
BOX: dict[str, Any] = {
    "id": "c1", "state": "exited", "exit_code": 0, "pid": 9, "started_at": 5.0, "finished_at": 7.0, "oom_killed": False,
    "error": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fact", "box", "expected"),
    [
        ({}, {}, ("exited", 0, False, None, 7.0)),
        ({}, {"state": "running"}, ("running", None, False, 9, None)),
        ({}, {"state": "created"}, ("ready", None, False, None, None)),
        ({"launcher": True}, {"state": "created"}, ("preparing", None, False, None, None)),
        ({"failed": "125"}, {"state": "created"}, ("failed", 125, False, None, None)),
        ({"failed": "0"}, {"state": "created"}, ("failed", 1, False, None, None)),
        ({"same_boot": False}, {"state": "created"}, ("lost", None, False, None, None)),
        ({}, {"exit_code": 137}, ("exited", 137, False, None, 7.0)),
        ({"files": ["meta", "oom"]}, {"exit_code": 137}, ("exited", 137, True, None, 7.0)),
        ({}, {"exit_code": 137, "oom_killed": True}, ("exited", 137, True, None, 7.0)),
        ({}, {"exit_code": 139}, ("exited", 139, False, None, 7.0)),
        ({"same_boot": False}, {"exit_code": 255}, ("lost", None, False, 9, 7.0)),
        ({"same_boot": False}, {"exit_code": 1}, ("exited", 1, False, None, 7.0)),
        ({}, {"exit_code": 255}, ("exited", 255, False, None, 7.0)),
        (None, {"exit_code": 137}, ("exited", 137, False, None, 7.0)),
        (None, {"state": "created"}, ("ready", None, False, None, None)),
    ],
)
def test_a_container_and_what_its_launcher_left(fact: Any, box: dict[str, Any], expected: tuple[Any, ...]) -> None:
    (one,) = merge({} if fact is None else {NAME: FACT | fact}, {NAME: BOX | box}, "c")
    assert (one["phase"], one["exit_code"], one["oom_killed"], one["pid"], one["finished_at"]) == expected
    assert (one["name"], one["id"], one["cluster_id"]) == (NAME, "c1", "c")


def test_an_engine_that_cannot_be_asked_says_nothing_of_its_containers() -> None:
    process = {"b": FACT | {"meta": {"runtime": "process"}, "exit": "4 9.5", "started": "2.5"}}
    (one,) = merge({NAME: FACT, **process}, None, "c")
    assert (one["name"], one["phase"], one["exit_code"], one["finished_at"]) == ("b", "exited", 4, 9.5)
    assert (one["started_at"], one["id"]) == (2.5, None)
    assert [one["name"] for one in merge({NAME: FACT, "z": process["b"]}, None, "c")] == ["z"], "those behind it, too"
    (two, three) = merge({NAME: FACT, "a": FACT | {"launcher": True}}, {}, "c")
    assert [(o["name"], o["phase"]) for o in (two, three)] == [("a", "preparing"), (NAME, "lost")]
    assert three["error"] == "the launcher died before it made a container"


KILLED = "its supervisor was killed: the exit code is unknown"
CONMON_KILLED = "its supervisor on the node (conmon) was killed: the exit code is unknown"
PROCESS = {"runtime": "process", "boot": "b"}


@pytest.mark.parametrize(
    ("fact", "box", "found"),
    [
        ({"exit": "4 9.5", "started": "2.5"}, None, {"phase": "exited", "exit_code": 4, "started_at": 2.5,
                                                     "finished_at": 9.5}),
        ({"exit": "4", "pid": 9, "launcher": True}, None, {"phase": "running", "pid": 9}),
        ({"pid": 9, "pid_alive": True, "started": "2.5"}, None, {"phase": "running", "pid": 9, "started_at": 2.5}),
        ({"pid": 9, "started": "2.5"}, None, {"error": KILLED, "started_at": 2.5}),
        ({"pid": 9, "same_boot": False}, None, {"error": "the node was rebooted"}),
        ({"pid": 9, "same_boot": False, "meta": {"runtime": "process"}}, None, {"error": KILLED}),
        ({"pid": 9, "failed": "125 x", "error": "why"}, None, {"phase": "failed", "exit_code": 125, "error": "why"}),
        ({"failed": "odd"}, None, {"phase": "failed", "exit_code": 1}),
        ({"launcher": True, "files": ["ready"]}, None, {"phase": "ready"}),
        ({"files": ["ready"]}, None, {"error": "the launcher died before it made a container"}),
        ({"same_boot": False}, None, {"error": "the node was rebooted"}),
        ({"new": True, "files": ["meta"], "attached_s": 3.0}, None, {"phase": "preparing", "attached_s": 3.0}),
        ({}, {"state": "lost"}, {"started_at": 5.0, "error": CONMON_KILLED}),
        ({"attached_s": 3.0}, {"state": "paused"}, {"phase": "running", "pid": 9, "started_at": 5.0,
                                                    "attached_s": 3.0}),
        ({}, {"state": "dead", "error": "boom"}, {"phase": "exited", "exit_code": 0, "started_at": 5.0,
                                                  "finished_at": 7.0, "error": "boom"}),
        ({"same_boot": False}, {"state": "configured"}, {"error": "the node was rebooted"}),
        ({"same_boot": False, "meta": {}}, {"state": "configured"}, {"phase": "ready"}),
        ({"failed": "3", "error": "why"}, {"state": "configured"}, {"phase": "failed", "exit_code": 3, "error": "why"}),
        ({"same_boot": False}, {"exit_code": 255}, {"pid": 9, "started_at": 5.0, "finished_at": 7.0,
                                                    "error": "the node was rebooted"}),
        ({"same_boot": False, "meta": {}}, {"exit_code": 255}, {"phase": "exited", "exit_code": 255, "started_at": 5.0,
                                                                "finished_at": 7.0}),
    ],
)  # fmt: skip
def test_what_is_concluded_of_an_attempt_and_why(
    fact: dict[str, Any], box: dict[str, Any] | None, found: dict[str, Any]
) -> None:
    """Of one that runs without an engine, where there is no box. What is not named is unknown."""
    meta = {} if box is not None else {"meta": PROCESS}
    (one,) = merge({NAME: FACT | meta | fact}, {} if box is None else {NAME: BOX | box}, "c")
    base = {
        "name": NAME, "phase": "lost", "exit_code": None, "oom_killed": False, "started_at": None, "finished_at": None,
        "error": None, "cluster_id": "c", "pid": None, "ran_s": None, "attached_s": None,
        "id": None if box is None else "c1",
    }  # fmt: skip
    assert {key: one[key] for key in base} == base | found


@pytest.mark.parametrize("runtime", [None, "podman", "docker", "process"])
def test_whether_an_engine_or_its_folder_says_all_of_an_attempt(runtime: str | None) -> None:
    fact = FACT | {"meta": {"runtime": runtime}, "exit": "4 9.5"}
    (one,) = merge({NAME: fact}, {NAME: BOX}, "c")
    assert one["exit_code"] == (4 if runtime == "process" else 0)
    assert [one["phase"] for one in merge({NAME: fact}, None, "c")] == (["exited"] if runtime == "process" else [])


def test_podmans_containers_that_are_lost_and_names_it_leaves_out() -> None:
    text = json.dumps([json.loads(podman())[0], json.loads(podman(Id="c2", Labels={}, Names=["two", "three"]))[0]])
    assert {name: one["state"] for name, one in parse_podman(text, lost="c0 c2").items()} == {
        NAME: "exited", "two": "lost"
    }  # fmt: skip
    bare = parse_podman(podman(StartedAt=None, ExitedAt=0, State=None, ExitCode=None))[NAME]
    assert (bare["started_at"], bare["finished_at"], bare["state"], bare["exit_code"]) == (None, None, "none", None)
