"""Ports of a job, brought to this machine: one connection of `gpusched.model.relay` for each that is made here."""

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

HERE = "127.0.0.1"
_FIRST_FOR_ALL = 1024  # those below are the system's
_TRIED = 100
Connect = Callable[[int], socket.socket]
"""Opens a connection to a port of the job."""


class Forwards:
    """Ports here that lead to ports of a job, once there is one. They are taken at once, or refused."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Take the ports of ``--forward PORT`` and ``--forward HERE:THERE``.

        Raises:
            UsageError: It is none, or another program has the port here.
        """
        self._listeners: list[tuple[socket.socket, int]] = []
        self._serving = False
        try:
            asked = [_ports(text) for text in texts]
            for here, there in asked:
                self._listeners.append((_listener(here, there, {port for port, _ in asked}), there))
        except BaseException:
            self.close()
            raise

    def serve(self, connect: Connect) -> Iterator[str]:
        """From now on connections are taken; a line for people for each port."""
        for listener, port in self._listeners:
            if not self._serving:
                listener.listen(64)
                threading.Thread(target=_accept, args=(listener, port, connect), daemon=True).start()
            yield f"forwarding {HERE}:{listener.getsockname()[1]} to port {port} of the job"
        self._serving = True

    def close(self) -> None:
        """Give the ports back."""
        for listener, _ in self._listeners:
            listener.close()


def _ports(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", text)
    ports = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not all(0 < port < 65536 for port in ports):
        raise UsageError(f"--forward: expected PORT or LOCAL:REMOTE, found {text[:40]!r}", "8888, 9000:8888")
    return ports


def _listener(here: int, there: int, asked: Container[int]) -> socket.socket:
    try:
        return _bound(here)
    except OSError as error:
        free = _free_port(here, asked)
        raise UsageError(
            f"--forward: port {here} cannot be opened on this machine: {error.strerror}", f"--forward {free}:{there}"
        ) from None


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HERE, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _free_port(near: int, asked: Container[int]) -> int:
    """A port that can be had here, the next after ``near`` if possible (80: 8081), and none that is ``asked`` for."""
    first = near + 1 if near >= _FIRST_FOR_ALL else near + 8001
    for port in (*range(first, min(first + _TRIED, 65536)), 0):  # 0: any that is free
        with contextlib.suppress(OSError), _bound(port) as sock:
            if port not in asked:
                sock.listen(1)  # elsewhere two may be bound to a port, but only one listens
                return int(sock.getsockname()[1])
    return first


def _accept(listener: socket.socket, port: int, connect: Connect) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_carry, args=(sock, port, connect), daemon=True).start()


def _carry(here: socket.socket, port: int, connect: Connect) -> None:
    """One connection. Where the job does not take it, it is broken off, as by a port that nobody listens on."""
    with here, contextlib.suppress(GpuschedError, OSError), connect(port) as there:
        threading.Thread(target=_send, args=(here, there), daemon=True).start()
        try:
            _receive(there, here)
        except GpuschedError:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            for sock in (here, there):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _send(here: socket.socket, there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := here.recv(CHUNK):
            there.sendall(frame(INPUT, data))
        there.sendall(frame(INPUT_ENDED))


def _receive(there: socket.socket, here: socket.socket) -> None:
    frames = Frames()
    while True:
        for kind, payload in relay.checked(frames, relay.receive(there)):
            if kind == EXITED:
                return
            if kind == OUTPUT:
                here.sendall(payload)
