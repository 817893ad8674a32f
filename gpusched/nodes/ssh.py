"""Commands on a node over one lasting SSH connection."""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from gpusched.model.relay import CHUNK, Terminal
from gpusched.model.resources import Node, Settings
from gpusched.nodes.load_paramiko import paramiko
from gpusched.nodes.ssh_config import resolve_node
from gpusched.nodes.ssh_connect import Connection, connect
from gpusched.nodes.transport import (
    CommandResult,
    RemoteScript,
    Session,
    SessionRefused,
    TransportError,
    output_too_large,
    stream_argv,
)
from gpusched.nodes.watchdog import guard

_INLINE_BYTES = 16384  # stdin up to this size is sent before reading; more is pumped by a thread of its own
_READ_BYTES = 1 << 20
_WINDOW_BYTES = 4 << 20
_WRITE_S = 1.0
_DATA, _REQUEST = 94, 98  # SSH_MSG_CHANNEL_...
_PROHIBITED = 1  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED
_NOT_LISTENING_HINT = "does the job listen on it by now, and at 127.0.0.1?"
# What paramiko raises when a connection is broken, sometimes after it has returned.
_CONNECTION_ERRORS = (EOFError, OSError, paramiko.SSHException)


class SshTransport:
    """`gpusched.nodes.transport.Transport` over paramiko: connects when needed, again after a loss."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._settings = settings
        self._connecting = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        """See `gpusched.nodes.transport.Transport.run`; after a timeout the connection is made anew."""
        deadline = time.monotonic() + timeout_s
        with self._explained(deadline, timeout_s), self._session(deadline) as (connection, channel):
            return self._exchange(connection, channel, script, deadline)

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        """See `gpusched.nodes.transport.Transport.stream`."""
        timeout_s = self._settings.probe_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._explained(deadline, timeout_s), self._session(deadline) as (connection, channel):
            channel.set_combine_stderr(True)
            _request_exec(channel, self._command(stream_argv(script.argv)))
            with self._explained(math.inf, timeout_s):  # the deadline is for opening it
                while chunk := channel.recv(_READ_BYTES):
                    yield chunk
                _exit_code(connection, channel)

    def close(self) -> None:
        """Drop the connection for good; one that another thread is making is dropped by that."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def session(self, argv: tuple[str, ...], terminal: Terminal | None = None) -> Session:
        """See `gpusched.nodes.transport.Transport.session`."""
        timeout_s = self._settings.probe_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._explained(deadline, timeout_s):
            connection, channel = self._channel(deadline)
            if terminal is not None:
                with guard(deadline, connection.drop):
                    channel.get_pty(terminal.name, terminal.columns, terminal.rows)
            _request_exec(channel, self._command(argv))
            return _SshSession(self._node.name, connection, channel)

    def dial(self, host: str, port: int) -> Session:
        """See `gpusched.nodes.transport.Transport.dial`; by sshd's own forwarding."""
        timeout_s = self._settings.probe_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._explained(deadline, timeout_s):
            connection = self._connected(deadline)
            try:
                with guard(deadline, connection.drop):
                    channel = connection.transport.open_channel(
                        "direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=max(0.1, deadline - time.monotonic())
                    )
            except paramiko.ChannelException as error:
                name, why = self._node.name, error.text or str(error)
                if error.code == _PROHIBITED:
                    hint = "AllowTcpForwarding of its sshd_config says no"
                    raise TransportError("ssh", f"{name}: sshd forwards no ports: {why}", hint) from None
                reason = f"{name}: port {port} cannot be reached: {why}"
                raise TransportError("refused", reason, _NOT_LISTENING_HINT) from None
            return _SshTunnel(self._node.name, connection, channel)

    def _command(self, argv: tuple[str, ...]) -> str:
        # sudo outermost: only what runs as root too can end what it runs.
        return shlex.join(("sudo", "-n", "-H", "--", *argv) if self._node.become == "sudo" else argv)

    @contextlib.contextmanager
    def _explained(self, deadline: float, timeout_s: float) -> Iterator[None]:
        """Raise `TransportError` if the connection breaks in the block, or is too late."""
        try:
            yield
        except _CONNECTION_ERRORS as error:
            name = self._node.name
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline - 0.05:
                raise TransportError(
                    "timeout",
                    f"{name}: no answer within {timeout_s:.3g} s",
                    "it may be frozen, overloaded or disconnected",
                ) from None
            raise _connection_lost(name, f": {str(error) or 'closed by the other side'}") from None

    @contextlib.contextmanager
    def _session(self, deadline: float) -> Iterator[tuple[Connection, paramiko.Channel]]:
        connection, channel = self._channel(deadline)
        try:
            yield connection, channel
        finally:
            with contextlib.suppress(Exception):
                channel.close()

    def _channel(self, deadline: float, retry: bool = True) -> tuple[Connection, paramiko.Channel]:
        """Return an open session channel; a connection found dead here is replaced once (nothing was sent)."""
        connection = self._connected(deadline)
        try:
            with guard(deadline, connection.drop):
                channel = connection.transport.open_session(
                    window_size=_WINDOW_BYTES, timeout=max(0.1, deadline - time.monotonic())
                )
        except paramiko.ChannelException as error:
            raise SessionRefused(
                "ssh",
                f"{self._node.name}: sshd refuses another session: {error.text or error}",
                "raise MaxSessions in its sshd_config, or PermitTTY/ForceCommand restricts this account",
            ) from None
        except _CONNECTION_ERRORS:
            self._forget(connection)
            if not retry or time.monotonic() >= deadline:
                raise
            return self._channel(deadline, retry=False)
        return connection, channel

    def _connected(self, deadline: float) -> Connection:
        connection = self._connection
        if connection is not None and connection.transport.is_active():
            return connection
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransportError("timeout", f"{self._node.name}: still connecting", "check the node")
        try:
            connection = self._connection
            if not self._closed and (connection is None or not connection.transport.is_active()):
                self._drop()
                target = resolve_node(self._node, self._settings)
                connection = connect(target, self._settings, self._node.name, deadline)
                self._connection = connection
            if self._closed or connection is None:  # perhaps only since `connect` began
                self._drop()
                raise TransportError("unreachable", f"{self._node.name}: the connection was closed on this side")
            return connection
        finally:
            self._connecting.release()

    def _exchange(
        self, connection: Connection, channel: paramiko.Channel, script: RemoteScript, deadline: float
    ) -> CommandResult:
        output = {1: bytearray(), 2: bytearray()}

        def take(stream: int, data: bytes) -> None:
            output[stream] += data
            if len(output[1]) + len(output[2]) > script.max_bytes:
                raise output_too_large(self._node.name, script)

        try:
            with guard(deadline, connection.drop):
                _request_exec(channel, self._command(script.argv))
                _send_stdin(channel, script.stdin, deadline)
                _read_all(channel, take, _READ_BYTES, deadline)
        except TimeoutError:
            self._forget(connection)
            raise
        return CommandResult(_exit_code(connection, channel), bytes(output[1]), bytes(output[2]))

    def _forget(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):
            connection.drop()
        if self._connection is connection:
            self._connection = None


class _SshSession:
    """`gpusched.nodes.transport.Session` over a channel."""

    def __init__(self, node: str, connection: Connection, channel: paramiko.Channel) -> None:
        self._node, self._connection, self._channel = node, connection, channel
        channel.settimeout(_WRITE_S)

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        try:
            _read_all(self._channel, take, CHUNK)  # paramiko sends as it reads, and finds the connection gone
            return _exit_code(self._connection, self._channel)
        except (EOFError, paramiko.SSHException):
            raise _connection_lost(self._node) from None

    def write(self, data: bytes) -> int:
        try:
            return _send(self._channel, data)
        except TimeoutError:
            return 0
        except _CONNECTION_ERRORS:
            return len(data)

    def end_input(self) -> None:
        with contextlib.suppress(*_CONNECTION_ERRORS):
            _end_input(self._channel)

    def resize(self, rows: int, columns: int) -> None:
        channel = self._channel

        def message() -> paramiko.Message | None:  # as `resize_pty` makes it
            if channel.closed:
                return None
            return _message(channel, _REQUEST, "window-change", False, columns, rows, 0, 0)

        with contextlib.suppress(*_CONNECTION_ERRORS):
            _in_order(channel, message)

    def close(self) -> None:
        with contextlib.suppress(*_CONNECTION_ERRORS):
            self._channel.close()


class _SshTunnel(_SshSession):
    """A connection: its output ends, and that is all."""

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        while True:
            try:
                data = self._channel.recv(CHUNK)
            except TimeoutError:  # which is for writing
                continue
            if not data:
                return 0
            take(1, data)


class _WakeEvent(threading.Event):
    """One event for two buffers: paramiko clears it when either is empty, so clearing is left to `reset`."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


def _connection_lost(node: str, why: str = "") -> TransportError:
    return TransportError("ssh", f"{node}: the connection was lost{why}", "it is re-established at the next command")


def _message(channel: paramiko.Channel, number: int, *parts: str | bytes | int) -> paramiko.Message:
    """Return a message about a channel, by its number in RFC 4254, section 9."""
    made = paramiko.Message()
    made.add_byte(bytes([number]))
    for part in (channel.remote_chanid, *parts):
        if isinstance(part, bool):
            made.add_boolean(part)
        elif isinstance(part, int):
            made.add_int(part)
        else:
            made.add_string(part)
    return made


def _request_exec(channel: paramiko.Channel, command: str) -> None:
    """Ask for the command without waiting for the answer: a refusal closes the channel, which the reader sees.

    paramiko's ``exec_command`` waits for it, one more round trip (and thread switch) for every command.
    """
    transport: Any = channel.transport
    transport._send_user_message(_message(channel, _REQUEST, "exec", True, command))


def _send_stdin(channel: paramiko.Channel, data: bytes, deadline: float) -> None:
    if len(data) <= _INLINE_BYTES:
        channel.settimeout(max(0.0, deadline - time.monotonic()))
        _pump(channel, data)
        return
    channel.settimeout(None)  # the channel is closed under the thread when the caller gives up
    threading.Thread(target=_pump, args=(channel, data), daemon=True).start()


def _pump(channel: paramiko.Channel, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(*_CONNECTION_ERRORS):  # the command need not read its stdin
        while view:
            view = view[_send(channel, bytes(view[:_READ_BYTES])) :]
        _end_input(channel)


def _send(channel: paramiko.Channel, data: bytes) -> int:
    """Call ``channel.send``, in order; return how much was sent, 0 where nothing can be."""
    sent = 0

    def message() -> paramiko.Message | None:
        nonlocal sent
        if channel.closed:
            raise OSError("the channel is closed")
        sent = cast(Any, channel)._wait_for_send_window(len(data))
        return _message(channel, _DATA, data[:sent]) if sent else None

    _in_order(channel, message)
    return sent


def _end_input(channel: paramiko.Channel) -> None:
    """Call ``channel.shutdown_write``, in order."""
    _in_order(channel, cast(Any, channel)._send_eof)


def _in_order(channel: paramiko.Channel, message: Callable[[], paramiko.Message | None]) -> None:
    """Make and send under the channel's lock, so that nothing follows the close: sshd ends the connection for that.

    paramiko sends when it has let go of the lock. If the other side closes in between, paramiko's own thread answers
    with a close first. But during a key exchange no thread can send, and that one must not wait: then as paramiko does.
    """
    transport: Any = channel.transport
    with channel.lock:
        made = message()
        now = transport.clear_to_send.is_set()
        if made is not None and now:
            transport._send_user_message(made)
    if made is not None and not now:
        transport._send_user_message(made)


def _finished(channel: paramiko.Channel) -> bool:
    return bool(channel.closed or (channel.eof_received and channel.exit_status_ready()))


def _read_all(
    channel: paramiko.Channel, take: Callable[[int, bytes], None], most: int, deadline: float | None = None
) -> None:
    """Give the output to ``take`` (1: stdout, 2: stderr), at most ``most`` bytes at once, until the command has ended.

    Raises:
        TimeoutError: It has not by the deadline.
    """
    wake = _WakeEvent()
    channel.in_buffer.set_event(wake)
    channel.in_stderr_buffer.set_event(wake)
    while not _finished(channel):
        wake.reset()
        if not _read_available(channel, take, most) and not _finished(channel):
            if not wake.wait(None if deadline is None else deadline - time.monotonic()):
                raise TimeoutError
    while _read_available(channel, take, most):
        pass


def _read_available(channel: paramiko.Channel, take: Callable[[int, bytes], None], most: int) -> bool:
    """Pass on what has arrived; return whether there was anything."""
    out, err = channel.recv_ready(), channel.recv_stderr_ready()
    if out:
        take(1, channel.recv(most))
    if err:
        take(2, channel.recv_stderr(most))
    return out or err


def _exit_code(connection: Connection, channel: paramiko.Channel) -> int:
    """Return the code of a command after its output has ended; 255 where a signal ended it.

    Raises:
        EOFError: The connection broke: both look like b'' and status -1.
    """
    if channel.exit_status >= 0:
        return channel.exit_status
    if channel.eof_received:  # paramiko closes channels a moment before it marks the connection as gone
        connection.transport.join(0.05)
    if not channel.eof_received or not connection.transport.is_active():
        raise EOFError
    return 255
