"""A mapping's result in words: why jobs stay, and how good it is."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BACKFILL,
    FIRST_FIT,
    LIMIT,
    MAPPING,
    PRIORITY,
    RESOURCES,
    SKIP,
    STARTED,
    Ints,
    PassArrays,
)


class Report(NamedTuple):
    """One mapping: how many jobs were looked at and started, its value and the greedy answer's, and how sure it is."""

    jobs: int
    started: int
    value: float
    greedy: float
    gap: float
    solver: str
    note: str


def say_why(arrays: PassArrays, jobs: list[int], head: int, late: Ints, backfill: int) -> None:
    """The codes of those of the jobs that stay; ``late``: those that would outlast the head's wait."""
    code, shape, outlasts = arrays.outcome.code, arrays.jobs.shape, set(late.tolist())
    fits: dict[int, bool] = {}
    for job in jobs:
        if code[job] == STARTED:
            continue
        if exceeds(arrays.jobs.links, arrays.jobs.room, arrays.jobs.account, job):
            code[job] = LIMIT
            continue
        one = int(shape[job])
        if one not in fits:
            request = request_of(arrays.requests, one)
            fits[one] = bool(choose(arrays.resources, arrays.jobs.masks, request, FIRST_FIT, arrays.scratch))
        if job == head:
            code[job] = MAPPING if fits[one] else RESOURCES  # a gang may fit on two GPU types together
        elif fits[one] and job in outlasts:
            code[job] = BACKFILL
        elif fits[one] and backfill != 0:
            code[job] = MAPPING
        else:
            code[job] = RESOURCES if backfill == SKIP else PRIORITY


def summary(reports: list[Report]) -> str:
    """The mappings of one decision in a line; "" where there were none."""
    if not reports:
        return ""
    jobs, started = sum(r.jobs for r in reports), sum(r.started for r in reports)
    gap = max(r.gap for r in reports)
    gain = sum(r.value - r.greedy for r in reports)
    known = f"at most {gap:.2%} below the best" if gap < 1 else "gap to the best unknown"
    notes = "; ".join(dict.fromkeys(r.note for r in reports if r.note))
    return f"{started} of {jobs} jobs mapped, worth {gain:.3g} GPUs more than greedily, {known}" + (
        f" ({notes})" if notes else ""
    )
