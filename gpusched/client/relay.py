"""Access to running jobs for users who cannot log in to the nodes: through the controller, which checks the user."""

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
    """No controller is listening."""


def is_needed(client: Client) -> bool:
    """Return whether this user must go through the controller: in shared mode all users but root and its own."""
    try:
        owner = client.state.stat().st_uid
    except OSError:
        return False
    if os.getuid() in (0, owner):
        return False
    return client.is_shared


def stream(client: Client, request: Request) -> Iterator[bytes]:
    """Yield the requested output as it arrives.

    Raises:
        NotListening: No controller is listening.
        TransportError: The connection, or the controller's connection to the node, was lost.
        GpuschedError: The controller refused the request.
    """
    frames = Frames()
    with connect(client, request) as sock:
        while True:
            for kind, payload in decoded_frames(frames, receive(sock)):
                if kind == EXITED:
                    return
                yield payload


def run(client: Client, request: Exec) -> int:
    """Run a command with our stdin (if requested), stdout and stderr; return its exit code.

    Raises:
        GpuschedError: See `stream`.
    """
    with connect(client, request) as sock, contextlib.ExitStack() as stack:
        if request.terminal is not None:
            stack.enter_context(raw_terminal())
        resized = stack.enter_context(window_changes()) if request.terminal is not None else None
        return copy_streams(sock, request.stdin or request.terminal is not None, resized)


def terminal() -> Terminal:
    """Return a description of our terminal for the remote side."""
    rows, columns = window_size()
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert({"name": os.environ.get("TERM") or "xterm", "rows": rows, "columns": columns}, Terminal)
    return Terminal()


def connect(client: Client, request: Request) -> socket.socket:
    """Return a connection on which the request has been sent.

    Raises:
        NotListening: No controller is listening.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        folder = os.open(client.state, os.O_PATH | os.O_DIRECTORY)
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
    """Return the data that has arrived.

    Raises:
        TransportError: The other side has closed the connection.
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


def decoded_frames(frames: Frames, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the frames that this data completes.

    Raises:
        GpuschedError: A frame reports an error; see `stream`.
    """
    try:
        for kind, payload in frames.feed(data):
            if kind == FAILED:
                failure = msgspec.json.decode(payload, type=Failure)
                if failure.transient:
                    raise TransportError("ssh", failure.message, failure.hint)
                raise GpuschedError(failure.message, failure.hint)
            if kind == EXITED:
                exit_code(payload)
            yield kind, payload
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise GpuschedError("the controller runs another version", "use the same version of gpusched") from None


def copy_streams(
    sock: socket.socket,
    with_input: bool,
    resized: int | None,
    frames: Frames | None = None,
    scheduled: tuple[float, Callable[[], bytes]] | None = None,
    keep_input_open: bool = False,
    watch: tuple[float, Callable[[], None]] | None = None,
) -> int:
    """Copy data both ways until the program exits; return its exit code. Neither direction blocks the other.

    ``frames`` may hold data received earlier. ``scheduled``: (seconds, function) whose result is sent after that time.
    ``keep_input_open``: the end of our input is a lost connection, and is not passed on to the program.
    ``watch``: (seconds, function) that is called at such intervals.

    Raises:
        GpuschedError: See `stream`.
        TransportError: Our input has ended, with ``keep_input_open``.
        BrokenPipeError: The reader of our output has gone (``| head``), whether or not there is output.
    """
    sock.setblocking(False)
    frames, unsent, received = frames or Frames(), bytearray(), b""
    send_at = time.monotonic() + scheduled[0] if scheduled is not None else None
    watch_at = time.monotonic() + watch[0] if watch is not None else None
    while True:
        for kind, payload in decoded_frames(frames, received):
            if kind == EXITED:
                return exit_code(payload)
            _write(2 if kind == ERRORS else _stdout(), payload)
        received = b""
        readers = [sock.fileno()] if resized is None else [sock.fileno(), resized]
        if with_input and len(unsent) < CHUNK:  # no more input than the controller takes: memory stays bounded
            readers.append(0)
        due = [at for at in (send_at, watch_at) if at is not None]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, writable = _poll(readers, sock.fileno() if unsent else None, timeout_s)
        if scheduled is not None and send_at is not None and time.monotonic() >= send_at:
            unsent += scheduled[1]()
            send_at = None
        if watch is not None and watch_at is not None and time.monotonic() >= watch_at:
            watch[1]()
            watch_at = time.monotonic() + watch[0]
        if sock.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                received = receive(sock)
        if resized is not None and resized in readable:
            os.read(resized, CHUNK)
            unsent += size_frame(*window_size())
        if 0 in readable:
            data = _read_stdin()
            if not data and keep_input_open:
                raise TransportError("ssh", "the terminal was closed")
            unsent += frame(INPUT, data) if data else frame(INPUT_ENDED)
            with_input = bool(data)
        if writable:
            with contextlib.suppress(OSError):  # the peer has closed; its last output is still to be read
                del unsent[: sock.send(unsent)]


def show_line(line: str) -> None:
    """Show a line of ours in a terminal that is raw."""
    _write(2, f"\r\n{line}\r\n".encode())


def _poll(readers: Iterable[int], writer: int | None, timeout_s: float | None) -> tuple[set[int], bool]:
    """Return the readable descriptors, and whether ``writer`` is writable.

    Raises:
        BrokenPipeError: The pipe that our output goes to has lost its reader.
    """
    poll, stdout = select.poll(), _stdout()
    if _is_pipe(stdout):  # not for a terminal: if it is closed, the job is kept
        poll.register(stdout, 0)  # POLLERR is always reported
    events_of = dict.fromkeys(readers, select.POLLIN)
    if writer is not None:
        events_of[writer] = events_of.get(writer, 0) | select.POLLOUT
    for descriptor, events in events_of.items():
        poll.register(descriptor, events)
    found = dict(poll.poll(None if timeout_s is None else 1000 * timeout_s))
    if found.get(stdout, 0) & select.POLLERR:
        raise BrokenPipeError
    readable = {d for d in readers if found.get(d, 0) & ~select.POLLOUT}
    return readable, bool(writer is not None and found.get(writer, 0) & (select.POLLOUT | select.POLLERR))


def _stdout() -> int:
    """Return the descriptor of our stdout, which is 1 unless a command has redirected it (`cli.stdout`)."""
    try:
        return sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or none
        return 1


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False


def _read_stdin() -> bytes:
    try:
        return os.read(0, CHUNK)
    except OSError:  # of a terminal that was closed
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def window_size() -> tuple[int, int]:
    """Return the rows and columns of our terminal."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Pass every key, including Ctrl-C, to the other side."""
    saved = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # keeps what was typed ahead
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)


@contextlib.contextmanager
def window_changes() -> Iterator[int]:
    """Yield a descriptor that becomes readable when the window is resized."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def changed(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b"w")

    previous = signal.signal(signal.SIGWINCH, changed)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGWINCH, previous)
        os.close(reader)
        os.close(writer)
