"""Reports to other programs' monitoring: totals of metrics, and events for log pipelines."""

from __future__ import annotations

import time
from pathlib import Path

from gpusched.controller.eventstream import EventStreams
from gpusched.controller.metering import Metering, Timings
from gpusched.model.resources import EventSettings
from gpusched.queue.store import Store

WRITE_EVERY_S = 1.0  # a commit of its own, shared by both: not one for each of many short cycles


class Reporting:
    """Runs both after each cycle. ``timings``: where the cycle puts its durations."""

    def __init__(self, store: Store, state: Path) -> None:
        self.timings = Timings()
        self._store = store
        self._metering, self._streams = Metering(store, self.timings), EventStreams(store, state)
        self._written_at = float("-inf")

    def step(self, cycle_s: float, events: EventSettings) -> None:
        """Count a cycle, have its events sent, and record both if the last time was long enough ago.

        Raises:
            OSError, sqlite3.Error, Damaged: The store cannot be written or read; nothing is lost by it.
        """
        self._metering.count(cycle_s)
        self._streams.step(events)
        if time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self._written_at = time.monotonic()
            self._write()

    def _write(self) -> None:
        with self._store.transaction():
            self._metering.write()
            if self._streams.has_moved:
                self._streams.write_positions()

    def close(self) -> None:
        """Send the last events, if that is quickly done, and record the rest.

        Raises:
            OSError, sqlite3.Error, Damaged: As `step`.
        """
        self._streams.close()
        self._write()
