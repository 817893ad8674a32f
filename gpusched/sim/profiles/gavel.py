"""Gavel's measured throughputs (Narayanan et al., OSDI 2020): stanford-futuredata/gavel, MIT.

``{TYPE: {"('MODEL', GPUS)": {"null": alone, "('OTHER', GPUS)": [its own, the other's]}}}`` in steps per second of the
whole job. ``TYPE_unconsolidated`` is the same over several servers. 0 says that it did not run, which is no figure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusched.errors import FileError
from gpusched.sim.profiles.table import Profiles, Series, model_key, type_key

_APART = "_unconsolidated"
_RECORDED_ON = "V100"  # of its types the fastest, and what `gpusched.traces.readers.gavel` takes run times from
_EXPECTED = "Gavel's throughputs: GPU type -> ('model', GPUs) -> null or ('other', GPUs) -> steps per second"


def tables_of(path: Path, root: Any) -> Profiles:
    """Return the table in a file.

    Raises:
        FileError: It is something else.
    """
    per_s: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    beside: dict[tuple[str, str, int, str], float] = {}
    for kind, jobs in _entries(path, "", root):
        apart = kind.endswith(_APART)
        gpu_type = type_key(kind.removesuffix(_APART))
        for key, others in _entries(path, kind, jobs):
            model, gpus = _job(path, f"{kind}.{key}", key)
            alone = _number(path, f"{kind}.{key}.null", others.get("null") if isinstance(others, dict) else None)
            if alone <= 0:
                continue
            per_s.setdefault((model, gpu_type), {})[gpus, 2 if apart else 1] = alone
            if not apart:
                for other, slowed in _pairs(path, f"{kind}.{key}", others, gpus):
                    beside[model, gpu_type, gpus, other] = slowed / alone
    return Profiles(
        series={key: Series(points, "apart") for key, points in per_s.items()},
        beside=beside,
        recorded_on={model: _RECORDED_ON for model, _ in per_s},
        sources=((path.name, frozenset(model for model, _ in per_s)),),
    )


def _pairs(path: Path, where: str, others: dict[str, Any], gpus: int) -> Iterator[tuple[str, float]]:
    """Yield each other model and this one's steps per second beside it, without pairs that did not run."""
    for key, both in others.items():
        if key == "null":
            continue
        other, size = _job(path, f"{where}.{key}", key)
        if not isinstance(both, list) or len(both) != 2:
            raise FileError(str(path), None, f"{where}.{key}", repr(both), "two numbers of steps per second")
        rate, its = (_number(path, f"{where}.{key}", value) for value in both)
        if size == gpus and rate > 0 and its > 0:
            yield other, rate


def _entries(path: Path, where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        raise FileError(str(path), None, where, "something else" if value else "nothing", _EXPECTED)
    yield from value.items()


def _job(path: Path, where: str, key: str) -> tuple[str, int]:
    try:
        model, gpus = ast.literal_eval(key)
        if isinstance(model, str) and isinstance(gpus, int) and gpus > 0:
            return model_key(model), gpus
    except (ValueError, SyntaxError, TypeError):
        pass
    raise FileError(str(path), None, where, repr(key), "('model', GPUs)")


def _number(path: Path, where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise FileError(str(path), None, where, repr(value), "steps per second")
    return float(value)
