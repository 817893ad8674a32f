"""Ownership of the lease: two controllers with separate state folders must not both decide.

A reservation has no owner field. But the controller that renewed it last knows its end, so a lease that ends later was
renewed by another controller, which is thereby known to be alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import randrange

from gpusched.model.slurm import LEASE, SlurmReservation
from gpusched.model.units import local_clock
from gpusched.queue.store import Store

LEASED_UNTIL = "slurm_leased_until"
"""Meta: the latest end of the lease as requested by this controller (Unix seconds)."""

_SCONTROL_DELAY_S = 10.0  # delay until scontrol reads its line, from which it counts
_RESOLUTION_S = 1.0  # Slurm rounds to seconds
_SPREAD = 1 / 12  # random part of the lease: controllers that renew in the same second choose different ends


class LeaseOwnership:
    """Distinguishes this controller's lease from another controller's.

    Args:
        store: Keeps the lease's end.
        wall: The clock that Slurm's commands use.
    """

    def __init__(self, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._store, self._wall = store, wall
        self._other: tuple[float, float] | None = None  # another's lease: its end, first seen

    def is_other_controllers(self, lease: SlurmReservation | None, takes_over: bool, now: float) -> bool:
        """Return whether another controller owns the lease; if it has stopped renewing, ``takes_over`` decides.

        Args:
            lease: The lease as Slurm has it, or None.
            takes_over: Whether this controller wants it.
            now: Unix seconds.
        """
        own = float(self._store.meta(LEASED_UNTIL) or 0.0)
        if lease is None or lease.end_time <= max(now, own + _RESOLUTION_S):
            self._other = None
            return False
        if self._other is None or self._other[0] != lease.end_time:
            self._other = lease.end_time, now
        end, since = self._other
        return not takes_over or now < since + (end - since) / 2  # a live controller would have renewed it three times

    def claim(self, wanted_s: int) -> int:
        """Return the duration to request, slightly random, and record the lease as ours."""
        duration_s = wanted_s + randrange(int(wanted_s * _SPREAD) + 1)
        self._store.set_meta(LEASED_UNTIL, str(self._wall() + duration_s + _SCONTROL_DELAY_S))
        return duration_s

    def note_requested(self, duration_s: int) -> None:
        """Record that the lease was requested just now."""
        self._store.set_meta(LEASED_UNTIL, str(self._wall() + duration_s))


def other_owner_message(lease: SlurmReservation, now: float) -> str:
    """Return the message that another controller decides."""
    until = local_clock(lease.end_time, now)
    return (
        f"another controller has the lease in Slurm (reservation {LEASE}, until {until}), so this one decides nothing: "
        "stop one of the two; a lease that is not renewed any more is taken over within a minute"
    )
