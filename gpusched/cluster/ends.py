"""Notices job ends at once, over one channel to each node with jobs of this cluster.

A channel only triggers a probe before the next tick; the probe reports what happened to the job. Where a channel is
refused or lost, the tick remains.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container

from gpusched.model.readings import NodeReading
from gpusched.nodes.ends import WatchedJob, channel_argv, jobs_to_watch, parse_end, program, request
from gpusched.nodes.probe import has_python
from gpusched.nodes.transport import Session, Transport, TransportError

LINGER_S = 10.0  # a channel without jobs is kept so long: the next job often comes soon
MIN_BACKOFF_S, MAX_BACKOFF_S = 5.0, 600.0  # delay before a broken channel is opened again
YIELD_S = 3600.0
"""For so long no channel is opened to a node after its sshd ran out of sessions."""
RECHECK_S, MAX_RECHECKS = 0.25, 6
"""Interval and number of probes of a container that has ended while its engine still reports it running."""
_MAX_LINE = 1000


class EndWatch:
    """The channels to all nodes. Called from the threads that probe nodes, by at most one thread per node at a time."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._nodes: dict[str, _NodeChannel] = {}
        self._is_open = False
        self._wake: Callable[[], None] = lambda: None

    def begin(self, wake: Callable[[], None]) -> None:
        """Open channels from now on. ``wake`` is called, from any thread, when a node reports an end."""
        self._is_open, self._wake = True, wake

    def update(self, name: str, transport: Transport, reading: NodeReading) -> None:
        """Watch the jobs that run on a node according to a reading, over the transport of that reading."""
        if reading.containers is None:
            self.probe_failed(name)
            return
        with self._lock:
            if not self._is_open:
                return
            node = self._nodes.setdefault(name, _NodeChannel(self._cluster_id, name, self._wake))
        node.update(jobs_to_watch(reading), transport)

    def is_due(self, probing: Container[str]) -> bool:
        """Return whether a node not in ``probing`` has reported an end and should be probed."""
        with self._lock:
            return any(node.is_due() for name, node in self._nodes.items() if name not in probing)

    def probe_started(self, name: str) -> None:
        """Note that a probe starts: it covers the ends that the node has reported so far."""
        with self._lock:
            if name in self._nodes:
                self._nodes[name].probe_at = None

    def probe_failed(self, name: str) -> None:
        """Note that a probe did not show the node's jobs: ends that it has reported are still to be seen."""
        with self._lock:
            node = self._nodes.get(name)
        if node is not None:
            node.recheck()

    def yield_session(self, name: str) -> bool:
        """Close the node's channel for long, to free an SSH session; return False if there is none."""
        with self._lock:
            node = self._nodes.get(name)
        return node is not None and node.yield_session()

    def drop(self, name: str) -> None:
        """Close the channel of a node that has another transport now, or has left the inventory."""
        with self._lock:
            node = self._nodes.pop(name, None)
        if node is not None:
            node.end()

    def keep_only(self, names: Container[str]) -> None:
        """Drop other nodes: one that left the inventory before its last probe ended, say."""
        with self._lock:
            others = [name for name in self._nodes if name not in names]
        for name in others:
            self.drop(name)

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            self._is_open = False
            names = list(self._nodes)
        for name in names:
            self.drop(name)


class _NodeChannel:
    """One node's channel, and when to probe the node because of it.

    Attributes:
        probe_at: When to probe (monotonic seconds); None: at the tick.
    """

    def __init__(self, cluster_id: str, name: str, wake: Callable[[], None]) -> None:
        self._cluster_id, self._name, self._wake = cluster_id, name, wake
        self._lock = threading.Lock()
        self._channel: _Channel | None = None
        self.probe_at: float | None = None
        self._reported: set[WatchedJob] = set()
        self._rechecks: dict[WatchedJob, int] = {}  # probes of jobs that ended but are still reported running
        self._idle_since = self._not_before = self._pause_s = 0.0
        self._has_ended = False

    def is_due(self) -> bool:
        due = self.probe_at
        return due is not None and time.monotonic() >= due

    def update(self, jobs: frozenset[WatchedJob], transport: Transport) -> None:
        now = time.monotonic()
        if jobs:
            self._idle_since = now
        channel = self._channel
        if channel is not None and not (channel.is_alive and channel.transport is transport):
            self._back_off(now)
        elif channel is not None and now - self._idle_since > LINGER_S:
            self.close()
        if self._channel is None and jobs and now >= self._not_before:
            try:
                self._channel = _Channel(self._cluster_id, self._name, transport, self._on_end)
            except TransportError:
                self._back_off(now)
        if self._has_ended:  # it was dropped while its probe, or this, was under way
            self.close()
        channel = self._channel
        if channel is not None:
            channel.wait_for(self._unreported(jobs, now))

    def recheck(self) -> None:
        """Have the node probed again soon, a few times, if it has reported an end."""
        self._unreported(None, time.monotonic())

    def _unreported(self, jobs: frozenset[WatchedJob] | None, now: float) -> frozenset[WatchedJob]:
        """Return which of the jobs to watch; None: of those that were reported.

        A job that was reported ended but still runs is probed again soon, a few times.
        """
        with self._lock:
            jobs = frozenset(self._reported) if jobs is None else jobs
            self._reported &= jobs
            self._rechecks = {job: self._rechecks.get(job, 0) + 1 for job in self._reported}
            recheck = any(count <= MAX_RECHECKS for count in self._rechecks.values())
            self.probe_at = now + RECHECK_S if recheck else None
            return jobs - self._reported

    def _on_end(self, job: WatchedJob) -> None:
        with self._lock:
            self._reported.add(job)
            self.probe_at = time.monotonic()
        self._wake()

    def _back_off(self, now: float) -> None:
        channel = self._channel
        was_stable = channel is not None and now - channel.opened > MAX_BACKOFF_S
        self._pause_s = 0.0 if was_stable else min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * self._pause_s))
        self._not_before = now + self._pause_s
        self.close()

    def yield_session(self) -> bool:
        if self._channel is None:
            return False
        self._not_before = time.monotonic() + YIELD_S
        self.close()
        return True

    def end(self) -> None:
        """Close the channel for good."""
        self._has_ended = True
        self.close()

    def close(self) -> None:
        channel, self._channel = self._channel, None
        with self._lock:
            self._reported.clear()
        if channel is not None:
            channel.close()


class _Channel:
    """A session with payload/ends.py, read by a thread of its own, which calls ``on_end`` for each job that ended."""

    def __init__(self, cluster_id: str, name: str, transport: Transport, on_end: Callable[[WatchedJob], None]) -> None:
        """Open the session.

        Raises:
            TransportError: The node refuses it.
        """
        self.transport, self.opened, self.is_alive = transport, time.monotonic(), True
        python = has_python(transport)
        self._session: Session = transport.session(channel_argv(cluster_id, name, python))
        self._on_end, self._sent, self._rest = on_end, frozenset[WatchedJob](), b""
        threading.Thread(target=self._read, name=f"ends-{name}", daemon=True).start()
        self._write(program(python))

    def wait_for(self, jobs: frozenset[WatchedJob]) -> None:
        """Watch these jobs, and no others."""
        if jobs != self._sent:
            self._sent = jobs
            self._write(request(jobs))

    def close(self) -> None:
        self.is_alive = False
        self._session.close()

    def _write(self, data: bytes) -> None:
        while data and self.is_alive:
            sent = self._session.write(data)
            if not sent:
                self.close()  # the other end does not read
            data = data[sent:]

    def _read(self) -> None:
        with contextlib.suppress(TransportError):
            self._session.pump(self._on_output)
        self.is_alive = False

    def _on_output(self, stream: int, chunk: bytes) -> None:
        if stream != 1:
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_MAX_LINE:]
        for line in lines:
            ended = parse_end(line)
            for job in self._sent:  # other lines come from a shell start-up file
                if ended in (job, (job[0], None)):
                    self._on_end(job)
