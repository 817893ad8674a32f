"""The view of all viewers, computed once for each change of the store and kept as bytes ready to be sent.

A viewer has a version and requests what came after it: it gets the changes (`Feed.since`), or everything if it has no
version or one that is too old.
"""

from __future__ import annotations

import gzip
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpusched import __version__
from gpusched.client.context import Client
from gpusched.client.jobs import Query, queried, sharing_partners
from gpusched.client.overview import cluster_rows
from gpusched.config.paths import find_inventory
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.model.progress import JobProgress
from gpusched.queue.presence import controller_of
from gpusched.queue.store import Reader
from gpusched.web.rows import job_rows, node_row

POLL_S = 0.5  # how often the store is checked for changes
_REST_FACTOR = 4.0  # pauses last this many times as long as the refresh before them
_MAX_AGE_S = 15.0  # warnings depend on the clock, too
_KEPT_CHANGES = 64  # changes
_MAX_CLOCK_AGE_S = 2.0  # viewers set their clocks by the time in a response
ENDED_SHOWN, ENDED_FOR_S = 1000, 86400.0
MAX_ROWS = 30_000


class FeedUpdate(NamedTuple):
    """The changes from the previous version to ``version``, as JSON without the enclosing braces."""

    version: int
    body: bytes


class ResponseBody(NamedTuple):
    """JSON as it is sent, plain and compressed."""

    plain: bytes
    zipped: bytes

    @classmethod
    def of(cls, plain: bytes) -> ResponseBody:
        """Compress; fast rather than small, since most of it is sent over loopback."""
        return cls(plain, gzip.compress(plain, 3, mtime=0))


class View(NamedTuple):
    """The state at one moment: the rows of nodes and jobs as bytes, by key, and the head."""

    head: bytes
    nodes: dict[str, bytes]
    jobs: dict[str, bytes]

    def body(self) -> bytes:
        """Return the view as JSON, without the enclosing braces."""
        nodes, jobs = b",".join(self.nodes.values()), b",".join(self.jobs.values())
        return b'"head":%b,"nodes":[%b],"jobs":[%b]' % (self.head, nodes, jobs)


class SiteReader:
    """The store and the inventory of one thread; a changed inventory is read again."""

    def __init__(self, client: Client | None = None) -> None:
        self.client = client or Client()
        self._inventory = self._stamp_of_inventory()
        self._store = self._stamp_of_store()

    def refresh(self) -> None:
        """Reload the inventory if its file has changed, and the store if it was replaced."""
        if (stamp := self._stamp_of_inventory()) != self._inventory:
            self._inventory = stamp
            self.client.__dict__.pop("inventory", None)
        if (store := self._stamp_of_store()) != self._store:
            self._store = store
            self.client.reopen()

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes whenever anything shown may have changed."""
        self.refresh()
        reader = self.client.reader
        return (self._inventory, self._store, reader.data_version() if reader else None, _stamp(self.client.inbox.new))

    def _stamp_of_inventory(self) -> object:
        try:
            return _stamp(find_inventory())
        except GpuschedError:
            return None

    def _stamp_of_store(self) -> object:
        found = _stamp(self.client.state / "gpusched.db")
        return found and found[0]  # only the inode: the time changes with every write


class Feed:
    """Keeps the current `View` and the changes that led to it; `run` has its own thread."""

    def __init__(self, site: SiteReader, *, clock: Callable[[], float] = time.time) -> None:
        self._site, self._clock = site, clock
        self.name = secrets.token_hex(4)  # versions count per process
        self.news = threading.Condition()
        self.version = 0
        self.extras: dict[str, int] = {}  # name -> version, of data beside the view
        self._view = View(b"{}", {}, {})
        self._changes: deque[FeedUpdate] = deque(maxlen=_KEPT_CHANGES)
        self._packed: dict[int, tuple[float, ResponseBody]] = {}  # when it was made, and what is sent
        self._stamp: object = None
        self._refreshed_at = 0.0
        self._stop = threading.Event()

    def run(self) -> None:
        """Refresh until `stop`."""
        while not self._stop.is_set():
            begin = time.monotonic()
            self.refresh_view()
            self._stop.wait(max(POLL_S, _REST_FACTOR * (time.monotonic() - begin)))

    def stop(self) -> None:
        """End `run`, and wake all waiting viewers."""
        self._stop.set()
        with self.news:
            self.news.notify_all()

    @property
    def stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stop.is_set()

    def refresh_view(self, *, strict: bool = False) -> bool:
        """Recompute the view if something may have changed; return whether something has.

        Errors are shown in the view; with ``strict`` they are raised.
        """
        now = self._clock()
        try:
            stamp = self._site.stamp()
            if stamp == self._stamp and abs(now - self._refreshed_at) < _MAX_AGE_S:
                return False
            view = view_of(self._site.client, now)
            self._stamp, self._refreshed_at = stamp, now
        except Exception as error:  # a stale page that says so is better than none
            if strict:
                raise
            line = error.line() if isinstance(error, GpuschedError) else f"{type(error).__name__}: {error}"
            view = self._view._replace(head=_failed(self._view.head, line))
            self._stamp = None
        return self._publish(view, now)

    def _publish(self, view: View, now: float) -> bool:
        body = _difference(self._view, view)
        if not body and self.version:
            return False
        with self.news:
            self.version += 1
            self._view = view
            self._changes.append(FeedUpdate(self.version, body))
            self._packed.clear()
            self.news.notify_all()
        return True

    def notify(self, extra: str) -> None:
        """Count a change of data beside the view, and wake the viewers."""
        with self.news:
            self.extras[extra] = self.extras.get(extra, 0) + 1
            self.news.notify_all()

    def versions(self) -> dict[str, Any]:
        """Return the name and version of the feed, and the versions of the extras."""
        return {"feed": self.name, "v": self.version, **self.extras}

    def wait(self, known: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Wait until the `versions` differ from the known ones; return None on timeout or `stop`."""
        with self.news:
            if not self.news.wait_for(lambda: self.stopped or self.versions() != known, timeout_s) or self.stopped:
                return None
            return self.versions()

    def since(self, feed: str, version: int) -> ResponseBody:
        """Return the changes after ``version`` of this feed, or everything; built once for viewers of one moment."""
        with self.news:
            changes = [c for c in self._changes if c.version > version]
            can_use_changes = feed == self.name and len(changes) == self.version - version and version > 0
            key = version if can_use_changes else 0
            now = self._clock()
            built_at, found = self._packed.get(key, (-math.inf, None))
            if found is None or not 0 <= now - built_at < _MAX_CLOCK_AGE_S:
                parts = [b'{"v":%d,%b}' % (c.version, c.body) for c in changes]
                content = b'"changes":[%b]' % b",".join(parts) if can_use_changes else self._view.body()
                start = b'{"feed":"%b","v":%d,"now":%f,' % (self.name.encode(), self.version, now)
                found = ResponseBody.of(start + content + b"}")
                self._packed[key] = now, found
            return found


def _difference(old: View, new: View) -> bytes:
    """Return what changed in each part, as JSON without the braces; b"" if nothing."""
    parts = []
    if new.head != old.head:
        parts.append(b'"head":' + new.head)
    if list(new.nodes) != list(old.nodes):
        parts.append(b'"all_nodes":[%b]' % b",".join(new.nodes.values()))
    elif changed := [row for name, row in new.nodes.items() if old.nodes[name] != row]:
        parts.append(b'"nodes":[%b]' % b",".join(changed))
    if changed := [row for key, row in new.jobs.items() if old.jobs.get(key) != row]:
        parts.append(b'"jobs":[%b]' % b",".join(changed))
    if removed := [key for key in old.jobs if key not in new.jobs]:
        parts.append(b'"gone":' + msgspec.json.encode(removed))
    return b",".join(parts)


def view_of(client: Client, now: float) -> View:
    """Return what ``status`` and ``nodes`` show now."""
    jobs = shown_jobs(client, now)
    reader = client.reader
    rows = job_rows(jobs, {}, _progress(reader), sharing_partners(reader, jobs))
    hidden = max(0, len(rows) - MAX_ROWS)
    packed = {key: msgspec.json.encode(row) for key, row in list(rows.items())[:MAX_ROWS]}
    nodes = {row.name: msgspec.json.encode(node_row(row)) for row in cluster_rows(reader, client.inventory, now)}
    are_cut = sum(job.state in ENDED for job in jobs) >= ENDED_SHOWN
    return View(msgspec.json.encode(_head(client, hidden, are_cut)), nodes, packed)


def _head(client: Client, hidden: int, are_cut: bool) -> dict[str, Any]:
    from gpusched.client import slurm

    inventory, reader = client.inventory, client.reader
    fallbacks = reader.fallbacks() if reader else {}
    notes = [*client.notes(), *(found.line for found in fallbacks.values())]
    if hidden:
        notes.append(f"{hidden:,} more pending jobs not shown")
    return {
        "version": __version__,
        "host": socket.gethostname(),
        "partitions": [p.name for p in inventory.partitions],
        "warning": client.warning(),
        "controller": _silence(client),
        "notes": notes,
        "engine": slurm.modes_line(client) if inventory.engine == "slurm" else client.standby_line(),
        "simulated": any(n.simulated_gpus for n in inventory.nodes),
        "last_ended": ENDED_SHOWN if are_cut else None,  # of those that ended, only so many are shown
    }


def _silence(client: Client) -> dict[str, Any] | None:
    """Return whether an idle controller ``runs`` and when it was last ``seen``; None if it is working."""
    if not client.controller_warning():
        return None
    heartbeat = client.reader.meta("heartbeat") if client.reader is not None else None
    seen = None if heartbeat is None else round(float(heartbeat))
    return {"runs": controller_of(client.state) is not None, "seen": seen}


def _failed(head: bytes, line: str) -> bytes:
    """Return the head with an error in place of the warning."""
    head_fields = msgspec.json.decode(head)
    head_fields.setdefault("partitions", [])
    return msgspec.json.encode(head_fields | {"warning": f"this page cannot be updated: {line}"})


def shown_jobs(client: Client, now: float) -> list[JobRecord]:
    """Return the jobs of ``status`` and those that ended within a day; the active ones first, so none is cut."""
    found = queried(client, Query(ended=ENDED_SHOWN))
    ended = [j for j in found if j.state in ENDED and (j.end_time or 0.0) > now - ENDED_FOR_S]
    return [*(j for j in found if j.state not in ENDED), *reversed(ended)]


def _progress(reader: Reader | None) -> dict[str, JobProgress]:
    found = reader.progress_of_unended() if reader else {}
    return {job: reports[-1] for job, reports in found.items()}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return the inode, modification time and size of a file or folder; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
