"""DL2's measured speeds (Peng et al., IEEE TPDS 32(8), 2021): pengyanghua/DL2, config_speed.txt.

One tuple a line: (model, mode, batch size, parameter servers, workers, [speed of each worker], [CPU use of each
server], [CPU use of each worker]). The job's speed is the sum of its workers' (as in DL2's speed.py). A worker holds
one GPU and two CPU cores, a server two cores; a job has the number of servers that is fastest of those that its cores
hold; 16 of each are the most. The file names neither the GPU nor the spread over nodes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpusched.errors import FileError
from gpusched.sched.state import Floats
from gpusched.sim.profiles.measured import rows_of
from gpusched.sim.profiles.table import Profiles, Series, model_key
from gpusched.traces.readers.columns import open_text

_EXPECTED = "(model, mode, batch size, servers, workers, [speeds], [CPU use of servers], [of workers])"
_NOTE = (
    "DL2's speeds are those with the number of parameter servers that is fastest of those that a job's cores hold;"
    " they hold for any GPU type and spread"
)
_TASK_CORES = 2  # of a worker, and of a server
_MOST_TASKS = 16  # servers, and workers, that a job has in DL2's setting
_NOTHING = 1e-6


class MeasuredSpeed(NamedTuple):
    """One line: the job's speed, in steps/s, with so many servers and workers; 0: it did not run."""

    model: str
    servers: int
    workers: int
    speed: float


def records(path: Path | None) -> Iterator[MeasuredSpeed]:
    """Yield the lines of one file; None: of the built-in table.

    Raises:
        FileError: It is something else.
    """
    if path is None:
        for row in rows_of("dl2_speeds"):
            yield MeasuredSpeed(row["model"], int(row["servers"]), int(row["workers"]), float(row["steps_per_s"]))
        return
    with open_text(path) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                yield _record(path, number, line)


@dataclass(frozen=True, eq=False)
class Servers:
    """How one model's speed depends on the number of parameter servers beside its workers.

    Attributes:
        speed: ``float64[servers + 1, workers + 1]``: steps/s; 0 where there is none of either, or it did not run.
    """

    speed: Floats

    def at(self, gpus: int, cores: float | None, memory_mib: float | None) -> float:
        """Return the best speed with servers that the cores hold (one at least), relative to that with any number."""
        column = self.speed[1:, min(gpus, self.speed.shape[1] - 1)]
        servers = len(column) if cores is None else max(1, int(cores) // _TASK_CORES - gpus)
        found, best = float(column[:servers].max()), float(column.max())
        # Where one server is too few to run at all, the fewest that do.
        return (found or float(column[column > 0][0])) / best


def read(path: Path) -> Profiles:
    """Return the table of one file: by workers, at the best number of servers, with the effect of fewer.

    Raises:
        FileError: It is something else.
    """
    # As far as any of the file's models was measured, and as DL2's setting goes.
    most_servers = max((min(r.servers, _MOST_TASKS) for r in records(path)), default=0)
    most_workers = max((min(r.workers, _MOST_TASKS) for r in records(path)), default=0)
    tables = read_speeds(path, max(most_servers, most_workers))
    series, servers = {}, {}
    for model, table in tables.items():
        speed = table[: most_servers + 1, : most_workers + 1]
        best = speed.max(axis=0)
        if points := {(w, 1): float(best[w]) for w in range(1, len(best)) if best[w] > 0}:
            series[model, ""], servers[model] = Series(points, "any"), Servers(speed)
    if not series:
        raise FileError(str(path), None, "", "no speed above 0", _EXPECTED)
    models = frozenset(servers)
    return Profiles(
        series=series, recorded_on=dict.fromkeys(models, ""), sensitivity=servers,
        sources=((path.name, models),), notes=((_NOTE, models),),
    )  # fmt: skip


def read_speeds(path: Path | None, max_tasks: int) -> dict[str, Floats]:
    """Return steps/s by model, ``float64[most + 1, most + 1]`` by ``[servers, workers]``; 0 without either.

    ``path``: As of `records`.

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
    return {model: _interpolated(at, max_tasks) for model, at in points.items()}


def _interpolated(points: dict[tuple[int, int], float], max_tasks: int) -> Floats:
    speed = np.zeros((max_tasks + 1, max_tasks + 1))
    if len(points) == 1:  # nothing to draw a line to
        (((servers, workers), value),) = points.items()
        if max(servers, workers) <= max_tasks:
            speed[servers, workers] = value
        return speed
    known = np.array(list(points), np.float64)
    weights = np.linalg.solve(_distances(known, known), np.array(list(points.values())))
    grid = np.array([(s, w) for s in range(1, max_tasks + 1) for w in range(1, max_tasks + 1)], np.float64)
    speed[1:, 1:] = (_distances(grid, known) @ weights).reshape(max_tasks, max_tasks)
    speed[speed < _NOTHING] = 0.0
    return speed


def _distances(a: Floats, b: Floats) -> Floats:
    distances: Floats = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    return distances


def _record(path: Path, number: int, line: str) -> MeasuredSpeed:
    found: Any = None
    try:
        found = ast.literal_eval(line.strip())
        model, _, _, servers, workers, speeds, _, _ = found
        if len(speeds) == workers >= 1 and min(speeds) >= 0 and sum(speeds) < float("inf") and servers >= 1:
            return MeasuredSpeed(model_key(model), int(servers), int(workers), float(sum(speeds)))
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        pass
    shown = repr(found) if found is not None else line.strip()
    raise FileError(str(path), number, "", shown, _EXPECTED)
