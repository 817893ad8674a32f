"""The one exception a user may see, always as a single line; and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


def printable(text: str) -> str:
    """The text in one line, safe for a terminal: controls (C0, C1, bidirectional), lone surrogates escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _log(line: str) -> None:
    import logging  # commands start faster without it

    logging.getLogger("gpusched").warning(line)


class Warnings:
    """Where warnings of this process go: to the log, or, in a command, to stderr. Each is given once."""

    given: ClassVar[set[str]] = set()
    show: ClassVar[Callable[[str], None]] = staticmethod(_log)

    @classmethod
    def give(cls, line: str) -> None:
        """Warn, in one line."""
        if line not in cls.given:
            cls.given.add(line)
            cls.show(printable(line))


class GpuschedError(Exception):
    """Something a user can act on.

    Attributes:
        message: What is wrong and where, in one line.
        hint: What to do about it, or "".
        exit_code: 1 the thing failed, 2 the request was wrong (usage).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)  # tracebacks of programs show it

    def line(self) -> str:
        """The error as one line, hint included; control characters are escaped."""
        return printable(f"{self.message}; {self.hint}" if self.hint else self.message)


class UsageError(GpuschedError):
    """The request itself is wrong: bad option, unknown flavor, malformed file."""

    exit_code = 2


class NoHistory(GpuschedError):
    """There is no store yet, or no job of the time asked for has run and ended: nothing to learn from or to replay.

    A store that is there and cannot be read is a plain `GpuschedError`: nobody may take it for this.
    """


class FileError(UsageError):
    """A file holds something wrong.

    Args:
        path: The file.
        line: 1-based line, or None where the whole file is meant.
        key: Dotted key, such as ``partitions.A100.nodes[0].address``.
        found: What stands there.
        expected: What should.
    """

    def __init__(self, path: str, line: int | None, key: str, found: str, expected: str) -> None:
        where = f"{path}:{line}" if line is not None else path
        found = found if len(found) <= 120 else found[:117] + "..."
        at = f"{key}: " if key else ""
        super().__init__(f"{where}: {at}found {found}, expected {expected}")
        self.path, self.line_number, self.key, self.found, self.expected = path, line, key, found, expected
