"""Slurm's reservations, as used by plans, forecasts and `why`; without our lease. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpusched.model.reservations import Reservation
from gpusched.model.slurm import LEASE, SlurmReservation

START_DELAY_S = 10.0
"""Usual maximum delay between requesting a start and the start; reservations count as beginning this much earlier."""


def other_reservations(reservations: Iterable[SlurmReservation]) -> list[SlurmReservation]:
    """Return all reservations except our lease."""
    return [r for r in reservations if r.name != LEASE]


def calendar_of(reservations: Iterable[SlurmReservation], declared: Collection[str]) -> list[Reservation]:
    """Return the reservations of declared nodes: whole nodes even if only cores are reserved, recurring ones once."""
    return [
        Reservation(
            name=r.name, nodes=nodes, begin=r.start_time, end=r.end_time, users=r.users, groups=r.accounts,
            maintenance="MAINT" in r.flags, by="Slurm",
        )
        for r in other_reservations(reservations)
        if (nodes := tuple(node for node in r.nodes if node in declared)) and r.end_time > r.start_time
    ]  # fmt: skip
