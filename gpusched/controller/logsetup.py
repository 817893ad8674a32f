"""Log messages of long-running commands on stderr: as text, for systemd's journal, or as JSON lines.

Every module logs by ``logging.getLogger(__name__)``. The job and the node of a message are fields: ``extra={"job": ...,
"node": ...}``. ERROR: an operator must act. WARNING: something failed and is handled. INFO: what happened. The logger
`JOBS` has the routine of single jobs, which is logged with ``-v`` only: cron mails whatever a tick prints.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum

from gpusched.errors import printable

JOBS = "gpusched.jobs"
_FIELDS = ("job", "node")
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}  # as in syslog(3)
_DEBUG_PRIORITY = 7
_log = logging.getLogger(__name__)


class LogFormat(StrEnum):
    """Form of log messages."""

    TEXT = "text"
    JOURNAL = "journal"
    JSON = "json"


class _Formatter(logging.Formatter):
    """Formats a record as one line, and an exception as more of them; no message can begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields_of(record) if value is not None)
        first = printable(f"{_short_name(record)}: {record.getMessage()}{fields}")
        return "\n".join(self.line(record, text) for text in (first, *(f"    {line}" for line in _exception(record))))

    def line(self, record: logging.LogRecord, text: str) -> str:
        """Return a line of the record with what precedes it."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created))
        return f"{when} {record.levelname} {text}"


class _JournalFormatter(_Formatter):
    """Formats a record for systemd's journal: it has the time, and each line begins with a priority (sd-daemon(3))."""

    def line(self, record: logging.LogRecord, text: str) -> str:
        priority = next((p for level, p in _PRIORITIES.items() if record.levelno >= level), _DEBUG_PRIORITY)
        return f"<{priority}>{text}"


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in ASCII, so that no text of it can end the line."""

    def format(self, record: logging.LogRecord) -> str:
        unix_s = round(record.created, 3)
        when = datetime.fromtimestamp(unix_s).astimezone()
        entry = {
            "time": when.isoformat(timespec="milliseconds"),
            "unix_s": unix_s,
            "level": record.levelname,
            "logger": _short_name(record),
            "message": record.getMessage(),
            **{name: None if value is None else str(value) for name, value in _fields_of(record)},
        }
        if exception := "\n".join(_exception(record)):
            entry["exception"] = exception
        return json.dumps(entry)


def _short_name(record: logging.LogRecord) -> str:
    return record.name.removeprefix("gpusched.")


def _fields_of(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    return ((name, getattr(record, name, None)) for name in _FIELDS)


def _exception(record: logging.LogRecord) -> list[str]:
    """Return the lines of the record's traceback, if it has one."""
    if not record.exc_info or record.exc_info[1] is None:
        return []
    return [printable(line) for line in "".join(traceback.format_exception(record.exc_info[1])).splitlines()]


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    LogFormat.TEXT: _Formatter, LogFormat.JOURNAL: _JournalFormatter, LogFormat.JSON: _JsonFormatter,
}  # fmt: skip


class _StderrHandler(logging.Handler):
    """Writes to stderr, whatever that is at the moment; ``before`` is called before each message."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = self.format(record)
            self._before()
            sys.stderr.write(f"{lines}\n")  # in one piece: the relay writes to the same file
            sys.stderr.flush()
        except Exception:  # the reader has gone, or the disk is full: the controller goes on
            self.handleError(record)


_handler: _StderrHandler | None = None
_started_with = ["0", "text"]


def start(verbosity: int = 0, log_format: LogFormat | None = None, before: Callable[[], None] = lambda: None) -> None:
    """Send to stderr what this process logs, Python's warnings and its threads' uncaught exceptions.

    Args:
        verbosity: -1: warnings and errors. 0: also what happened, except the routine of single jobs. 1: that, too.
            2: also details.
        log_format: None: for the journal if stderr is connected to it, else text.
        before: Called before each message.
    """
    global _handler, _started_with
    is_journal = os.environ.get("JOURNAL_STREAM") == _device_and_inode(2)
    chosen = log_format or (LogFormat.JOURNAL if is_journal else LogFormat.TEXT)
    if _handler is not None:
        logging.root.removeHandler(_handler)
    _handler = _StderrHandler(before)
    _handler.setFormatter(_FORMATTERS[chosen]())
    logging.root.addHandler(_handler)
    level = logging.WARNING if verbosity < 0 else logging.INFO if verbosity < 2 else logging.DEBUG
    logging.getLogger("gpusched").setLevel(level)
    logging.getLogger(JOBS).setLevel(logging.WARNING if verbosity < 1 else level)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread
    _started_with = [str(verbosity), chosen]


def start_as_parent(verbosity: str = "0", log_format: str = LogFormat.TEXT) -> None:
    """Call `start` as the parent process did; these are its `arguments`."""
    start(int(verbosity), LogFormat(log_format))


def arguments() -> list[str]:
    """Return how `start` was called, for a child process."""
    return _started_with


def _device_and_inode(descriptor: int) -> str:
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread is not None else "?"
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        _log.error("thread %s ended: %s", name, failed.exc_type.__name__, exc_info=failed.exc_value)
