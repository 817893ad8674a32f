"""Publishes a copy of the store for the users of a shared installation; docs/decisions/0049 explains why a copy.

Each copy is a file that never changes, and `CURRENT` links to the latest. So a reader's lock delays no other process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.model.units import format_memory
from gpusched.queue.lastgood import LAST_GOOD
from gpusched.queue.private import create_private
from gpusched.queue.reading import COPY_EVERY, CURRENT, DATABASE, PUBLISHED

POLL_S = 0.1
PAUSE_FACTOR = 5.0  # pause before the next copy, as a multiple of the time that copying took
RETRY_S = 5.0
RESERVED_BYTES = 16 << 20  # disk space left to the writer of the store
MAX_HELD = 64  # old copies that readers still have open
# Their URLs and options are secrets.
_WITHOUT_RECEIVERS = """\
UPDATE meta SET value = CASE WHEN json_valid(value)
    THEN json_remove(value, '$.inventory.notices.to', '$.inventory.settings.events') ELSE '' END WHERE key = ?"""
_log = logging.getLogger(__name__)


class Publisher:
    """Publishes a copy whenever the store has changed, from `start` to `stop`, in its own thread."""

    def __init__(self, state: Path) -> None:
        self._state, self._folder = state, state / PUBLISHED
        self._source: sqlite3.Connection | None = None
        self._published_version = -1
        self._every_s = POLL_S
        self._held: list[int] = []  # descriptors of old copies that readers have open
        self._reported_error = ""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Publish now, and whenever the store changes; idempotent."""
        if self._thread is not None:
            return
        self._stopping.clear()
        with self._reporting():
            self.publish()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish the last changes and stop; the published copy remains."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(5.0)
        if self._thread.is_alive():  # the disk hangs: the thread ends with the process
            return
        self._thread = None
        with self._reporting():
            self.publish()
        if self._source is not None:
            self._source.close()
        self._source, self._published_version = None, -1
        while self._held:
            os.close(self._held.pop())

    def withdraw(self) -> None:
        """Stop, and remove the published copy."""
        self.stop()
        with contextlib.suppress(OSError):
            (self._folder / CURRENT).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            with self._reporting():
                self.publish()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Log an error once; the old copy remains, and publishing is retried."""
        try:
            yield
            self._reported_error = ""
        except (OSError, sqlite3.Error, GpuschedError) as error:
            self._every_s = max(RETRY_S, self._every_s)
            if str(error) != self._reported_error:
                self._reported_error = str(error)
                _log.warning(
                    "cannot make a new copy of the store for other users, who still read the old one: %s", error
                )

    def publish(self) -> None:
        """Publish a copy if the store has changed since the last one.

        Raises:
            OSError, sqlite3.Error, GpuschedError: No copy can be made; the old one remains.
        """
        if self._source is None:
            self._source = self._open_source()
        (version,) = self._source.execute("PRAGMA data_version").fetchone()
        if version == self._published_version and (self._folder / CURRENT).exists():
            return
        self._make_room(self._source)
        names = self._names()
        number = max((int(name.removesuffix(".db")) for name in names), default=0) + 1
        part = self._folder / f"{number}.part"
        try:
            self._copy(self._source, part)
            part.chmod(0o644)
            # A new name: when a rename replaces a file, ext4 flushes the new one to the disk at once.
            part.rename(self._folder / f"{number}.db")
            self._link_current(f"{number}.db")
        except BaseException:
            self._clean_up()
            raise
        self._published_version = version
        self._retire(names)

    def _open_source(self) -> sqlite3.Connection:
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o755)
        self._clean_up()
        uri = f"{(self._state / DATABASE).absolute().as_uri()}?mode=ro"
        # Used by one thread at a time: the caller's before `_run` starts and after it has ended.
        return sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None, check_same_thread=False)

    def _copy(self, source: sqlite3.Connection, part: Path) -> None:
        create_private(part)
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy:
            # No need to survive a power cut: the next start makes a new copy.
            copy.executescript("PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF; PRAGMA locking_mode=EXCLUSIVE;")
            begin = time.perf_counter()
            source.backup(copy)
            self._every_s = max(POLL_S, PAUSE_FACTOR * (time.perf_counter() - begin))
            copy.execute("PRAGMA journal_mode=DELETE")  # no WAL, which needs more files
            copy.execute("PRAGMA secure_delete=ON")
            copy.execute("DELETE FROM audit")  # everyone may read their own entries only
            copy.execute(_WITHOUT_RECEIVERS, (LAST_GOOD,))
            copy.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (COPY_EVERY, str(1.2 * self._every_s)))

    def _link_current(self, name: str) -> None:
        link = self._folder / "link.part"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self._folder / CURRENT)

    def _names(self) -> list[str]:
        """Return the copies' names, oldest first."""
        names = [name for name in os.listdir(self._folder) if name.removesuffix(".db").isdecimal()]
        return sorted(names, key=lambda name: int(name.removesuffix(".db")))

    def _clean_up(self) -> None:
        """Remove unfinished copies of a killed controller or a full disk."""
        for path in self._folder.iterdir():
            if ".part" in path.name:
                path.unlink(missing_ok=True)
        self._retire(self._names())

    def _retire(self, names: list[str]) -> None:
        """Remove old copies, except the latest of ``names``, which a reader may be about to open."""
        current = os.path.basename(os.path.realpath(self._folder / CURRENT))
        for name in names[:-1]:
            if name != current:
                path = self._folder / name
                descriptor = os.open(path, os.O_RDWR)
                path.unlink()
                self._held.append(descriptor)
        for descriptor in [d for d in self._held if not _open_elsewhere(d)]:
            self._held.remove(descriptor)
            os.close(descriptor)
        self._truncate(self._held[:-MAX_HELD])

    def _truncate(self, descriptors: list[int]) -> None:
        """Truncate old copies, so that readers cannot fill the disk by holding them; such a reader gets an error."""
        for descriptor in descriptors:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
            self._held.remove(descriptor)

    def _make_room(self, source: sqlite3.Connection) -> None:
        (pages,), (size,) = (source.execute(f"PRAGMA {p}").fetchone() for p in ("page_count", "page_size"))
        needed = pages * size + RESERVED_BYTES
        if _free(self._folder) < needed:
            self._truncate([*self._held])
        if (free := _free(self._folder)) < needed:
            has, wants = format_memory(free >> 20), format_memory(needed >> 20)
            raise GpuschedError(f"{self._state} has {has} free, {wants} are needed")


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _open_elsewhere(descriptor: int) -> bool:
    """Return whether an unlinked file is open in another process, or by another descriptor."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # granted only if no other descriptor is open
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False
