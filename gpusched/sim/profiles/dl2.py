"""DL2's measured speeds (Peng et al., IEEE TPDS 32(8), 2021): pengyanghua/DL2, config_speed.txt.

One tuple a line: (model, mode, batch size, parameter servers, workers, [speed of each worker], [CPU use of each
server], [CPU use of each worker]). The job's speed is the sum of its workers' (as in DL2's speed.py). A worker holds
one GPU; of all numbers of servers those with as many as workers count. The file names neither the GPU nor the spread
over nodes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpusched.errors import FileError
from gpusched.sim.profiles.table import Profiles, Series, model_key
from gpusched.traces.readers.columns import open_text

_EXPECTED = "(model, mode, batch size, servers, workers, [speeds], [CPU use of servers], [of workers])"
_NOTE = "DL2's speeds are those with as many parameter servers as workers; they hold for any GPU type and spread"


class Measured(NamedTuple):
    """One line: the job's speed, in steps/s, with so many servers and workers; 0 says that it did not run."""

    model: str
    servers: int
    workers: int
    speed: float


def records(path: Path) -> Iterator[Measured]:
    """The lines of one file.

    Raises:
        FileError: It is something else.
    """
    with open_text(path) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                yield _record(path, number, line)


def read(path: Path) -> Profiles:
    """The table of one file.

    Raises:
        FileError: It is something else.
    """
    per_s: dict[str, dict[tuple[int, int], float]] = {}
    for model, servers, workers, speed in records(path):
        if servers == workers and speed > 0:
            per_s.setdefault(model, {})[workers, 1] = speed
    if not per_s:
        raise FileError(str(path), None, "", "no speed with as many servers as workers", _EXPECTED)
    series = {(model, ""): Series(points, "any") for model, points in per_s.items()}
    notes = ((_NOTE, frozenset(per_s)),)
    return Profiles(
        series=series, recorded_on=dict.fromkeys(per_s, ""), sources=((path.name, frozenset(per_s)),), notes=notes
    )


def _record(path: Path, number: int, line: str) -> Measured:
    found: Any = None
    try:
        found = ast.literal_eval(line.strip())
        model, _, _, servers, workers, speeds, _, _ = found
        if len(speeds) == workers >= 1 and min(speeds) >= 0 and sum(speeds) < float("inf") and servers >= 1:
            return Measured(model_key(model), int(servers), int(workers), float(sum(speeds)))
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        pass
    shown = repr(found) if found is not None else line.strip()
    raise FileError(str(path), number, "", shown, _EXPECTED)
