"""The relay to running jobs: who may, what ends a session, and how many there are. The rest: tests/e2e/test_site.py."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.controller import attaching, peers, relay
from gpusched.errors import GpuschedError
from gpusched.model.audit import AuditEntry, audit_entry
from gpusched.model.commands import RecordAudit
from gpusched.model.jobs import JobState
from gpusched.model.relay import (
    ERRORS,
    EXITED,
    FAILED,
    INPUT,
    INPUT_ENDED,
    NOT_STARTED,
    OUTPUT,
    REQUEST,
    SOCKET,
    Attach,
    AuditQuery,
    Exec,
    Failure,
    Forward,
    Frames,
    KeptLog,
    NodeLog,
    Request,
    Terminal,
    exit_code,
    exit_frame,
    frame,
    size_frame,
)
from gpusched.nodes.runtimes import AttemptRef, sessions
from gpusched.nodes.transport import Session, TransportError
from gpusched.queue.inbox import Inbox, ReceivedCommand
from gpusched.queue.lastgood import declared_or_kept, store_declared
from gpusched.queue.store import Store
from tests.cli.nodes.attempts import ID, Attempt
from tests.cli.nodes.conftest import Cluster, job, spec
from tests.logged import messages
from tests.testbed.processes import command_line
from tests.testbed.waiting import wait_until

OWNER, ADMIN, OTHER = 64001, 3, 64003


class Caller:
    """A client's end of a session that runs in a thread."""

    def __init__(self, site: relay.RelayContext, uid: int, request: Request | bytes) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(300)
        self.thread = threading.Thread(target=self._serve, args=(theirs, uid, site), daemon=True)
        self.thread.start()
        self.frames = Frames()
        self.sock.sendall(request if isinstance(request, bytes) else frame(REQUEST, msgspec.json.encode(request)))
        self.output, self.errors, self.code, self.failure = b"", b"", None, ""

    def _serve(self, sock: socket.socket, uid: int, site: relay.RelayContext) -> None:
        with sock:
            relay.serve(sock, uid, site)

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def hear(self, until: bytes | None = None) -> Caller:
        """Until the end, or until so much was said."""
        while until is None or until not in self.output:
            if not (data := self.sock.recv(65536)):
                self.sock.close()
                break
            for kind, payload in self.frames.feed(data):
                if kind == FAILED:
                    self.failure = msgspec.json.decode(payload, type=Failure).message
                elif kind == EXITED:
                    self.code = exit_code(payload)
                elif kind == ERRORS:
                    self.errors += payload
                else:
                    assert kind == OUTPUT
                    self.output += payload
        return self

    def hang_up(self) -> None:
        self.sock.close()
        self.thread.join(300)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As `relay.main` does it: what runs the tests may ignore Ctrl-C, and what is started inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path)
    text = cluster.inventory.read_text().replace("settings: {", "settings: {admins: [sys], ")
    cluster.inventory.write_text(text)
    return cluster


@pytest.fixture
def site(cluster: Cluster) -> relay.RelayContext:
    Inbox(cluster.state).create()
    return relay.RelayContext(cluster.state, cluster.inventory)


@pytest.fixture
def running(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """A job of OWNER on this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    attempt = Attempt(cluster, "echo begun; exec sleep 7001")
    cluster.store.put_jobs([msgspec.structs.replace(attempt.job, uid=OWNER)])
    yield attempt
    attempt.remove()


@pytest.fixture
def call(site: relay.RelayContext, running: Attempt) -> Callable[..., Caller]:
    def ask(*argv: str, uid: int = OWNER, **fields: Any) -> Caller:
        return Caller(site, uid, Exec(job=ID, rank=0, argv=argv, **fields))

    wait_until(lambda: ask("true").hear().code == 0, 60, "the job to run")
    return ask


def pids(*words: str) -> list[int]:
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and command_line(int(p)) == list(words)]


def test_permissions_of_exec(call: Callable[..., Caller], site: relay.RelayContext, cluster: Cluster) -> None:
    for uid in (OWNER, ADMIN, 0):
        heard = call("sh", "-c", "echo out; echo err >&2; exit 9", uid=uid).hear()
        assert (heard.output, heard.errors, heard.code, heard.failure) == (b"out\n", b"err\n", 9, "")
    log = NodeLog(job=ID, attempt=1, rank=0)
    assert Caller(site, OWNER, log).hear().output == b"begun\n"
    path = cluster.state / "logs" / ID / "1.0.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"kept")
    kept = KeptLog(job=ID, attempt=1, rank=0)
    assert Caller(site, OWNER, kept).hear().output == b"kept"
    path.with_suffix(".result").write_bytes(b"returned")
    result = KeptLog(job=ID, attempt=1, rank=0, result=True)
    assert Caller(site, OWNER, result).hear().output == b"returned"
    for request in (Exec(job=ID, rank=0, argv=("id",)), log, kept, result):
        refused = Caller(site, OTHER, request).hear()
        assert (refused.output, refused.code) == (b"", None)
        assert "belongs to ann" in refused.failure


def test_what_is_not_there(call: Callable[..., Caller], site: relay.RelayContext, cluster: Cluster) -> None:
    def refusal(request: Request) -> str:
        return Caller(site, 0, request).hear().failure

    assert "there is no job" in refusal(Exec(job="../x", rank=0, argv=("id",)))
    assert "rank 7" in refusal(Exec(job=ID, rank=7, argv=("id",)))
    assert "null character" in refusal(Exec(job=ID, rank=0, argv=("a\0b",)))
    assert "attempt 2" in refusal(NodeLog(job=ID, attempt=2, rank=0))
    assert "no output" in refusal(KeptLog(job=ID, attempt=1, rank=0))
    cluster.store.put_jobs([job(ID, JobState.COMPLETED, {"here": (0,)}, spec=spec("x", 1, 1, "local"))])
    assert "is COMPLETED" in refusal(Exec(job=ID, rank=0, argv=("id",)))


def test_permissions_of_attach(call: Callable[..., Caller], site: relay.RelayContext, cluster: Cluster) -> None:
    asked = Attach(job=ID, attempt=1), Forward(job=ID, attempt=1, port=22)
    for request in asked:
        assert "belongs to ann" in Caller(site, OTHER, request).hear().failure
        assert "not started with 'gpusched run'" in Caller(site, OWNER, request).hear().failure
    ours = job(ID, JobState.COMPLETING, {"here": (0,)}, spec=spec("x", 1, 1, "local", session=600), uid=OWNER)
    cluster.store.put_jobs([ours])
    for request in asked:
        assert Caller(site, OWNER, request).hear().failure == f"job {ID} is COMPLETING"
    cluster.store.put_jobs([msgspec.structs.replace(ours, state=JobState.RUNNING)])
    assert "belongs to ann" in Caller(site, OTHER, asked[1]).hear().failure


@pytest.mark.parametrize(
    ("status", "code"),
    [(b"failed\n", NOT_STARTED), (b"0\n", 0), (b"137\n", 137), (b"", None), (b"x\n", None), (b"1370\n", None)],
)
def test_an_attached_client_learns_how_its_job_ended(
    status: bytes, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the node prints: an exit code, `failed`, or something else while the job may still run (None)."""
    did: list[str] = []
    transport: Any = SimpleNamespace(
        session=lambda *_: None, run=lambda *_: SimpleNamespace(stdout=status), close=lambda: did.append("close")
    )
    monkeypatch.setattr(attaching, "open_transport", lambda *_: transport)
    monkeypatch.setattr(attaching, "forward_streams", lambda *_, **__: None)
    unused: Any = None
    ends = contextlib.nullcontext() if code is not None else pytest.raises(TransportError, match="to x ended")
    with ends:
        last = attaching.attach(unused, unused, unused, AttemptRef("c", "n", "x"), Attach(job=ID, attempt=1), 60.0)
        assert last == exit_frame(code or 0)
    assert did == ["close"]


def test_a_port_of_a_job(
    call: Callable[..., Caller], site: relay.RelayContext, cluster: Cluster, tmp_path: Path
) -> None:
    ours = job(ID, JobState.RUNNING, {"here": (0,)}, spec=spec("x", 1, 1, "local", session=600), uid=OWNER)
    cluster.store.put_jobs([ours])
    (launch,) = (tmp_path / "xdg").glob("gpusched-node/*/*/*/launch")
    with launch.open("a") as file:  # as that of a session has it
        file.write(sessions.SUPERVISED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        port = server.getsockname()[1]
        caller = Caller(site, OWNER, Forward(job=ID, attempt=1, port=port))
        other, _ = server.accept()
        caller.send(frame(INPUT, b"x" * 200_000), frame(INPUT_ENDED))
        assert b"".join(iter(lambda: other.recv(65536), b"")) == b"x" * 200_000
        other.sendall(b"y" * 200_000)
        other.close()
        assert (caller.hear().output, caller.code) == (b"y" * 200_000, 0)
        gone = Caller(site, OWNER, Forward(job=ID, attempt=1, port=port))
        other, _ = server.accept()
        gone.hang_up()
        assert other.recv(1) == b""
        other.close()
    refused = Caller(site, OWNER, Forward(job=ID, attempt=1, port=port)).hear()
    assert refused.failure == f"here: port {port} cannot be reached: Connection refused"
    assert site.tunnels._open == {}


def test_input_a_terminal_and_its_size(call: Callable[..., Caller]) -> None:
    cat = call("cat", stdin=True)
    cat.send(frame(INPUT, b"a"), frame(INPUT, b"b" * 200_000), frame(INPUT_ENDED))
    assert (cat.hear().output, cat.code) == (b"a" + b"b" * 200_000, 0)
    shell = call("sh", "-c", "stty size; read x; stty size; exec cat", terminal=Terminal("vt100", 31, 97))
    shell.hear(b"31 97")
    shell.send(size_frame(40, 111), frame(INPUT, b"go\n"))
    shell.hear(b"40 111")
    shell.send(frame(INPUT, b"\x03"))
    assert shell.hear().code == 130


def test_a_terminal_has_its_size_before_its_command_begins(
    call: Callable[..., Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusched.nodes.local._LocalSession.resize", lambda *_: None)
    assert call("stty", "size", terminal=Terminal("vt100", 31, 97)).hear().output == b"31 97\r\n"


@pytest.mark.parametrize("fields", [{}, {"stdin": True}, {"terminal": Terminal()}])
def test_a_client_that_goes_ends_its_session(
    call: Callable[..., Caller], fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caller = call("sh", "-c", "echo up; exec sleep 7002", **fields)
    caller.hear(b"up")
    if fields.get("stdin"):
        caller.send(*[frame(INPUT, b"x" * 65536)] * 3)  # that nobody reads
    caller.hang_up()
    if not fields.get("stdin"):  # only the end of its input can reach this one
        wait_until(lambda: not pids("sleep", "7002"), 30, "the command's end")
    assert messages(caplog) == []


def test_following_ends_with_the_client(site: relay.RelayContext, call: Callable[..., Caller]) -> None:
    caller = Caller(site, OWNER, NodeLog(job=ID, attempt=1, rank=0, follow=True))
    caller.hear(b"begun")
    caller.hang_up()
    garbling = Caller(site, OWNER, NodeLog(job=ID, attempt=1, rank=0, follow=True))
    garbling.hear(b"begun")
    garbling.send(frame(INPUT, b"x"))
    assert garbling.hear().output == b"begun\n"
    garbling.hang_up()


def test_a_client_that_does_not_read_holds_up_its_own_session_only(call: Callable[..., Caller]) -> None:
    stalled = call("cat", "/dev/zero")
    assert call("echo", "x").hear().output == b"x\n"
    stalled.hang_up()
    wait_until(lambda: not pids("cat", "/dev/zero"), 30, "the command's end")


def test_a_relay_that_starts_beside_a_garbled_inventory_goes_by_the_last_good_one(
    cluster: Cluster, site: relay.RelayContext
) -> None:
    with contextlib.closing(Store.create_or_open(cluster.state)) as store:
        store_declared(store, declared_or_kept(cluster.inventory, cluster.state))
    names = [node.name for node in site.inventory().nodes]
    cluster.inventory.write_text("partitions: [")
    begun = relay.RelayContext(cluster.state, cluster.inventory)
    assert [node.name for node in begun.inventory().nodes] == names


def test_the_sessions_of_a_user_are_limited(site: relay.RelayContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_SESSIONS_PER_USER", 2)
    monkeypatch.setattr(peers, "REQUEST_S", 600.0)  # for which a session is held
    door, callers = relay.ConnectionLimiter(site), []
    for _ in range(3):
        ours, theirs = socket.socketpair()
        ours.settimeout(300)
        door.accept(theirs)
        callers.append(ours)
    assert b"too many sessions" in callers[2].recv(65536)
    callers[0].sendall(b"garbage!")
    assert callers[0].recv(65536)[:1] == b"f"
    assert callers[0].recv(65536) == b""

    def has_room() -> bool:
        ours, theirs = socket.socketpair()
        with ours:
            door.accept(theirs)
            ours.settimeout(300)
            with contextlib.suppress(BrokenPipeError):  # turned away
                ours.sendall(b"garbage!")
            return b"not a request" in ours.recv(65536)

    wait_until(has_room, 30, "room for another")
    for caller in callers:
        caller.close()


def test_the_process_ends_with_its_controller(cluster: Cluster) -> None:
    argv = [sys.executable, "-m", "gpusched.controller.relay", str(cluster.state), str(cluster.inventory), "1", "json"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=cluster.env()) as process:
        path = cluster.state / SOCKET
        wait_until(lambda: process.poll() is None and path.exists() and path.stat().st_mode & 0o777 == 0o666, 60)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(300) == 0


def test_sessions_are_counted_by_user(site: relay.RelayContext) -> None:
    door = relay.ConnectionLimiter(site)
    door._open.update({OWNER: 3, OTHER: 1})
    door._release(OWNER)
    door._release(OTHER)
    assert dict(door._open) == {OWNER: 2}


class Clock:
    """A second passes each time that somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Timed(socket.socket):
    """Remembers how long it was to wait, and waits for no time at all."""

    def settimeout(self, value: float | None) -> None:
        self.asked = [*getattr(self, "asked", []), value]
        super().settimeout(None if value is None else min(value, 0.02))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Timed]]:
    """The client's and the relay's."""
    ours, theirs = socket.socketpair()
    timed = Timed(fileno=theirs.detach())
    with ours, timed:
        ours.settimeout(300)
        yield ours, timed


def test_a_client_has_ten_seconds_to_ask(site: relay.RelayContext, ends: tuple[socket.socket, Timed]) -> None:
    ours, theirs = ends
    ours.sendall(frame(REQUEST, b"{}")[:3])
    relay.serve(theirs, OWNER, site)
    assert [9 < (asked or 0.0) <= 10 for asked in theirs.asked] == [True, True]
    assert ours.recv(1) == b"", "hung up, without an error"


def test_a_client_that_asks_bit_by_bit_has_no_longer(
    ends: tuple[socket.socket, Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(relay.time, "monotonic", Clock())
    peer = peers.RelayPeer(theirs)
    ours.sendall(frame(REQUEST, msgspec.json.encode(KeptLog(job=ID, attempt=1, rank=0))))
    monkeypatch.setattr(relay.wire, "CHUNK", 8)
    with pytest.raises(relay.wire.ProtocolError, match="no request"):
        peer.request()
    # two looks a round, begun at 102 + 10
    assert theirs.asked == [9.0, 7.0, 5.0, 3.0, 1.0, 0.01]


def test_the_first_frame_is_the_request(ends: tuple[socket.socket, Timed]) -> None:
    ours, theirs = ends
    asked = KeptLog(job=ID, attempt=1, rank=0)
    ours.sendall(frame(REQUEST, msgspec.json.encode(asked)) + frame(INPUT, b"x"))
    assert peers.RelayPeer(theirs).request() == asked
    assert theirs.asked[-1] is None, "from then on it takes its time"
    ours.sendall(frame(INPUT, b"x"))
    with pytest.raises(relay.wire.ProtocolError, match="no request"):
        peers.RelayPeer(theirs).request()
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(relay.wire.ProtocolError, match="no request"):
        peers.RelayPeer(theirs).request()


@pytest.mark.parametrize(
    ("since", "limit_s", "ends_at"),
    [(None, 20.0, 122.0), (110.0, None, 116.0), (110.0, 20.0, 116.0), (119.0, 20.0, 122.0)],
)
def test_a_client_silent_or_not_reading_for_long_is_disconnected(
    ends: tuple[socket.socket, Timed], monkeypatch: pytest.MonkeyPatch, since: float | None, limit_s: float | None,
    ends_at: float,
) -> None:  # fmt: skip
    clock = Clock()
    monkeypatch.setattr(relay.time, "monotonic", clock)
    monkeypatch.setattr(peers, "UNREAD_S", 5.0)
    monkeypatch.setattr(peers, "POLL_S", 0.0005)
    peer = peers.RelayPeer(ends[1])
    peer.sending_since = since
    assert peer.active_at == 101.0
    assert not peer._wait_readable(limit_s)
    assert clock.now == ends_at
    ends[0].sendall(b"x")
    assert peer._wait_readable(limit_s), "what is there is read first"
    assert clock.now == ends_at


class Heard:
    """A session that takes two bytes at a time."""

    def __init__(self) -> None:
        self.did: list[object] = []

    def write(self, data: bytes) -> int:
        self.did.append(data[:2])
        return len(data[:2])

    def resize(self, *size: int) -> None:
        self.did.append(size)

    def end_input(self) -> None:
        self.did.append("end")

    def close(self) -> None:
        self.did.append("close")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("frames", "with_input", "did"),
    [
        ([frame(INPUT, b"abc"), frame(INPUT, b""), frame(INPUT_ENDED)], True, [b"ab", b"c", "end"]),
        ([size_frame(40, 111), frame(INPUT, b"a"), size_frame(41, 112)], True, [(40, 111), b"a", (41, 112)]),
        ([frame(INPUT_ENDED), frame(INPUT, b"x")], True, ["end"]),
        ([frame(INPUT_ENDED), size_frame(1, 2)], True, ["end"]),
        ([frame(INPUT_ENDED), frame(INPUT_ENDED)], True, ["end"]),
        ([frame(INPUT, b"x")], False, []),
        ([frame(INPUT_ENDED)], False, []),
        ([size_frame(1, 2)], False, []),
        ([frame(OUTPUT, b"x"), frame(INPUT, b"x")], True, []),
        ([b"garbage!", frame(INPUT, b"x")], True, []),
    ],
)
def test_frames_of_a_client_are_handled_until_an_invalid_one(
    ends: tuple[socket.socket, Timed], frames: list[bytes], with_input: bool, did: list[object], at_once: bool
) -> None:
    ours, theirs = ends
    asked = frame(REQUEST, msgspec.json.encode(KeptLog(job=ID, attempt=1, rank=0)))
    peer, session = peers.RelayPeer(theirs), Heard()
    said = b"".join([*frames, frame(OUTPUT)])  # of a client there is no output
    ours.sendall(asked + (said if at_once else b""))
    with contextlib.suppress(relay.wire.ProtocolError):
        peer.request()
        if not at_once:
            ours.sendall(said)
        peer.listen(session, with_input, None)  # type: ignore[arg-type]
        assert session.did == [*did, "close"]
        assert ours.recv(1) == b"", "both ways"


def test_frames_of_a_closed_client_are_read_without_waiting(ends: tuple[socket.socket, Timed]) -> None:
    peer, session = peers.RelayPeer(ends[1]), Heard()
    ends[0].sendall(frame(INPUT, b"abc"))
    ends[0].close()
    peer.listen(session, True, None)  # type: ignore[arg-type]
    assert session.did == [b"ab", "close"]


def test_a_session_ends_with_its_listener_and_a_socket_that_was_closed_is_no_error(
    ends: tuple[socket.socket, Timed],
) -> None:
    peer, session = peers.RelayPeer(ends[1]), Heard()
    peer.start_listening(session, True, None)  # type: ignore[arg-type]
    peer.hang_up()
    assert session.did == ["close"], "before the socket may be closed"
    ends[1].close()
    peer.listen(session, True, None)  # type: ignore[arg-type]
    assert session.did == ["close", "close"]
    with pytest.raises(OSError, match="closed"):
        peer._has_disconnected()


def test_sent_data_counts_as_a_sign_of_life(
    ends: tuple[socket.socket, Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peers.RelayPeer(ends[1])
    monkeypatch.setattr(relay.time, "monotonic", lambda: 1e9)
    peer.send(b"x")
    assert (peer.active_at, peer.sending_since) == (1e9, None)
    ends[0].close()
    with pytest.raises(OSError, match="pipe"):
        peer.send(b"x" * 10_000_000)
    assert peer.sending_since == 1e9


def test_the_inventory_is_read_again_when_it_changes(site: relay.RelayContext, cluster: Cluster) -> None:
    first = site.inventory()
    assert site.inventory() is first
    text = cluster.inventory.read_text()
    cluster.inventory.write_text(text.replace("dgx2", "another"))
    assert "another" in {node.name for node in site.inventory().nodes}
    status = cluster.inventory.stat()
    cluster.inventory.write_text(text.replace("dgx2", "thelast"))
    os.utime(cluster.inventory, ns=(status.st_mtime_ns - 10**9,) * 2)
    assert "thelast" in {node.name for node in site.inventory().nodes}, "as one that is put back"
    changed = site.inventory()
    for text in ("partitions: [", "partitions: [ "):
        cluster.inventory.write_text(text)
        assert site.inventory() is changed, "a broken one changes nothing"
    cluster.inventory.unlink()
    assert site.inventory() is changed
    with pytest.raises(GpuschedError, match="cannot be read by the controller"):
        relay.RelayContext(cluster.state, cluster.inventory).inventory()


def test_only_commands_may_not_be_silent_for_ever(
    site: relay.RelayContext, call: Callable[..., Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    real = peers.RelayPeer.listen

    def listen(self: peers.RelayPeer, session: Session, with_input: bool, limit_s: float | None) -> None:
        limits.append(limit_s)
        real(self, session, with_input, limit_s)

    monkeypatch.setattr(peers.RelayPeer, "listen", listen)
    call("true").hear()
    limits.clear()
    call("true", stdin=True).hear()
    Caller(site, OWNER, NodeLog(job=ID, attempt=1, rank=0)).hear()
    assert limits[-1] is None
    assert set(limits[:-1]) == {12 * 3600.0}


def test_without_a_store_there_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    empty = relay.RelayContext(tmp_path / "empty", cluster.inventory)
    assert Caller(empty, 0, KeptLog(job=ID, attempt=1, rank=0)).hear().failure == "there is no store"


def turned_away(door: relay.ConnectionLimiter) -> str:
    ours, theirs = socket.socketpair()
    with ours:
        door.accept(theirs)
        ours.settimeout(300)
        ((kind, payload),) = Frames().feed(ours.recv(65536))
        assert kind == FAILED
        failure = msgspec.json.decode(payload, type=Failure)
        assert (failure.hint, failure.transient) == ("close some of them", True)
        return failure.message


def test_sessions_are_bounded_in_all_too(site: relay.RelayContext, monkeypatch: pytest.MonkeyPatch) -> None:
    door = relay.ConnectionLimiter(site)
    door._open.update({n: 1 for n in range(relay.MAX_SESSIONS)})
    before = dict(door._open)
    assert turned_away(door) == "too many sessions (at most 32 per user, 256 in all)"
    assert dict(door._open) == before
    door._open = Counter({os.getuid(): 32})
    assert "too many sessions" in turned_away(door)

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    door._open = Counter({os.getuid(): 31})
    assert turned_away(door) == "can't start new thread"
    assert door._open[os.getuid()] == 31


def test_anybody_may_connect_and_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 30)
    state.mkdir()
    for _ in range(2):
        with relay.listen(state) as listener, socket.socket(socket.AF_UNIX) as sock:
            assert (state / SOCKET).stat().st_mode & 0o777 == 0o666
            folder = os.open(state, os.O_PATH)
            sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            os.close(folder)
            listener.accept()[0].close()


def test_a_connection_that_cannot_be_taken_now_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    class Listener:
        def accept(self) -> tuple[str, None]:
            if len(rests) < 2:
                raise OSError("too many open files")
            return "connection", None

    class Entrance:
        def accept(self, sock: object) -> None:
            assert sock == "connection"
            raise SystemExit

    monkeypatch.setattr(relay.time, "sleep", rests.append)
    with pytest.raises(SystemExit):
        relay._accept(Listener(), Entrance())  # type: ignore[arg-type]
    assert rests == [0.1, 0.1]


@pytest.mark.parametrize(("most", "allowed"), [(1000, 1000), (1 << 20, 65536), (-1, 65536)])
def test_the_process_may_open_many_files_and_ends_with_its_stdin(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, most: int, allowed: int
) -> None:
    calls: dict[str, Any] = {}
    accepting = threading.Event()

    def accept(listener: socket.socket, door: relay.ConnectionLimiter) -> None:
        calls["door"] = door
        listener.close()
        accepting.set()

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(relay, "_accept", accept)
    monkeypatch.setattr(relay.os, "nice", lambda by: calls.setdefault("nice", by))
    monkeypatch.setattr(relay.os, "_exit", leave)
    monkeypatch.setattr(relay.resource, "getrlimit", lambda _: (64, most))
    monkeypatch.setattr(relay.resource, "setrlimit", lambda _, limits: calls.setdefault("files", limits))
    monkeypatch.setattr(sys, "argv", ["relay", str(cluster.state), str(cluster.inventory)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(SystemExit) as left:
        relay.main()
    assert left.value.code == 0
    assert accepting.wait(300)
    assert (calls["nice"], calls["files"]) == (5, (allowed, most))
    assert {node.name for node in calls["door"]._context.inventory().nodes} >= {"dgx1", "here"}
    assert calls["door"]._context.state == cluster.state


def reported(cluster: Cluster) -> list[tuple[str, int | None, str]]:
    """Return the relay's entries for the audit log: action, user id, why it was refused."""
    found = [item.command for item in Inbox(cluster.state).waiting() if isinstance(item, ReceivedCommand)]
    return [(c.action, c.uid, c.refused) for c in found if isinstance(c, RecordAudit)]


def test_sessions_and_refusals_are_recorded(
    call: Callable[..., Caller], site: relay.RelayContext, cluster: Cluster
) -> None:
    for file in Inbox(cluster.state).new.iterdir():
        file.unlink()
    log = NodeLog(job=ID, attempt=1, rank=0)
    assert Caller(site, OWNER, log).hear().code == 0, "one's own output is nobody's business"
    assert reported(cluster) == []
    assert call("true", uid=ADMIN).hear().code == 0
    assert Caller(site, ADMIN, log).hear().code == Caller(site, ADMIN, log).hear().code == 0
    assert Caller(site, OTHER, log).hear().failure
    assert Caller(site, OTHER, frame(REQUEST, b"{}")).hear().failure
    actions = sorted(reported(cluster))
    assert [(action, uid) for action, uid, _ in actions] == [
        ("exec", ADMIN), ("log", ADMIN), ("log", OTHER), ("malformed", OTHER),
    ]  # fmt: skip
    assert "belongs to ann" in actions[2][2]


def test_a_session_that_cannot_be_recorded_is_refused(call: Callable[..., Caller], cluster: Cluster) -> None:
    inbox = Inbox(cluster.state)
    inbox.new.rename(inbox.new.with_name("gone"))
    assert "nothing can be queued" in call("true").hear().failure


def test_everyone_reads_their_own_entries(site: relay.RelayContext, cluster: Cluster) -> None:
    for uid in (OWNER, OTHER):
        cluster.store.add_audit(audit_entry(1.0, "h", (uid, str(uid)), "cancel"))

    def read(uid: int) -> list[int]:
        lines = Caller(site, uid, AuditQuery()).hear().output.splitlines()
        return [msgspec.json.decode(line, type=AuditEntry).uid for line in lines]

    assert (read(OWNER), read(OTHER), read(64009)) == ([OWNER], [OTHER], [])
    assert read(0) == read(ADMIN) == [OWNER, OTHER]
