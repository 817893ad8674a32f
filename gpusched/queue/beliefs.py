"""Stored estimates per job class, and the latest measured speeds with the GPUs that they were measured on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from gpusched.model.interference import AttemptSpeed, JobClassEstimate
from gpusched.queue.damage import TABLE_CHECKS, TableCheck, json_of
from gpusched.queue.rows import JobReads

MAX_STORED_SPEEDS = 4000
_SHAPE_SINCE_VERSION = 15  # of the schema: before it, a shape's max_gpus_per_node was called most
_RENAMED = """CAST(replace(CAST(data AS TEXT), '"most":', '"max_gpus_per_node":') AS BLOB)"""


class BeliefReads(JobReads):
    """Queries for job class estimates."""

    _db: sqlite3.Connection
    _decoded_rows: tuple[dict[str, bytes], dict[str, JobClassEstimate]] = ({}, {})

    def beliefs(self) -> dict[str, JobClassEstimate]:
        """Return the estimate of each job class; the same object while nothing has changed. Do not modify it."""
        rows: dict[str, bytes] = dict(self._rows(f"SELECT kind, {self._shape_data()} FROM beliefs"))
        before, known = self._decoded_rows
        if rows != before:
            same = {kind for kind, data in rows.items() if before.get(kind) == data}
            known = {kind: known[kind] if kind in same else _decoded(data) for kind, data in rows.items()}
            self._decoded_rows = rows, known
        return known

    def belief(self, kind: str) -> JobClassEstimate | None:
        """Return the estimate of one job class, if any."""
        rows = self._rows(f"SELECT {self._shape_data()} FROM beliefs WHERE kind = ?", (kind,))
        return _decoded(rows[0][0]) if rows else None

    def believes_anything(self) -> bool:
        """Return whether any job class has an estimate."""
        return bool(self._rows("SELECT 1 FROM beliefs LIMIT 1"))

    def paces(self) -> list[AttemptSpeed]:
        """Return the latest measured speeds, oldest first."""
        rows = self._rows(f"SELECT {self._shape_data()} FROM paces ORDER BY seq")
        return [msgspec.json.decode(row[0], type=AttemptSpeed) for row in rows]

    def _shape_data(self) -> str:
        """Return the SQL for data with shapes, also of a store that no controller of this version has opened."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        return "data" if version >= _SHAPE_SINCE_VERSION else _RENAMED


def _decoded(data: bytes) -> JobClassEstimate:
    return msgspec.json.decode(data, type=JobClassEstimate)


class BeliefWrites:
    """Writes of job class estimates."""

    _db: sqlite3.Connection

    def put_beliefs(self, beliefs: Iterable[JobClassEstimate]) -> None:
        """Insert or replace the estimates of these job classes."""
        self._db.executemany(
            "INSERT OR REPLACE INTO beliefs VALUES (?, ?)", ((b.kind, msgspec.json.encode(b)) for b in beliefs)
        )

    def add_pace(self, pace: AttemptSpeed) -> None:
        """Append a measured speed, and drop the oldest beyond `MAX_STORED_SPEEDS`."""
        self._db.execute("INSERT INTO paces (data) VALUES (?)", (msgspec.json.encode(pace),))
        self._db.execute("DELETE FROM paces WHERE seq <= (SELECT max(seq) FROM paces) - ?", (MAX_STORED_SPEEDS,))


TABLE_CHECKS.append(TableCheck("beliefs", ("kind",), ("data",), _decoded))
TABLE_CHECKS.append(TableCheck("paces", ("seq",), ("data",), json_of(AttemptSpeed)))
