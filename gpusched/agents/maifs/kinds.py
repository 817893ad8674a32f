"""Measured speeds of kinds of jobs by GPUs, nodes, CPU cores and memory: the ground truth of the setting."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.errors import FileError, UsageError
from gpusched.sched.state import Floats, Ints
from gpusched.sim.profiles import Profiles, read_profiles
from gpusched.sim.profiles.measured import rows_of
from gpusched.sim.profiles.reading import read_restarts
from gpusched.sim.profiles.table import Series, type_key
from gpusched.study.paper import Paper, read_paper
from gpusched.traces.readers.columns import open_text

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (16, 2))
"""(GPUs, nodes); the GPUs are spread evenly."""
CORES = (1, 2, 3, 4, 5, 6, 9, 12)
"""CPU cores per GPU. Synergy's 24 are no faster than its 12 for any model."""
MEMORY_GB = (20.83, 62.5, 125.0, 187.5, 250.0)
"""GB per GPU."""
SERVER = (8, 24, 500.0)
"""GPUs, cores and GB of a node, as in Synergy; proportionally 3 cores and 62.5 GB per GPU."""
POINTS = len(SHAPES) * len(CORES) * len(MEMORY_GB)
PROPORTIONAL = CORES.index(3) * len(MEMORY_GB) + MEMORY_GB.index(62.5)
"""Offset of the proportional cores and memory among the points of a shape."""
_GPU_TYPE = "RTX2080TI"  # the measured nodes of 8 GPUs, with the widest spread between models
_PLACEHOLDER = 0.1
_SOURCE = "synergy_sensitivity.json (from github.com/msr-fiddle/synergy)"


class Weeks(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a trace's weeks, counted from its first job.

    Attributes:
        file: Of the trace. copies: Copies of a week superimposed, each shifted cyclically by whole hours.
    """

    train: tuple[int, ...]
    choose: tuple[int, ...]
    test: tuple[int, ...]
    file: str = ""
    copies: int = 1


class MaifsRival(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of the scenario.

    Attributes:
        rule: One of `rules.RULES`; "": the agents. speeds: Known: all, or those with proportional resources.
        trained: Whether the agents' weights are trained. choose: Coordination of agents, one of `joint.MODES`.
        attends: Whether the agents attend to each other.
    """

    rule: str = ""
    speeds: str = "all"
    trained: bool = True
    choose: str = "graph"
    attends: bool = True


class Maifs(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/maifs.yaml``."""

    policies: dict[str, MaifsRival]
    ablations: dict[str, MaifsRival]
    loads: tuple[float, ...]
    traces: dict[str, Weeks]
    models: dict[str, str]
    absent: tuple[str, ...]


@cache
def maifs() -> Maifs:
    """Return the shipped scenario."""
    return read_paper("maifs", Maifs)


class MaifsJobClasses(NamedTuple):
    """Kinds of jobs. A point is a shape, cores and memory: ``(shape * len(CORES) + cores) * len(MEMORY_GB) + memory``.

    Attributes:
        names: Of the models.
        speed: ``float64[kinds, points]``: steps/s; 0: not measured, not possible on a node, or below its memory.
        restart_s: ``float64[kinds]``.
    """

    names: tuple[str, ...]
    speed: Floats
    restart_s: Floats


def needs() -> Floats:
    """Return GPUs, cores and GB of a point on each of its nodes, ``float64[points, 3]``."""
    shape, cores, memory = parts()
    gpus = np.array([g / n for g, n in SHAPES])[shape]
    return np.stack((gpus, gpus * np.array(CORES)[cores], gpus * np.array(MEMORY_GB)[memory]), 1)


def parts() -> tuple[Ints, Ints, Ints]:
    """Return the shape, cores and memory of every point, as indices."""
    shape, rest = np.divmod(np.arange(POINTS), len(CORES) * len(MEMORY_GB))
    cores, memory = np.divmod(rest, len(MEMORY_GB))
    return shape, cores, memory


class Measurements(NamedTuple):
    """The measurements behind the kinds of jobs.

    Attributes:
        sensitivity: Of Synergy: ``models/MODEL_GPUS`` -> ``tput`` by cores and memory, ``iter_time`` in seconds.
        scaling: Of Sia: samples per second by GPUs and nodes. restart_s: Model -> seconds of a restart.
        source: The file of ``sensitivity``, for errors.
    """

    sensitivity: dict[str, Any]
    scaling: Profiles
    restart_s: dict[str, float]
    source: str


def read_kinds(folder: Path | None = None) -> MaifsJobClasses:
    """Return all kinds, by the shipped measurements, or those of a folder.

    ``folder``: with Synergy's sensitivities, ``placement/`` and restart_seconds.csv, as their authors publish them.
    Speed is the product of two measurements: by GPUs and nodes (with proportional cores and memory), and by cores and
    memory for each GPU (at 1, 2, or 4 and more GPUs).

    Raises:
        FileError: A file is invalid.
        UsageError: A file is missing.
    """
    given, models = _shipped() if folder is None else _measured(folder), maifs().models
    fits = (needs() <= np.array(SERVER)).all(1)
    speed = np.zeros((len(models), POINTS))
    for row, (name, scale) in enumerate(models.items()):
        by_shape = _by_shape(given.scaling, scale)
        by_rest = np.stack([_sensitivity(given.source, given.sensitivity, name, gpus) for gpus, _ in SHAPES])
        whole = by_shape[:, None, None] * by_rest / _iter_time(given.source, given.sensitivity, name)
        speed[row] = np.where(fits, whole.reshape(-1), 0.0)
    return MaifsJobClasses(tuple(models), speed, np.array([given.restart_s[scale] for scale in models.values()]))


def _shipped() -> Measurements:
    """Return the measurements of ``data/measured``."""
    sensitivity: dict[str, Any] = {}
    for row in rows_of("synergy_sensitivity"):
        entry = sensitivity.setdefault(f"models/{row['model']}_{row['gpus']}", {"tput": [], "iter_time": None})
        entry["tput"].append([float(text) for text in list(row.values())[4:] if text])
        entry["iter_time"] = float(row["step_s"]) if row["step_s"] else None
    points: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows_of("sia_placement"):
        points.setdefault(row["model"], {})[int(row["gpus"]), int(row["nodes"])] = float(row["samples_per_s"])
    series = {(model, type_key(_GPU_TYPE)): Series(of, "nodes") for model, of in points.items()}
    restarts = {row["model"]: float(row["restart_s"]) for row in rows_of("sia_restarts")}
    return Measurements(sensitivity, Profiles(series=series), restarts, "synergy_sensitivity.csv")


def _measured(folder: Path) -> Measurements:
    """Return the measurements of a folder."""
    file = folder / "synergy_sensitivity.json"
    for path in (file, folder / "placement", folder / "restart_seconds.csv"):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder of measurements", f"--speeds: {_SOURCE}")
    with open_text(file) as text:
        try:
            raw: dict[str, Any] = json.load(text)
        except json.JSONDecodeError as error:
            raise FileError(str(file), error.lineno, "", f"a JSON error ({error.msg})", "valid JSON") from None
    restarts = read_restarts(folder / "restart_seconds.csv")
    if missing := set(maifs().models.values()) - set(restarts):
        raise FileError(str(folder / "restart_seconds.csv"), None, "", "", f"seconds of {', '.join(sorted(missing))}")
    return Measurements(raw, read_profiles([folder / "placement"]), restarts, str(file))


def _by_shape(profiles: Profiles, model: str) -> Floats:
    """Return speed relative to one GPU, ``float64[shapes]``; 0: not measured."""
    found = [profiles.per_s(model, _GPU_TYPE, gpus, nodes) or 0.0 for gpus, nodes in SHAPES]
    if found[0] <= 0:
        raise UsageError(f"the placement tables do not say how fast {model} is on one {_GPU_TYPE}")
    return np.array(found) / found[0]


def _sensitivity(file: str, raw: dict[str, Any], name: str, gpus: int) -> Floats:
    """Return speed by cores and memory, ``float64[cores, memory]``; 0 for a placeholder (too little memory).

    With 2 and 4 GPUs there is no column for 20.83 GB: it is used only for models insensitive to memory. Rows of zeros
    (more cores than the server had) are taken as no slower than the rows above.
    """
    alone = _table(file, raw, f"models/{name}_1")
    least = alone[:, 1:] if gpus == 1 else _table(file, raw, f"models/{name}_{2 if gpus == 2 else 4}", alone)
    little = alone[:, :1] if (alone[:, 0] > _PLACEHOLDER).all() else np.zeros((len(alone), 1))
    whole = np.concatenate((little, np.maximum.accumulate(least, 0)), 1)[: len(CORES)]
    return np.maximum.accumulate(whole, 1)


def _table(file: str, raw: dict[str, Any], key: str, default: Floats | None = None) -> Floats:
    if key not in raw and default is not None:
        return default[:, 1:]
    try:
        table = np.array(raw[key]["tput"], np.float64)
        if table.shape == (9, 5 if default is None else 4) and (table >= 0).all():
            return table
    except (KeyError, TypeError, ValueError):
        pass
    raise FileError(file, None, key, "something else", "Synergy's table of throughput by 9 cores and memory")


def _iter_time(file: str, raw: dict[str, Any], name: str) -> float:
    seconds = raw[f"models/{name}_1"].get("iter_time")
    if not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise FileError(file, None, f"models/{name}_1.iter_time", repr(seconds), "seconds, more than 0")
    return float(seconds)
