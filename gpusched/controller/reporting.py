"""Writes what operators read outside the store: totals of metrics, streams of events, the audit log."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from gpusched.controller.auditing import audit_stream
from gpusched.controller.eventstream import CLOSE_S, EventStream, EventStreams
from gpusched.controller.metering import Metering, Timings
from gpusched.model.resources import EventSettings
from gpusched.queue.store import Store

_log = logging.getLogger(__name__)
WRITE_EVERY_S = 1.0  # short cycles share one commit


class Reporting:
    """Counts and sends after each cycle. ``timings``: the cycle records its durations there."""

    def __init__(self, store: Store, state: Path) -> None:
        self.timings = Timings()
        self._store = store
        self._metering, self._streams = Metering(store, self.timings), EventStreams(store, state)
        self._state = state
        self._audit: EventStream | None = None  # opened by the first step
        self._audit_failed = False
        self._written_at = float("-inf")

    def step(self, cycle_s: float, events: EventSettings) -> None:
        """Count a cycle and wake the threads that send events; record both at most once a second.

        Raises:
            OSError, sqlite3.Error, Damaged: The store cannot be written or read. Nothing is lost; call it again.
        """
        self._metering.count(cycle_s)
        self._streams.step(events)
        self._write_audit()
        if time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self._written_at = time.monotonic()
            self._write()

    def _write_audit(self) -> None:
        if self._audit is None:
            try:
                self._audit = audit_stream(self._store, self._state)
            except OSError as error:  # entries stay in the store until it can
                if not self._audit_failed:
                    _log.error("cannot read the audit log: %s; entries are kept in the database", error)
                self._audit_failed = True
                return
        self._audit.wake()

    def _write(self) -> None:
        with self._store.transaction():
            self._metering.write()
            if self._streams.has_moved:
                self._streams.write_positions()
            # Entries are deleted only once they are in the file, so a crash loses none.
            if self._audit is not None and self._store.has_audit_entries(self._audit.position):
                self._store.forget_audit(self._audit.position)

    def close(self) -> None:
        """Send the last events within a short time limit, and record how far they were sent.

        Raises:
            OSError, sqlite3.Error, Damaged: As `step`.
        """
        self._streams.close()
        if self._audit is not None:
            self._audit.stop(CLOSE_S)
        self._write()
