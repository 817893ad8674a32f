"""The audit log: entries wait in the database, stored with what they are about, until they are in the log's files.

The files are below ``audit/`` of the state folder. ``audit.jsonl`` is the latest; a full one is renamed after the
number of its last entry. The log itself says up to where it is written, so that no entry is in it twice.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model.audit import AuditEntry
from gpusched.model.commands import RecordAudit
from gpusched.queue.damage import TABLE_CHECKS, TableCheck
from gpusched.queue.inbox import Inbox
from gpusched.queue.notices import EVENT_DATA
from gpusched.queue.rows import JobReads

FOLDER, CURRENT = "audit", "audit.jsonl"
_OLD = "audit-*.jsonl"
REFUSALS, REFILL_S = 20, 3.0  # refusals recorded at once per user, and the pause until one more is
REPEATED_S = 3600.0  # the same forwarding by the same user is recorded once in that time: each connection is one
_ENTRY = msgspec.json.Decoder(AuditEntry)


class AuditReads(JobReads):
    """Queries for entries that may not be in the log yet. A store from before this table has none."""

    _db: sqlite3.Connection

    def audit_entries(self, after: int, limit: int) -> list[AuditEntry]:
        """Return later entries, in order."""
        rows = self._rows("SELECT seq, data FROM audit WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
        return [msgspec.structs.replace(_ENTRY.decode(data), seq=seq) for seq, data in rows]

    def has_audit_entries(self, until: int) -> bool:
        """Return whether an entry up to this number is stored."""
        return bool(self._rows("SELECT 1 FROM audit WHERE seq <= ? LIMIT 1", (until,)))

    def starts_by(
        self, policy: str, partition: str, since: float, until: float
    ) -> list[tuple[str, float, tuple[str, ...]]]:
        """Return the starts that a policy decided in a partition in this time: job, time, nodes."""
        rows = self._rows(
            "SELECT e.job_id, e.time, e.data FROM events e JOIN jobs j ON j.id = e.job_id "
            "WHERE e.kind = 'starting' AND e.time >= ? AND e.time < ? AND j.partition = ? ORDER BY e.seq",
            (since, until, partition),
        )
        found = [(job, time, EVENT_DATA.decode(data)) for job, time, data in rows]
        return [(job, time, tuple(data["nodes"])) for job, time, data in found if data.get("policy") == policy]


class AuditWrites(AuditReads):
    """Writes of entries."""

    def add_audit(self, entry: AuditEntry) -> None:
        """Append an entry; the store assigns its number."""
        self._db.execute("INSERT INTO audit (data) VALUES (?)", (msgspec.json.encode(entry),))

    def number_audit_from(self, last: int) -> None:
        """Give numbers greater than ``last`` only: a store restored from a backup must not repeat those in the log."""
        (given,) = self._db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'audit'").fetchone()
        if last > given:
            self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'audit'")
            self._db.execute("INSERT INTO sqlite_sequence VALUES ('audit', ?)", (last,))

    def forget_audit(self, until: int) -> None:
        """Delete entries that are in the log, and overwrite them: others can read copies of the database."""
        self._db.execute("PRAGMA secure_delete=ON")
        self._db.execute("DELETE FROM audit WHERE seq <= ?", (until,))


TABLE_CHECKS.append(TableCheck("audit", ("seq",), ("data",), _ENTRY.decode))


def old_files(state: Path) -> list[Path]:
    """Return the full files of the log, oldest first."""
    return sorted((state / FOLDER).glob(_OLD))


def last_number(state: Path) -> int:
    """Return the number of the last whole entry in the log; 0 for none.

    Raises:
        OSError: It cannot be read.
    """
    for path in (state / FOLDER / CURRENT, *reversed(old_files(state))):
        with contextlib.suppress(FileNotFoundError):
            tail = _tail(path)
            for line in reversed(tail.split(b"\n")[:-1]):  # what follows the last line's end is half a line
                with contextlib.suppress(msgspec.MsgspecError):
                    return _ENTRY.decode(line).seq
    return 0


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        return file.read()


def entries(state: Path, reader: AuditReads | None, since: float = 0.0) -> Iterator[AuditEntry]:
    """Yield the entries at or after ``since``, oldest first: those in the log, then those only in the store.

    Raises:
        OSError: The log cannot be read.
        GpuschedError: A line of it is not an entry.
    """
    # Against the direction in which the controller moves entries, so that none is missed: the store, the latest file,
    # the old ones.
    stored = reader.audit_entries(0, -1) if reader is not None else []
    last, current = 0, state / FOLDER / CURRENT
    with contextlib.ExitStack() as stack:
        latest = None
        with contextlib.suppress(FileNotFoundError):
            latest = stack.enter_context(current.open("rb"))
        for path in old_files(state):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if latest is None or not os.path.sameopenfile(file.fileno(), latest.fileno()):
                    for entry in _entries_of(file, path, since):
                        last = max(last, entry.seq)
                        yield entry
        for entry in _entries_of(latest, current, since) if latest is not None else ():
            last = max(last, entry.seq)
            yield entry
    yield from (entry for entry in stored if entry.seq > last and entry.unix_s >= since)


def _entries_of(file: BinaryIO, path: Path, since: float) -> Iterator[AuditEntry]:
    if os.fstat(file.fileno()).st_mtime < since:
        return
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return  # being written
        try:
            entry = _ENTRY.decode(line)
        except msgspec.MsgspecError as error:
            raise GpuschedError(f"{path}:{number}: not an entry of the audit log: {error}") from None
        if entry.unix_s >= since:
            yield entry


class AuditReporter:
    """Reports to the controller, through the inbox, what another process did or refused."""

    def __init__(self, state: Path) -> None:
        self._inbox, self._lock = Inbox(state), threading.Lock()
        self._refusals: dict[int | str, tuple[float, float, int]] = {}  # per sender: tokens, since when, unreported
        self._reported: dict[tuple[object, ...], float] = {}

    def done(self, command: RecordAudit, *, once: bool = False) -> None:
        """Report something before it is done; ``once``: not again within an hour.

        Raises:
            GpuschedError: It cannot be recorded, so it must not be done.
        """
        key, now = (command.uid, command.user, command.action, command.subject), time.monotonic()
        if once and now - self._reported.get(key, float("-inf")) < REPEATED_S:
            return
        self._inbox.deliver(command)
        if once:
            if len(self._reported) >= 10_000:
                self._reported.clear()
            self._reported[key] = now

    def refused(self, command: RecordAudit) -> None:
        """Report a refusal; of many in a row by one sender only their number."""
        sender = command.user if command.uid is None else command.uid
        with self._lock:
            now = time.monotonic()
            tokens, since, unreported = self._refusals.pop(sender, (float(REFUSALS), now, 0))
            tokens = min(float(REFUSALS), tokens + (now - since) / REFILL_S)
            reported = tokens >= 1.0
            self._refusals[sender] = (tokens - reported, now, 0 if reported else unreported + 1)
            if len(self._refusals) > 1000:
                del self._refusals[next(iter(self._refusals))]  # the least recent
        if reported:
            more = f" (and {unreported} more before)" if unreported else ""
            with contextlib.suppress(GpuschedError, OSError):  # it is refused all the same
                self._inbox.deliver(msgspec.structs.replace(command, refused=(command.refused or "refused") + more))
