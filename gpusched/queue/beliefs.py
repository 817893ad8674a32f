"""What the store keeps of kinds of jobs: what is believed of each, and the latest paces with the GPUs they were on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from gpusched.model.interference import JobClassEstimate, PaceOn
from gpusched.queue.damage import KINDS, TableCheck, json_of
from gpusched.queue.rows import JobReads

LATEST_PACES = 4000


class BeliefReads(JobReads):
    """The part of a store's reader that is about beliefs. A store from before there were such tables has none."""

    _db: sqlite3.Connection
    _told: tuple[dict[str, bytes], dict[str, JobClassEstimate]] = ({}, {})

    def beliefs(self) -> dict[str, JobClassEstimate]:
        """Kind -> what is believed of it; the very same as before where nothing has changed, not to be written to."""
        rows: dict[str, bytes] = dict(self._rows("SELECT kind, data FROM beliefs"))
        before, known = self._told
        if rows != before:
            same = {kind for kind, data in rows.items() if before.get(kind) == data}
            known = {kind: known[kind] if kind in same else _decoded(data) for kind, data in rows.items()}
            self._told = rows, known
        return known

    def belief(self, kind: str) -> JobClassEstimate | None:
        """What is believed of one kind; None: nothing is."""
        rows = self._rows("SELECT data FROM beliefs WHERE kind = ?", (kind,))
        return _decoded(rows[0][0]) if rows else None

    def believes_anything(self) -> bool:
        """Whether anything was learned of any kind."""
        return bool(self._rows("SELECT 1 FROM beliefs LIMIT 1"))

    def paces(self) -> list[PaceOn]:
        """The latest, oldest first."""
        rows = self._rows("SELECT data FROM paces ORDER BY seq")
        return [msgspec.json.decode(row[0], type=PaceOn) for row in rows]


def _decoded(data: bytes) -> JobClassEstimate:
    return msgspec.json.decode(data, type=JobClassEstimate)


class BeliefWrites:
    """The part of the store's writer that is about beliefs."""

    _db: sqlite3.Connection

    def put_beliefs(self, beliefs: Iterable[JobClassEstimate]) -> None:
        """Insert or replace what is believed of these kinds."""
        self._db.executemany(
            "INSERT OR REPLACE INTO beliefs VALUES (?, ?)", ((b.kind, msgspec.json.encode(b)) for b in beliefs)
        )

    def add_pace(self, pace: PaceOn) -> None:
        """Keep one more; the oldest is forgotten."""
        self._db.execute("INSERT INTO paces (data) VALUES (?)", (msgspec.json.encode(pace),))
        self._db.execute("DELETE FROM paces WHERE seq <= (SELECT max(seq) FROM paces) - ?", (LATEST_PACES,))


KINDS.append(TableCheck("beliefs", ("kind",), ("data",), _decoded))
KINDS.append(TableCheck("paces", ("seq",), ("data",), json_of(PaceOn)))
