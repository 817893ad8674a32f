"""Ends of jobs, told by their nodes as they happen: one waiting channel to each node that has jobs of ours.

It only says when to look. What has become of a job the next probe says, which comes at once instead of at the next
tick; where a channel is refused or lost, the tick is what there is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container

from gpusched.model.readings import NodeReading
from gpusched.nodes.ends import Awaited, awaited, channel_argv, parse_told, program, request
from gpusched.nodes.probe import has_python
from gpusched.nodes.transport import Session, Transport, TransportError

LINGER_S = 10.0  # a channel is kept so long without jobs: the next one is often near
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0  # before a channel that broke is opened again
GIVEN_UP_S = 3600.0
"""A node whose sshd has no session to spare is left alone for so long."""
LOOK_AGAIN_S, LOOKS = 0.25, 6
"""An engine that has yet to write an end down is asked again so soon, so often."""
_LONGEST_LINE = 1000


class EndWatch:
    """The channels. Used from the threads that probe nodes, by one of them at a time for each node."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._nodes: dict[str, _NodeChannel] = {}
        self._is_open = False
        self._wake: Callable[[], None] = lambda: None

    def begin(self, wake: Callable[[], None]) -> None:
        """Open channels from now on; before, nothing is done. ``wake`` is called, by any thread, when one tells."""
        self._is_open, self._wake = True, wake

    def update(self, name: str, transport: Transport, reading: NodeReading) -> None:
        """Wait for what runs on a node by this reading, over the transport that it came by."""
        with self._lock:
            if not self._is_open or reading.containers is None:
                return
            node = self._nodes.setdefault(name, _NodeChannel(self._cluster_id, name, self._wake))
        node.update(awaited(reading), transport)

    def is_due(self, probing: Container[str]) -> bool:
        """Whether a node has told of an end and should be asked; those that are being asked (``probing``) are not."""
        with self._lock:
            return any(node.is_due() for name, node in self._nodes.items() if name not in probing)

    def asked(self, name: str) -> None:
        """Take note of a probe that begins now: it sees what the node has told of so far."""
        with self._lock:
            if name in self._nodes:
                self._nodes[name].look_at = None

    def give_way(self, name: str) -> bool:
        """Close the node's channel for long, as it has no session for others; False where there is none."""
        with self._lock:
            node = self._nodes.get(name)
        return node is not None and node.give_way()

    def drop(self, name: str) -> None:
        """Close the channel of a node that is reached otherwise from now on, or not at all."""
        with self._lock:
            node = self._nodes.pop(name, None)
        if node is not None:
            node.close()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            self._is_open = False
            names = list(self._nodes)
        for name in names:
            self.drop(name)


class _NodeChannel:
    """One node's channel, and when the node is to be asked because of what came over it.

    Attributes:
        look_at: Monotonic seconds; None: not before the tick.
    """

    def __init__(self, cluster_id: str, name: str, wake: Callable[[], None]) -> None:
        self._cluster_id, self._name, self._wake = cluster_id, name, wake
        self._lock = threading.Lock()
        self._channel: _Channel | None = None
        self.look_at: float | None = None
        self._told: set[Awaited] = set()
        self._looks: dict[Awaited, int] = {}  # of those told of that are still said to run
        self._idle_since = self._not_before = self._pause_s = 0.0

    def is_due(self) -> bool:
        at = self.look_at
        return at is not None and time.monotonic() >= at

    def update(self, jobs: frozenset[Awaited], transport: Transport) -> None:
        now = time.monotonic()
        if jobs:
            self._idle_since = now
        channel = self._channel
        if channel is not None and not (channel.is_alive and channel.transport is transport):
            self._lost(now)
        elif channel is not None and now - self._idle_since > LINGER_S:
            self.close()
        if self._channel is None and jobs and now >= self._not_before:
            try:
                self._channel = _Channel(self._cluster_id, self._name, transport, self._hear)
            except TransportError:
                self._lost(now)
        channel = self._channel
        if channel is not None:
            channel.wait_for(self._untold(jobs, now))

    def _untold(self, jobs: frozenset[Awaited], now: float) -> frozenset[Awaited]:
        """Those that are still to be waited for. What was told of and goes on is soon looked at again, for a while."""
        with self._lock:
            self._told &= jobs
            self._looks = {job: self._looks.get(job, 0) + 1 for job in self._told}
            again = any(looks <= LOOKS for looks in self._looks.values())
            self.look_at = now + LOOK_AGAIN_S if again else None
            return jobs - self._told

    def _hear(self, job: Awaited) -> None:
        with self._lock:
            self._told.add(job)
            self.look_at = time.monotonic()
        self._wake()

    def _lost(self, now: float) -> None:
        channel = self._channel
        lived = channel is not None and now - channel.opened > LONGEST_PAUSE_S
        self._pause_s = 0.0 if lived else min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, 2 * self._pause_s))
        self._not_before = now + self._pause_s
        self.close()

    def give_way(self) -> bool:
        if self._channel is None:
            return False
        self._not_before = time.monotonic() + GIVEN_UP_S
        self.close()
        return True

    def close(self) -> None:
        channel, self._channel = self._channel, None
        with self._lock:
            self._told.clear()
        if channel is not None:
            channel.close()


class _Channel:
    """A session with payload/ends.py, read by a thread of its own, which gives ``hear`` what has ended."""

    def __init__(self, cluster_id: str, name: str, transport: Transport, hear: Callable[[Awaited], None]) -> None:
        """Open it.

        Raises:
            TransportError: It is refused.
        """
        self.transport, self.opened, self.is_alive = transport, time.monotonic(), True
        python = has_python(transport)
        self._session: Session = transport.session(channel_argv(cluster_id, name, python))
        self._hear, self._sent, self._rest = hear, frozenset[Awaited](), b""
        threading.Thread(target=self._listen, name=f"ends-{name}", daemon=True).start()
        self._write(program(python))

    def wait_for(self, jobs: frozenset[Awaited]) -> None:
        """Wait for these, and no others."""
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
                self.close()  # nobody reads there
            data = data[sent:]

    def _listen(self) -> None:
        with contextlib.suppress(TransportError):
            self._session.pump(self._take)
        self.is_alive = False

    def _take(self, stream: int, chunk: bytes) -> None:
        if stream != 1:
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            told = parse_told(line)
            for job in self._sent:  # what else comes is what a start-up file prints
                if told in (job, (job[0], None)):
                    self._hear(job)
