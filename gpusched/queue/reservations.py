"""Stored reservations: future, current and past."""

from __future__ import annotations

import sqlite3

import msgspec

from gpusched.model.reservations import Reservation
from gpusched.queue.damage import TABLE_CHECKS, TableCheck
from gpusched.queue.rows import JobReads

_DECODER = msgspec.json.Decoder(Reservation)


class ReservationReads(JobReads):
    """Queries for reservations."""

    def reservations(self, now: float) -> tuple[Reservation, ...]:
        """Return reservations that have not ended, by begin."""
        found = self._rows("SELECT data FROM reservations WHERE until > ?", (now,))
        return tuple(sorted((_DECODER.decode(row[0]) for row in found), key=lambda one: (one.begin, one.name)))

    def jobs_of_reservations(self) -> dict[str, set[str]]:
        """Return reservation name -> ids of all jobs that ever requested it."""
        query = (
            "SELECT json_extract(CAST(specs.data AS TEXT), '$.reservation') AS name, jobs.id FROM specs "
            "JOIN jobs ON jobs.spec = specs.digest WHERE name IS NOT NULL AND name != ''"
        )
        found: dict[str, set[str]] = {}
        for name, job in self._rows(query):
            found.setdefault(name, set()).add(job)
        return found


class ReservationWrites:
    """Writes of reservations."""

    _db: sqlite3.Connection

    def put_reservation(self, reservation: Reservation, now: float) -> None:
        """Insert a reservation, or replace the unended one of its name."""
        self.drop_reservation(reservation.name, now)
        row = (reservation.name, reservation.end, msgspec.json.encode(reservation))
        self._db.execute("INSERT INTO reservations (name, until, data) VALUES (?, ?, ?)", row)

    def drop_reservation(self, name: str, now: float) -> None:
        """Delete a reservation that has not ended."""
        self._db.execute("DELETE FROM reservations WHERE name = ? AND until > ?", (name, now))


TABLE_CHECKS.append(TableCheck("reservations", ("seq",), ("data",), _DECODER.decode))
