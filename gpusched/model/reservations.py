"""Reservations: nodes kept for some users, or for maintenance, for a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpusched.model.limits import Groups
from gpusched.model.units import format_duration

MAX_RESERVATIONS = 1000
MAX_RESERVATION_NAME = 64
OVERRUN_S = 600.0  # grace after its end for its jobs, since none starts exactly when it begins
RESTART_S = 600.0  # upper bound of a preempted job's restart


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that other users' jobs may use only if they end, by their limits, before it begins.

    Attributes:
        name: One word. nodes: Names; two reservations of a node do not overlap.
        begin, end: Unix seconds. Its jobs start from ``begin`` on, if they end with it (`OVERRUN_S`) at the latest.
        users, groups: Their jobs may run in it; empty: none.
        maintenance: The nodes are worked on; else they are kept for jobs.
        reason: Why, for people. by, made: Who made it, and when.
    """

    name: str
    nodes: tuple[str, ...]
    begin: float
    end: float
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    maintenance: bool = False
    reason: str = ""
    by: str = ""
    made: float = 0.0

    def serves(self, user: str, groups: Groups) -> bool:
        """Return whether a user may run jobs in it."""
        return user in self.users or groups.within(user, self.groups)

    def meets(self, begin: float, end: float) -> bool:
        """Return whether it overlaps the time from ``begin`` to ``end``."""
        return self.begin < end and begin < self.end

    @property
    def what(self) -> str:
        """Return ``maintenance weekly`` or ``reservation class``."""
        return f"{'maintenance' if self.maintenance else 'reservation'} {self.name}"

    def when(self, now: float) -> str:
        """Return ``in 2:00:00, for 4:00:00``; once it has begun ``for another 1:00:00``."""
        if self.begin <= now:
            return f"for another {format_duration(max(0.0, self.end - now))}"
        return f"in {format_duration(self.begin - now)}, for {format_duration(self.end - self.begin)}"


def overlapping(wanted: Reservation, others: Iterable[Reservation]) -> tuple[Reservation, str] | None:
    """Return the first other reservation, by begin, that overlaps in time and nodes, and a shared node."""
    for other in sorted(others, key=lambda one: (one.begin, one.name)):
        if other.name != wanted.name and other.meets(wanted.begin, wanted.end):
            for node in wanted.nodes:
                if node in other.nodes:
                    return other, node
    return None


def by_node(reservations: Iterable[Reservation], now: float) -> dict[str, tuple[Reservation, ...]]:
    """Return node -> its reservations that have not ended, by begin."""
    found: dict[str, list[Reservation]] = {}
    for one in sorted(reservations, key=lambda one: (one.begin, one.name)):
        if one.end > now:
            for node in one.nodes:
                found.setdefault(node, []).append(one)
    return {node: tuple(ones) for node, ones in found.items()}


def named_nodes_unreserved_at(
    nodes: Iterable[str], here: Mapping[str, Sequence[Reservation]], limit_s: float, now: float
) -> tuple[float, str] | None:
    """Return when the nodes that a job names are unreserved for its whole limit, and why not now; None: now.

    ``here``: node -> those of it that are not over.
    """
    found = [(one, node) for node in nodes for one in here.get(node, ())]
    at, why = now, ""
    while met := next(((one, node) for one, node in found if one.meets(at, at + limit_s)), None):
        one, node = met
        if not why:
            late = f"; its limit of {format_duration(limit_s)} does not fit before" if one.begin > now else ""
            why = f"{node}, which it names, is reserved ({one.what}) {one.when(now)}{late}"
        at = one.end
    return (at, why) if why else None


def restart_conflict(end: float, on: Iterable[Sequence[Reservation]], own: str, now: float) -> str:
    """Return why a running job could not restart in time if it were preempted; "": it could.

    ``end``: by its limit. ``on``: of each of its nodes, those that are not over. ``own``: the one that it runs in.
    """
    end = max(end, now) + RESTART_S
    for here in on:
        for one in here:
            if one.name == own and end > one.end + OVERRUN_S:
                return f"{one.what} ends soon after its time limit"
            if one.name != own and one.begin < end:
                return f"its node is reserved ({one.what}) {one.when(now)}"
    return ""
