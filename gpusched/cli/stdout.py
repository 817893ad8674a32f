"""Keep stdout for the command's own output: what a library prints from C goes to stderr.

HiGHS 1.16.0, for example, prints its name and licence when it is first used, whatever its options: in front of a JSON
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
    """Move this process's stdout to another descriptor; descriptor 1 becomes a copy of stderr.

    Programs that should write to our stdout get it by ``stdout=sys.stdout``. Closed streams are replaced by /dev/null:
    a file opened later would otherwise take their descriptor and be written to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    original = sys.stdout
    if not isinstance(original, io.TextIOWrapper) or sys.stderr is None:
        return
    with suppress(OSError):
        descriptor = fcntl.fcntl(
            _STDOUT, fcntl.F_DUPFD_CLOEXEC, 3
        )  # os.dup might return descriptor 0, if stdin is closed
        try:
            os.dup2(_STDERR, _STDOUT)
        except OSError:
            os.close(descriptor)
            return
        stream = io.TextIOWrapper(
            os.fdopen(descriptor, "wb", 0 if original.write_through else -1), original.encoding, original.errors,
            line_buffering=original.line_buffering, write_through=original.write_through,
        )  # fmt: skip
        sys.stdout = sys.__stdout__ = stream  # type: ignore[misc]  # shutil asks the second for the terminal's width


def discard() -> None:
    """Discard unwritten output: its reader has gone, and the interpreter would flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
