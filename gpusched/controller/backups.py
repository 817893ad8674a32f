"""Makes the controller's backups, in a thread of low priority beside the cycle."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model.backups import BACKUP_META, Backup, BackupResult, backup_result
from gpusched.model.events import Event
from gpusched.model.resources import BackupSettings
from gpusched.queue.backup import BackupStopped, make_backup
from gpusched.queue.store import Store

RETRY_S = 600.0
NICENESS = 10
CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class BackupRunner:
    """Starts due backups and records their outcomes; a failed one is tried again after ten minutes at most."""

    def __init__(self, store: Store, state: Path, inventory: Path) -> None:
        self._store, self._state, self._inventory = store, state, inventory
        self._last = backup_result(store.meta(BACKUP_META))
        self._thread: threading.Thread | None = None
        self._used = BackupSettings()  # the thread's
        self._made: Backup | None = None
        self._seconds, self._error = 0.0, ""
        self._stopping = threading.Event()

    def step(self, settings: BackupSettings, now: float) -> None:
        """Record a backup that has ended, and start the next one if it is due.

        Raises:
            sqlite3.Error, OSError, DatabaseDamaged: The outcome cannot be recorded.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._record(self._used, now)
            self._thread = None
        if not settings.to:
            if self._last is not None:
                self._store.set_meta(BACKUP_META, "")
                self._last = None
        elif self._thread is None and self._is_due(settings, now):
            self._used = settings
            self._thread = threading.Thread(target=self._make, args=(settings, now), name="backup", daemon=True)
            self._thread.start()

    def _is_due(self, settings: BackupSettings, now: float) -> bool:
        if self._last is None or self._last.to != settings.to:
            return True
        pause = min(settings.every_s, RETRY_S) if self._last.error else settings.every_s
        return not 0 <= now - self._last.tried < pause  # a clock that was set back delays nothing

    def _make(self, settings: BackupSettings, now: float) -> None:
        began = os.times().elapsed
        self._made, self._error = None, "it was interrupted"
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._made = make_backup(self._state, settings, now, self._inventory, self._stopping.is_set)
            self._error = ""
        except BackupStopped:
            pass
        except GpuschedError as error:
            self._error = error.line()
        except Exception as error:  # no fault of a backup ends the controller
            _log.exception("a backup failed")
            self._error = f"{type(error).__name__}: {error}"
        self._seconds = os.times().elapsed - began

    def _record(self, settings: BackupSettings, now: float) -> None:
        failed_before = self._last is not None and self._last.error != ""
        last = self._last or BackupResult(tried=now, every_s=settings.every_s, to=settings.to)
        if self._made is not None and self._made.manifest is not None:
            found = self._made.manifest
            last = BackupResult(
                tried=found.made, every_s=settings.every_s, to=settings.to, made=found.made, name=self._made.name,
                size_bytes=found.size_bytes, seconds=self._seconds,
            )  # fmt: skip
            _log.info("backup %s made in %.1f s", self._made.path, self._seconds)
        else:
            last = msgspec.structs.replace(last, tried=now, every_s=settings.every_s, to=settings.to, error=self._error)
            _log.log(logging.DEBUG if failed_before else logging.ERROR, "the backup failed: %s", self._error)
        with self._store.transaction():
            self._store.set_meta(BACKUP_META, msgspec.json.encode(last).decode())
            if bool(last.error) != failed_before:
                kind = "backup_failed" if last.error else "backup_succeeded"
                self._store.append([Event(time=now, kind=kind, data={"to": settings.to, "why": last.error})])
        self._last = last

    def finish(self, settings: BackupSettings, now: float) -> None:
        """Wait for the backup that is being made, and record it; for ``tick``, which exits afterwards."""
        if self._thread is not None:
            self._thread.join()
            self.step(settings, now)

    def close(self) -> None:
        """Abandon the backup that is being made."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
