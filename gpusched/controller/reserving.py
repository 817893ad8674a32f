"""What admins ask of reservations, done."""

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
    """Carries out the commands on reservations, inside the caller's transaction.

    Every method raises `GpuschedError` for what cannot be done; then nothing has changed.
    """

    def __init__(self, store: Store, inventory: Inventory) -> None:
        self._store, self._inventory = store, inventory

    def reserve(self, command: Reserve, user: str, now: float) -> None:
        """Make a reservation."""
        wanted = msgspec.structs.replace(command.reservation, by=user, made=now)
        there = self._store.reservations(now)
        if any(one.name == wanted.name for one in there):
            raise GpuschedError(f"reservation {wanted.name} already exists")
        self._put(wanted, there, "reserved", user, now)

    def change(self, command: ChangeReservation, user: str, now: float) -> None:
        """Change what the command names."""
        there = self._store.reservations(now)
        before = reservation_named(command.name, there)
        changed = changed_by(command, before, now)
        self._put(changed, there, "reservation_changed", user, now)

    def cancel(self, command: CancelReservation, user: str, now: float) -> None:
        """As if it had not been made; of one that has begun stays what was."""
        one = reservation_named(command.name, self._store.reservations(now))
        if one.begin < now:
            self._store.put_reservation(msgspec.structs.replace(one, end=now), now)
        else:
            self._store.drop_reservation(one.name, now)
        self._note("reservation_cancelled", one, user, now)

    def _put(self, wanted: Reservation, there: tuple[Reservation, ...], kind: str, user: str, now: float) -> None:
        check_reservation(wanted, self._inventory, there, now)
        self._store.put_reservation(wanted, now)
        self._note(kind, wanted, user, now)

    def _note(self, kind: str, one: Reservation, user: str, now: float) -> None:
        data = {"name": one.name, "nodes": list(one.nodes), "from": one.begin, "to": one.end}
        self._store.append([Event(time=now, kind=kind, user=user, data=data)])
