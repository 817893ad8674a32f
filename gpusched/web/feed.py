"""What all viewers see, computed once for each change of the store, and kept as bytes that are ready to be sent.

A viewer has a version and asks for what came after it: it gets the changes (`Feed.since`), or all where it has none or
where that is too long ago.
"""

from __future__ import annotations

import gzip
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
from gpusched.client.jobs import Query, queried
from gpusched.client.overview import cluster_rows
from gpusched.config.paths import find_inventory
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.model.progress import JobProgress
from gpusched.queue.presence import controller_of
from gpusched.queue.store import Reader
from gpusched.web.rows import job_rows, node_row

LOOK_S = 0.5  # so often it is looked whether the store has changed
_REST = 4.0  # so many times as long as the last look took is waited before the next
_AT_LEAST_S = 15.0  # warnings depend on the clock, too
_KEPT = 64  # changes
ENDED_SHOWN, ENDED_FOR_S = 1000, 86400.0
MOST_ROWS = 30_000


class FeedUpdate(NamedTuple):
    """From the version before to ``version``: what is new, as JSON, without the braces around it."""

    version: int
    body: bytes


class Packed(NamedTuple):
    """JSON as it is sent, plain and compressed."""

    plain: bytes
    zipped: bytes

    @classmethod
    def of(cls, plain: bytes) -> Packed:
        """Compressed, too; quickly rather than well: most of it is sent over loopback."""
        return cls(plain, gzip.compress(plain, 3, mtime=0))


class View(NamedTuple):
    """Everything at one moment: bytes of each node's and job's row by its key, and of what concerns all."""

    head: bytes
    nodes: dict[str, bytes]
    jobs: dict[str, bytes]

    def body(self) -> bytes:
        """As JSON, without the braces around it."""
        nodes, jobs = b",".join(self.nodes.values()), b",".join(self.jobs.values())
        return b'"head":%b,"nodes":[%b],"jobs":[%b]' % (self.head, nodes, jobs)


class SiteReader:
    """The store and the inventory of one thread; the inventory is read again when its file has changed."""

    def __init__(self, client: Client | None = None) -> None:
        self.client = client or Client()
        self._inventory = self._stamp_of_inventory()
        self._store = self._stamp_of_store()

    def refresh(self) -> None:
        """Look whether there is another inventory, or another store in the place of the old one."""
        if (stamp := self._stamp_of_inventory()) != self._inventory:
            self._inventory = stamp
            self.client.__dict__.pop("inventory", None)
        if (store := self._stamp_of_store()) != self._store:
            self._store = store
            self.client.reopen()

    def stamp(self) -> tuple[object, ...]:
        """Something that changes when anything that is shown may have changed."""
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
        return found and found[0]  # its time changes with every write


class Feed:
    """Keeps the present `View` and the changes that led to it; `run` in a thread of its own."""

    def __init__(self, site: SiteReader, *, clock: Callable[[], float] = time.time) -> None:
        self._site, self._clock = site, clock
        self.name = secrets.token_hex(4)  # versions of another process mean something else
        self.news = threading.Condition()
        self.version = 0
        self.extras: dict[str, int] = {}  # name -> version, of what is not part of the view
        self._view = View(b"{}", {}, {})
        self._changes: deque[FeedUpdate] = deque(maxlen=_KEPT)
        self._made: dict[int, Packed] = {}
        self._stamp: object = None
        self._looked = 0.0
        self._stop = threading.Event()

    def run(self) -> None:
        """Look, again and again, until `stop`."""
        while not self._stop.is_set():
            begin = time.monotonic()
            self.look()
            self._stop.wait(max(LOOK_S, _REST * (time.monotonic() - begin)))

    def stop(self) -> None:
        """End `run`, and wake all who wait for news."""
        self._stop.set()
        with self.news:
            self.news.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def look(self, *, strict: bool = False) -> bool:
        """Compute the view anew where something may have changed; whether something has.

        What cannot be read is said in the view; with ``strict`` it is raised.
        """
        now = self._clock()
        try:
            stamp = self._site.stamp()
            if stamp == self._stamp and abs(now - self._looked) < _AT_LEAST_S:
                return False
            view = view_of(self._site.client, now)
            self._stamp, self._looked = stamp, now
        except Exception as error:  # a page that stays as it was, and says so, is better than none
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
            self._made.clear()
            self.news.notify_all()
        return True

    def tell(self, extra: str) -> None:
        """Something beside the view is new."""
        with self.news:
            self.extras[extra] = self.extras.get(extra, 0) + 1
            self.news.notify_all()

    def signs(self) -> dict[str, Any]:
        """What viewers are told: name and version of the feed, versions of the extras."""
        return {"feed": self.name, "v": self.version, **self.extras}

    def wait(self, known: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Until `signs` are others than the known ones; None: nothing new in that time, or it was stopped."""
        with self.news:
            if not self.news.wait_for(lambda: self.stopped or self.signs() != known, timeout_s) or self.stopped:
                return None
            return self.signs()

    def since(self, feed: str, version: int) -> Packed:
        """The changes after ``version`` of this feed, or everything. Made once for all who ask for the same."""
        with self.news:
            wanted = [c for c in self._changes if c.version > version]
            known = feed == self.name and len(wanted) == self.version - version and version > 0
            key = version if known else 0
            if key not in self._made:
                parts = [b'{"v":%d,%b}' % (c.version, c.body) for c in wanted]
                content = b'"changes":[%b]' % b",".join(parts) if known else self._view.body()
                start = b'{"feed":"%b","v":%d,"now":%f,' % (self.name.encode(), self.version, self._clock())
                self._made[key] = Packed.of(start + content + b"}")
            return self._made[key]


def _difference(old: View, new: View) -> bytes:
    """Of each part what changed, as JSON without the braces; b"": nothing."""
    parts = []
    if new.head != old.head:
        parts.append(b'"head":' + new.head)
    if list(new.nodes) != list(old.nodes):
        parts.append(b'"all_nodes":[%b]' % b",".join(new.nodes.values()))
    elif changed := [row for name, row in new.nodes.items() if old.nodes[name] != row]:
        parts.append(b'"nodes":[%b]' % b",".join(changed))
    if changed := [row for key, row in new.jobs.items() if old.jobs.get(key) != row]:
        parts.append(b'"jobs":[%b]' % b",".join(changed))
    if gone := [key for key in old.jobs if key not in new.jobs]:
        parts.append(b'"gone":' + msgspec.json.encode(gone))
    return b",".join(parts)


def view_of(client: Client, now: float) -> View:
    """What ``status`` and ``nodes`` show now."""
    jobs = shown_jobs(client, now)
    reader = client.reader
    rows = job_rows(jobs, {}, _progress(reader), _partners(reader, jobs))
    more = max(0, len(rows) - MOST_ROWS)
    packed = {key: msgspec.json.encode(row) for key, row in list(rows.items())[:MOST_ROWS]}
    nodes = {row.name: msgspec.json.encode(node_row(row)) for row in cluster_rows(reader, client.inventory, now)}
    return View(msgspec.json.encode(_head(client, more)), nodes, packed)


def _head(client: Client, more: int) -> dict[str, Any]:
    from gpusched.client import slurm

    inventory, reader = client.inventory, client.reader
    out = reader.fallbacks() if reader else {}
    notes = [*client.notes(), *(found.line for found in out.values())]
    if more:
        notes.append(f"{more:,} more pending jobs not shown")
    return {
        "version": __version__,
        "host": socket.gethostname(),
        "partitions": [p.name for p in inventory.partitions],
        "warning": client.warning(),
        "controller": _silence(client),
        "notes": notes,
        "engine": slurm.modes_line(client) if inventory.engine == "slurm" else "",
        "simulated": any(n.simulated_gpus for n in inventory.nodes),
    }


def _silence(client: Client) -> dict[str, Any] | None:
    """Return whether a controller that decides nothing ``runs``, and when it was ``seen`` last; None: it is at work."""
    if not client.controller_warning():
        return None
    beat = client.reader.meta("heartbeat") if client.reader is not None else None
    return {"runs": controller_of(client.state) is not None, "seen": None if beat is None else round(float(beat))}


def _failed(head: bytes, line: str) -> bytes:
    """The head with what went wrong in the place of the warning."""
    known = msgspec.json.decode(head)
    known.setdefault("partitions", [])
    return msgspec.json.encode(known | {"warning": f"this page cannot be updated: {line}"})


def shown_jobs(client: Client, now: float) -> list[JobRecord]:
    """What ``status`` shows, with those that ended within a day: running ones first, so that none of them is cut."""
    found = queried(client, Query(ended=ENDED_SHOWN))
    ended = [j for j in found if j.state in ENDED and (j.end_time or 0.0) > now - ENDED_FOR_S]
    return [*(j for j in found if j.state not in ENDED), *reversed(ended)]


def _progress(reader: Reader | None) -> dict[str, JobProgress]:
    found = reader.progress_of_unended() if reader else {}
    return {job: told[-1] for job, told in found.items()}


def _partners(reader: Reader | None, jobs: list[JobRecord]) -> dict[str, str]:
    if reader is None or not any(job.spec.share for job in jobs):
        return {}
    from gpusched.queue.snapshots import partners_of

    return partners_of(reader.active())


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Which file or folder it is, when it was changed, and how large it is; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
