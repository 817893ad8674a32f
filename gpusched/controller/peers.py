"""A client's end of a session: frames to it and from it, and a command's input and output in them."""

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

REQUEST_S = 10.0  # from the connection to the whole request
UNREAD_S = 3600.0  # a client that does not read
LOOK_S = 30.0
HANG_UP_S = 5.0  # a session that takes no more input is left after a second
_REQUESTS: msgspec.json.Decoder[wire.Request] = msgspec.json.Decoder(wire.Request)
_MOST_BEFORE = 1 << 16  # of what a node's start-up files print


class RelayPeer:
    """A client's end: frames to it from one thread, frames from it in another."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._frames = sock, wire.Frames()
        self.last = time.monotonic()
        self.sending_since: float | None = None
        self._listener: threading.Thread | None = None

    def request(self) -> wire.Request:
        """The first frame.

        Raises:
            ProtocolError: It is no request, or does not come.
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
        """Send, waiting for a slow client; OSError where it is gone."""
        self.sending_since = time.monotonic()
        self._sock.sendall(data)
        self.last, self.sending_since = time.monotonic(), None

    def start_listening(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        """Pass on what the client sends, in a thread, until it goes, or says what it must not; then hang up."""
        self._listener = threading.Thread(target=self.listen, args=(session, with_input, limit_s), daemon=True)
        self._listener.start()

    def hang_up(self) -> None:
        """End the connection, and the thread that listens there: then the socket may be closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            self._listener.join(HANG_UP_S)

    def listen(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        """Do what `start_listening` does, and return at its end."""
        try:
            with contextlib.suppress(OSError, wire.ProtocolError):
                self._hear(session, with_input, limit_s)
        finally:
            session.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # a thread that sends there comes free

    def _hear(self, session: Session, with_input: bool, limit_s: float | None) -> None:
        ended, data = False, b""
        while True:
            for kind, payload in self._frames.feed(data):
                ended = self._obey(session, kind, payload, with_input and not ended) or ended
            if not self._has_news(limit_s) or not (data := self._sock.recv(wire.CHUNK)):
                return
            self.last = time.monotonic()

    def _has_news(self, limit_s: float | None) -> bool:
        """Wait for something to read; False where the client has had its time."""
        poll = self._poll(select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            now, since = time.monotonic(), self.sending_since
            if (since is not None and now - since > UNREAD_S) or (limit_s is not None and now - self.last > limit_s):
                return False
        return True

    def _obey(self, session: Session, kind: int, payload: bytes, with_input: bool) -> bool:
        """Do what a frame says; True where it ends the input."""
        if kind == wire.RESIZED and with_input:
            session.resize(*wire.size(payload))
        elif kind == wire.INPUT and with_input:
            while payload:
                payload = payload[session.write(payload) :]
                if payload and self._is_gone():
                    raise wire.ProtocolError("gone")
        elif kind == wire.INPUT_ENDED and with_input:
            session.end_input()
            return True
        else:
            raise wire.ProtocolError("an unexpected frame")
        return False

    def _is_gone(self) -> bool:
        return bool(self._poll(select.POLLRDHUP).poll(0))

    def _poll(self, events: int) -> select.poll:
        """A poll object for the socket; OSError where it was closed meanwhile, as of every other call."""
        poll = select.poll()
        try:
            poll.register(self._sock, events)
        except ValueError:
            raise OSError(errno.EBADF, "the socket is closed") from None
        return poll


def talk(
    peer: RelayPeer,
    session: Session,
    errors: int = wire.ERRORS,
    with_input: bool = False,
    limit_s: float | None = None,
    mark: bytes = b"",
) -> bytes:
    """Pass on what both sides say until one of them ends; returns the last frame.

    Where there is a ``mark``, all output before it is left out, and `BEGAN` said in its place.
    """
    kinds = {1: wire.OUTPUT, 2: errors}
    peer.start_listening(session, with_input, limit_s)

    def send(stream: int, chunk: bytes) -> None:
        peer.send(wire.frame(kinds[stream], chunk))

    try:
        return wire.exit_frame(session.pump(_Marked(peer, mark, send) if mark else send))
    finally:
        session.close()


class _Marked:
    """Looks for the mark in stdout; stderr waits for it, too."""

    def __init__(self, peer: RelayPeer, mark: bytes, send: Callable[[int, bytes], None]) -> None:
        self._peer, self._mark, self._send = peer, mark, send
        self._began, self._before = False, b""

    def __call__(self, stream: int, chunk: bytes) -> None:
        if not self._began and stream == 1:
            before, found, chunk = (self._before + chunk).partition(self._mark)
            self._began, self._before = bool(found), before[-_MOST_BEFORE:]
            if self._began:
                self._peer.send(wire.frame(wire.BEGAN))
        if self._began and chunk:
            self._send(stream, chunk)
