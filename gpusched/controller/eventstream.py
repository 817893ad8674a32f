"""Sends each event as JSON to a file and a webhook, at least once and in order, in threads of its own.

A thread reads what is committed, so nothing is sent that did not happen, and nothing waits for a slow receiver. The
controller stores how far each has come; after a crash some lines are sent again, with the same numbers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gpusched.controller.notices.delivery import DeliveryFailed, post_json
from gpusched.errors import printable
from gpusched.model.audit import AuditEntry
from gpusched.model.events import EventLine
from gpusched.model.resources import EventSettings
from gpusched.queue.store import Reader, Store

BATCH = 500
RETRIES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses after failures in a row; the last is repeated."""
CLOSE_S, RESTART_S = 5.0, 0.5  # the cycle waits for a restart; what is not sent by then is sent by the new stream
_log = logging.getLogger(__name__)


ReadLines = Callable[[Reader, int, int], Sequence[EventLine] | Sequence[AuditEntry]]
"""Reads lines after a number, at most so many, in order."""


class EventFile:
    """Appends to a file. One that was moved (logrotate) is left alone, and a new one begun at its place."""

    def __init__(self, path: str, mode: int = 0o644) -> None:
        self._path, self._mode = path, mode
        self._file: int | None = None
        self._is_regular = True  # else a pipe or a terminal, which can be neither synced nor cut

    def write(self, lines: Sequence[bytes]) -> None:
        """Append all lines or none, synced to the disk, so that a power cut loses none that counts as sent.

        Raises:
            OSError: It did not.
        """
        file = self._opened()
        size = os.fstat(file).st_size if self._is_regular else None
        content = b"".join(line + b"\n" for line in lines)
        try:
            while content:
                content = content[os.write(file, content) :]
            if size is not None:
                os.fdatasync(file)
        except OSError:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)  # as on a full disk: no half line
            raise

    def _opened(self) -> int:
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return self._file
            self.close()
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._mode)
        self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        if self._is_regular:
            _cut_half_line(self._file)
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _cut_half_line(file: int) -> None:
    """Cut off a last line without an end, left by a controller that was killed; it is sent again."""
    size = end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file, end)


class EventWebhook:
    """Posts lines as one JSON array."""

    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, lines: Sequence[bytes]) -> None:
        """Send lines; raises DeliveryFailed."""
        post_json(self._url, b"[" + b",\n".join(lines) + b"]")

    def close(self) -> None:
        """Hold nothing."""


LineReceiver = EventFile | EventWebhook


class EventStream:
    """Sends events, or other numbered lines, to one receiver in a thread, from `position` on."""

    def __init__(
        self, state: Path, name: str, receiver: LineReceiver, position: int, read: ReadLines = Reader.event_lines
    ) -> None:
        self._read = read
        self.position = position  # number of the last event that the receiver has got
        self._state, self._name, self._receiver = state, name, receiver
        self._reader: Reader | None = None
        self._news, self._stopping = threading.Event(), threading.Event()
        self._failures = 0
        self._until = math.inf
        self._thread = threading.Thread(target=self._run, name=f"events to {name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there may be news."""
        self._news.set()

    def stop(self, wait_s: float) -> None:
        """Send the rest, for at most ``wait_s`` and unless the receiver fails, and stop."""
        self._until = time.monotonic() + wait_s
        self._stopping.set()
        self._news.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            stopping = self._stopping.is_set()  # asked before events are read: all that there are by then are sent
            while not self._send_next():
                if stopping := self._stopping.wait(RETRIES_S[min(self._failures, len(RETRIES_S)) - 1]):
                    break
            if stopping:
                break
        self._close_reader()
        self._receiver.close()

    def _send_next(self) -> bool:
        """Send all events there are; return whether that went well."""
        try:
            self._reader = self._reader or Reader.open(self._state)
            while self._reader is not None and (lines := self._read(self._reader, self.position, BATCH)):
                self._receiver.write([msgspec.json.encode(line) for line in lines])
                self.position = lines[-1].seq
                self._note_success()
                if time.monotonic() > self._until:
                    break
            return True
        except Exception as error:  # whatever it is, it is tried again; the controller goes on
            self._close_reader()
            self._failures += 1
            if self._failures == 1:
                why = str(error) if isinstance(error, DeliveryFailed | OSError) else f"{type(error).__name__}: {error}"
                _log.warning("cannot send events to the %s; they are sent later: %s", self._name, printable(why)[:500])
            return False

    def _note_success(self) -> None:
        if self._failures:
            self._failures = 0
            _log.info("events are sent to the %s again", self._name)

    def _close_reader(self) -> None:
        if self._reader is not None:
            with contextlib.suppress(Exception):
                self._reader.close()
            self._reader = None


class EventStreams:
    """The streams of ``settings.events``."""

    def __init__(self, store: Store, state: Path) -> None:
        self._store, self._state = store, state
        self._settings: EventSettings | None = None  # not known before the first step
        self._streams: dict[str, EventStream] = {}
        self._stored = store.event_positions()

    def step(self, settings: EventSettings) -> None:
        """Send what has happened since the last call; begin and end streams as the settings say."""
        if settings != self._settings:
            self._restart(settings)
        for stream in self._streams.values():
            stream.wake()

    def _restart(self, settings: EventSettings) -> None:
        self.close(RESTART_S)
        positions = self._stored | self._positions()
        self._streams.clear()
        self._settings = settings
        receivers: dict[str, LineReceiver] = {}
        if settings.file:
            receivers["file"] = EventFile(settings.file)
        if settings.webhook:
            receivers["webhook"] = EventWebhook(settings.webhook)
        last = self._store.latest_event()
        for name, receiver in receivers.items():
            position = min(positions.get(name, last), last)  # greater: the store was restored from a backup
            self._streams[name] = EventStream(self._state, name, receiver, position)

    @property
    def has_moved(self) -> bool:
        """Whether `write_positions` has something to write."""
        return self._settings is not None and self._positions() != self._stored

    def _positions(self) -> dict[str, int]:
        return {name: stream.position for name, stream in self._streams.items()}

    def write_positions(self) -> None:
        """Store how far each stream has come, inside the caller's transaction if there is one."""
        positions = self._positions()
        for name, seq in positions.items():
            if self._stored.get(name) != seq:
                self._store.put_event_position(name, seq)
        for name in self._stored.keys() - positions.keys():
            self._store.put_event_position(name, None)
        self._stored = positions

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End all streams; each sends the rest, if that is done within ``wait_s``."""
        until = time.monotonic() + wait_s
        for stream in self._streams.values():
            stream.stop(max(0.0, until - time.monotonic()))
