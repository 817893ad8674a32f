"""Select the file that a reader of the store opens.

The controller's user and root open the store itself. Other users open the copy that the controller of a shared
installation publishes (`gpusched.controller.publishing`): a user who can open a file can lock it, and the writer would
wait for the lock. The writer never waits for a lock on a copy.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from gpusched.queue.connection import ClosingConnection

DATABASE = "gpusched.db"
PUBLISHED = "published"  # the folder of copies below the state folder
CURRENT = "current"  # in it: a link to the latest one
COPY_EVERY = "copy_every_s"  # meta of a copy: the next one comes no later than that after a change
_TRIES = 5  # a copy may be replaced twice while it is being opened

Stamp = tuple[int, int]


class Opened(NamedTuple):
    """A read-only connection. ``stamp``: the copy that it reads; None: the store itself."""

    db: sqlite3.Connection
    stamp: Stamp | None = None


def file_to_read(state: Path) -> Path:
    """Return the store of a state folder, or the link to its copy where this user must not open the store.

    Without a copy (the controller is of an earlier version) it is the store for all users.
    """
    path, copy = state / DATABASE, state / PUBLISHED / CURRENT
    try:
        own = os.geteuid() in (0, path.stat().st_uid)
    except OSError:
        own = False
    return copy if not own and os.path.exists(copy) else path


def open_to_read(state: Path) -> Opened:
    """Connect to the store or its copy.

    Raises:
        OSError, sqlite3.Error: It cannot be read.
    """
    path = file_to_read(state)
    if path.name == DATABASE:
        if not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(f"it belongs to another user, and no copy of it is in {state / PUBLISHED}")
        return Opened(connect(path))
    for attempt in range(_TRIES):
        try:
            copy = Path(os.path.realpath(path))
            stamp = _stamp(copy)
            return Opened(_connected(copy, "mode=ro&immutable=1"), stamp)
        except (FileNotFoundError, sqlite3.OperationalError):  # replaced and removed meanwhile
            if attempt == _TRIES - 1:
                raise
    raise AssertionError


def current_stamp(state: Path) -> Stamp | None:
    """Return the stamp of the latest copy; None: no copy."""
    try:
        return _stamp(state / PUBLISHED / CURRENT)
    except OSError:
        return None


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def connect(path: Path) -> sqlite3.Connection:
    """Connect to the store itself, read-only.

    Raises:
        sqlite3.Error: It cannot be read.
    """
    try:
        return _connected(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
            # The writer was killed amid a commit by a rollback journal: half of it is in the database. Opening it
            # for writing undoes that.
            _connected(path, "mode=rw").close()
            return _connected(path, "mode=ro")
        # A reader without write permission cannot open a WAL database that no process has open; then nothing writes it.
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY or _is_in_use(path):
            raise
        return _connected(path, "mode=ro&immutable=1")


def _is_in_use(path: Path) -> bool:
    return any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal"))


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    quoted = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    db = sqlite3.connect(f"file:{quoted}?{mode}", uri=True, isolation_level=None, timeout=30, factory=ClosingConnection)
    try:
        db.execute("SELECT 1 FROM sqlite_schema LIMIT 1")
    except sqlite3.Error:
        db.close()
        raise
    return db
