"""The log's forms and levels, in this process. What a whole command logs: tests/cli/test_logging.py."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from gpusched.controller import logsetup
from gpusched.controller.logsetup import JOBS, LogFormat

LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
AT = 1_700_000_000.0426


class Log:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def lines(self) -> list[str]:
        """What was logged since the last call."""
        return self._capsys.readouterr().err.splitlines()

    def of(self, log_format: LogFormat, *records: logging.LogRecord) -> list[str]:
        logsetup.start(0, log_format)
        for one in records:
            logging.root.handle(one)
        return self.lines()


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """What this process logs, two hours east; afterwards it logs as before."""
    names, hook = ("gpusched", JOBS), threading.excepthook
    levels = [logging.getLogger(name).level for name in names]
    monkeypatch.setattr(logsetup, "_handler", None)
    monkeypatch.setattr(logsetup, "_started_with", ["0", "text"])
    monkeypatch.setenv("TZ", "Etc/GMT-2")
    time.tzset()
    yield Log(capsys)
    if logsetup._handler is not None:
        logging.root.removeHandler(logsetup._handler)
    monkeypatch.undo()
    time.tzset()
    logging.captureWarnings(False)
    threading.excepthook = hook
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


def record(level: int = logging.INFO, message: str = "m", **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("gpusched.a.b", level, "", 0, message, None, None)
    made.created = AT
    vars(made).update(fields)
    return made


def test_the_journals_priority_is_that_of_the_level(log: Log) -> None:
    levels = (*LEVELS, logging.INFO - 1, logging.INFO + 1, logging.CRITICAL + 1)
    found = log.of(LogFormat.JOURNAL, *map(record, levels))
    assert found == [f"<{priority}>a.b: m" for priority in (7, 6, 4, 3, 2, 7, 6, 2)]


def test_job_and_node_are_named_where_they_are_known(log: Log) -> None:
    records = record(), record(job="j1"), record(node="n1"), record(job="j1", node="n1"), record(job=None, node="n1")
    found = log.of(LogFormat.JOURNAL, *records)
    assert found == [f"<6>a.b: m{fields}" for fields in ("", " job=j1", " node=n1", " job=j1 node=n1", " node=n1")]


def test_each_line_of_an_exception_has_what_precedes_a_message(log: Log) -> None:
    error = ValueError("first\nsecond")
    raised = record(logging.ERROR, exc_info=(ValueError, error, None))
    nothing = record(exc_info=(None, None, None))  # as logged with exc_info=True outside of an except clause
    when = "2023-11-15T00:13:20+0200"
    assert log.of(LogFormat.TEXT, raised, nothing)[-4:] == [
        f"{when} ERROR a.b: m", f"{when} ERROR     ValueError: first", f"{when} ERROR     second",
        f"{when} INFO a.b: m",
    ]  # fmt: skip


def test_a_json_line_has_the_time_to_a_millisecond_and_null_for_what_is_not_known(log: Log) -> None:
    error = ValueError("first\nsecond")
    raised = record(logging.ERROR, job=7, exc_info=(ValueError, error, None))
    plain, failed = map(json.loads, log.of(LogFormat.JSON, record(), raised))
    common = {"time": "2023-11-15T00:13:20.043+02:00", "unix_s": 1_700_000_000.043, "logger": "a.b", "message": "m"}
    assert plain == common | {"level": "INFO", "job": None, "node": None}
    assert failed == common | {"level": "ERROR", "job": "7", "node": None, "exception": "ValueError: first\nsecond"}


@pytest.mark.parametrize(
    ("verbosity", "least", "least_of_jobs"),
    [
        (-2, logging.WARNING, logging.WARNING), (-1, logging.WARNING, logging.WARNING),
        (0, logging.INFO, logging.WARNING), (1, logging.INFO, logging.INFO), (2, logging.DEBUG, logging.DEBUG),
        (3, logging.DEBUG, logging.DEBUG),
    ],
)  # fmt: skip
def test_what_is_logged_by_verbosity(log: Log, verbosity: int, least: int, least_of_jobs: int) -> None:
    logsetup.start(verbosity, LogFormat.TEXT)
    for name, lowest in (("gpusched.a", least), (JOBS, least_of_jobs)):
        logger = logging.getLogger(name)
        assert [level for level in LEVELS if logger.isEnabledFor(level)] == [x for x in LEVELS if x >= lowest]
    assert logsetup.arguments() == [str(verbosity), "text"]


@pytest.mark.parametrize("verbosity", ["-1", "0", "2"])
@pytest.mark.parametrize("log_format", LogFormat)
def test_a_child_process_logs_as_its_parent(log: Log, verbosity: str, log_format: LogFormat) -> None:
    logsetup.start_as_parent(verbosity, log_format)
    assert logsetup.arguments() == [verbosity, log_format]
    logging.getLogger("gpusched.a").error("m")
    begins = {LogFormat.TEXT: "2", LogFormat.JOURNAL: "<3>", LogFormat.JSON: "{"}[log_format]
    (line,) = log.lines()
    assert line.startswith(begins)


def test_a_child_process_that_is_told_nothing_logs_text(log: Log) -> None:
    logsetup.start_as_parent()
    assert logsetup.arguments() == ["0", "text"]


@pytest.mark.parametrize(("stream", "chosen"), [("own", "journal"), ("8:1", "text"), (None, "text")])
def test_the_journals_form_is_chosen_where_stderr_is_its_stream(
    log: Log, monkeypatch: pytest.MonkeyPatch, stream: str | None, chosen: str
) -> None:
    status = os.fstat(2)
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    if stream is not None:
        monkeypatch.setenv("JOURNAL_STREAM", stream.replace("own", f"{status.st_dev}:{status.st_ino}"))
    logsetup.start()
    assert logsetup.arguments() == ["0", chosen]


def test_a_closed_stderr_is_no_stream_of_the_journal(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    with monkeypatch.context() as patched:
        patched.setattr(logsetup.os, "fstat", closed)
        logsetup.start()
    assert logsetup.arguments() == ["0", "text"]


def test_started_twice_a_message_is_logged_once_in_the_last_form(log: Log) -> None:
    logsetup.start(0, LogFormat.JSON)
    assert log.of(LogFormat.JOURNAL, record()) == ["<6>a.b: m"]


def test_before_each_message_a_caller_is_asked_and_one_that_cannot_be_written_ends_nothing(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[list[str]] = []
    logsetup.start(0, LogFormat.JOURNAL, before=lambda: before.append(log.lines()))
    logging.root.handle(record())
    logging.root.handle(record(message="n"))
    assert [*before, log.lines()] == [[], ["<6>a.b: m"], ["<6>a.b: n"]]
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with monkeypatch.context() as patched:
        patched.setattr(logsetup.sys, "stderr", None)  # its reader has gone
        logging.root.handle(record())


def test_warnings_and_uncaught_exceptions_of_threads_are_logged(log: Log) -> None:
    logsetup.start(0, LogFormat.JOURNAL)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("too old", stacklevel=1)
    (line,) = log.lines()
    assert re.match(r"<4>py.warnings: .*UserWarning: too old", line)
    for error in (SystemExit(1), None, ValueError("v")):
        kind = type(error) if error is not None else KeyError
        for thread in (threading.Thread(name="worker"), None):
            threading.excepthook(threading.ExceptHookArgs((kind, error, None, thread)))
    assert log.lines() == [
        "<3>controller.logsetup: thread worker ended: ValueError", "<3>    ValueError: v",
        "<3>controller.logsetup: thread ? ended: ValueError", "<3>    ValueError: v",
    ]  # fmt: skip
