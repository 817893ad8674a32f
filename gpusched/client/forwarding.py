"""Port forwarding from this machine into a job: one connection of `gpusched.model.relay` per local connection."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Container, Iterable, Iterator

from gpusched.client import relay
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.relay import CHUNK, EXITED, INPUT, INPUT_ENDED, OUTPUT, Frames, frame

LOCALHOST = "127.0.0.1"
_FIRST_UNPRIVILEGED = 1024  # those below are the system's
_MAX_TRIED = 100
Connect = Callable[[int], socket.socket]
"""Opens a connection to a port of the job."""


class Forwards:
    """Local ports that lead to ports of a job. They are bound at once or refused, and served once the job runs."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Bind the ports of ``--forward PORT`` and ``--forward LOCAL:REMOTE``.

        Raises:
            UsageError: It is not a port, or another program uses the local port.
        """
        self._listeners: list[tuple[socket.socket, int]] = []
        self._serving = False
        try:
            ports = [_ports(text) for text in texts]
            for local_port, remote_port in ports:
                self._listeners.append((_listener(local_port, remote_port, {port for port, _ in ports}), remote_port))
        except BaseException:
            self.close()
            raise

    def serve(self, connect: Connect) -> Iterator[str]:
        """Start to accept connections; return a line for people for each port."""
        for listener, port in self._listeners:
            if not self._serving:
                listener.listen(64)
                threading.Thread(target=_accept, args=(listener, port, connect), daemon=True).start()
            yield f"forwarding {LOCALHOST}:{listener.getsockname()[1]} to port {port} of the job"
        self._serving = True

    def close(self) -> None:
        """Release the ports."""
        for listener, _ in self._listeners:
            listener.close()


def _ports(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", text)
    ports = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not all(0 < port < 65536 for port in ports):
        raise UsageError(f"--forward: expected PORT or LOCAL:REMOTE, found {text[:40]!r}", "8888, 9000:8888")
    return ports


def _listener(local_port: int, remote_port: int, requested: Container[int]) -> socket.socket:
    try:
        return _bind(local_port)
    except OSError as error:
        free = _free_port(local_port, requested)
        problem = f"--forward: port {local_port} cannot be opened on this machine: {error.strerror}"
        raise UsageError(problem, f"--forward {free}:{remote_port}") from None


def _bind(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOCALHOST, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _free_port(near: int, requested: Container[int]) -> int:
    """Return a free port, the next after ``near`` if possible (80: 8081), and none that was ``requested``."""
    first = near + 1 if near >= _FIRST_UNPRIVILEGED else near + 8001
    for port in (*range(first, min(first + _MAX_TRIED, 65536)), 0):  # 0: any that is free
        with contextlib.suppress(OSError), _bind(port) as sock:
            if port not in requested:
                sock.listen(1)  # elsewhere two may be bound to a port, but only one listens
                return int(sock.getsockname()[1])
    return first


def _accept(listener: socket.socket, port: int, connect: Connect) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_forward, args=(sock, port, connect), daemon=True).start()


def _forward(local: socket.socket, port: int, connect: Connect) -> None:
    """Carry one connection. If the job refuses it, reset it, as a port without a listener would."""
    with local, contextlib.suppress(GpuschedError, OSError), connect(port) as remote:
        threading.Thread(target=_send, args=(local, remote), daemon=True).start()
        try:
            _receive(remote, local)
        except GpuschedError:
            local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            for sock in (local, remote):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _send(local: socket.socket, remote: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := local.recv(CHUNK):
            remote.sendall(frame(INPUT, data))
        remote.sendall(frame(INPUT_ENDED))


def _receive(remote: socket.socket, local: socket.socket) -> None:
    frames = Frames()
    while True:
        for kind, payload in relay.decoded_frames(frames, relay.receive(remote)):
            if kind == EXITED:
                return
            if kind == OUTPUT:
                local.sendall(payload)
