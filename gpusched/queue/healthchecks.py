"""Stored results of the site's own checks, one row per node and check."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from gpusched.model.healthchecks import CheckRecord
from gpusched.queue.damage import TABLE_CHECKS, TableCheck
from gpusched.queue.rows import JobReads

_DECODER = msgspec.json.Decoder(CheckRecord)
_TIMES = ("began", "ended", "since", "slow_since")


class HealthCheckReads(JobReads):
    """Queries for results of checks. A store from before this table has none."""

    def check_records(self) -> list[CheckRecord]:
        """Return the records of all checks, by node and check."""
        rows = self._rows("SELECT data FROM health_checks ORDER BY node, name")
        return [_DECODER.decode(row[0]) for row in rows]

    def check_record(self, node: str, check: str) -> CheckRecord | None:
        """Return the record of one check on one node."""
        rows = self._rows("SELECT data FROM health_checks WHERE node = ? AND name = ?", (node, check))
        return _DECODER.decode(rows[0][0]) if rows else None


class HealthCheckWrites(HealthCheckReads):
    """Writes of results of checks."""

    _db: sqlite3.Connection

    def put_check_records(self, records: Iterable[CheckRecord]) -> None:
        """Insert or replace records."""
        self._db.executemany(
            "INSERT OR REPLACE INTO health_checks VALUES (?, ?, ?)",
            ((r.node, r.check, msgspec.json.encode(r)) for r in records),
        )

    def drop_check_records(self, records: Iterable[CheckRecord]) -> None:
        """Delete records, of checks that are no longer declared."""
        self._db.executemany(
            "DELETE FROM health_checks WHERE node = ? AND name = ?", ((r.node, r.check) for r in records)
        )

    def shift_checks(self, step: float) -> None:
        """Shift all times by ``step`` seconds."""
        self.put_check_records(
            msgspec.structs.replace(
                r, **{name: at + step for name in _TIMES if (at := getattr(r, name)) is not None}
            )
            for r in self.check_records()
        )  # fmt: skip


TABLE_CHECKS.append(TableCheck("health_checks", ("node", "name"), ("data",), _DECODER.decode))
