"""Reservations: nodes that are kept for some, or for nobody, from one time to another."""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

MAX_RESERVATIONS = 1000
MAX_RESERVATION_NAME = 64
RESTART_S = 600.0  # so long before a reservation of its nodes a job is not stopped to go on: it might not come up again


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that others than its users get only as long as they end, by their limits, before it begins.

    Attributes:
        name: One word. nodes: Names; two reservations of a node do not overlap.
        begin, end: Unix seconds. From ``begin`` on its jobs may start, if they end by ``end`` at the latest.
        users, groups: Whose jobs may run in it; empty: nobody's.
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

    def serves(self, user: str, groups: Container[str]) -> bool:
        """Whether a user who is in these groups may run jobs in it."""
        return user in self.users or any(group in groups for group in self.groups)

    def meets(self, begin: float, end: float) -> bool:
        """Whether it has any time in common with what lasts from ``begin`` to ``end``."""
        return self.begin < end and begin < self.end

    @property
    def what(self) -> str:
        """``maintenance weekly``, ``reservation class``."""
        return f"{'maintenance' if self.maintenance else 'reservation'} {self.name}"


def overlapping(wanted: Reservation, others: Iterable[Reservation]) -> tuple[Reservation, str] | None:
    """The first of the others, by begin, that has a node of it at the same time, and that node."""
    for other in sorted(others, key=lambda one: (one.begin, one.name)):
        if other.name != wanted.name and other.meets(wanted.begin, wanted.end):
            for node in wanted.nodes:
                if node in other.nodes:
                    return other, node
    return None


def by_node(reservations: Iterable[Reservation], now: float) -> dict[str, tuple[Reservation, ...]]:
    """Node -> those of it that are not over, by begin."""
    found: dict[str, list[Reservation]] = {}
    for one in sorted(reservations, key=lambda one: (one.begin, one.name)):
        if one.end > now:
            for node in one.nodes:
                found.setdefault(node, []).append(one)
    return {node: tuple(ones) for node, ones in found.items()}
