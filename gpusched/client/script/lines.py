"""The lines of a job script that hold options. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Literal

import msgspec

from gpusched.client.script.source import Script
from gpusched.errors import UsageError

_MARKED = re.compile(r"#(GPUSCHED|SBATCH)(?=[\s-]|$)(.*)")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line with options, as words; ``where`` is ``train.sh:4``."""

    where: str
    marker: Literal["GPUSCHED", "SBATCH"]
    words: tuple[str, ...]


class ScriptError(UsageError):
    """A line of a script asks for what cannot be; ``where`` is its file and line, ``option`` what stands there."""

    def __init__(self, where: str, option: str, why: str, hint: str = "") -> None:
        super().__init__(f"{where}: {option}: {why}", hint)
        self.where, self.option = where, option


def lines_of(script: Script) -> tuple[list[Line], list[str]]:
    """The lines with options, and notes on those that count for nothing.

    As in Slurm they stand before the first command: before the first line that is neither empty nor a comment.

    Raises:
        ScriptError: A quote in one of them does not end.
    """
    found, notes, head = [], [], True
    for number, text in enumerate(script.text.split("\n"), 1):
        head = head and (not text.strip() or text.lstrip().startswith("#"))
        marked = _MARKED.match(text)
        if marked is None:
            continue
        where = f"{script.where}:{number}"
        if not head:
            notes.append(f"{where}: #{marked[1]} behind the first command has no effect, as in Slurm")
            continue
        try:
            words = tuple(shlex.split(_without_comment(marked[2])))
        except ValueError as error:
            raise ScriptError(where, f"#{marked[1]}", f"{error}".lower(), "give the quote its other half") from None
        found.append(Line(where=where, marker="SBATCH" if marked[1] == "SBATCH" else "GPUSCHED", words=words))
    return found, notes


def _without_comment(text: str) -> str:
    """The text up to a ``#`` that begins a word outside of quotes."""
    quote, before = "", " "
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote and before != "\\" else quote
        elif character in "'\"" and before != "\\":
            quote = character
        elif character == "#" and before.isspace():
            return text[:at]
        before = character
    return text
