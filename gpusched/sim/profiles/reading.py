"""Files of measurements by their names; a folder stands for all such files in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpusched.errors import GpuschedError, UsageError
from gpusched.sim.profiles import dl2, gavel, placement
from gpusched.sim.profiles.table import Profiles, merged
from gpusched.traces.readers.columns import stem

EXPECTED = "Gavel's *.json, Sia's MODEL-placements-CLUSTER.csv and MODEL-scalability-CLUSTER.csv, DL2's *speed*.txt"


def read_profiles(paths: Sequence[Path | str]) -> Profiles:
    """The measurements of these files and folders (gzip or not) as one table.

    Raises:
        FileError: A file holds something else.
        GpuschedError: It cannot be read.
        UsageError: No file of measurements is named.
    """
    files = [file for path in paths for file in _files(Path(path))]
    placements = [file for file in files if placement.is_one(stem(file))]
    try:
        parts = [gavel.read(file) for file in files if stem(file).endswith(".json")]
        parts += placement.read(placements)
        parts += [dl2.read(file) for file in files if stem(file).endswith(".txt")]
    except OSError as error:
        raise GpuschedError(f"{error.filename}: {error.strerror or error}") from None
    return merged(parts)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"{path}: there is no such file or folder of measurements")
        if not _known(path):
            raise UsageError(f"{path}: not known as a file of measurements", f"known by name are {EXPECTED}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _known(file))
    if not found:
        raise UsageError(f"{path}: no file of measurements is in it", f"known by name are {EXPECTED}")
    return found


def _known(path: Path) -> bool:
    name = stem(path)
    return name.endswith(".json") or placement.is_one(name) or (name.endswith(".txt") and "speed" in name)
