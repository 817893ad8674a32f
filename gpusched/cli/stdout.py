"""Stdout belongs to the command's own output: what a library prints in C goes to stderr.

HiGHS 1.16.0, for one, prints its name and licence when it is first used, whatever its options say: in front of a JSON
value, or in the middle of a job's output.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
from contextlib import suppress

_STDOUT, _STDERR = 1, 2


def reserve() -> None:
    """Move this process's stdout to a descriptor of its own; descriptor 1 becomes another name of stderr.

    Programs that are to write to our stdout get it by ``stdout=sys.stdout``. A stream that is closed goes nowhere: a
    file opened later would else take its place, and be written to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    given = sys.stdout
    if not isinstance(given, io.TextIOWrapper) or sys.stderr is None:
        return
    with suppress(OSError):
        own = fcntl.fcntl(_STDOUT, fcntl.F_DUPFD_CLOEXEC, 3)  # os.dup would take the place of a closed stdin
        try:
            os.dup2(_STDERR, _STDOUT)
        except OSError:
            os.close(own)
            return
        stream = io.TextIOWrapper(
            os.fdopen(own, "wb", 0 if given.write_through else -1), given.encoding, given.errors,
            line_buffering=given.line_buffering, write_through=given.write_through,
        )  # fmt: skip
        sys.stdout = sys.__stdout__ = stream  # type: ignore[misc]  # the second is who is asked for a terminal's width


def discard() -> None:
    """Let whatever is still unwritten go nowhere: nobody reads it any more, and the interpreter flushes as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
