"""Reservations as arrays: which nodes a row of the masks excludes at a time, and when that changes.

Jobs that are alike to reservations share a row: what they may use at all (``base``), the reservation they are of, and
their limit, or one that means the same now. A row is true at the time it was last turned to (`turn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.reservations import OVERRUN_S, Reservation
from gpusched.sched.state import Calendar, Flags, Floats, Ints, Resources, ints

MAX_LIMITS = 48  # rows of masks to be turned as a run ahead goes on; each costs a pass over the nodes


class Reserved(NamedTuple):
    """A snapshot's reservations that have not ended.

    Attributes:
        now: The snapshot's time.
        all: By begin; their index is their number. number: name -> it.
        node, of: ``int64[entries]``: row of a node, and the number of its reservation; by begin.
        begins: ``float64[...]``: distinct begins, ascending.
    """

    now: float
    all: tuple[Reservation, ...]
    number: dict[str, int]
    node: Ints
    of: Ints
    begins: Floats

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.all)


def reserved_of(reservations: Sequence[Sequence[Reservation]], now: float) -> Reserved:
    """Collect ``reservations``: for each row of the nodes, those that have not ended."""
    active = {r.name: r for on_row in reservations for r in on_row}
    found = tuple(sorted(active.values(), key=lambda r: (r.begin, r.name)))
    number = {r.name: i for i, r in enumerate(found)}
    pairs = sorted((number[r.name], row) for row, on_row in enumerate(reservations) for r in on_row)
    return Reserved(
        now, found, number, ints([row for _, row in pairs]), ints([of for of, _ in pairs]),
        np.array(sorted({r.begin for r in found}), np.float64),
    )  # fmt: skip


def reserved_masks(
    reserved: Reserved, allowed: Flags, base: Ints, own: Ints, limit: Floats, usable: Resources
) -> tuple[Flags, Calendar]:
    """Return the masks under reservations at the snapshot's time, and when they change; live and in replays.

    A row for each of ``base``, the row of ``allowed`` that says what its jobs may use if nothing is reserved, ``own``,
    the number of the reservation that they are of (-1: none), and ``limit``; one for looking ahead; then what of
    ``allowed`` is theirs. ``usable``: See `Calendar`.
    """
    rows, (bases, of) = len(base), np.unique(np.column_stack((base, own)), axis=0, return_inverse=True)
    own_nodes = allowed[bases[:, 0]]
    for at in np.flatnonzero(bases[:, 1] >= 0).tolist():
        own_nodes[at] &= np.isin(np.arange(allowed.shape[1]), reserved.node[reserved.of == bases[at, 1]])
    masks = np.concatenate((np.zeros((rows + 1, allowed.shape[1]), np.uint8), own_nodes))
    begin = np.array([r.begin for r in reserved.all], np.float64)[reserved.of]
    end = np.array([r.end for r in reserved.all], np.float64)[reserved.of]
    calendar = Calendar(
        reserved.node, reserved.of, begin, end, np.argsort(end, kind="stable").astype(np.int64),
        base=of.reshape(-1).astype(np.int64) + rows + 1, own=own, limit=limit, turns=np.full(rows, -np.inf),
        closed=np.zeros(allowed.shape[1], np.int64), usable=usable, kept=np.zeros(allowed.shape[1], np.int64),
        kept_for=np.zeros(2, np.int64), kept_times=np.full(2, np.inf), work=rows,
    )  # fmt: skip
    for row in range(rows):
        calendar.turns[row] = turn(calendar, masks, row, reserved.now)
    return masks, calendar


def grouped(limits: Floats) -> Floats:
    """Return the limits, ``float64[jobs]``; if too many differ, each rounded up to one of a few."""
    found: Floats = np.unique(limits, return_index=True)[0]  # else numpy imports its masked arrays
    if len(found) > MAX_LIMITS:
        found = np.unique(found[np.linspace(0, len(found) - 1, MAX_LIMITS).round().astype(np.int64)])
    return found[np.searchsorted(found, limits)]


@jit
def concerns(calendar: Calendar, entry: int, row: int) -> bool:
    """Return whether jobs of a row of the masks must stay off the nodes of an entry."""
    return bool(calendar.number[entry] != calendar.own[row])


@jit
def open_times(calendar: Calendar | None, row: int) -> tuple[float, float]:
    """Return when jobs of a mask row may run: with a reservation, during it or slightly longer."""
    opens, closes = -np.inf, np.inf
    if calendar is None or row < 0 or calendar.base.size == 0:
        return opens, closes
    own = calendar.own[row]
    for e in range(calendar.node.size if own >= 0 else 0):
        if calendar.number[e] == own:
            opens, closes = calendar.begin[e], calendar.end[e] + OVERRUN_S
    return opens, closes


@jit
def turn(calendar: Calendar, masks: Flags, row: int, now: float) -> float:
    """Update a row to a time; return when it changes next, seconds, infinite: never.

    It leaves a node out from then on that a job would still be on when a reservation begins, until that is over. What
    is of a reservation has its nodes from its begin on, if it ends with it, or little later.
    """
    base, own, limit = calendar.base[row], calendar.own[row], calendar.limit[row]
    after, begun, over = np.inf, True, np.inf
    for node in range(masks.shape[1]):
        masks[row, node] = masks[base, node]
    for e in range(calendar.node.size):
        begin, end = calendar.begin[e], calendar.end[e]
        if own >= 0 and calendar.number[e] == own:
            begun, over = now >= begin, end + OVERRUN_S
            if not begun:
                after = min(after, begin)
        elif concerns(calendar, e, row) and now < end:
            if begin < now + limit:
                masks[row, calendar.node[e]] = 0
                after = min(after, end)
            else:
                after = min(after, too_late(begin, limit, now))
    if own >= 0 and (not begun or now + limit > over):
        for node in range(masks.shape[1]):
            masks[row, node] = 0
    elif own >= 0 and over < np.inf:
        after = min(after, too_late(over, limit, now))
    return float(after)


@jit
def too_late(end: float, limit: float, now: float) -> float:
    """Return the first time at which a job would outlast ``end``, as floating point adds; later than now."""
    beyond = np.nextafter(end, np.inf)
    return float(max(beyond - limit, now + (beyond - end)))


@jit
def turn_due(calendar: Calendar | None, masks: Flags, now: float) -> bool:
    """Update all rows to a time; return whether any has changed."""
    turned = False
    if calendar is None:
        return turned
    for row in range(calendar.turns.size):
        if calendar.turns[row] <= now:
            calendar.turns[row] = turn(calendar, masks, row, now)
            turned = True
    return turned


@jit
def next_turn(calendar: Calendar | None, now: float) -> float:
    """Return when a row changes next, after ``now``; infinite: never. `keeping` reopens nodes at that instant."""
    following = np.inf
    if calendar is None:
        return following
    for row in range(calendar.turns.size):
        if calendar.turns[row] > now:
            following = min(following, calendar.turns[row])
    return following
