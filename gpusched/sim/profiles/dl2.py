"""DL2's measured speeds (Peng et al., IEEE TPDS 32(8), 2021): pengyanghua/DL2, config_speed.txt.

One tuple a line: (model, mode, batch size, parameter servers, workers, [speed of each worker], [CPU use of each
server], [CPU use of each worker]). The job's speed is the sum of its workers' (as in DL2's speed.py). A worker holds
one GPU; of all numbers of servers those with as many as workers count. The file names neither the GPU nor the spread
over nodes.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from gpusched.errors import FileError
from gpusched.sim.profiles.table import Profiles, Series, model_key
from gpusched.traces.readers.columns import open_text

_EXPECTED = "(model, mode, batch size, servers, workers, [speeds], [CPU use of servers], [of workers])"
_NOTE = "DL2's speeds are those with as many parameter servers as workers; they hold for any GPU type and spread"


def read(path: Path) -> Profiles:
    """The table of one file.

    Raises:
        FileError: It is something else.
    """
    per_s: dict[str, dict[tuple[int, int], float]] = {}
    with open_text(path) as text:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            model, servers, speeds = _record(path, number, line)
            if servers == len(speeds) and sum(speeds) > 0:  # 0 says that it did not run
                per_s.setdefault(model, {})[len(speeds), 1] = sum(speeds)
    if not per_s:
        raise FileError(str(path), None, "", "no speed with as many servers as workers", _EXPECTED)
    series = {(model, ""): Series(points, "any") for model, points in per_s.items()}
    notes = ((_NOTE, frozenset(per_s)),)
    return Profiles(
        series=series, recorded_on=dict.fromkeys(per_s, ""), sources=((path.name, frozenset(per_s)),), notes=notes
    )


def _record(path: Path, number: int, line: str) -> tuple[str, int, list[float]]:
    found: Any = None
    try:
        found = ast.literal_eval(line.strip())
        model, _, _, servers, workers, speeds, _, _ = found
        if len(speeds) == workers >= 1 and min(speeds) >= 0 and sum(speeds) < float("inf") and servers >= 1:
            return model_key(model), int(servers), [float(speed) for speed in speeds]
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        pass
    shown = repr(found) if found is not None else line.strip()
    raise FileError(str(path), number, "", shown, _EXPECTED)
