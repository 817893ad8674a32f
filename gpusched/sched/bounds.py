"""Limits shared by several jobs: of an array, a user, a group, a class. Passes count them down as jobs start."""

from __future__ import annotations

from gpusched.compiled import jit
from gpusched.sched.state import UNLIMITED, Ints, Records


@jit
def exceeds(links: Records | None, room: Ints, account: Ints, job: int) -> bool:
    """Return whether one of the job's bounds has too little left. A job that takes nothing of a bound passes it."""
    if links is None:
        return False
    at = account[job, 0]
    while at >= 0:
        link = links[at]
        unit = link["unit"]
        if (1 if unit == 0 else account[job, unit]) > max(room[link["bound"]], 0):
            return True
        at = link["next"]
    return False


@jit
def room_along(links: Records, room: Ints, least: Ints) -> None:
    """Set ``least: int64[n, 3]``: the least ``room`` from each of the first n links to the end of its chain, by unit.

    With it `within_bounds` asks of a job what `exceeds` does, for many jobs of few chains; below 0 counts as 0.
    """
    for at in range(len(least) - 1, -1, -1):  # a chain only goes upwards
        link = links[at]
        for unit in range(3):
            least[at, unit] = least[link["next"], unit] if link["next"] >= 0 else UNLIMITED
        least[at, link["unit"]] = min(least[at, link["unit"]], max(room[link["bound"]], 0))


@jit
def within_bounds(least: Ints, account: Ints, job: int) -> bool:
    """Return whether every bound leaves enough for the job, by the output of `room_along`."""
    first = account[job, 0]
    if first < 0:
        return True
    within = least[first, 0] >= 1 and least[first, 1] >= account[job, 1] and least[first, 2] >= account[job, 2]
    return bool(within)


@jit
def charge(links: Records | None, room: Ints, account: Ints, job: int, times: int = 1) -> None:
    """Subtract what a job takes from each of its bounds; ``times`` -1: add it."""
    if links is None:
        return
    at = account[job, 0]
    while at >= 0:
        link = links[at]
        unit = link["unit"]
        room[link["bound"]] -= times * (1 if unit == 0 else account[job, unit])
        at = link["next"]
