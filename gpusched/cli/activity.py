"""A line on the terminal that says what a command is at, and how far, once it takes longer than a second."""

from __future__ import annotations

import select
import shutil
import sys
import threading
import time

QUICK_S = 1.0
_EVERY_S = 0.2
_ASIDE_S = 0.5  # after something was printed


class Activity:
    """One command's line on stderr, drawn by a thread; it is gone before anything else is printed."""

    def __init__(self, what: str) -> None:
        self._what, self._done, self._total = what, 0, 0
        self._began = time.monotonic()
        self._quiet_until = self._began + QUICK_S
        self._drawn = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._draw, name="activity", daemon=True).start()

    def tell(self, what: str, done: int = 0, total: int = 0) -> None:
        """What it is at now; ``done`` of ``total`` where that is known."""
        self._what, self._done, self._total = what, done, total

    def erase(self) -> None:
        """Take the line away; it comes again if the command goes on for long."""
        with self._lock:
            self._quiet_until = max(self._quiet_until, time.monotonic() + _ASIDE_S)
            if self._drawn:
                self._write("\r\x1b[2K")
                self._drawn = False

    def stop(self) -> None:
        """Take it away for good."""
        self._over.set()
        self.erase()

    def line(self) -> str:
        """What it says now."""
        what, done, total = self._what, self._done, self._total
        columns = sys.modules.get("gpusched.traces.readers.columns")  # asked, and not imported for this
        if columns is not None and (file := columns.Reading.latest) is not None and (read := file.done) < file.size:
            what, done, total = f"reading {file.path.name}", read, file.size
        far = f" {100 * done // total} %" if total else ""
        return f"{what}{far}, {time.monotonic() - self._began:.0f} s"

    def _draw(self) -> None:
        while not self._over.wait(_EVERY_S):
            with self._lock:
                if time.monotonic() >= self._quiet_until and not self._over.is_set():
                    columns = shutil.get_terminal_size().columns  # a line that wraps could not be taken away again
                    self._write(f"\r\x1b[2K{_cut(f'gpusched: {self.line()} ...', columns - 1)}")
                    self._drawn = True

    @staticmethod
    def _write(text: str) -> None:
        try:
            if select.select([], [sys.stderr], [], 0)[1]:  # one that is stopped (Ctrl-S) must stop nothing else
                sys.stderr.write(text)
                sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone
            pass


def _cut(line: str, most: int) -> str:
    """Its beginning, and its end, which says for how long."""
    if len(line) <= most:
        return line
    what, _, seconds = line.rpartition(", ")
    return f"{what[: max(0, most - len(seconds) - 5)]}..., {seconds}"


_activity: Activity | None = None


def begin(what: str) -> None:
    """From now on the command is at ``what``; nothing is shown where stderr is no terminal."""
    global _activity
    stop()
    if sys.stderr.isatty():
        _activity = Activity(what)


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """See `Activity.tell`."""
    if _activity is not None:
        _activity.tell(what, done, total)


def erase() -> None:
    """See `Activity.erase`."""
    if _activity is not None:
        _activity.erase()


def stop() -> None:
    """See `Activity.stop`."""
    global _activity
    if _activity is not None:
        _activity.stop()
        _activity = None
