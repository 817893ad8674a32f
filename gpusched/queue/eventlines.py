"""Events as lines for log pipelines."""

from __future__ import annotations

import sqlite3

import msgspec

from gpusched.model.events import EventLine
from gpusched.model.units import iso_utc
from gpusched.queue.notices import EVENT_DATA
from gpusched.queue.rows import JobReads

POSITION = "event_position:"
"""Meta, followed by the receiver's name: number of the last event that it has got."""


class _Named(msgspec.Struct, frozen=True):
    name: str | None = None


_NAME = msgspec.json.Decoder(_Named)


class EventLineReads(JobReads):
    """Queries for events as lines."""

    _db: sqlite3.Connection

    def event_lines(self, after: int, limit: int) -> list[EventLine]:
        """Return later events, in order, with the names and partitions of their jobs."""
        of_array = "(SELECT id FROM jobs WHERE array_id = e.job_id LIMIT 1)"
        rows = self._db.execute(
            "SELECT e.seq, e.time, e.kind, e.job_id, e.user, e.node, e.data, j.user, j.partition, s.data FROM events e "
            f"LEFT JOIN jobs j ON j.id = coalesce((SELECT id FROM jobs WHERE id = e.job_id), {of_array}) "
            "LEFT JOIN specs s ON s.digest = j.spec WHERE e.seq > ? ORDER BY e.seq LIMIT ?",
            (after, limit),
        ).fetchall()
        (cluster,) = self._db.execute("SELECT value FROM meta WHERE key = 'cluster_id'").fetchone() or ("",)
        return [
            EventLine(
                seq=seq, time=iso_utc(time) or "", unix_s=time, cluster=cluster, kind=kind, job=job,
                name=_NAME.decode(spec).name if spec is not None else None, user=user or owner, partition=partition,
                node=node, data=EVENT_DATA.decode(data),
            )
            for seq, time, kind, job, user, node, data, owner, partition, spec in rows
        ]  # fmt: skip

    def event_positions(self) -> dict[str, int]:
        """Return receiver -> number of the last event that it has got."""
        return self.numbers(POSITION)

    def numbers(self, prefix: str) -> dict[str, int]:
        """Return the whole numbers of the meta table under keys with a prefix, by the rest of the key."""
        rows = self._db.execute("SELECT key, value FROM meta WHERE key >= ? AND key < ?", (prefix, prefix + "~"))
        return {key.removeprefix(prefix): int(value) for key, value in rows}


class EventLineWrites(EventLineReads):
    """Writes of the positions of receivers."""

    def put_event_position(self, receiver: str, seq: int | None) -> None:
        """Record the last event that a receiver has got; None: it gets no more."""
        if seq is None:
            self._db.execute("DELETE FROM meta WHERE key = ?", (POSITION + receiver,))
        else:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (POSITION + receiver, str(seq)))
