"""Slurm's reservations, as those by which plans, forecasts and `why` go: ours is none of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpusched.model.reservations import Reservation
from gpusched.model.slurm import LEASE, SlurmReservation

LATE_S = 10.0
"""A job that is asked to start begins so much later at the most, mostly: what it may run into begins for it earlier."""


def others(reservations: Iterable[SlurmReservation]) -> list[SlurmReservation]:
    """Those that are not our lease."""
    return [one for one in reservations if one.name != LEASE]


def calendar_of(reservations: Iterable[SlurmReservation], declared: Collection[str]) -> list[Reservation]:
    """Those of declared nodes, whole nodes even where some cores are reserved; one that recurs by its next time."""
    return [
        Reservation(
            name=one.name, nodes=nodes, begin=one.start_time, end=one.end_time, users=one.users, groups=one.accounts,
            maintenance="MAINT" in one.flags, by="Slurm",
        )
        for one in others(reservations)
        if (nodes := tuple(node for node in one.nodes if node in declared)) and one.end_time > one.start_time
    ]  # fmt: skip


def in_the_way(
    reservations: Iterable[SlurmReservation], nodes: Collection[str], begin: float, end: float
) -> SlurmReservation | None:
    """The first of the others' reservations that has one of the nodes between the two times."""
    met = (one for one in others(reservations) if one.start_time < end and begin < one.end_time)
    there = (one for one in met if not set(nodes).isdisjoint(one.nodes))
    return min(there, key=lambda one: one.start_time, default=None)
