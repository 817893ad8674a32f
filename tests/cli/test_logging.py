"""The log of controller and tick as its readers see it: on stderr, in three forms."""

from __future__ import annotations

import calendar
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpusched.controller.eventlog import EventLogger
from gpusched.controller.leadership import controller_lock
from gpusched.model.commands import Drain, Resume
from gpusched.model.events import Event
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests import commands
from tests.logged import messages

ONE_NODE = """\
partitions:
  here:
    nodes: [{name: n1, transport: local, runtime: process, gpus: 0, cores: 2, memory: 1G}]
"""
TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (DEBUG|INFO|WARNING|ERROR) [a-z_.]+: .+")
FORGED = "down\n2026-01-01T00:00:00+0000 ERROR controller: all is lost\r\x1b[31m\u2028\u202e<0>x"


class OneNode:
    """An installation whose only node is this machine."""

    def __init__(self, folder: Path) -> None:
        self.state, self.inventory = folder / "state", folder / "inventory.yaml"
        self.inventory.write_text(ONE_NODE)

    @property
    def env(self) -> dict[str, str]:
        zone = {"TZ": "Etc/GMT-2"}  # two hours east
        return os.environ | {"GPUSCHED_STATE": str(self.state), "GPUSCHED_INVENTORY": str(self.inventory)} | zone

    def log(self, *words: str, code: int = 0) -> str:
        """Return a command's stderr; it wrote nothing else."""
        done = commands.run(*words, env=self.env)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr

    def json_lines(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        log = self.log(*words, "--log-format", "json", code=code)
        assert log.isascii()
        return [json.loads(line) for line in log.splitlines()]

    def submit(self, *words: str, **env: str) -> str:
        options = ("-p", "here", "--gpus", "0", "--cpus-per-task", "1", "--mem", "10M", "--time", "5m", *words)
        return commands.run("submit", *options, env=self.env | env).stdout.strip()

    def drain(self, reason: str) -> None:
        """As `gpusched drain`, which does not send such a reason; any program can put this file there."""
        Inbox(self.state).deliver(Drain(time=time.time(), nodes=("n1",), reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first tick of an installation says that it compiles."""
    OneNode(tmp_path_factory.mktemp("first")).log("tick")


@pytest.fixture
def here(tmp_path: Path) -> OneNode:
    here = OneNode(tmp_path)
    here.log("tick")
    return here


def test_a_tick_in_which_nothing_went_wrong_says_nothing_so_that_cron_mails_nothing(here: OneNode) -> None:
    here.submit("--", "true")
    assert here.log("tick") == ""


def test_each_message_has_time_level_and_logger(here: OneNode) -> None:
    here.drain("new disk")
    (line,) = here.log("controller", "--once").splitlines()
    assert TEXT.fullmatch(line), line
    assert line[19:] == "+0200 INFO controller.eventlog: drained reason=new disk user=root node=n1"
    assert abs(calendar.timegm(time.strptime(line[:19], "%Y-%m-%dT%H:%M:%S")) - 7200 - time.time()) < 1800


def test_in_json_they_are_fields_with_job_and_node(here: OneNode) -> None:
    job = here.submit("--", "true")
    logged = here.json_lines("tick", "-v")
    assert {entry["job"] for entry in logged} == {job}
    assert [(entry["message"].split()[0], entry["node"]) for entry in logged[:1]] == [("starting", "n1")]
    for entry in logged:
        assert entry.keys() == {"time", "unix_s", "level", "logger", "message", "job", "node"}
        assert (entry["level"], entry["logger"]) == ("INFO", "jobs")
        assert abs(entry["unix_s"] - time.time()) < 1800
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+02:00", entry["time"])


def test_journald_gets_priorities_where_stderr_is_its_stream(here: OneNode, tmp_path: Path) -> None:
    def line(stream: str) -> str:
        here.inventory.write_text("partitions: [")
        with (tmp_path / "stderr").open("w+") as file:
            status = os.fstat(file.fileno())
            own = f"{status.st_dev}:{status.st_ino}"
            argv = [sys.executable, "-m", "gpusched", "tick"]
            env = here.env | {"JOURNAL_STREAM": stream.format(own=own)}
            subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=file, check=True)
            return (tmp_path / "stderr").read_text()

    assert line("{own}").startswith("<3>controller.service: kept the old inventory: ")
    assert TEXT.match(line("8:1")), "stderr was redirected to a file"
    assert here.log("tick", "--log-format", "journal").startswith("<3>controller.service: kept")


@pytest.mark.parametrize("log_format", ["text", "journal", "json"])
def test_text_of_users_neither_ends_nor_begins_a_log_line(here: OneNode, log_format: str) -> None:
    here.drain(FORGED)
    log = here.log("tick", "--log-format", log_format)
    assert (log.count("\n"), log[-1]) == (1, "\n")
    assert log[:-1].isprintable()
    assert "all is lost" in log
    if log_format == "json":
        assert FORGED in json.loads(log)["message"]


def test_how_much_is_logged(here: OneNode) -> None:
    def levels(*words: str) -> dict[str, set[str]]:
        here.submit("--", "true")
        Inbox(here.state).deliver(Resume(time=time.time(), nodes=("n1",)))
        here.inventory.write_text("partitions: [")
        found: dict[str, set[str]] = {}
        for entry in here.json_lines("tick", *words):
            found.setdefault(entry["level"], set()).add(entry["logger"])
        here.inventory.write_text(ONE_NODE)
        return found

    wrong = {"ERROR": {"controller.service"}}
    assert levels("-q") == wrong
    assert levels() == wrong | {"INFO": {"controller.eventlog"}}
    assert levels("-v") == wrong | {"INFO": {"controller.eventlog", "jobs"}}
    assert levels("--verbose", "--verbose")["DEBUG"] == {"controller.service", "jobs"}
    assert "cannot be combined" in here.log("tick", "-q", "-v", code=2)


@pytest.mark.parametrize("log_format", ["text", "journal", "json"])
def test_the_error_that_ends_it_is_in_the_log_too(here: OneNode, log_format: str) -> None:
    with controller_lock(here.state):
        log = here.log("controller", "--log-format", log_format, code=1)
    assert log.count("\n") == 1
    assert f"a controller (pid {os.getpid()}) already runs on {here.state}" in log
    match log_format:
        case "text":
            assert TEXT.fullmatch(log.strip())
        case "journal":
            assert log.startswith("<3>controller: ")
        case "json":
            assert json.loads(log)["level"] == "ERROR"


def test_secrets_and_variables_are_not_logged(here: OneNode) -> None:
    job = here.submit("--secret", "TOKEN", "--env", "NAME=value-5ecre7", "--", "echo", "$TOKEN", TOKEN="hidden-5ecre7")
    log = here.log("tick", "-vv")
    assert f"job={job}" in log
    assert "5ecre7" not in log


LIBRARY = """
import logging, threading, warnings
from gpusched.controller import logsetup
logsetup.start(0, logsetup.LogFormat(FORMAT))
logging.getLogger("some.library").warning("from %s", "a library")
logging.getLogger("some.library").info("of no interest")
warnings.warn("two\\nlines")
def fails():
    raise ValueError("first\\n2026-01-01T00:00:00+0000 ERROR controller: second\\x1b[31m")
thread = threading.Thread(target=fails, name="worker")
thread.start()
thread.join()
logging.getLogger("gpusched.a").error("%s", "x", extra={"job": "j\\n<0>y", "node": 5})
"""


@pytest.mark.parametrize("log_format", ["text", "journal", "json"])
def test_libraries_threads_and_python_log_there_as_well_and_tracebacks_are_indented(log_format: str) -> None:
    code = LIBRARY.replace("FORMAT", repr(log_format))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    if log_format == "json":
        library, warned, thread, last = map(json.loads, lines)
        assert (library["logger"], library["level"], library["message"]) == (
            "some.library", "WARNING", "from a library",
        )  # fmt: skip
        assert "two\nlines" in warned["message"]
        assert "exception" not in library
        assert thread["message"] == "thread worker ended: ValueError"
        assert thread["exception"].startswith("Traceback ")
        assert "ValueError: first" in thread["exception"]
        assert (last["job"], last["node"]) == ("j\n<0>y", "5")
        return
    start = r"<[34]>" if log_format == "journal" else r"2\d{3}-\S+ (WARNING|ERROR) "
    (first, *_, last), traceback = lines, [line for line in lines if re.match(f"{start}    ", line)]
    assert all(re.match(start, line) and line.isprintable() for line in lines), "each line has its own"
    assert first.endswith("some.library: from a library")
    assert last.endswith(r"a: x job=j\n<0>y node=5")
    assert len(lines) == 4 + len(traceback), done.stderr
    assert any(line.endswith(r"ERROR controller: second\x1b[31m") for line in traceback)


def test_a_warning_that_every_cycle_has_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.create_or_open(tmp_path)
    store.append([Event(time=1.0, kind="node_down", node="before")])
    log = EventLogger(store)

    def cycle(*events: tuple[str, str]) -> list[tuple[str, str, str]]:
        caplog.clear()
        store.append(Event(time=1.0, kind=kind, node=node, data={"why": "x"}) for kind, node in events)
        log.step()
        return [(r.levelname, r.getMessage(), r.node) for r in caplog.records]  # type: ignore[attr-defined]

    assert cycle() == []
    assert cycle(("plan_rejected", "a")) == [("WARNING", "plan_rejected why=x", "a")]
    assert cycle(("plan_rejected", "a"), ("plan_rejected", "b")) == [("WARNING", "plan_rejected why=x", "b")]
    assert cycle(("node_up", "a")) == [("INFO", "node_up why=x", "a")]
    assert cycle(("plan_rejected", "a")) == [("WARNING", "plan_rejected why=x", "a")]
    assert cycle(("controller_stopped", "a")) == []
    assert messages(caplog) == []
    store.close()
