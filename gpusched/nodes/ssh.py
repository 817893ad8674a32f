"""Commands on a node over one lasting SSH connection."""

from __future__ import annotations

import contextlib
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
from gpusched.nodes.transport import Result, Script, TransportError, stream_argv, too_much
from gpusched.nodes.watchdog import guard

_INLINE_BYTES = 16384  # stdin up to this size is sent before reading; more is pumped by a thread of its own
_READ_BYTES = 1 << 20
_WINDOW_BYTES = 4 << 20
_WRITE_S = 1.0


class SshTransport:
    """`gpusched.nodes.transport.Transport` over paramiko: connects when needed, again after a loss."""

    def __init__(self, node: Node, settings: Settings) -> None:
        self._node = node
        self._settings = settings
        self._connecting = threading.Lock()
        self._connection: Connection | None = None

    def run(self, script: Script, timeout_s: float) -> Result:
        """See `gpusched.nodes.transport.Transport.run`; after a timeout the connection is made anew."""
        deadline = time.monotonic() + timeout_s
        try:
            with self._session(deadline, retry=True) as (connection, channel):
                return self._exchange(connection, channel, script, deadline)
        except TransportError:
            raise
        except (TimeoutError, EOFError, OSError, paramiko.SSHException) as error:
            raise self._lost(deadline, timeout_s, error) from None

    def stream(self, script: Script) -> Iterator[bytes]:
        """See `gpusched.nodes.transport.Transport.stream`."""
        deadline = time.monotonic() + self._settings.probe_timeout_s
        try:
            with self._session(deadline, retry=True) as (connection, channel):
                channel.set_combine_stderr(True)
                _request_exec(channel, shlex.join(stream_argv(script.argv)))
                while chunk := channel.recv(_READ_BYTES):
                    yield chunk
                if _lost_while_reading(connection, channel):
                    raise EOFError
        except TransportError:
            raise
        except (EOFError, OSError, paramiko.SSHException) as error:
            raise self._lost(deadline, self._settings.probe_timeout_s, error) from None

    def close(self) -> None:
        """Drop the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def session(self, argv: tuple[str, ...], terminal: Terminal | None = None) -> SshSession:
        """See `gpusched.nodes.transport.Transport.session`."""
        timeout_s = self._settings.probe_timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            connection, channel = self._channel(deadline, retry=True)
            if terminal is not None:
                with guard(deadline, connection.drop):
                    channel.get_pty(terminal.name, terminal.columns, terminal.rows)
            _request_exec(channel, shlex.join(argv))
        except TransportError:
            raise
        except (EOFError, OSError, paramiko.SSHException) as error:
            raise self._lost(deadline, timeout_s, error) from None
        return SshSession(self._node.name, connection, channel)

    @contextlib.contextmanager
    def _session(self, deadline: float, retry: bool) -> Iterator[tuple[Connection, paramiko.Channel]]:
        connection, channel = self._channel(deadline, retry)
        try:
            yield connection, channel
        finally:
            with contextlib.suppress(Exception):
                channel.close()

    def _channel(self, deadline: float, retry: bool) -> tuple[Connection, paramiko.Channel]:
        """An open session channel; a connection that turns out to be dead here is replaced once (nothing was sent)."""
        connection = self._connected(deadline)
        try:
            with guard(deadline, connection.drop):
                channel = connection.transport.open_session(
                    window_size=_WINDOW_BYTES, timeout=max(0.1, deadline - time.monotonic())
                )
        except paramiko.ChannelException as error:
            raise TransportError(
                "ssh",
                f"{self._node.name}: sshd refuses another session: {error.text or error}",
                "raise MaxSessions in its sshd_config, or PermitTTY/ForceCommand restricts this account",
            ) from None
        except (EOFError, OSError, paramiko.SSHException):
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
            raise TransportError("timeout", f"{self._node.name}: still connecting", "is the node well?")
        try:
            connection = self._connection
            if connection is None or not connection.transport.is_active():
                self.close()
                target = resolve_node(self._node, self._settings)
                connection = connect(target, self._settings, self._node.name, deadline)
                self._connection = connection
            return connection
        finally:
            self._connecting.release()

    def _exchange(self, connection: Connection, channel: paramiko.Channel, script: Script, deadline: float) -> Result:
        wake = _Wake()
        channel.in_buffer.set_event(wake)
        channel.in_stderr_buffer.set_event(wake)
        stdout, stderr = bytearray(), bytearray()
        try:
            with guard(deadline, connection.drop):
                _request_exec(channel, shlex.join(script.argv))
                _send_stdin(channel, script.stdin, deadline)
                while not _finished(channel):
                    wake.reset()
                    if len(stdout) + len(stderr) > script.max_bytes:
                        raise too_much(self._node.name, script)
                    if not _drain(channel, stdout, stderr) and not _finished(channel):
                        if not wake.wait(deadline - time.monotonic()):
                            raise TimeoutError
                while _drain(channel, stdout, stderr):
                    pass
                if len(stdout) + len(stderr) > script.max_bytes:
                    raise too_much(self._node.name, script)
        except TimeoutError:
            self._forget(connection)
            raise
        if channel.exit_status < 0 and _lost_while_reading(connection, channel):
            raise EOFError
        return Result(channel.exit_status if channel.exit_status >= 0 else 255, bytes(stdout), bytes(stderr))

    def _forget(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):
            connection.drop()
        if self._connection is connection:
            self._connection = None

    def _lost(self, deadline: float, timeout_s: float, error: BaseException) -> TransportError:
        name = self._node.name
        if isinstance(error, TimeoutError) or time.monotonic() >= deadline - 0.05:
            return TransportError(
                "timeout", f"{name}: no answer within {timeout_s:.3g} s", "it may be frozen, overloaded or cut off"
            )
        why = str(error) or "closed by the other side"
        return TransportError("ssh", f"{name}: the connection was lost: {why}", "it is made anew at the next command")


class SshSession:
    """`gpusched.nodes.transport.Session` over a channel."""

    def __init__(self, node: str, connection: Connection, channel: paramiko.Channel) -> None:
        self._node, self._connection, self._channel = node, connection, channel
        channel.settimeout(_WRITE_S)
        self._wake = _Wake()
        channel.in_buffer.set_event(self._wake)
        channel.in_stderr_buffer.set_event(self._wake)

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        """See `gpusched.nodes.transport.Session.pump`."""
        channel = self._channel
        while not _finished(channel):
            self._wake.reset()
            if not self._pass_on(take) and not _finished(channel):
                self._wake.wait()
        while self._pass_on(take):
            pass
        if channel.exit_status < 0 and _lost_while_reading(self._connection, channel):
            raise TransportError("ssh", f"{self._node}: the connection was lost", "it is made anew at the next command")
        return channel.exit_status if channel.exit_status >= 0 else 255

    def _pass_on(self, take: Callable[[int, bytes], None]) -> bool:
        got = False
        if self._channel.recv_ready():
            take(1, self._channel.recv(CHUNK))
            got = True
        if self._channel.recv_stderr_ready():
            take(2, self._channel.recv_stderr(CHUNK))
            got = True
        return got

    def write(self, data: bytes) -> int:
        """See `gpusched.nodes.transport.Session.write`."""
        try:
            return _send(self._channel, data)
        except TimeoutError:
            return 0
        except (OSError, EOFError, paramiko.SSHException):
            return len(data)

    def end_input(self) -> None:
        """See `gpusched.nodes.transport.Session.end_input`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            _end_input(self._channel)

    def resize(self, rows: int, columns: int) -> None:
        """See `gpusched.nodes.transport.Session.resize`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            _in_order(self._channel, lambda: _window_change(self._channel, rows, columns))

    def close(self) -> None:
        """See `gpusched.nodes.transport.Session.close`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()


class _Wake(threading.Event):
    """One event for two buffers: paramiko clears it when either is empty, so clearing is left to `reset`."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


def _request_exec(channel: paramiko.Channel, command: str) -> None:
    """Ask for the command without waiting for the answer: a refusal closes the channel, which the reader sees.

    paramiko's ``exec_command`` waits for it, one more round trip (and thread switch) for every command.
    """
    message = paramiko.Message()
    message.add_byte(bytes([98]))  # SSH_MSG_CHANNEL_REQUEST, RFC 4254 section 6.5
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(True)
    message.add_string(command)
    transport: Any = channel.transport
    transport._send_user_message(message)


def _send_stdin(channel: paramiko.Channel, data: bytes, deadline: float) -> None:
    if len(data) <= _INLINE_BYTES:
        channel.settimeout(max(0.0, deadline - time.monotonic()))
        _pump(channel, data)
        return
    channel.settimeout(None)  # the channel is closed under the thread when the caller gives up
    threading.Thread(target=_pump, args=(channel, data), daemon=True).start()


def _pump(channel: paramiko.Channel, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # the command need not read its stdin
        while view:
            view = view[_send(channel, bytes(view[:_READ_BYTES])) :]
        _end_input(channel)


def _send(channel: paramiko.Channel, data: bytes) -> int:
    """``channel.send``, in order: how much was sent, 0 where nothing can be."""
    sent = 0

    def message() -> paramiko.Message | None:
        nonlocal sent
        if channel.closed:
            raise OSError("the channel is closed")
        sent = cast(Any, channel)._wait_for_send_window(len(data))
        made = paramiko.Message()
        made.add_byte(bytes([94]))  # SSH_MSG_CHANNEL_DATA, RFC 4254 section 5.2
        made.add_int(channel.remote_chanid)
        made.add_string(data[:sent])
        return made if sent else None

    _in_order(channel, message)
    return sent


def _window_change(channel: paramiko.Channel, rows: int, columns: int) -> paramiko.Message | None:
    """As ``channel.resize_pty`` makes it; None where the channel is closed."""
    if channel.closed:
        return None
    made = paramiko.Message()
    made.add_byte(bytes([98]))  # SSH_MSG_CHANNEL_REQUEST, RFC 4254 section 6.7
    made.add_int(channel.remote_chanid)
    made.add_string("window-change")
    made.add_boolean(False)
    for number in (columns, rows, 0, 0):
        made.add_int(number)
    return made


def _end_input(channel: paramiko.Channel) -> None:
    """``channel.shutdown_write``, in order."""
    _in_order(channel, cast(Any, channel)._send_eof)


def _in_order(channel: paramiko.Channel, message: Callable[[], paramiko.Message | None]) -> None:
    """Make and send under the channel's lock, so that nothing follows the close: sshd ends the connection for that.

    paramiko sends when it has let go of the lock. If the other side closes in between, paramiko's own thread answers
    with a close first. But during a key exchange nobody can send, and that thread must not wait: then as paramiko does.
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


def _drain(channel: paramiko.Channel, stdout: bytearray, stderr: bytearray) -> bool:
    got = False
    if channel.recv_ready():
        stdout += channel.recv(_READ_BYTES)
        got = True
    if channel.recv_stderr_ready():
        stderr += channel.recv_stderr(_READ_BYTES)
        got = True
    return got


def _lost_while_reading(connection: Connection, channel: paramiko.Channel) -> bool:
    """Whether the connection broke, rather than the process dying of a signal: both look like b'' and status -1."""
    if channel.exit_status >= 0:
        return False
    if channel.eof_received:  # paramiko closes channels a moment before it marks the connection as gone
        connection.transport.join(0.05)
    return not channel.eof_received or not connection.transport.is_active()
