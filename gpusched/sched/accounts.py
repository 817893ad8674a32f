"""The bounds that waiting jobs count for, as the arrays that the passes count down (`state.Jobs`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor

import numpy as np

from gpusched.model.jobs import JobSpec
from gpusched.model.limits import WEEK_S, Bound
from gpusched.model.slicetables import GPU_PARTS, parts_of
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.state import LINK, Floats, Ints, Records, ints

COLUMNS = {"jobs": 0, "gpus": 1, "gpu_s": 2}  # of an account, where a job says what it takes


def accounts_of(
    jobs: Sequence[PendingView], gpus: Ints, limit: Floats, bounds: Sequence[Bound], scale: int = 1
) -> tuple[Ints, Ints, Records]:
    """Return ``account: int64[jobs, 3]``, ``room: int64[bounds]`` and ``links``, as in `state.Jobs`.

    First the bounds of ``bounds`` (`Snapshot.bounds`; empty: limits do not count here), then one for each array that
    has a bound. A chain begins with the array, and goes on in the order of `PendingView.bounds`. ``gpus: int64[jobs]``,
    ``limit: float64[jobs]``: of each job. ``scale``: `gpu_scale`; ``gpus`` and ``room`` of them are in parts of a GPU.
    """
    rooms = [int(bound.room) if bound.rule.unit == "jobs" else floor(bound.room * scale + 1e-6) for bound in bounds]
    units = [COLUMNS[bound.rule.unit] for bound in bounds]
    arrays: dict[str, int] = {}
    chains: dict[tuple[int, tuple[int, ...]], int] = {(-1, ()): -1}
    rows: list[tuple[int, int, int]] = []
    first: list[int] = []
    # without bounds, as in most queues, no job counts for any
    counted = jobs if units or any(job.array_room is not None for job in jobs) else ()
    for job in counted:
        array = -1
        if job.array_room is not None:
            array = arrays.setdefault(job.array_id or job.id, len(rooms))
            if array == len(rooms):
                rooms.append(job.array_room)
        key = (array, job.bounds if units else ())
        at = chains.get(key)
        if at is None:
            at = chains[key] = len(rows)
            rows += chain([(array, 0)] * (array >= 0) + [(bound, units[bound]) for bound in key[1]], at)
        first.append(at)
    account = np.empty((len(jobs), 3), np.int64)
    account[:, 0], account[:, 1], account[:, 2] = first or -1, gpus, gpus * np.minimum(limit, WEEK_S)
    return account, ints(rooms), np.array(rows, LINK)


def gpu_scale(snapshot: Snapshot | None, jobs: Iterable[PendingView]) -> int:
    """Return into how many parts a GPU is counted by limits: 1, where no job has slices."""
    if snapshot is None or not snapshot.bounds:
        return 1
    sliced = any(job.spec.profile for job in jobs) or any(one.spec and one.spec.profile for one in snapshot.running)
    return GPU_PARTS if sliced else 1


def scaled_gpus(gpus: int, spec: JobSpec | None, scale: int) -> int:
    """Return a job's GPUs, or slices, in such parts of a GPU."""
    return gpus if scale == 1 else gpus * parts_of(spec.profile if spec is not None else "")


def chain(bounds: Sequence[tuple[int, int]], row: int) -> list[tuple[int, int, int]]:
    """Return the rows of ``LINK``, from ``row`` on, of a job that counts toward these (bound, unit)."""
    last = row + len(bounds) - 1
    return [(at, unit, -1 if row + i == last else row + i + 1) for i, (at, unit) in enumerate(bounds)]
