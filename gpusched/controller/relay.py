"""Access to running jobs for users without an account on the nodes: a process beside the controller, on a socket.

It reads the store, connects to the nodes itself, and writes nothing. Permissions follow the user id that the kernel
reports for the other end of the socket. It is a separate process, so that neither a flood of output nor a hostile
client can slow down a cycle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from gpusched.config.paths import log_path, result_path
from gpusched.config.users import user_name
from gpusched.controller.attaching import Tunnels, attach
from gpusched.controller.logsetup import start_as_parent
from gpusched.controller.outputs import is_operator, may_see
from gpusched.controller.peers import RelayPeer, forward_streams
from gpusched.controller.secretfiles import forbid_core_dumps
from gpusched.errors import GpuschedError, UsageError
from gpusched.model import relay as wire
from gpusched.model.commands import RecordAudit
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, Runtime, runtime_for
from gpusched.nodes.transport import Transport, TransportError, stream_argv
from gpusched.queue.audit import AuditReporter, entries
from gpusched.queue.lastgood import declared_or_kept
from gpusched.queue.store import Reader

NO_SESSION = "cannot attach to job {}: it was not started with 'gpusched run'"
MAX_SESSIONS, MAX_SESSIONS_PER_USER = 256, 32
IDLE_S = 12 * 3600.0  # a command without input and output for so long is disconnected
_log = logging.getLogger("gpusched.controller.relay")  # its __name__ is __main__
_log.addHandler(logging.NullHandler())  # a client that serves itself has its terminal for other things


class RelayContext:
    """The state shared by sessions: the state folder, and the current inventory."""

    def __init__(self, state: Path, inventory_path: Path) -> None:
        self.state, self._path, self._lock = state, inventory_path, threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._inventory: Inventory | None = None
        self.tunnels = Tunnels()
        self.audit = AuditReporter(state)

    def inventory(self) -> Inventory:
        """Return the inventory; while it is invalid, the last valid one.

        Raises:
            GpuschedError: There never was a valid one.
        """
        with self._lock:
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if self._inventory is None or stamp != self._stamp:
                    self._inventory, self._stamp = declared_or_kept(self._path, self.state).inventory, stamp
            except (OSError, GpuschedError):
                if self._inventory is None:
                    raise GpuschedError(f"{self._path} cannot be read by the controller") from None
            return self._inventory


def serve(sock: socket.socket, uid: int, context: RelayContext) -> None:
    """Serve one connection, from the request to its end. Raises nothing."""
    peer = RelayPeer(sock)
    try:
        peer.send(_answer(peer, peer.request(), uid, context))
    except OSError:
        return  # the client has disconnected
    except (wire.ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        context.audit.refused(_record(uid, "malformed", (), f"not a request: {error}"))
        _fail(peer, wire.Failure(f"not a request: {error}"[:500]))
    except GpuschedError as error:
        _fail(peer, wire.Failure(str(error), error.hint, isinstance(error, TransportError)))
    except Exception as error:  # must not affect other clients
        _log.exception("a request of %s failed: %r", user_name(uid), error)
        _fail(peer, wire.Failure("internal error of the controller; see its output"))
    finally:
        peer.hang_up()


def _fail(peer: RelayPeer, failure: wire.Failure) -> None:
    with contextlib.suppress(OSError):
        peer.send(wire.frame(wire.FAILED, msgspec.json.encode(failure)))


def _answer(peer: RelayPeer, request: wire.Request, uid: int, context: RelayContext) -> bytes:
    """Carry out the request; return the last frame."""
    inventory = context.inventory()
    if isinstance(request, wire.AuditQuery):
        return _send_audit(peer, context, uid, is_operator(uid, inventory), request.since)
    reader = Reader.open(context.state)
    if reader is None:
        raise GpuschedError("there is no store")
    try:
        try:
            job = _job(reader, inventory, request, uid)
            place = None if isinstance(request, wire.KeptLog) else _locate(reader, inventory, job, request)
        except GpuschedError as error:
            context.audit.refused(_record(uid, request.__struct_config__.tag, (request.job,), str(error)))
            raise
    finally:
        reader.close()
    if uid != job.uid or not isinstance(request, wire.KeptLog | wire.NodeLog):
        repeated = isinstance(request, wire.Forward | wire.KeptLog | wire.NodeLog)
        context.audit.done(_record(uid, request.__struct_config__.tag, (job.id,)), once=repeated)
    if place is None or isinstance(request, wire.KeptLog):
        assert isinstance(request, wire.KeptLog)
        return _send_kept_log(peer, context.state, job, request)
    node, runtime, ref = place
    if isinstance(request, wire.Attach):
        return attach(peer, node, inventory.settings, ref, request, job.spec.session or 0)
    if isinstance(request, wire.Forward):
        return context.tunnels.forward(peer, node, inventory.settings, ref, request.port)
    transport = open_transport(node, inventory.settings)
    try:
        if isinstance(request, wire.Exec):
            return _exec(peer, transport, request, runtime.exec_argv(ref, request.argv, request.terminal is not None))
        log = runtime.log(ref, request.follow, request.tail_bytes)
        return forward_streams(peer, transport.session(stream_argv(log.argv)), errors=wire.OUTPUT)
    finally:
        transport.close()


def _job(reader: Reader, inventory: Inventory, request: wire.JobRequest, uid: int) -> JobRecord:
    job = reader.job(request.job)
    if job is None:
        raise UsageError(f"there is no job {request.job[:60]!r}")
    if not may_see(uid, job, inventory):
        raise GpuschedError(f"job {job.id} belongs to {job.user}; its output and processes are private")
    return job


def _record(uid: int, action: object, subject: tuple[str, ...], refused: str = "") -> RecordAudit:
    return RecordAudit(
        time=time.time(), origin="relay", action=str(action), subject=tuple(name[:80] for name in subject),
        refused=refused, via="relay", uid=uid, user=user_name(uid),
    )  # fmt: skip


def _send_audit(peer: RelayPeer, context: RelayContext, uid: int, everyone: bool, since: float) -> bytes:
    """Send the caller's entries of the audit log, or everyone's, by lines."""
    reader = Reader.open(context.state)
    try:
        lines = bytearray()
        for entry in entries(context.state, reader, since):
            if everyone or entry.uid == uid:
                lines += msgspec.json.encode(entry) + b"\n"
                if len(lines) >= wire.CHUNK:
                    peer.send(wire.frame(wire.OUTPUT, bytes(lines)))
                    lines.clear()
        peer.send(wire.frame(wire.OUTPUT, bytes(lines)))
    finally:
        if reader is not None:
            reader.close()
    return wire.exit_frame(0)


def _locate(
    reader: Reader, inventory: Inventory, job: JobRecord, request: wire.NodeLog | wire.Exec | wire.Attach | wire.Forward
) -> tuple[Node, Runtime, AttemptRef]:
    attempt = job.attempt if isinstance(request, wire.Exec) else request.attempt
    if isinstance(request, wire.Exec) and job.state is not JobState.RUNNING:
        raise GpuschedError(f"job {job.id} is {job.state}; a command can only be run in a RUNNING job")
    if isinstance(request, wire.Attach | wire.Forward):
        if job.spec.session is None:
            raise UsageError(NO_SESSION.format(job.id), "'gpusched exec' runs a command beside it")
        if job.state not in (JobState.STARTING, JobState.RUNNING):
            raise GpuschedError(f"job {job.id} is {job.state}")
    rank = next((r for r in reader.ranks(job_id=job.id) if (r.attempt, r.rank) == (attempt, request.rank)), None)
    if rank is None:
        raise GpuschedError(f"job {job.id}, attempt {attempt}, rank {request.rank} is not on a node")
    node = inventory.node(rank.node)
    if node is None:
        raise GpuschedError(f"job {job.id} is on {rank.node}, which is no longer in the inventory")
    ref = AttemptRef(reader.meta("cluster_id") or "", node.name, container_name(job.id, attempt, request.rank))
    return node, runtime_for(rank.runtime), ref


def _exec(peer: RelayPeer, transport: Transport, request: wire.Exec, argv: tuple[str, ...]) -> bytes:
    if any("\0" in word for word in request.argv):
        raise UsageError("a word of the command contains a null character")
    if request.stdin or request.terminal is not None:
        return forward_streams(peer, transport.session(argv, request.terminal), with_input=True, limit_s=IDLE_S)
    return forward_streams(peer, transport.session(stream_argv(argv)), limit_s=IDLE_S)


def _send_kept_log(peer: RelayPeer, state: Path, job: JobRecord, request: wire.KeptLog) -> bytes:
    path = (result_path if request.result else log_path)(state, job.id, request.attempt, request.rank)
    try:
        with path.open("rb") as file:
            while chunk := file.read(wire.CHUNK):
                peer.send(wire.frame(wire.OUTPUT, chunk))
    except FileNotFoundError:
        raise GpuschedError(f"no output of job {job.id}, attempt {request.attempt}") from None
    return wire.exit_frame(0)


class ConnectionLimiter:
    """Accepts connections, up to a limit per user and in all."""

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._open: Counter[int] = Counter()
        self._lock = threading.Lock()

    def accept(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own, or reject it."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with self._lock:
            full = self._open.total() >= MAX_SESSIONS or self._open[uid] >= MAX_SESSIONS_PER_USER
            self._open[uid] += not full
        try:
            if full:
                self._context.audit.refused(_record(uid, "connect", (), "too many sessions"))
                raise GpuschedError(
                    f"too many sessions (at most {MAX_SESSIONS_PER_USER} per user, {MAX_SESSIONS} in all)"
                )
            threading.Thread(target=self._serve, args=(sock, uid), daemon=True).start()
        except (GpuschedError, RuntimeError) as error:  # RuntimeError: no more threads
            if not full:
                self._release(uid)
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                failure = wire.Failure(str(error), "close some of them", transient=True)
                sock.send(wire.frame(wire.FAILED, msgspec.json.encode(failure)))

    def _serve(self, sock: socket.socket, uid: int) -> None:
        try:
            with sock:
                serve(sock, uid, self._context)
        finally:
            self._release(uid)

    def _release(self, uid: int) -> None:
        with self._lock:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]


def listen(state: Path) -> socket.socket:
    """Return a listening socket in the state folder; all users may connect, and the kernel reports who did."""
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{folder}/{wire.SOCKET}"  # a socket's path is limited to 107 bytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o666)
        listener.listen(64)
        return listener
    finally:
        os.close(folder)


def main() -> None:
    """Run ``python -m gpusched.controller.relay STATE INVENTORY`` until stdin, a pipe from the controller, ends."""
    forbid_core_dumps()
    os.nice(5)
    # Restore Ctrl-C, which the controller may ignore (nohup, &), for commands in the terminals opened here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 65536) if hard_limit > 0 else 65536, hard_limit))
    state = Path(sys.argv[1])
    listener = listen(state)
    limiter = ConnectionLimiter(RelayContext(state, Path(sys.argv[2])))
    threading.Thread(target=_accept, args=(listener, limiter), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    os._exit(0)  # sessions may hang in calls without a time limit


def _accept(listener: socket.socket, limiter: ConnectionLimiter) -> None:
    while True:
        try:
            limiter.accept(listener.accept()[0])
        except OSError:  # no descriptor is free
            time.sleep(0.1)


if __name__ == "__main__":
    start_as_parent(*sys.argv[3:])
    main()
