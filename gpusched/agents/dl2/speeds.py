"""How fast a job of DL2's testbed trains with so many parameter servers and workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.errors import FileError, UsageError
from gpusched.sched.state import Floats
from gpusched.sim.profiles.dl2 import records

SOURCE = "config_speed.txt of github.com/pengyanghua/DL2"
_NOTHING = 1e-6
_NAMES = ("dl2_speed.txt.gz", "dl2_speed.txt", "config_speed.txt")


def find(beside: Path | None) -> Path:
    """The file of measured speeds: in this folder, beside the workloads, or in ``profiles`` beside their folder.

    Raises:
        UsageError: It is in none of them.
    """
    folders = [Path(), *([beside.parent, beside.parent.parent / "profiles"] if beside is not None else [])]
    for folder in folders:
        for name in _NAMES:
            if (folder / name).is_file():
                return folder / name
    raise UsageError("DL2's measured speeds are not here", f"fetch {SOURCE} and name it with --speeds")


def read_speeds(path: Path, most: int) -> dict[str, Floats]:
    """Model -> ``float64[most + 1, most + 1]``: steps/s with ``[servers, workers]``; 0 where there is none of either.

    Between the measured points as DL2's code has it: scipy's ``Rbf`` with the function "linear", that is weights w with
    ``|x_i - x_j| w = speed``, and ``S(x) = sum_i w_i |x - x_i|``; what is below 1e-6 is 0.

    Raises:
        FileError: It is something else, or a point is measured twice.
    """
    points: dict[str, dict[tuple[int, int], float]] = {}
    for model, servers, workers, speed in records(path):
        at = points.setdefault(model, {})
        if (servers, workers) in at:
            found = f"{model} with {servers} servers and {workers} workers twice"
            raise FileError(str(path), None, "", found, "one speed for each size")
        at[servers, workers] = speed
    if not points:
        raise FileError(str(path), None, "", "nothing", "measured speeds")
    return {model: _interpolated(at, most) for model, at in points.items()}


def _interpolated(points: dict[tuple[int, int], float], most: int) -> Floats:
    known = np.array(list(points), np.float64)
    weights = np.linalg.solve(_distances(known, known), np.array(list(points.values())))
    grid = np.array([(s, w) for s in range(1, most + 1) for w in range(1, most + 1)], np.float64)
    speed = np.zeros((most + 1, most + 1))
    speed[1:, 1:] = (_distances(grid, known) @ weights).reshape(most, most)
    speed[speed < _NOTHING] = 0.0
    return speed


def _distances(a: Floats, b: Floats) -> Floats:
    distances: Floats = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    return distances
