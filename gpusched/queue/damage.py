"""A damaged database: its error, and the search for unreadable rows."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from gpusched.errors import GpuschedError
from gpusched.queue.lease import Superseded

SEARCH_S = 20.0  # a command searches at most this long for the damaged row
_NO_TEXT = "Could not decode to UTF-8"


class UnreadableRow(NamedTuple):
    """A row that cannot be read: its table, its key, and why."""

    table: str
    key: dict[str, Any]
    why: str

    @property
    def line(self) -> str:
        """Return it as a sentence."""
        key = ", ".join(v.hex() if isinstance(v, bytes) else str(v) for v in self.key.values())
        return f"row {key[:80]} of {self.table} cannot be read ({self.why[:200]})"


class TableCheck(NamedTuple):
    """A table, its key, the columns that are read of it (SQL), and a function that raises on unreadable values."""

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    read: Callable[..., object]


TABLE_CHECKS: list[TableCheck] = []
"""Of all tables, each declared where it is read."""


def json_of(kind: Any) -> Callable[[bytes], object]:
    """Return a reader of a JSON column."""
    return msgspec.json.Decoder(kind).decode


class DatabaseDamaged(GpuschedError):
    """Unreadable data in the database; ``row`` is None where a page is damaged, or the row is unknown."""

    def __init__(self, row: UnreadableRow | None, why: str = "") -> None:
        hint = "a controller sets such rows aside; see 'gpusched check'" if row else "see 'gpusched check'"
        super().__init__(f"the database is damaged: {row.line if row else why}", hint)
        self.row = row


UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # where the schema is damaged, SQLite's own message is no text
STORE_FAULTS = (sqlite3.DatabaseError, OSError, DatabaseDamaged, Superseded)  # no fault of a job, policy or notice


def guard(cls: type) -> None:
    """Make the public methods of a store class raise `DatabaseDamaged` for data they cannot read."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return method(self, *args, **named)
        except GpuschedError:
            raise
        except sqlite3.Error as error:
            if type(error) is not sqlite3.DatabaseError and _NO_TEXT not in str(error):
                raise  # a full disk, a lock, a wrong query
            raise damage_or_disk_error(self._db, error) from error
        except Exception as error:
            row = next(unreadable(self._db), None)
            if row is None and not isinstance(error, UnicodeDecodeError):
                raise
            raise DatabaseDamaged(row, str(error)) from error

    return guarded


_OF_THE_DISK = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
}  # fmt: skip


def damage_or_disk_error(db: sqlite3.Connection, error: sqlite3.Error) -> DatabaseDamaged | sqlite3.OperationalError:
    """Return what it is that SQLite calls damage."""
    path = next((file for _, name, file in db.execute("PRAGMA database_list") if name == "main"), "")
    failed = disk_error(Path(path), error) if path else None
    return failed or DatabaseDamaged(next(unreadable(db), None), str(error))


def disk_error(database: Path, error: Exception) -> sqlite3.OperationalError | None:
    """Return why a database cannot be read, though it may be in order; None: it is damaged, or ``error`` is another.

    SQLite also reports "malformed" when the disk does not return a page (SQLITE_IOERR_CORRUPTFS). A copy distinguishes
    the two: making it fails only because of the disk, checking it only because of its content.
    """
    if isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
        return error
    if type(error) is not sqlite3.DatabaseError:
        return None

    def step(status: int, *_: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):  # else it would retry forever
            locked = sqlite3.OperationalError("database is locked")
            locked.sqlite_errorcode = status
            raise locked

    uri = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as source, closing(sqlite3.connect("")) as copy:
            source.backup(copy, progress=step)
            copy.text_factory = bytes
            # An empty file is a sound database.
            check = "SELECT integrity_check, (SELECT count(*) > 0 FROM sqlite_schema) FROM pragma_integrity_check(1)"
            sound = copy.execute(check).fetchone() == (b"ok", 1)
    except sqlite3.OperationalError as failed:
        full = getattr(failed, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL  # the copy is full: unknown
        return None if full else disk_error(database, failed)
    except sqlite3.Error:
        return None
    return sqlite3.OperationalError("disk I/O error") if sound else None


def unreadable(db: sqlite3.Connection, limit_s: float = SEARCH_S) -> Iterator[UnreadableRow]:
    """Yield the rows that cannot be read, searching at most ``limit_s`` seconds; nothing where a page is damaged."""
    until, kept = time.monotonic() + limit_s, db.text_factory
    db.text_factory = _text  # invalid UTF-8 must not end the search
    try:
        existing = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        for kind in TABLE_CHECKS:
            if kind.table not in existing:
                continue  # the store of an earlier version
            for values in db.execute(f"SELECT {', '.join((*kind.key, *kind.columns))} FROM {kind.table}"):
                if time.monotonic() > until:
                    return
                try:
                    kind.read(*values[len(kind.key) :])
                except Exception as error:
                    yield UnreadableRow(kind.table, dict(zip(kind.key, values, strict=False)), str(error))
    except UNREADABLE:
        return
    finally:
        db.text_factory = kept


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")
