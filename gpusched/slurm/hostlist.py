"""Slurm's lists of nodes: ``dgx[001-003,7],login,r[1-2]n[1-4]``."""

from __future__ import annotations

import itertools
import math
import re

MOST = 100_000  # names of one list: a few characters may stand for any number
_PART = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """The names in Slurm's order; () where Slurm says that there is none.

    Raises:
        ValueError: The text is no such list.
    """
    if text in ("", "(null)", "N/A", "None", "None assigned"):
        return ()
    found = tuple(itertools.islice(itertools.chain.from_iterable(map(_names, _split(text))), MOST + 1))
    if len(found) > MOST:
        raise ValueError(f"more than {MOST} names")
    return found


def numbers(text: str, most: int | None = None) -> list[str]:
    """The numbers of ``1-3,7,10-20:5`` in its order, as wide as they stand there.

    Raises:
        ValueError: The text is no such list, or has more than ``most``.
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
        if most is not None and (width > 18 or len(found) + int(last) - int(first) >= most):
            raise ValueError(f"more than {most} numbers")
        found += [str(n).zfill(width) for n in range(int(first), int(last) + 1, int(step or 1))]
    return found


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    if depth:
        raise ValueError(f"{text!r} has a bracket without its other half")
    return [*parts, text[begin:]]


def _names(part: str) -> list[str]:
    if not part:
        raise ValueError("a name is missing between two commas")
    pieces = _PART.split(part)  # text, numbers, text, numbers, ..., text
    ways = [numbers(piece, MOST) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    if math.prod(map(len, ways)) > MOST:
        raise ValueError(f"more than {MOST} names")
    return ["".join(way) for way in itertools.product(*ways)]
