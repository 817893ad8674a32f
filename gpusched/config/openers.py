"""Open files that users name: pipes and devices among them do not hang a command for ever."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from gpusched.errors import UsageError

PIPE_WAIT_S = 10.0


def open_input(path: Path | str) -> BinaryIO:
    """Open a file to read its bytes once; see `input_opener`."""
    return open(path, "rb", opener=input_opener)


def input_opener(path: str, flags: int) -> int:
    """Open a file for `open` to read: a pipe that nothing writes to fails after `PIPE_WAIT_S`.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    if is_pipe and not select.select([descriptor], [], [], PIPE_WAIT_S)[0]:
        os.close(descriptor)
        raise OSError(errno.ETIMEDOUT, "a pipe that nothing writes to", path)
    os.set_blocking(descriptor, True)
    return descriptor


def output_opener(path: str, flags: int) -> int:
    """Open a file for `open` to write: a pipe that nothing reads fails at once.

    Raises:
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "a pipe that nothing reads"
        raise
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def open_output(path: Path | str) -> Iterator[TextIO]:
    """Open a text file to write it; errors of writing name it, too. See `output_opener`."""
    try:
        with open(path, "w", encoding="utf-8", newline="", opener=output_opener) as file:
            yield file
    except OSError as error:
        error.filename = str(path)
        raise


def require_input(path: Path) -> None:
    """Raise `UsageError` for what is not there, and for pipes and devices, where a file is read more than once."""
    if not path.exists():
        raise UsageError(f"{path}: No such file or directory")
    refuse_pipe(path)


def refuse_pipe(path: Path) -> None:
    """Raise `UsageError` for a pipe or device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"{path}: a pipe or device, not a file", "write it to a file first")
