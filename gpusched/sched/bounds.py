"""What jobs may have together: of an array, a user, a group, a class. The passes count it down as they start jobs."""

from __future__ import annotations

from gpusched.compiled import jit
from gpusched.sched.state import Ints, Records


@jit
def exceeds(links: Records | None, room: Ints, account: Ints, job: int) -> bool:
    """Whether one of the job's bounds has too little left for it. What takes nothing of a bound passes it."""
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
def charge(links: Records | None, room: Ints, account: Ints, job: int) -> None:
    """Takes what a job takes off each of its bounds."""
    if links is None:
        return
    at = account[job, 0]
    while at >= 0:
        link = links[at]
        unit = link["unit"]
        room[link["bound"]] -= 1 if unit == 0 else account[job, unit]
        at = link["next"]
