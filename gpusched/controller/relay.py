"""Running jobs for users who have no account on the nodes: a process beside the controller, at a socket.

It reads the store, asks the nodes over connections of its own, and writes nothing. What it does for whom is decided by
the user id that the kernel gives for the other end of the socket. It is no part of the controller's process, so that
neither a flood of output nor what a hostile client sends can slow a cycle down.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpusched.config.paths import log_path, result_path
from gpusched.config.users import user_name
from gpusched.controller.joining import Tunnels, join
from gpusched.controller.outputs import may_see
from gpusched.controller.peers import RelayPeer, talk
from gpusched.errors import GpuschedError, UsageError
from gpusched.model import relay as wire
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, Runtime, runtime_for
from gpusched.nodes.transport import Transport, TransportError, stream_argv
from gpusched.queue.lastgood import declared_or_kept
from gpusched.queue.store import Reader

NO_SESSION = "cannot attach to job {}: it was not started with 'gpusched run'"
MAX_SESSIONS, MAX_SESSIONS_PER_USER = 256, 32
IDLE_S = 12 * 3600.0  # a command that neither says nor hears anything for so long is hung up


class RelayContext:
    """What sessions share: the state folder, and the inventory as it is now."""

    def __init__(self, state: Path, inventory_path: Path) -> None:
        self.state, self._path, self._lock = state, inventory_path, threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._inventory: Inventory | None = None
        self.tunnels = Tunnels()

    def inventory(self) -> Inventory:
        """The inventory; while it is broken, the last good one.

        Raises:
            GpuschedError: There never was a good one.
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


def serve(sock: socket.socket, uid: int, site: RelayContext, say: Callable[[str], None]) -> None:
    """One connection, from the request to its end. Raises nothing."""
    peer = RelayPeer(sock)
    try:
        peer.send(_answer(peer, peer.request(), uid, site))
    except OSError:
        return  # the client is gone
    except (wire.ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _fail(peer, wire.Failure(f"not a request: {error}"[:500]))
    except GpuschedError as error:
        _fail(peer, wire.Failure(str(error), error.hint, isinstance(error, TransportError)))
    except Exception as error:  # one client's trouble stays its own
        say(f"relay: a request of {user_name(uid)} failed: {error!r}")
        _fail(peer, wire.Failure("internal error of the controller; see its output"))
    finally:
        peer.hang_up()


def _fail(peer: RelayPeer, failure: wire.Failure) -> None:
    with contextlib.suppress(OSError):
        peer.send(wire.frame(wire.FAILED, msgspec.json.encode(failure)))


def _answer(peer: RelayPeer, request: wire.Request, uid: int, site: RelayContext) -> bytes:
    """Do it; returns the last frame."""
    inventory = site.inventory()
    reader = Reader.open(site.state)
    if reader is None:
        raise GpuschedError("there is no store")
    try:
        job = reader.job(request.job)
        if job is None:
            raise UsageError(f"there is no job {request.job[:60]!r}")
        if not may_see(uid, job, inventory):
            raise GpuschedError(f"job {job.id} belongs to {job.user}; its output and processes are private")
        if isinstance(request, wire.KeptLog):
            return _kept(peer, site.state, job, request)
        node, runtime, ref = _place(reader, inventory, job, request)
    finally:
        reader.close()
    if isinstance(request, wire.Attach):
        return join(peer, node, inventory.settings, ref, request, job.spec.session or 0)
    if isinstance(request, wire.Forward):
        return site.tunnels.forward(peer, node, inventory.settings, ref, request.port)
    transport = open_transport(node, inventory.settings)
    try:
        if isinstance(request, wire.Exec):
            return _exec(peer, transport, request, runtime.exec_argv(ref, request.argv, request.terminal is not None))
        log = runtime.log(ref, request.follow, request.tail_bytes)
        return talk(peer, transport.session(stream_argv(log.argv)), errors=wire.OUTPUT)
    finally:
        transport.close()


def _place(
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
    record = next((r for r in reader.ranks(job_id=job.id) if (r.attempt, r.rank) == (attempt, request.rank)), None)
    if record is None:
        raise GpuschedError(f"job {job.id}, attempt {attempt}, rank {request.rank} is not on a node")
    node = inventory.node(record.node)
    if node is None:
        raise GpuschedError(f"job {job.id} is on {record.node}, which is no longer in the inventory")
    ref = AttemptRef(reader.meta("cluster_id") or "", node.name, container_name(job.id, attempt, request.rank))
    return node, runtime_for(record.runtime), ref


def _exec(peer: RelayPeer, transport: Transport, request: wire.Exec, argv: tuple[str, ...]) -> bytes:
    if any("\0" in word for word in request.argv):
        raise UsageError("a word of the command contains a null character")
    if request.stdin or request.terminal is not None:
        return talk(peer, transport.session(argv, request.terminal), with_input=True, limit_s=IDLE_S)
    return talk(peer, transport.session(stream_argv(argv)), limit_s=IDLE_S)


def _kept(peer: RelayPeer, state: Path, job: JobRecord, request: wire.KeptLog) -> bytes:
    path = (result_path if request.result else log_path)(state, job.id, request.attempt, request.rank)
    try:
        with path.open("rb") as file:
            while chunk := file.read(wire.CHUNK):
                peer.send(wire.frame(wire.OUTPUT, chunk))
    except FileNotFoundError:
        raise GpuschedError(f"no output of job {job.id}, attempt {request.attempt}") from None
    return wire.exit_frame(0)


class Door:
    """Lets clients in, so many of each user."""

    def __init__(self, site: RelayContext, say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        self._inside: Counter[int] = Counter()
        self._lock = threading.Lock()

    def enter(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own, or turn it away."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with self._lock:
            full = self._inside.total() >= MAX_SESSIONS or self._inside[uid] >= MAX_SESSIONS_PER_USER
            self._inside[uid] += not full
        try:
            if full:
                raise GpuschedError(
                    f"too many sessions (at most {MAX_SESSIONS_PER_USER} per user, {MAX_SESSIONS} in all)"
                )
            threading.Thread(target=self._serve, args=(sock, uid), daemon=True).start()
        except (GpuschedError, RuntimeError) as error:  # RuntimeError: no more threads
            if not full:
                self._leave(uid)
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                failure = wire.Failure(str(error), "close some of them", transient=True)
                sock.send(wire.frame(wire.FAILED, msgspec.json.encode(failure)))

    def _serve(self, sock: socket.socket, uid: int) -> None:
        try:
            with sock:
                serve(sock, uid, self._site, self._say)
        finally:
            self._leave(uid)

    def _leave(self, uid: int) -> None:
        with self._lock:
            self._inside[uid] -= 1
            if not self._inside[uid]:
                del self._inside[uid]


def listen(state: Path) -> socket.socket:
    """The socket in the state folder; everybody may connect, the kernel says who did."""
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{folder}/{wire.SOCKET}"  # a socket's path may be no longer than 107 bytes
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
    """``python -m gpusched.controller.relay STATE INVENTORY``: until stdin ends, which is when the controller does."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    os.nice(5)
    # Where the controller was told to ignore Ctrl-C (nohup, &), what runs in the terminals made here must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536) if most > 0 else 65536, most))
    state = Path(sys.argv[1])
    listener = listen(state)
    door = Door(RelayContext(state, Path(sys.argv[2])), say)
    threading.Thread(target=_accept, args=(listener, door), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    os._exit(0)  # sessions may hang in calls without a time limit


def _accept(listener: socket.socket, door: Door) -> None:
    while True:
        try:
            door.enter(listener.accept()[0])
        except OSError:  # no descriptor is free
            time.sleep(0.1)


if __name__ == "__main__":
    main()
