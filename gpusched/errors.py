"""The exception that users may see, always as a single line; and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

MAX_LINE = 2000
"""Characters of an error's line: what it quotes may come from anyone."""
_END = 400


def printable(text: str) -> str:
    """Return text as one terminal-safe line: control characters (C0, C1, bidirectional), lone surrogates escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def bounded(text: str) -> str:
    """Return text as one printable line of at most `MAX_LINE` characters: what is wrong stands at its end."""
    line = printable(text if len(text) <= MAX_LINE else text[:MAX_LINE] + text[-_END:])
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - _END - 3]}...{line[-_END:]}"


def _log(line: str) -> None:
    import logging  # commands start faster without it

    logging.getLogger("gpusched").warning(line)


class Warnings:
    """This process's warnings: to the log or, in a command, to stderr. Each is emitted once."""

    given: ClassVar[set[str]] = set()
    show: ClassVar[Callable[[str], None]] = staticmethod(_log)

    @classmethod
    def give(cls, line: str) -> None:
        """Emit a warning of one line."""
        if line not in cls.given:
            cls.given.add(line)
            cls.show(printable(line))


class GpuschedError(Exception):
    """An error that a user can act on.

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
        """Return the error as one line with its hint; control characters are escaped, its length is bounded."""
        return bounded(f"{self.message}; {self.hint}" if self.hint else self.message)


class UsageError(GpuschedError):
    """An invalid request: bad option, unknown flavor, malformed file."""

    exit_code = 2


class NoHistory(GpuschedError):
    """No store exists yet, or no job of the requested time has run and ended: nothing to train on or replay.

    A store that is there and cannot be read is a plain `GpuschedError`: it must not be taken for this.
    """


class FileError(UsageError):
    """An invalid value in a file.

    Args:
        path: The file.
        line: 1-based line, or None where the whole file is meant.
        key: Dotted key, such as ``partitions.A100.nodes[0].address``.
        found: What stands there.
        expected: What should.
    """

    def __init__(self, path: str, line: int | None, key: str, found: str, expected: str) -> None:
        where = f"{path}:{line}" if line is not None else path
        found, shown = (text if len(text) <= 120 else text[:117] + "..." for text in (found, key))
        at = f"{shown}: " if key else ""
        super().__init__(f"{where}: {at}found {found}, expected {expected}")
        self.path, self.line_number, self.key, self.found, self.expected = path, line, key, found, expected


class UnreadableFile(FileError):
    """A file that cannot be read at all.

    Args:
        path: The file.
        why: As the operating system says it.
        expected: What the file should be.
    """

    def __init__(self, path: str, why: str, expected: str) -> None:
        super().__init__(path, None, "", why.lower(), expected)
        self.message = f"{path}: {self.found}; expected {expected}"
        self.args = (self.message,)
