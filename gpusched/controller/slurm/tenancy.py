"""Whose the lease in Slurm is: two controllers with two state folders must not both decide.

A reservation has no field for an owner. But its end is known to who has renewed it last, so one that lasts longer was
renewed by another controller; and whoever renews shows by that that it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import randrange

from gpusched.model.slurm import LEASE, SlurmReservation
from gpusched.model.units import local_clock
from gpusched.queue.store import Store

LEASED_UNTIL = "slurm_leased_until"
"""Meta: until when, at the latest, the lease lasts as this controller has asked for it (Unix seconds)."""

_SLOW_S = 10.0  # scontrol counts from when it reads its line
_EXACT_S = 1.0  # Slurm has whole seconds
_SPREAD = 1 / 12  # of the lease: two controllers that renew it in the same second do not agree on its end


class Tenancy:
    """Knows the lease that this controller renews from that of another one.

    Args:
        store: In which it is kept.
        wall: The clock by which Slurm's commands go.
    """

    def __init__(self, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._store, self._wall = store, wall
        self._another: tuple[float, float] | None = None  # the end of another's lease, and since when it is that

    def is_anothers(self, known: SlurmReservation | None, takes_over: bool, now: float) -> bool:
        """Whether another controller has the lease; for one that is not renewed any more, ``takes_over`` decides.

        Args:
            known: The lease as Slurm has it; None: there is none.
            takes_over: Whether this controller wants it.
            now: Unix seconds.
        """
        own = float(self._store.meta(LEASED_UNTIL) or 0.0)
        if known is None or known.end_time <= max(now, own + _EXACT_S):
            self._another = None
            return False
        if self._another is None or self._another[0] != known.end_time:
            self._another = known.end_time, now
        end, since = self._another
        return not takes_over or now < since + (end - since) / 2  # who lives renews it three times meanwhile

    def lasts_s(self, wanted_s: int) -> int:
        """For how long to ask for the lease now; that it is ours is known from here on."""
        lasts_s = wanted_s + randrange(int(wanted_s * _SPREAD) + 1)
        self._store.set_meta(LEASED_UNTIL, str(self._wall() + lasts_s + _SLOW_S))
        return lasts_s

    def note_asked(self, lasts_s: int) -> None:
        """It was asked for, just now."""
        self._store.set_meta(LEASED_UNTIL, str(self._wall() + lasts_s))


def trouble_of(known: SlurmReservation, now: float) -> str:
    """For people: that another controller decides."""
    until = local_clock(known.end_time, now)
    return (
        f"another controller has the lease in Slurm (reservation {LEASE}, until {until}), so this one decides nothing: "
        "stop one of the two; a lease that is not renewed any more is taken over within a minute"
    )
