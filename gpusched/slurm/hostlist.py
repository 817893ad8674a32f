"""Slurm's hostlist expressions: ``dgx[001-003,7],login,r[1-2]n[1-4]``."""

from __future__ import annotations

import itertools
import math
import re

MAX_NAMES = 100_000  # names per list: a few characters can expand to any number of them
_PART = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """Return the host names in Slurm's order; () where Slurm reports none.

    Raises:
        ValueError: The text is not a hostlist.
    """
    if text in ("", "(null)", "N/A", "None", "None assigned"):
        return ()
    found = tuple(itertools.islice(itertools.chain.from_iterable(map(_names, _split(text))), MAX_NAMES + 1))
    if len(found) > MAX_NAMES:
        raise ValueError(f"more than {MAX_NAMES} names")
    return found


def numbers(text: str, limit: int | None = None) -> list[str]:
    """Return the numbers of ``1-3,7,10-20:5`` in order, with their leading zeros.

    Raises:
        ValueError: The text is not such a list, or has more than ``limit`` numbers.
    """
    found: list[str] = []
    for item in text.split(","):
        span, _, step = item.partition(":")
        first, dash, last = span.partition("-")
        if not dash:
            last = first
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError(f"{item!r} is no range")
        width = len(first)
        if limit is not None and (width > 18 or len(found) + int(last) - int(first) >= limit):
            raise ValueError(f"more than {limit} numbers")
        found += [str(n).zfill(width) for n in range(int(first), int(last) + 1, int(step or 1))]
    return found


def _split(text: str) -> list[str]:
    """Return the comma-separated parts, ignoring commas within brackets."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    if depth:
        raise ValueError(f"{text!r} has a bracket without its other half")
    return [*parts, text[begin:]]


def _names(part: str) -> list[str]:
    if not part:
        raise ValueError("a name is missing between two commas")
    pieces = _PART.split(part)  # text, numbers, text, numbers, ..., text
    choices = [numbers(piece, MAX_NAMES) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MAX_NAMES:
        raise ValueError(f"more than {MAX_NAMES} names")
    return ["".join(choice) for choice in itertools.product(*choices)]
