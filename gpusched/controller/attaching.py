"""Interactive jobs, for the relay: attaching to them, and forwarding their ports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpusched.controller.peers import RelayPeer, forward_streams
from gpusched.errors import GpuschedError
from gpusched.model import relay as wire
from gpusched.model.resources import Node, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, sessions
from gpusched.nodes.transport import Transport, TransportError

ATTENDANCE_S = 15.0
"""Interval at which the node is notified that a client is attached."""
_ATTENDANCE_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 30.0
_MAX_ADDRESSES = 1000


def attach(
    peer: RelayPeer, node: Node, settings: Settings, ref: AttemptRef, request: wire.Attach, kept_s: float
) -> bytes:
    """Attach a client to a job until either ends; return the last frame.

    Attendance follows the client: when it disconnects, the node counts the job as unattended, whatever happens to the
    session.

    Raises:
        TransportError: The connection was lost, or ended without the job.
    """
    transport = open_transport(node, settings)
    try:
        session = transport.session(sessions.attach_argv(ref), request.terminal)
        with _attended(transport, lambda: open_transport(node, settings), ref, min(ATTENDANCE_S, kept_s / 4)):
            forward_streams(peer, session, with_input=True, mark=sessions.MARK)
        status = transport.run(sessions.ended(ref), _QUERY_TIMEOUT_S).stdout.strip()
    finally:
        transport.close()
    if status == b"failed":
        return wire.exit_frame(wire.NOT_STARTED)
    if not status.isdigit() or len(status) > 3:
        raise TransportError("ssh", f"{ref.node}: the connection to {ref.name} ended", "the job may still be running")
    return wire.exit_frame(int(status))


@contextmanager
def _attended(transport: Transport, reopen: Callable[[], Transport], ref: AttemptRef, pause_s: float) -> Iterator[None]:
    stopped = threading.Event()

    def report() -> None:
        connection = transport
        while not stopped.is_set():
            try:
                connection.run(sessions.note_attached(ref), _ATTENDANCE_TIMEOUT_S)
            except TransportError:  # lost, or limited to one session: use another connection
                if connection is not transport:
                    connection.close()
                connection = reopen()
            stopped.wait(pause_s)
        if connection is not transport:
            connection.close()

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()


class Tunnels:
    """Connections to nodes for port forwarding: one per node, shared by all clients while any uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Node, tuple[Transport, int]] = {}
        self._addresses: dict[str, str] = {}

    def forward(self, peer: RelayPeer, node: Node, settings: Settings, ref: AttemptRef, port: int) -> bytes:
        """Connect a client to a port of a job until either ends; return the last frame.

        Raises:
            TransportError: The node cannot be reached, or nothing listens there.
            GpuschedError: The job has no address that its node can reach.
        """
        with self._connection(node, settings) as transport:
            session = transport.dial(self._address(transport, ref), port)
            return forward_streams(peer, session, with_input=True)

    @contextmanager
    def _connection(self, node: Node, settings: Settings) -> Iterator[Transport]:
        with self._lock:
            transport, users = self._open.get(node) or (open_transport(node, settings), 0)
            self._open[node] = transport, users + 1
        try:
            yield transport
        finally:
            with self._lock:
                users = self._open[node][1] - 1
                self._open[node] = transport, users
                if not users:
                    del self._open[node]
            if not users:
                transport.close()

    def _address(self, transport: Transport, ref: AttemptRef) -> str:
        known = self._addresses.get(ref.name)
        if known is not None:
            return known
        result = transport.run(sessions.address(ref), _QUERY_TIMEOUT_S)
        address = result.stdout.decode(errors="replace").strip()
        if result.exit_code or not address:
            raise GpuschedError(f"{ref.node}: {result.complaint}")
        if len(self._addresses) >= _MAX_ADDRESSES:
            self._addresses.clear()
        self._addresses[ref.name] = address
        return address
