"""The client side of a relay session: frames to and from the client, carrying a command's input and output."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from gpusched.model import relay as wire
from gpusched.nodes.transport import Session

REQUEST_S = 10.0  # from the connection to the complete request
UNREAD_S = 3600.0  # a client that does not read is disconnected
POLL_S = 30.0
HANG_UP_S = 5.0  # a session that accepts no input is closed after a second
_REQUESTS: msgspec.json.Decoder[wire.Request] = msgspec.json.Decoder(wire.Request)
_MAX_BEFORE_MARK = 1 << 16  # bytes kept of what a node's shell start-up files print


class RelayPeer:
    """A connected client. Frames are sent from one thread and received in another."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._frames = sock, wire.Frames()
        self.active_at = time.monotonic()
        self.sending_since: float | None = None
        self._listener: threading.Thread | None = None

    def request(self) -> wire.Request:
        """Receive the request, which is the first frame.

        Raises:
            Garbled: It is not a request, or did not arrive in time.
        """
        until = time.monotonic() + REQUEST_S
        while True:
            self._sock.settimeout(max(0.01, until - time.monotonic()))
            data = self._sock.recv(wire.CHUNK)
            if not data or time.monotonic() > until:
                raise wire.ProtocolError("no request")
            for kind, payload in self._frames.feed(data):
                if kind != wire.REQUEST:
                    raise wire.ProtocolError("no request")
                self._sock.settimeout(None)
                return _REQUESTS.decode(payload)

    def send(self, data: bytes) -> None:
        """Send, waiting for a slow client; OSError if it has disconnected."""
        self.sending_since = time.monotonic()
        self._sock.sendall(data)
        self.active_at, self.sending_since = time.monotonic(), None

    def start_listening(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        """Forward the client's frames to the session, in a thread, until it disconnects or breaks the protocol."""
        self._listener = threading.Thread(target=self.listen, args=(session, with_input, limit_s), daemon=True)
        self._listener.start()

    def hang_up(self) -> None:
        """End the connection and the listening thread; then the socket may be closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            self._listener.join(HANG_UP_S)

    def listen(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        """Run the loop of `start_listening`; return when it ends."""
        try:
            with contextlib.suppress(OSError, wire.ProtocolError):
                self._receive(session, with_input, limit_s)
        finally:
            session.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # unblocks a thread that sends

    def _receive(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        input_ended, data = False, b""
        while True:
            for kind, payload in self._frames.feed(data):
                input_ended = self._handle_frame(session, kind, payload, with_input and not input_ended) or input_ended
            if not self._wait_readable(limit_s) or not (data := self._sock.recv(wire.CHUNK)):
                return
            self.active_at = time.monotonic()

    def _wait_readable(self, limit_s: float | None) -> bool:
        """Wait for input; return False if the client exceeded a time limit."""
        poll = self._poll(select.POLLIN)
        while not poll.poll(POLL_S * 1000):
            now, since = time.monotonic(), self.sending_since
            is_idle = limit_s is not None and now - self.active_at > limit_s
            if is_idle or (since is not None and now - since > UNREAD_S):
                return False
        return True

    def _handle_frame(self, session: Session, kind: int, payload: bytes, with_input: bool) -> bool:
        """Handle a frame; return True if it ends the input."""
        if kind == wire.RESIZED and with_input:
            session.resize(*wire.size(payload))
        elif kind == wire.INPUT and with_input:
            while payload:
                payload = payload[session.write(payload) :]
                if payload and self._has_disconnected():
                    raise wire.ProtocolError("gone")
        elif kind == wire.INPUT_ENDED and with_input:
            session.end_input()
            return True
        else:
            raise wire.ProtocolError("an unexpected frame")
        return False

    def _has_disconnected(self) -> bool:
        return bool(self._poll(select.POLLRDHUP).poll(0))

    def _poll(self, events: int) -> select.poll:
        """Return a poll object for the socket; OSError if it was closed meanwhile, as from every other call."""
        poll = select.poll()
        try:
            poll.register(self._sock, events)
        except ValueError:
            raise OSError(errno.EBADF, "the socket is closed") from None
        return poll


def forward_streams(
    peer: RelayPeer,
    session: Session,
    errors: int = wire.ERRORS,
    with_input: bool = False,
    limit_s: float | None = None,
    mark: bytes = b"",
) -> bytes:
    """Forward both directions until one side ends; return the last frame.

    With a ``mark``, all output before it is dropped, and `BEGAN` is sent in its place.
    """
    kinds = {1: wire.OUTPUT, 2: errors}
    peer.start_listening(session, with_input, limit_s)

    def send(stream: int, chunk: bytes) -> None:
        peer.send(wire.frame(kinds[stream], chunk))

    try:
        return wire.exit_frame(session.pump(_AfterMark(peer, mark, send) if mark else send))
    finally:
        session.close()


class _AfterMark:
    """Drops all output, also on stderr, before the mark in stdout."""

    def __init__(self, peer: RelayPeer, mark: bytes, send: Callable[[int, bytes], None]) -> None:
        self._peer, self._mark, self._send = peer, mark, send
        self._began, self._skipped = False, b""

    def __call__(self, stream: int, chunk: bytes) -> None:
        if not self._began and stream == 1:
            before, found, chunk = (self._skipped + chunk).partition(self._mark)
            self._began, self._skipped = bool(found), before[-_MAX_BEFORE_MARK:]
            if self._began:
                self._peer.send(wire.frame(wire.BEGAN))
        if self._began and chunk:
            self._send(stream, chunk)
