"""What running jobs give back and when: a list ordered by time, cheap to extend, shrink and walk."""

from __future__ import annotations

from gpusched.compiled import jit
from gpusched.sched.state import PlacementRequest, Releases

_FEW = 16


@jit
def add(releases: Releases, end: float, node: int, request: PlacementRequest, owner: int) -> None:
    """Record that ``owner`` gives back a part of ``request`` on ``node`` at ``end``; a slot must be unused."""
    slot = releases.order[releases.used[0]]
    releases.end[slot] = end
    releases.node[slot] = node
    releases.gpus[slot] = request.gpus
    releases.cores[slot] = request.cores
    releases.memory[slot] = request.memory
    releases.owner[slot] = owner
    releases.used[0] += 1


@jit
def drop(releases: Releases, owner: int) -> int:
    """Remove the parts of ``owner`` (it has ended); return how many there were."""
    found = 0
    at = 0
    while at < releases.used[0]:
        slot = releases.order[at]
        if releases.owner[slot] != owner:
            at += 1
            continue
        last = releases.used[0] - 1
        for i in range(at, last):
            releases.order[i] = releases.order[i + 1]
        releases.order[last] = slot
        releases.used[0] = last
        if at < releases.used[1]:
            releases.used[1] -= 1
        found += 1
    return found


@jit
def drop_ended(releases: Releases, end: float, owner: int) -> None:
    """Call `drop` for an owner whose parts all have this ``end``, found by bisection."""
    settle(releases)
    used = releases.used[0]
    low, high = 0, used
    while low < high:
        middle = (low + high) // 2
        if releases.end[releases.order[middle]] < end:
            low = middle + 1
        else:
            high = middle
    kept = low
    while low < used and releases.end[releases.order[low]] == end:
        slot = releases.order[low]
        if releases.owner[slot] != owner:
            releases.order[low] = releases.order[kept]
            releases.order[kept] = slot
            kept += 1
        low += 1
    _close_gap(releases, kept, low)


@jit
def _close_gap(releases: Releases, first: int, last: int) -> None:
    """Mark the slots at ``first <= at < last`` of the order unused; the others keep theirs."""
    order = releases.order
    for at in range(last - 1, first - 1, -1):  # mostly one: a copy of them all would take longer
        slot, end = order[at], releases.used[0] - 1
        for i in range(at, end):
            order[i] = order[i + 1]
        order[end] = slot
        releases.used[:] = end


@jit
def settle(releases: Releases) -> None:
    """Sort the used slots by (end, slot): by insertion if few are new, else by Shell's sort."""
    used = releases.used[0]
    first = releases.used[1]
    gap = 1
    if used - first > _FEW:
        first = 0
        while gap < used // 9:
            gap = 3 * gap + 1
    while gap > 0:
        for i in range(max(gap, first), used):
            _sink(releases, i, gap)
        gap //= 3
    releases.used[1] = used


@jit
def _sink(releases: Releases, at: int, gap: int) -> None:
    slot = releases.order[at]
    end = releases.end[slot]
    while at >= gap:
        before = releases.order[at - gap]
        if releases.end[before] < end or (releases.end[before] == end and before < slot):
            break
        releases.order[at] = before
        at -= gap
    releases.order[at] = slot
