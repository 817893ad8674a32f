"""Waiting for locks on the writer's files: in slices, and with the processes that hold them.

SQLite's own wait blocks the thread for its whole length: signals are not handled, and nothing is reported.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gpusched.errors import printable
from gpusched.queue.connection import ClosingConnection

T = TypeVar("T")

LOCK_TIMEOUT_S = 30.0
_SLICE_S = 0.2
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL}
_WAL_WRITER_BYTES = range(120, 123)  # of -shm: writing, checkpointing, recovering; see SQLite's wal.c
_WRITES = ("INSERT", "REPLACE", "UPDATE", "DELETE")
_SHARED_BYTE = 0x40000002  # of the database: the first that readers lock; those before it keep the writer out

LockWait = Callable[[float], bool]
"""Called again and again while a lock is waited for, with the seconds so far, and with -1.0 when it is there; returns
whether to go on waiting."""


def wait_until_timeout(waited_s: float) -> bool:
    """Wait up to `LOCK_TIMEOUT_S`, for programs without a terminal."""
    return waited_s < LOCK_TIMEOUT_S


class LockWaitingConnection(ClosingConnection):
    """A writer's connection. ``waiting`` decides how long it waits for a lock."""

    waiting: LockWait = staticmethod(wait_until_timeout)
    fence: Callable[[sqlite3.Connection], None] | None = None
    """Called with the write lock at the beginning of each transaction that may write; it raises to prevent it."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Execute a statement, waiting for locks."""
        if self.fence is None or self.in_transaction:
            return self._patiently(lambda: sqlite3.Connection.execute(self, *args))
        if args[0].startswith(_WRITES):
            return self._whole(lambda: sqlite3.Connection.execute(self, *args))
        cursor = self._patiently(lambda: sqlite3.Connection.execute(self, *args))
        if args[0] == "BEGIN IMMEDIATE":
            try:
                self.fence(self)
            except BaseException:
                self.rollback()
                raise
        return cursor

    def executemany(self, sql: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        """Execute a statement for all rows or none, waiting for locks."""
        if self.in_transaction:  # which has the lock
            return super().executemany(sql, rows)
        return self._whole(lambda: sqlite3.Connection.executemany(self, sql, rows))

    def _whole(self, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        """Run one writing statement as a transaction."""
        self.execute("BEGIN IMMEDIATE")
        try:
            cursor = run()
            self.execute("COMMIT")
        except BaseException:
            self.rollback()
            raise
        return cursor

    def executescript(self, script: str) -> sqlite3.Cursor:
        """Execute a script, waiting for locks; restart it from its first statement after a wait."""

        def run() -> sqlite3.Cursor:
            try:
                return sqlite3.Connection.executescript(self, script)
            except sqlite3.OperationalError:
                if self.in_transaction:
                    self.rollback()
                raise

        return self._patiently(run)

    def _patiently(self, run: Callable[[], T]) -> T:
        begin, waited = time.monotonic(), False
        while True:
            try:
                result = run()
                if waited:
                    self.waiting(-1.0)
                return result
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY or not self.waiting(time.monotonic() - begin):
                    raise
                waited = True


def connect_to_write(path: Path, waiting: LockWait | None) -> LockWaitingConnection:
    """Return a connection that waits for locks as ``waiting`` decides."""
    db = sqlite3.connect(path, isolation_level=None, timeout=_SLICE_S, factory=LockWaitingConnection)
    db.waiting = waiting or wait_until_timeout
    return db


def lock_holders(database: Path) -> list[str]:
    """Return the processes that block a database's writer: "process 12 (name, user 1000) on FILE"."""
    found = []
    for suffix in ("-shm", ""):
        path = database.with_name(database.name + suffix)
        try:
            locks = list(_locks_on(path))
        except OSError:
            continue
        for pid, writes, begin in locks:
            blocks = begin < _WAL_WRITER_BYTES.stop if suffix else begin < _SHARED_BYTE
            if pid != os.getpid() and (writes or blocks):
                found.append(f"{_describe_process(pid)} on {path}")
    return list(dict.fromkeys(found))


def _locks_on(path: Path) -> Iterator[tuple[int, bool, int]]:
    """Yield (process, whether for writing, first byte) of the kind of locks that SQLite takes.

    Read from /proc/locks: to ask by fcntl, the file would have to be opened, and closing it would drop our own locks.
    """
    status = path.stat()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) == 8 and words[1] in ("POSIX", "OFDLCK") and words[5] == wanted:
            yield int(words[4]), words[3] == "WRITE", int(words[6])


def _describe_process(pid: int) -> str:
    if pid <= 0:
        return "an unknown process"
    try:
        name = printable(Path(f"/proc/{pid}/comm").read_text().rstrip("\n"))
        return f"process {pid} ({name}, user {os.stat(f'/proc/{pid}').st_uid})"
    except OSError:
        return f"process {pid}"
