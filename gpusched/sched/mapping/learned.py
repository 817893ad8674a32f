"""Speeds of jobs by GPU type: those that jobs of the class have reported replace those of the policy's file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np

from gpusched.model.interference import JobClassEstimate, SpeedSamples, job_class_of
from gpusched.sched.state import Floats

_LEAST = 1e-9


class TypeSpeeds:
    """Speeds of jobs on each GPU type: as reported (``learned``, by job class), else by a policy's ``speeds``."""

    def __init__(
        self, speeds: dict[str, dict[str, float]], kinds: tuple[str, ...], learned: Mapping[str, JobClassEstimate]
    ) -> None:
        self._speeds, self._kinds, self._learned = speeds, kinds, learned
        self._known: dict[tuple[str, str, int], list[float]] = {}

    def of(self, jobs: Iterable[tuple[str, str, int]]) -> Floats:
        """Return ``float64[jobs, kinds]`` for jobs of these users, names and GPUs."""
        rows = [self._known.get(job) or self._look_up(*job) for job in jobs]
        return np.array(rows, np.float64).reshape(len(rows), len(self._kinds))

    def _look_up(self, user: str, name: str, gpus: int) -> list[float]:
        typed = speeds_by_name(self._speeds, name, self._kinds)
        found = speeds_by_type(self._learned.get(job_class_of(user, name)), gpus, typed, self._kinds)
        return self._known.setdefault((user, name, gpus), found)


def speeds_by_name(speeds: dict[str, dict[str, float]], name: str, kinds: tuple[str, ...]) -> list[float]:
    """Return a job name's speed on each GPU type; types not listed get the slowest listed speed."""
    found = next((by_type for pattern, by_type in speeds.items() if fnmatchcase(name, pattern)), {})
    slowest = min(found.values(), default=1.0)
    return [found.get(kind, slowest) for kind in kinds]


def speeds_by_type(
    estimate: JobClassEstimate | None, gpus: int, typed: list[float], kinds: tuple[str, ...]
) -> list[float]:
    """Return a job's speed on each GPU type, relative to one another.

    Reports are comparable if they count in the same unit on as many GPUs; those on most types are used, of equally many
    those nearest to ``gpus``. Types without a report keep the ratio of ``typed``, the speeds of the policy's file, to
    the others. Reports of one type only change nothing.
    """
    known = _comparable(estimate.shapes if estimate is not None else (), gpus, kinds)
    if not known:
        return typed
    as_typed = {kind: math.log(max(speed, _LEAST)) for kind, speed in zip(kinds, typed, strict=True)}
    above = sum(log - as_typed[kind] for kind, log in known.items()) / len(known)
    logs = {kind: known.get(kind, as_typed[kind] + above) for kind in kinds}
    best = max(logs.values())
    return [math.exp(logs[kind] - best) if speed > 0 or kind in known else 0.0
            for kind, speed in zip(kinds, typed, strict=True)]  # fmt: skip


def _comparable(shapes: tuple[SpeedSamples, ...], gpus: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Return GPU type -> mean logarithm of the reported speed, of the comparable reports."""
    groups: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = {}
    for samples in shapes:
        shape = samples.shape
        if shape.gpu_type in kinds and shape.gpus > 0 and any(weight > 0 for _, weight in samples.logs):
            by_type = groups.setdefault((shape.unit, shape.gpus), {})
            by_type.setdefault(shape.gpu_type, []).extend(samples.logs)
    if not groups:
        return {}

    def worth(key: tuple[str, int]) -> tuple[int, float, str]:
        return -len(groups[key]), abs(math.log(key[1] / max(gpus, 1))), key[0]

    return {
        kind: sum(log * weight for log, weight in logs) / sum(weight for _, weight in logs)
        for kind, logs in groups[min(groups, key=worth)].items()
    }
