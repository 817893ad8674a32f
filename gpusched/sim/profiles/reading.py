"""Reads files of measurements, recognized by name; a folder means all such files in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gpusched.errors import FileError, GpuschedError, UsageError
from gpusched.sim.profiles import dl2, gavel, placement, synergy
from gpusched.sim.profiles.measured import number_at, whole_table
from gpusched.sim.profiles.table import Profiles, merged, model_key
from gpusched.traces.readers.columns import open_text, stem

EXPECTED = (
    "Gavel's and Synergy's *.json, Sia's MODEL-placements-CLUSTER.csv and MODEL-scalability-CLUSTER.csv,"
    " DL2's *speed*.txt"
)


def read_profiles(paths: Sequence[Path | str]) -> Profiles:
    """Read the measurements of these files and folders (gzip or not) as one table.

    Raises:
        FileError: A file has another format.
        GpuschedError: A file cannot be read.
        UsageError: A path is missing, or not a file of measurements.
    """
    files = [file for path in paths for file in _files(Path(path))]
    placements = [file for file in files if placement.is_placement(stem(file))]
    try:
        parts = [_of_json(file) for file in files if stem(file).endswith(".json")]
        parts += placement.read(placements)
        parts += [dl2.read(file) for file in files if stem(file).endswith(".txt")]
    except OSError as error:
        raise GpuschedError(f"{error.filename}: {error.strerror or error}") from None
    return merged(parts)


def read_restarts(path: Path | str) -> dict[str, float]:
    """Read the cost of stopping and restarting a job in seconds, by model: a CSV with ``model,restart_s``.

    Sia's simulator has such constants (siasosp23/artifacts).

    Raises:
        FileError: The file has another format.
        GpuschedError: The file cannot be read.
    """
    try:
        table = whole_table(Path(path), "a file of restart costs", ("model", "restart_s"))
    except OSError as error:
        raise GpuschedError(f"{error.filename}: {error.strerror or error}") from None
    found: dict[str, float] = {}
    for row, name in enumerate(table.columns["model"]):
        if not (model := model_key(name)) or model in found:
            raise FileError(str(path), int(table.lines[row]), "model", repr(name), "a model's name, once")
        found[model] = number_at(Path(path), table, row, "restart_s", "seconds")
    if not found:
        raise FileError(str(path), None, "", "no model", "model,restart_s and one line for each model")
    return found


def _of_json(path: Path) -> Profiles:
    try:
        with open_text(path) as text:
            root = json.load(text)
    except json.JSONDecodeError as error:
        raise FileError(str(path), error.lineno, "", f"a JSON error ({error.msg})", "valid JSON") from None
    return synergy.tables_of(path, root) if synergy.is_synergy_file(root) else gavel.tables_of(path, root)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder of measurements")
        if not _known(path):
            raise UsageError(f"{path}: not recognized as a file of measurements", f"recognized are {EXPECTED}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _known(file))
    if not found:
        raise UsageError(f"{path}: contains no file of measurements", f"recognized are {EXPECTED}")
    return found


def _known(path: Path) -> bool:
    name = stem(path)
    return name.endswith(".json") or placement.is_placement(name) or (name.endswith(".txt") and "speed" in name)
