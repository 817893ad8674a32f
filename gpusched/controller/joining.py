"""Jobs that people work in, for the relay: being attached, and reaching a job's ports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpusched.controller.peers import RelayPeer, talk
from gpusched.errors import GpuschedError
from gpusched.model import relay as wire
from gpusched.model.resources import Node, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, sessions
from gpusched.nodes.transport import Transport, TransportError

NOTE_S = 15.0
"""So often it is noted on the node that somebody is attached."""
_NOTE_WITHIN_S = 60.0
_ASK_S = 30.0
_MOST_ADDRESSES = 1000


def join(
    peer: RelayPeer, node: Node, settings: Settings, ref: AttemptRef, request: wire.Attach, kept_s: float
) -> bytes:
    """Connect a client with a job until either ends; returns the last frame.

    It is the client who is noted to be there: as soon as it is gone, nobody is, whatever becomes of the node's end.

    Raises:
        TransportError: The connection was lost, or ended without the job.
    """
    transport = open_transport(node, settings)
    try:
        session = transport.session(sessions.attach_argv(ref), request.terminal)
        with _noting(transport, lambda: open_transport(node, settings), ref, min(NOTE_S, kept_s / 4)):
            talk(peer, session, with_input=True, mark=sessions.MARK)
        told = transport.run(sessions.ended(ref), _ASK_S).stdout.strip()
    finally:
        transport.close()
    if told == b"failed":
        return wire.exit_frame(wire.NOT_STARTED)
    if not told.isdigit():
        raise TransportError("ssh", f"{ref.node}: the connection to {ref.name} ended", "the job need not have")
    return wire.exit_frame(int(told))


@contextmanager
def _noting(transport: Transport, another: Callable[[], Transport], ref: AttemptRef, pause_s: float) -> Iterator[None]:
    over = threading.Event()

    def note() -> None:
        own = transport
        while not over.is_set():
            try:
                own.run(sessions.attended(ref), _NOTE_WITHIN_S)
            except TransportError:  # lost; or it may have but one session: then by one of our own
                if own is not transport:
                    own.close()
                own = another()
            over.wait(pause_s)
        if own is not transport:
            own.close()

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


class Tunnels:
    """Connections to nodes through which jobs' ports are reached: one for all who use it, as long as anybody does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Node, tuple[Transport, int]] = {}
        self._addresses: dict[str, str] = {}

    def forward(self, peer: RelayPeer, node: Node, settings: Settings, ref: AttemptRef, port: int) -> bytes:
        """Connect a client with a port of a job until either ends; returns the last frame.

        Raises:
            TransportError: The node cannot be reached, or nothing listens there.
            GpuschedError: The job has no address that its node can reach.
        """
        with self._used(node, settings) as transport:
            session = transport.dial(self._address(transport, ref), port)
            return talk(peer, session, with_input=True)

    @contextmanager
    def _used(self, node: Node, settings: Settings) -> Iterator[Transport]:
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
        result = transport.run(sessions.address(ref), _ASK_S)
        told = result.stdout.decode(errors="replace").strip()
        if result.exit_code or not told:
            raise GpuschedError(f"{ref.node}: {result.complaint}")
        if len(self._addresses) >= _MOST_ADDRESSES:
            self._addresses.clear()
        self._addresses[ref.name] = told
        return told
