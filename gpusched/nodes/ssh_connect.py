"""Make one SSH connection: socket, jump hosts, host key, login. Each failure is one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpusched.model.resources import Settings
from gpusched.nodes import hostkeys
from gpusched.nodes.load_paramiko import paramiko
from gpusched.nodes.ssh_auth import authenticate
from gpusched.nodes.ssh_config import SshHop, resolve_jump
from gpusched.nodes.transport import TransportError

logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # its errors come back as exceptions; it also prints them

_LOSS_MS = 6000  # unacknowledged for that long, a connection is lost
_POLL_S = 2.0  # paramiko's reader wakes that often for nothing; its own 0.1 s costs 200 nodes 2000 wake-ups a second
_ALIVE_S = 2.0  # a jump host that does not answer within this is taken for lost
_Cleanup = Callable[[], None]
_JumpKey = tuple[str, ...]
_Trail = tuple[_JumpKey, ...]


class Connection:
    """An authenticated connection, and what must end with it (proxy process, use of a jump host)."""

    def __init__(self, transport: paramiko.Transport, sock: Any, cleanup: _Cleanup) -> None:
        self.transport = transport
        self._sock = sock
        self._cleanup = cleanup
        self._dropped = False

    def drop(self) -> None:
        """End it at once, whatever state it is in; safe from any thread and more than once."""
        if self._dropped:
            return
        self._dropped = True
        _drop(self.transport, self._sock)
        self._cleanup()


def connect(target: SshHop, settings: Settings, node: str, deadline: float, trail: _Trail = ()) -> Connection:
    """Connect, verify the host key, log in.

    The target's jump hosts are connected (and verified) first and shared between nodes; ``trail`` are the jumps that
    already wait for this connection. The deadline is on the monotonic clock.

    Raises:
        TransportError: With the kind and the reason.
    """
    sock, cleanup = _open(target, settings, node, deadline, trail)
    transport: paramiko.Transport | None = None
    try:
        transport = _handshake(sock, target, node, deadline)
        key = transport.get_remote_server_key()
        hostkeys.verify(node, target.host, target.port, target.label, target.known_hosts, key.get_name(), key.asbytes())
        authenticate(transport, target, node, deadline)
    except BaseException:
        _drop(transport, sock)
        cleanup()
        raise
    with contextlib.suppress(OSError):
        sock.settimeout(_POLL_S)
    return Connection(transport, sock, cleanup)


def _drop(transport: paramiko.Transport | None, sock: Any) -> None:
    # shutdown wakes a thread that is blocked on the socket; close alone would leave paramiko's reader there.
    with contextlib.suppress(Exception):
        sock.shutdown(socket.SHUT_RDWR) if isinstance(sock, socket.socket) else None
    with contextlib.suppress(Exception):
        if transport is not None:
            transport.close()
    with contextlib.suppress(Exception):
        sock.close()


def _handshake(sock: Any, target: SshHop, node: str, deadline: float) -> paramiko.Transport:
    budget = min(target.connect_timeout_s, _remaining(deadline))
    started = time.monotonic()
    try:
        transport = paramiko.Transport(sock)
        transport.banner_timeout = transport.handshake_timeout = budget
        security = transport.get_security_options()
        known = hostkeys.known_keys(target.known_hosts, target.label)
        security.key_types = hostkeys.preferred_algorithms(known, security.key_types)
        transport.start_client(timeout=budget)
    except (paramiko.SSHException, EOFError, OSError) as error:
        if time.monotonic() - started < budget - 0.2:
            raise _no_handshake(node, target, str(error)) from None
    else:
        if transport.initial_kex_done:
            return transport
        transport.close()
    raise TransportError(
        "timeout",
        f"{node}: {target.where} accepts connections but sshd did not answer within {budget:.0f} s",
        "the node may be frozen or overloaded",
    )


def _no_handshake(node: str, target: SshHop, error: str) -> TransportError:
    if "banner" in error:
        hint = "too many connections at once (MaxStartups), a firewall, or no SSH server on that port"
        return TransportError("ssh", f"{node}: {target.where} closed the connection before SSH began", hint)
    return TransportError("ssh", f"{node}: no SSH session with {target.where}: {error or 'connection lost'}",
                          f"try `ssh -v -p {target.port} {target.user}@{target.host}`")  # fmt: skip


def _open(target: SshHop, settings: Settings, node: str, deadline: float, trail: _Trail) -> tuple[Any, _Cleanup]:
    if target.jumps:
        return _through_jump(target, settings, node, deadline, trail)
    if target.proxy_command:
        return _through_command(target.proxy_command, node)
    return _dial(target, node, deadline), lambda: None


def _dial(target: SshHop, node: str, deadline: float) -> socket.socket:
    failure: OSError | None = None
    budget = min(target.connect_timeout_s, _remaining(deadline))
    until = time.monotonic() + budget
    for family, kind, protocol, _, address in _addresses(target, node, budget):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # paramiko writes small; 40 ms a turn without
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOSS_MS)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
            sock.settimeout(max(0.05, until - time.monotonic()))
            sock.connect(address)
            return sock
        except OSError as error:
            failure = failure or error
            sock.close()
    raise _dial_error(failure, target, node, budget)


def _dial_error(failure: OSError | None, target: SshHop, node: str, budget: float) -> TransportError:
    if isinstance(failure, ConnectionRefusedError):
        return TransportError("refused", f"{node}: nothing is listening on {target.host} port {target.port}",
                              "is sshd running there, and is the port right?")  # fmt: skip
    if failure is None or isinstance(failure, TimeoutError) or failure.errno == errno.ETIMEDOUT:
        return TransportError("timeout", f"{node}: no answer from {target.where} within {budget:.0f} s",
                              "is it switched on, and does a firewall let SSH through?")  # fmt: skip
    return TransportError("unreachable", f"{node}: {target.where} cannot be reached: {failure.strerror or failure}",
                          "check the network and the node's address")  # fmt: skip


def _addresses(target: SshHop, node: str, budget: float) -> list[Any]:
    """getaddrinfo, which knows no time limit of its own, within ``budget`` seconds."""
    answer: list[Any] = []
    problem: list[OSError] = []

    def ask() -> None:
        try:
            answer.extend(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except OSError as error:
            problem.append(error)
        except UnicodeError:
            problem.append(OSError(errno.EINVAL, "it is no host name"))

    if target.host.replace(".", "").isdigit() or ":" in target.host:
        ask()
    else:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(budget)
    if answer:
        return answer
    why = problem[0].strerror if problem else f"the name servers did not answer within {budget:.0f} s"
    name = "" if target.host == node else f"{target.host} "
    raise TransportError("unreachable", f"{node}: host name {name}cannot be resolved: {why}",
                         "check the address, and the name servers")  # fmt: skip


def _through_command(command: str, node: str) -> tuple[socket.socket, _Cleanup]:
    own_end, child_end = socket.socketpair()
    fd = child_end.fileno()
    process = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdin=fd, stdout=fd, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    child_end.close()

    def cleanup() -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, 9)
        process.wait()

    return own_end, cleanup


class _Jump:
    """A connection to a jump host and how many nodes use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.users = 0


_jumps: dict[_JumpKey, _Jump] = {}
_jumps_lock = threading.Lock()


def _through_jump(
    target: SshHop, settings: Settings, node: str, deadline: float, trail: _Trail
) -> tuple[Any, _Cleanup]:
    """Return a channel from the last jump host; one connection to each jump host serves all nodes behind it."""
    *before, last = target.jumps
    key = (*target.jumps, settings.ssh_config or "", settings.known_hosts or "")
    if key in trail:
        raise TransportError("ssh", f"{node}: the jump hosts form a loop", "fix ProxyJump in the SSH config")
    with _jumps_lock:
        jump = _jumps.setdefault(key, _Jump())
        jump.users += 1

    def release() -> None:
        with _jumps_lock:
            jump.users -= 1
            idle = jump.users == 0 and _jumps.get(key) is jump
            if idle:
                del _jumps[key]
        if idle and jump.connection is not None:
            jump.connection.drop()

    try:
        if not jump.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransportError("timeout", f"{node}: the jump host {last} did not answer in time")
        try:
            if jump.connection is None or not jump.connection.transport.is_active():
                hop = resolve_jump(last, settings)
                if before:
                    hop = msgspec.structs.replace(hop, jumps=tuple(before), proxy_command=None)
                jump.connection = connect(hop, settings, f"{node} (jump host {last})", deadline, (*trail, key))
        finally:
            jump.lock.release()
        return _tunnel(jump.connection, target, node, last, deadline), release
    except BaseException:
        release()
        raise


def _tunnel(jump: Connection, target: SshHop, node: str, name: str, deadline: float) -> Any:
    budget = min(target.connect_timeout_s, _remaining(deadline))
    try:
        return jump.transport.open_channel("direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), timeout=budget)
    except paramiko.ChannelException as error:
        reason = "it forbids forwarding (AllowTcpForwarding)" if error.code == 1 else "no connection from there"
        raise TransportError("unreachable", f"{node}: jump host {name} cannot reach {target.where}: {reason}",
                             "check the node, and that the jump host may connect to it") from None  # fmt: skip
    except (paramiko.SSHException, EOFError, OSError) as error:
        # A node that is switched off answers nothing either, and must not cost the others behind it their connections.
        try:
            jump.transport.open_session(timeout=_ALIVE_S).close()
        except paramiko.ChannelException:
            pass  # it answers
        except (paramiko.SSHException, EOFError, OSError):
            jump.drop()
        raise TransportError("timeout", f"{node}: jump host {name} did not connect to {target.where}: {error}",
                             "check the jump host") from None  # fmt: skip


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransportError("timeout", "timed out before the connection was made", "raise probe_timeout_s")
    return left
