"""Carries out admins' commands on reservations."""

from __future__ import annotations

import msgspec

from gpusched.config.reservations import changed_by, check_reservation, reservation_named
from gpusched.errors import GpuschedError
from gpusched.model.commands import CancelReservation, ChangeReservation, Reserve
from gpusched.model.events import Event
from gpusched.model.reservations import Reservation
from gpusched.model.resources import Inventory
from gpusched.queue.store import Store


class ReservationCommandHandler:
    """Carries out commands on reservations, inside the caller's transaction.

    Every method raises `GpuschedError` if a command cannot be carried out; then nothing has changed.
    """

    def __init__(self, store: Store, inventory: Inventory) -> None:
        self._store, self._inventory = store, inventory

    def reserve(self, command: Reserve, user: str, now: float) -> None:
        """Create a reservation."""
        reservation = msgspec.structs.replace(command.reservation, by=user, made=now)
        existing = self._store.reservations(now)
        if any(r.name == reservation.name for r in existing):
            raise GpuschedError(f"reservation {reservation.name} already exists")
        self._put(reservation, existing, "reserved", user, now)

    def change(self, command: ChangeReservation, user: str, now: float) -> None:
        """Change the fields that the command names."""
        existing = self._store.reservations(now)
        before = reservation_named(command.name, existing)
        changed = changed_by(command, before, now)
        self._put(changed, existing, "reservation_changed", user, now)

    def cancel(self, command: CancelReservation, user: str, now: float) -> None:
        """Delete a reservation; if it has begun, end it now."""
        reservation = reservation_named(command.name, self._store.reservations(now))
        if reservation.begin < now:
            self._store.put_reservation(msgspec.structs.replace(reservation, end=now), now)
        else:
            self._store.drop_reservation(reservation.name, now)
        self._append_event("reservation_cancelled", reservation, user, now)

    def _put(self, r: Reservation, existing: tuple[Reservation, ...], kind: str, user: str, now: float) -> None:
        check_reservation(r, self._inventory, existing, now)
        self._store.put_reservation(r, now)
        self._append_event(kind, r, user, now)

    def _append_event(self, kind: str, r: Reservation, user: str, now: float) -> None:
        data = {"name": r.name, "nodes": list(r.nodes), "from": r.begin, "to": r.end}
        self._store.append([Event(time=now, kind=kind, user=user, data=data)])
