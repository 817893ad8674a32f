"""A progress line on the terminal for commands that take longer than a second."""

from __future__ import annotations

import select
import shutil
import sys
import threading
import time

SHOWN_AFTER_S = 1.0
_REFRESH_S = 0.2
_RETURN_AFTER_S = 0.5  # after other output


class Activity:
    """One command's progress line on stderr, drawn by a thread and erased before anything else is printed."""

    def __init__(self, what: str) -> None:
        self._what, self._done, self._total = what, 0, 0
        self._began = time.monotonic()
        self._hidden_until = self._began + SHOWN_AFTER_S
        self._drawn = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._draw, name="activity", daemon=True).start()

    def update(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set the current step; ``done`` of ``total`` if known."""
        self._what, self._done, self._total = what, done, total

    def erase(self) -> None:
        """Erase the line; it returns if the command keeps running."""
        with self._lock:
            self._hidden_until = max(self._hidden_until, time.monotonic() + _RETURN_AFTER_S)
            if self._drawn:
                self._write("\r\x1b[2K")
                self._drawn = False

    def stop(self) -> None:
        """Erase the line for good."""
        self._stopped.set()
        self.erase()

    def line(self) -> str:
        """Return the text of the line."""
        what, done, total = self._what, self._done, self._total
        columns = sys.modules.get("gpusched.traces.readers.columns")  # only if it is loaded: importing it is slow
        counted = getattr(columns, "CountedFile", None)  # not there yet while the command imports it
        if counted is not None and (file := counted.latest) is not None and (read := file.done) < file.size:
            what, done, total = f"reading {file.path.name}", read, file.size
        percent = f" {100 * done // total} %" if total else ""
        return f"{what}{percent}, {time.monotonic() - self._began:.0f} s"

    def _draw(self) -> None:
        while not self._stopped.wait(_REFRESH_S):
            with self._lock:
                if time.monotonic() >= self._hidden_until and not self._stopped.is_set():
                    columns = shutil.get_terminal_size().columns  # a line that wraps cannot be erased
                    self._write(f"\r\x1b[2K{_cut(f'gpusched: {self.line()} ...', columns - 1)}")
                    self._drawn = True

    @staticmethod
    def _write(text: str) -> None:
        try:
            if select.select([], [sys.stderr], [], 0)[1]:  # a stopped terminal (Ctrl-S) must not block the command
                sys.stderr.write(text)
                sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone
            pass


def _cut(line: str, width: int) -> str:
    """Shorten the line in its middle: the end, which has the elapsed time, stays."""
    if len(line) <= width:
        return line
    what, _, seconds = line.rpartition(", ")
    return f"{what[: max(0, width - len(seconds) - 5)]}..., {seconds}"


_activity: Activity | None = None


def begin(what: str) -> None:
    """Start a line for this step; nothing is shown if stderr is not a terminal."""
    global _activity
    stop()
    if sys.stderr.isatty():
        _activity = Activity(what)


def update(what: str, done: int = 0, total: int = 0) -> None:
    """Call `Activity.update`."""
    if _activity is not None:
        _activity.update(what, done, total)


def erase() -> None:
    """Call `Activity.erase`."""
    if _activity is not None:
        _activity.erase()


def stop() -> None:
    """Call `Activity.stop`."""
    global _activity
    if _activity is not None:
        _activity.stop()
        _activity = None
