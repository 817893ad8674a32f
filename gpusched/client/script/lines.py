"""The lines of a job script that hold options. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Literal

import msgspec

from gpusched.client.script.source import JobScript
from gpusched.errors import UsageError

_MARKED = re.compile(r"#(GPUSCHED|SBATCH)(?=[\s-]|$)(.*)")


class OptionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line with options, split into words; ``where`` is ``train.sh:4``."""

    where: str
    marker: Literal["GPUSCHED", "SBATCH"]
    words: tuple[str, ...]


class ScriptError(UsageError):
    """An error in a line of a script; ``where`` is its file and line, ``option`` the text there."""

    def __init__(self, where: str, option: str, why: str, hint: str = "") -> None:
        super().__init__(f"{where}: {option}: {why}", hint)
        self.where, self.option = where, option


def lines_of(script: JobScript) -> tuple[list[OptionLine], list[str]]:
    """Return the lines with options, and notes on those without effect.

    As in Slurm options stand before the first command: before the first line that is neither empty nor a comment.

    Raises:
        ScriptError: A quote is not closed.
    """
    found, notes, head = [], [], True
    for number, text in enumerate(script.text.split("\n"), 1):
        head = head and (not text.strip() or text.lstrip().startswith("#"))
        marked = _MARKED.match(text)
        if marked is None:
            continue
        where = f"{script.where}:{number}"
        if not head:
            notes.append(f"{where}: #{marked[1]} after the first command has no effect, as in Slurm")
            continue
        try:
            words = tuple(shlex.split(_without_comment(marked[2])))
        except ValueError as error:
            raise ScriptError(where, f"#{marked[1]}", f"{error}".lower(), "close the quote") from None
        found.append(OptionLine(where=where, marker="SBATCH" if marked[1] == "SBATCH" else "GPUSCHED", words=words))
    return found, notes


_MPI = re.compile(r"^[^#]*\bsrun\b[^#|;&]*\s--mpi[= ]([\w,.-]+)")


def notes_on_steps(script: JobScript) -> list[str]:
    """Return notes on what `srun` inside the job will refuse, so that users learn of it before the job has waited."""
    found = []
    for number, text in enumerate(script.text.split("\n"), 1):
        match = _MPI.match(text)
        if match is not None and match[1] != "none":
            found.append(
                f"{script.where}:{number}: srun --mpi={match[1]} will be refused: srun provides no PMI here; start "
                "MPI programs with mpirun, or use --mpi=none"
            )
    return found


def _without_comment(text: str) -> str:
    """Return the text up to a ``#`` that begins a word outside quotes."""
    quote, before = "", " "
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote and before != "\\" else quote
        elif character in "'\"" and before != "\\":
            quote = character
        elif character == "#" and before.isspace():
            return text[:position]
        before = character
    return text
