"""Synergy's measured sensitivities (Mohan et al., OSDI 2022): msr-fiddle/synergy, simulator/models, as one JSON file.

``{"models/MODEL_GPUS": {"tput": rows}}``: relative throughput of a job with this number of GPUs. Rows are CPU cores per
GPU, columns GB of memory per GPU (tables for several GPUs lack the first column). 1 is the throughput with a server's
proportional share, 3 cores and 62.5 GB. 0 and 0.1 mean not measured. ``models-4/`` and similar sets have the same
models on servers with more cores per GPU; they are used only for models that ``models/`` lacks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusched.errors import FileError
from gpusched.sim.profiles.table import Profiles, model_key

CORES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 12.0, 24.0)
MEMORY_MIB = tuple(gb * 1000**3 / 2**20 for gb in (20.83, 62.5, 125.0, 187.5, 250.0))
PLACEHOLDER = 0.1
"""Figures up to this one mean not measured."""
_KEY = re.compile(r"(?:(?P<set>[^/]+)/)?(?P<model>[^/]+)_(?P<gpus>[1-9][0-9]{0,3})")
_EXPECTED = "Synergy's sensitivities: 'models/MODEL_GPUS' -> tput, 9 rows (CPU cores) of 5 or 4 columns (memory)"
_NOTE = "Synergy's 0 and 0.1 count as not measured; outside the measured range the nearest measurement is used"

Rows = list[list[float | None]]


@dataclass(frozen=True)
class ModelSensitivity:
    """One model's sensitivity.

    ``tables``: GPUs -> relative throughput, rows by `CORES` and columns by `MEMORY_MIB` per GPU; None: not measured.
    """

    tables: dict[int, Rows]

    def at(self, gpus: int, cores: float | None, memory_mib: float | None) -> float:
        """Return the relative throughput with these cores and MiB in total (None: plenty).

        Interpolates between measurements (bilinear), and uses the nearest one outside their range. Uses the table for
        this number of GPUs, else that for the next smaller number, else the smallest.
        """
        table = self.tables[max((g for g in self.tables if g <= gpus), default=min(self.tables))]
        found = [(c, _between(MEMORY_MIB, row, None if memory_mib is None else memory_mib / gpus))
                 for c, row in zip(CORES, table, strict=True)]  # fmt: skip
        by_cores = [value for _, value in found]
        value = _between(CORES, by_cores, None if cores is None else cores / gpus)
        assert value is not None
        return value


def _between(axis: Sequence[float], values: Sequence[float | None], at: float | None) -> float | None:
    """Interpolate linearly at ``at`` (None: take the last value); outside, return the nearest; None: no values."""
    known = [(x, v) for x, v in zip(axis, values, strict=True) if v is not None]
    if not known:
        return None
    above = len(known) if at is None else bisect_right([x for x, _ in known], at)
    if at is None or above == len(known):
        return known[-1][1]
    if above == 0:
        return known[0][1]
    (low, a), (high, b) = known[above - 1], known[above]
    return a + (b - a) * (at - low) / (high - low)


def is_synergy_file(root: Any) -> bool:
    """Return whether a parsed JSON file has this format: its first value is a mapping with ``tput``."""
    return isinstance(root, dict) and any("tput" in v for v in list(root.values())[:1] if isinstance(v, dict))


def tables_of(path: Path, root: dict[str, Any]) -> Profiles:
    """Return the sensitivities in a file.

    Raises:
        FileError: The file has another format, or no measurement.
    """
    found: dict[tuple[str, str], dict[int, Rows]] = {}
    for key, entry in root.items():
        match = _KEY.fullmatch(key)
        if match is None or not isinstance(entry, dict):
            raise FileError(str(path), None, "", repr(key), _EXPECTED)
        rows = _rows(path, f"{key}.tput", entry.get("tput"))
        if any(value is not None for row in rows for value in row):
            found.setdefault((model_key(match["model"]), match["set"] or ""), {})[int(match["gpus"])] = rows
    if not found:
        raise FileError(str(path), None, "", "no value above 0.1", _EXPECTED)
    sensitivity = {}
    for model in dict.fromkeys(model for model, _ in found):
        sets = {name: tables for (of, name), tables in found.items() if of == model}
        tables = sets.get("models") or sets[min(sets)]
        sensitivity[model] = ModelSensitivity(_completed(tables))
    models = frozenset(sensitivity)
    return Profiles(series={}, sensitivity=sensitivity, sources=((path.name, models),), notes=((_NOTE, models),))


def _completed(tables: dict[int, Rows]) -> dict[int, Rows]:
    """Fill gaps in the tables for several GPUs from the table for one, as Synergy's own simulator does."""
    one = tables.get(1)
    if one is None:
        return tables
    return {
        gpus: [[v if v is not None else w for v, w in zip(*both, strict=True)] for both in zip(rows, one, strict=True)]
        for gpus, rows in tables.items()
    }


def _rows(path: Path, where: str, found: Any) -> Rows:
    rows: Rows = []
    unmeasured: list[float | None] = [None]
    if not isinstance(found, list) or len(found) != len(CORES):
        raise FileError(str(path), None, where, "something else", _EXPECTED)
    for row in found:
        if not isinstance(row, list) or len(row) not in (len(MEMORY_MIB), len(MEMORY_MIB) - 1):
            raise FileError(str(path), None, where, repr(row), _EXPECTED)
        for value in row:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise FileError(str(path), None, where, repr(value), "a relative throughput")
        figures = [float(v) if v > PLACEHOLDER else None for v in row]
        # Tables for several GPUs lack the smallest memory.
        rows.append(unmeasured * (len(MEMORY_MIB) - len(row)) + figures)
    return rows
