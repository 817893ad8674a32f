"""Slurm's reservations, as used by plans, forecasts and `why`; without our lease. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpusched.model.reservations import Reservation
from gpusched.model.slurm import LEASE, SlurmReservation

START_DELAY_S = 10.0
"""Usual maximum delay between requesting a start and the start; reservations count as beginning this much earlier."""


def other_reservations(reservations: Iterable[SlurmReservation]) -> list[SlurmReservation]:
    """Return all reservations except our lease."""
    return [one for one in reservations if one.name != LEASE]


def calendar_of(reservations: Iterable[SlurmReservation], declared: Collection[str]) -> list[Reservation]:
    """Return the reservations of declared nodes: whole nodes even if only cores are reserved, recurring ones once."""
    return [
        Reservation(
            name=one.name, nodes=nodes, begin=one.start_time, end=one.end_time, users=one.users, groups=one.accounts,
            maintenance="MAINT" in one.flags, by="Slurm",
        )
        for one in other_reservations(reservations)
        if (nodes := tuple(node for node in one.nodes if node in declared)) and one.end_time > one.start_time
    ]  # fmt: skip


def first_conflict(
    reservations: Iterable[SlurmReservation], nodes: Collection[str], begin: float, end: float
) -> SlurmReservation | None:
    """Return the first reservation, except the lease, that includes one of the nodes between the two times."""
    met = (one for one in other_reservations(reservations) if one.start_time < end and begin < one.end_time)
    there = (one for one in met if not set(nodes).isdisjoint(one.nodes))
    return min(there, key=lambda one: one.start_time, default=None)
