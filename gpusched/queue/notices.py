"""Stored notices: those still to be sent, and those delivered."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpusched.model.events import Event
from gpusched.model.notices import Notice
from gpusched.queue.damage import TABLE_CHECKS, TableCheck
from gpusched.queue.rows import JobReads

EVENT_DATA = msgspec.json.Decoder(dict[str, Any])
_NOTICE = msgspec.json.Decoder(Notice)


class NoticeReads(JobReads):
    """Queries for notices."""

    _db: sqlite3.Connection

    def due_notices(self, now: float, limit: int, without: Sequence[str] = ()) -> list[Notice]:
        """Return notices due by now, longest due first; ``without``: those whose keys begin with these words."""
        others = " AND NOT (key >= ? AND key < ?)" * len(without)
        keys = (key for name in without for key in (f"{name} ", f"{name}!"))
        return self._notices(f"WHERE due <= ?{others} ORDER BY due LIMIT ?", (now, *keys, limit))

    def failed_notices(self, limit: int = 1000) -> list[Notice]:
        """Return notices whose last attempt failed, latest first."""
        return self._notices("WHERE failed = 1 ORDER BY made DESC LIMIT ?", (limit,))

    def _notices(self, rest: str, values: tuple[object, ...]) -> list[Notice]:
        return [_NOTICE.decode(row[0]) for row in self._rows(f"SELECT data FROM notices {rest}", values)]

    def events_after(self, seq: int, kinds: Iterable[str], limit: int) -> list[tuple[int, Event]]:
        """Return later events of these kinds with their numbers, in order."""
        chosen = list(kinds)
        rows = self._db.execute(
            "SELECT seq, time, kind, job_id, node, user, data FROM events "
            f"WHERE seq > ? AND kind IN ({','.join('?' * len(chosen))}) ORDER BY seq LIMIT ?",
            (seq, *chosen, limit),
        )
        return [
            (s, Event(time=t, kind=k, job_id=j, node=n, user=u, data=EVENT_DATA.decode(d)))
            for s, t, k, j, n, u, d in rows
        ]


class NoticeWrites(NoticeReads):
    """Writes of notices."""

    def add_notices(self, notices: Iterable[Notice]) -> None:
        """Insert new notices; existing keys stay unchanged."""
        self._db.executemany("INSERT OR IGNORE INTO notices VALUES (?, ?, ?, ?, ?)", map(_row, notices))

    def put_notices(self, notices: Iterable[Notice]) -> None:
        """Insert or replace notices."""
        self._db.executemany("INSERT OR REPLACE INTO notices VALUES (?, ?, ?, ?, ?)", map(_row, notices))

    def shift_notices(self, step: float) -> None:
        """Shift the times of notices that are still to be sent, after the clock was set."""
        self.put_notices(
            [msgspec.structs.replace(one, made=one.made + step, due=one.due + step)
             for one in self._notices("WHERE due IS NOT NULL", ()) if one.due is not None]
        )  # fmt: skip

    def forget_notices(self, before: float) -> None:
        """Delete notices created before ``before``, delivered or not."""
        self._db.execute("DELETE FROM notices WHERE made < ?", (before,))


def _row(notice: Notice) -> tuple[object, ...]:
    return notice.key, notice.made, notice.due, bool(notice.error), msgspec.json.encode(notice)


TABLE_CHECKS.append(TableCheck("notices", ("key",), ("data",), _NOTICE.decode))
