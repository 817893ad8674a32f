"""Read job scripts: from a file, stdin or ``--wrap``."""

from __future__ import annotations

import os
import re
import select
import stat

import msgspec

from gpusched.config.validate import MAX_SCRIPT_BYTES, script_error
from gpusched.errors import UsageError

_SCRIPT_NAME = re.compile(r"[^/]+(/[^/]+)*\.(sh|bash|sbatch|slurm|job)")
STDIN = 0


class JobScript(msgspec.Struct, frozen=True, kw_only=True):
    """A job script; ``where`` names it in errors, ``name`` is the default job name."""

    text: str
    where: str
    name: str


def from_word(word: str) -> JobScript | None:
    """Return the script that the first word after the options names; None if the word is a program.

    It names a script if it is a readable local file that begins with ``#!``.

    Raises:
        UsageError: It looks like the name of a script, but there is no such file.
    """
    if word == "-":
        return _script(_stdin_to_its_end(), "stdin", "stdin")
    try:
        if not stat.S_ISREG(os.stat(word).st_mode):
            return None
        with open(word, "rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        if _SCRIPT_NAME.fullmatch(word):
            raise UsageError(f"{word}: {error.strerror}", f"for a program inside the job, use -- {word}") from None
        return None
    if content[:2] != b"#!" and not _SCRIPT_NAME.fullmatch(os.path.basename(word)):
        return None
    return _script(content, word, os.path.basename(word))


def from_stdin(wait: bool) -> JobScript | None:
    """Return the script that a pipe or a file provides as stdin, as sbatch reads it; None if empty or a terminal.

    With ``wait``, read to the end however long that takes; without, only if data is available.
    """
    try:
        mode = os.fstat(STDIN).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return None
        if not wait and not select.select([STDIN], [], [], 0)[0]:
            return None
    except (OSError, ValueError):
        return None
    content = _stdin_to_its_end()
    return _script(content, "stdin", "stdin") if content else None


def wrapped(command: str) -> JobScript:
    """Return a script around one shell command, as sbatch makes it of ``--wrap``."""
    return _script(f"#!/bin/sh\n# made by gpusched submit --wrap\n\n{command}\n".encode(), "--wrap", "wrap")


def from_text(text: str, where: str, name: str) -> JobScript:
    """Return a script that was sent to the controller; undecodable characters arrive as U+FFFD."""
    return _script(text.encode() if "\ufffd" not in text else b"\xff", where, name)


def _stdin_to_its_end() -> bytes:
    found = b""
    while len(found) <= MAX_SCRIPT_BYTES and (more := os.read(STDIN, 1 << 16)):
        found += more
    return found


def _script(content: bytes, where: str, name: str) -> JobScript:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{where}:{line}: a job script must be UTF-8 text") from None
    if error_in := script_error(text):
        raise UsageError(f"{where}:{error_in}")
    return JobScript(text=text, where=where, name=name)
