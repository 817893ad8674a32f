"""The origin of shipped weights: what a file's metadata says, so that users can make it again.

Nothing in it varies between two runs: times are on the training card, and no path is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gpusched import __version__
from gpusched.study.options import PaperOptions, rows_of

_NO_PART = ("out", "jobs", "weights")  # of what is made


def origin_of(command: Sequence[str], seed: int | None, data: Sequence[Path] = ()) -> dict[str, str]:
    """Return the metadata of weights: command, seed, data with digests, and the version that made them.

    ``command``: its words after ``gpusched``, without ``--out``; files by their names. ``seed``: None: no random draws.
    ``data``: files read.
    """
    digests = [f"{file.name} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in data]
    return {
        "command": " ".join(("gpusched", *command)), "seed": "none" if seed is None else str(seed),
        "data": "; ".join(digests) or "drawn", "gpusched": __version__,
    }  # fmt: skip


def paper_command(paper: str, options: PaperOptions) -> list[str]:
    """Return the words of a ``reproduce`` that differ from its defaults and matter to what it makes."""
    words, usual = ["reproduce", paper], PaperOptions()
    for name, (_, row) in rows_of(PaperOptions).items():
        value = getattr(options, name)
        if name in _NO_PART or value == getattr(usual, name):
            continue
        if value is True:
            words.append(row.long)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            text = Path(one).name if row.names_files else f"{one:g}" if isinstance(one, float) else str(one)
            words += [row.long, text]
    return words
