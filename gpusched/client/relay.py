"""The way to running jobs of users who cannot log in to the nodes: through the controller, which looks who asks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from gpusched.config.paths import SHARED_STATE
from gpusched.errors import GpuschedError
from gpusched.model.relay import (
    CHUNK,
    ERRORS,
    EXITED,
    FAILED,
    INPUT,
    INPUT_ENDED,
    REQUEST,
    SOCKET,
    Exec,
    Failure,
    Frames,
    ProtocolError,
    Request,
    Terminal,
    exit_code,
    frame,
    size_frame,
)
from gpusched.nodes.transport import TransportError

if TYPE_CHECKING:
    from gpusched.client.context import Client


class NotListening(GpuschedError):
    """No controller listens."""


def is_needed(client: Client) -> bool:
    """Whether this user of a shared installation goes through the controller: not root, not the controller's own."""
    try:
        owner = client.state.stat().st_uid
    except OSError:
        return False
    if os.getuid() in (0, owner):
        return False
    return client.state == SHARED_STATE or client.inventory.settings.shared


def stream(client: Client, request: Request) -> Iterator[bytes]:
    """The output that is asked for, as it comes.

    Raises:
        NotListening: No controller listens.
        TransportError: The connection, or the controller's to the node, was lost.
        GpuschedError: The controller says no.
    """
    frames = Frames()
    with connect(client, request) as sock:
        while True:
            for kind, payload in checked(frames, receive(sock)):
                if kind == EXITED:
                    return
                yield payload


def run(client: Client, request: Exec) -> int:
    """Run a command with our stdin (where it is asked for), stdout and stderr; returns its exit code.

    Raises:
        GpuschedError: See `stream`.
    """
    with connect(client, request) as sock, contextlib.ExitStack() as stack:
        if request.terminal is not None:
            stack.enter_context(raw_terminal())
        resized = stack.enter_context(resizes()) if request.terminal is not None else None
        return talk(sock, request.stdin or request.terminal is not None, resized)


def terminal() -> Terminal:
    """Ours, as the other side shall see it."""
    rows, columns = window_size()
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert({"name": os.environ.get("TERM") or "xterm", "rows": rows, "columns": columns}, Terminal)
    return Terminal()


def connect(client: Client, request: Request) -> socket.socket:
    """A connection on which this was asked for.

    Raises:
        NotListening: No controller listens.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        folder = os.open(client.state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # a socket's path may be no longer than 107 bytes
        finally:
            os.close(folder)
        sock.sendall(frame(REQUEST, msgspec.json.encode(request)))
        return sock
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise NotListening(
            "running jobs are reached through the controller, which is not listening",
            "start 'gpusched controller' ('gpusched tick' does not listen), or read the output after the job ends",
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        return sock  # the relay has sent why, which is still to be read
    except OSError as error:
        sock.close()
        raise GpuschedError(f"{client.state / SOCKET}: {error.strerror}") from None


def receive(sock: socket.socket) -> bytes:
    """What has come.

    Raises:
        TransportError: The other side is gone.
    """
    try:
        data = sock.recv(CHUNK)
    except BlockingIOError:
        raise
    except OSError:
        data = b""
    if not data:
        raise TransportError("ssh", "the controller closed the connection", "is it running?")
    return data


def checked(frames: Frames, data: bytes) -> Iterator[tuple[int, bytes]]:
    """The frames that are complete with this.

    Raises:
        GpuschedError: One says why nothing more comes; see `stream`.
    """
    try:
        for kind, payload in frames.feed(data):
            if kind == FAILED:
                failure = msgspec.json.decode(payload, type=Failure)
                if failure.transient:
                    raise TransportError("ssh", failure.message, failure.hint)
                raise GpuschedError(failure.message, failure.hint)
            yield kind, payload
    except (ProtocolError, msgspec.MsgspecError, struct.error):
        raise GpuschedError("the controller runs another version", "use the same version of gpusched") from None


def talk(
    sock: socket.socket,
    with_input: bool,
    resized: int | None,
    frames: Frames | None = None,
    after: tuple[float, Callable[[], bytes]] | None = None,
    keeps: bool = False,
) -> int:
    """Pass on both ways, waiting for neither side while the other has something to say; returns the exit code.

    ``frames`` may hold what was received before. ``after`` so many seconds what is called there is sent. ``keeps``: the
    end of our input is none of the other side's.

    Raises:
        GpuschedError: See `stream`.
        BrokenPipeError: Nobody reads our output any more (``| head``), whether or not there is any.
    """
    sock.setblocking(False)
    frames, unsent, heard = frames or Frames(), bytearray(), b""
    due = time.monotonic() + after[0] if after is not None else None
    while True:
        for kind, payload in checked(frames, heard):
            if kind == EXITED:
                return exit_code(payload)
            _write(2 if kind == ERRORS else _stdout(), payload)
        heard = b""
        listened = [sock.fileno()] if resized is None else [sock.fileno(), resized]
        if with_input and len(unsent) < CHUNK:
            listened.append(0)
        left = None if due is None else max(0.0, due - time.monotonic())
        readable, writable = _ready(listened, sock.fileno() if unsent else None, left)
        if after is not None and due is not None and time.monotonic() >= due:
            unsent += after[1]()
            due = None
        if sock.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                heard = receive(sock)
        if resized is not None and resized in readable:
            os.read(resized, CHUNK)
            unsent += size_frame(*window_size())
        if 0 in readable:
            data = _typed()
            if not data and keeps:
                raise TransportError("ssh", "the terminal was closed")
            unsent += frame(INPUT, data) if data else frame(INPUT_ENDED)
            with_input = bool(data)
        if writable:
            with contextlib.suppress(OSError):  # it is gone; its last output is still to be read
                del unsent[: sock.send(unsent)]


def _ready(listened: Iterable[int], sending: int | None, timeout_s: float | None) -> tuple[set[int], bool]:
    """Which descriptors can be read, and whether the one that sends can be written to.

    Raises:
        BrokenPipeError: The pipe that our output goes to has lost its reader.
    """
    poll, ours = select.poll(), _stdout()
    if _is_pipe(ours):  # a terminal that is gone is another matter: the job is kept
        poll.register(ours, 0)  # errors are told of anyway
    wanted = dict.fromkeys(listened, select.POLLIN)
    if sending is not None:
        wanted[sending] = wanted.get(sending, 0) | select.POLLOUT
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    found = dict(poll.poll(None if timeout_s is None else 1000 * timeout_s))
    if found.get(ours, 0) & select.POLLERR:
        raise BrokenPipeError
    readable = {d for d in listened if found.get(d, 0) & ~select.POLLOUT}
    return readable, bool(sending is not None and found.get(sending, 0) & (select.POLLOUT | select.POLLERR))


def _stdout() -> int:
    """Return the descriptor of our stdout: 1 only where no command line has moved it (`cli.stdout`)."""
    try:
        return sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or none
        return 1


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False


def _typed() -> bytes:
    try:
        return os.read(0, CHUNK)
    except OSError:  # of a terminal that was closed
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def window_size() -> tuple[int, int]:
    """Rows and columns of our terminal."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Every key goes to the other side, Ctrl-C too."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead counts
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def resizes() -> Iterator[int]:
    """A descriptor from which a byte can be read whenever the window got another size."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def changed(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(theirs, b"w")

    before = signal.signal(signal.SIGWINCH, changed)
    try:
        yield ours
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(ours)
        os.close(theirs)
