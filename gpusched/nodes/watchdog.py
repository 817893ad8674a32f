"""One thread that cuts off whatever outlives its deadline.

paramiko has calls without a time limit (a send behind another send to a peer that no longer reads). Waiting for them
elsewhere would cost a thread for every command; this is one for the process.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator

_GRACE_S = 0.2  # the call itself should notice first
_lock = threading.Condition()
_entries: list[tuple[float, int]] = []
_actions: dict[int, Callable[[], None]] = {}
_ids = itertools.count()
_thread: threading.Thread | None = None


@contextlib.contextmanager
def guard(deadline: float, cut: Callable[[], None]) -> Iterator[None]:
    """Call ``cut`` from another thread if the block is still running shortly after ``deadline`` (monotonic)."""
    global _thread
    with _lock:
        entry = next(_ids)
        _actions[entry] = cut
        heapq.heappush(_entries, (deadline + _GRACE_S, entry))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_watch, name="gpusched-watchdog", daemon=True)
            _thread.start()
        elif _entries[0][1] == entry:
            _lock.notify()
    try:
        yield
    finally:
        with _lock:
            _actions.pop(entry, None)


def _watch() -> None:
    while True:
        due: list[Callable[[], None]] = []
        with _lock:
            now = time.monotonic()
            while _entries and (_entries[0][0] <= now or _entries[0][1] not in _actions):
                action = _actions.pop(heapq.heappop(_entries)[1], None)
                if action is not None:
                    due.append(action)
            if not due:
                _lock.wait(_entries[0][0] - now if _entries else None)
        for action in due:
            with contextlib.suppress(Exception):
                action()
