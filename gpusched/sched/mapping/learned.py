"""Speeds of jobs by GPU type: those that jobs of the class have reported replace those of the policy's file."""

from __future__ import annotations

import math

from gpusched.model.interference import JobClassEstimate, SpeedSamples

_LEAST = 1e-9


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
