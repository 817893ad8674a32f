"""What the store keeps of reservations: those that are to come, those that are, and what was."""

from __future__ import annotations

import sqlite3

import msgspec

from gpusched.model.reservations import Reservation
from gpusched.queue.damage import KINDS, TableCheck
from gpusched.queue.rows import JobReads

_DECODER = msgspec.json.Decoder(Reservation)


class ReservationReads(JobReads):
    """The part of a store's reader that is about reservations. A store from before there were any has none."""

    def reservations(self, now: float) -> tuple[Reservation, ...]:
        """Those that are not over, by begin."""
        found = self._rows("SELECT data FROM reservations WHERE until > ?", (now,))
        return tuple(sorted((_DECODER.decode(row[0]) for row in found), key=lambda one: (one.begin, one.name)))

    def jobs_of_reservations(self) -> dict[str, set[str]]:
        """Name of a reservation -> ids of the jobs that asked for it, ever."""
        query = (
            "SELECT json_extract(CAST(specs.data AS TEXT), '$.reservation') AS name, jobs.id FROM specs "
            "JOIN jobs ON jobs.spec = specs.digest WHERE name IS NOT NULL AND name != ''"
        )
        found: dict[str, set[str]] = {}
        for name, job in self._rows(query):
            found.setdefault(name, set()).add(job)
        return found


class ReservationWrites:
    """The part of the store's writer that is about reservations."""

    _db: sqlite3.Connection

    def put_reservation(self, reservation: Reservation, now: float) -> None:
        """Insert it, or change the one of its name that is not over."""
        self.drop_reservation(reservation.name, now)
        row = (reservation.name, reservation.end, msgspec.json.encode(reservation))
        self._db.execute("INSERT INTO reservations (name, until, data) VALUES (?, ?, ?)", row)

    def drop_reservation(self, name: str, now: float) -> None:
        """As if it had not been, unless it is over."""
        self._db.execute("DELETE FROM reservations WHERE name = ? AND until > ?", (name, now))


KINDS.append(TableCheck("reservations", ("seq",), ("data",), _DECODER.decode))
