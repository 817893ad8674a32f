"""Attacks by another user of the login node, with a user id of its own: each is refused in one clear line.

Those that reach the controller have an entry in the audit log; the kernel refuses the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gpusched.controller import relay
from gpusched.controller.auditing import audit_stream
from gpusched.controller.leadership import controller_lock
from gpusched.controller.publishing import Publisher
from gpusched.errors import GpuschedError
from gpusched.model import commands as c
from gpusched.model import ids
from gpusched.model.audit import AuditEntry
from gpusched.model.jobs import Dependency, DependencyKind, JobState, Mount
from gpusched.model.relay import (
    EXITED,
    FAILED,
    OUTPUT,
    REQUEST,
    Attach,
    AuditQuery,
    Exec,
    Failure,
    Forward,
    Frames,
    KeptLog,
    NodeLog,
    Request,
    frame,
)
from gpusched.model.reservations import Reservation
from gpusched.queue import audit
from gpusched.queue.inbox import MAX_COMMAND_BYTES
from gpusched.queue.reading import CURRENT, PUBLISHED
from tests.builders import spec
from tests.controller.applying import ALICE, NOW, InboxWorld
from tests.controller.rights import needs_root

pytestmark = [needs_root, pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")]
MALLORY = 12399
SECRET = "s3cr3t-that-leaks-nowhere"


class Place:
    """A shared installation with a job of alice's, and its relay."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.state = folder / "state"
        self.world = InboxWorld(self.state)
        self.state.chmod(0o755)
        self.world.inbox.create(shared=True)
        self.waits = self.world.submit(ALICE, secret_names=("TOKEN",), secrets={"TOKEN": SECRET})
        self.runs = self.world.submit(ALICE)
        self.array = self.world.submit(ALICE, array=(1, 2, 3))
        self.world.put(self.runs, JobState.RUNNING)
        self.own = self.world.submit(MALLORY)
        one = Reservation(name="r", nodes=("n0",), begin=NOW + 36000, end=NOW + 72000, users=("ann",))
        assert self.world.say(c.Reserve(time=NOW, reservation=one)) == ""
        self.log = self.state / "logs" / self.runs / "1.0.log"
        self.log.parent.mkdir(parents=True)
        self.log.write_text(SECRET)
        self.log.chmod(0o600)  # as collected output is
        for folder in self.log.parents[:2]:
            folder.chmod(0o711)
        self.publisher = Publisher(self.state)
        self.sync()
        self._lock = controller_lock(self.state)
        self._lock.__enter__()
        context = relay.RelayContext(self.state, folder / "inventory.yaml")
        context.inventory = lambda: self.world.inventory  # type: ignore[method-assign]
        self.listener = relay.listen(self.state)
        self.limiter = relay.ConnectionLimiter(context)
        threading.Thread(target=relay._accept, args=(self.listener, self.limiter), daemon=True).start()

    def sync(self) -> None:
        """Write the audit log and the published copy."""
        stream = audit_stream(self.world.store, self.state)
        stream.wake()
        stream.stop(300)
        self.publisher.publish()

    def close(self) -> None:
        self.listener.close()
        self._lock.__exit__(None, None, None)
        self.publisher.stop()
        self.world.store.close()

    def entries(self) -> list[AuditEntry]:
        return [entry for entry in audit.entries(self.state, self.world.store) if entry.uid == MALLORY]

    # -- what the attacker does

    def ask(self, request: Request | bytes) -> str:
        """Ask the relay; returns the answer, or the refusal."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(300)
            sock.connect(str(self.state / "relay.sock"))
            with contextlib.suppress(BrokenPipeError):  # a refusal that came before the request, as the client has it
                sock.sendall(request if isinstance(request, bytes) else frame(REQUEST, msgspec.json.encode(request)))
            return answer(sock)


def answer(sock: socket.socket) -> str:
    frames, output = Frames(), b""
    while data := sock.recv(65536):
        for kind, payload in frames.feed(data):
            if kind == FAILED:
                return msgspec.json.decode(payload, type=Failure).message
            output += payload if kind == OUTPUT else b""
            if kind == EXITED:
                return output.decode()
    return "closed"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="gpusched-attacks-", dir="/tmp"))
    place = Place(folder)
    yield place
    place.close()
    shutil.rmtree(folder)


def as_mallory(act: Callable[[], object]) -> str:
    """Do something as another user, in a process of its own; returns what it got, or the kernel's refusal."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgroups([])
            os.setgid(MALLORY)
            os.setuid(MALLORY)
            os.umask(0)
            try:
                random.seed(os.getpid())
                got = str(act())
            except OSError as error:
                got = errno.errorcode.get(error.errno or 0, str(error))
            except (GpuschedError, sqlite3.Error, msgspec.MsgspecError) as error:
                got = str(error)
            with open(writer, "wb") as answers:
                answers.write(got.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        got = file.read().decode()
    os.waitpid(pid, 0)
    return got


def fresh_id(now: float) -> str:
    """An id that no other process has made."""
    return ids.mint(now)[:3] + "".join(random.choices("0123456789abcdefghjkmnpqrstvwxyz", k=8))


class Attack(NamedTuple):
    """An attack, and the line that refuses it. ``entry``: command of the audit entry; "": the kernel refuses."""

    name: str
    act: Callable[[Place], object]
    line: str
    entry: str = ""


def sends(title: str, line: str, make: Callable[[Place], c.AnyCommand]) -> Attack:
    """A command of the attacker's in the inbox."""
    def act(place: Place) -> None:
        place.world.inbox.deliver(make(place))

    return Attack(title, act, line, "any")


def submits(title: str, line: str, **fields: Any) -> Attack:
    return sends(title, line, lambda place: c.Submit(time=NOW, id=fresh_id(NOW), spec=spec(**fields)))


def mounts(name: str, line: str, source: str, target: str = "/mnt") -> Attack:
    return submits(name, line, mounts=(Mount(source, target),))


def asks(name: str, line: str, make: Callable[[Place], Request | bytes], entry: str) -> Attack:
    return Attack(name, lambda place: place.ask(make(place)), line, entry)


def on_jobs(kind: Callable[..., c.AnyCommand], **fields: Any) -> Callable[[Place], c.AnyCommand]:
    return lambda place: kind(time=NOW, job_ids=(place.waits,), **fields)


def places(content: bytes | str, name: str = "0aaa{}.submit") -> Callable[[Place], object]:
    """Write a file into the inbox by hand."""
    def act(place: Place) -> None:
        path = place.world.inbox.new / name.format(os.getpid())
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return act


def raw(**changes: Any) -> str:
    """A submission as JSON, with these changes."""
    command = c.Submit(time=NOW, id=fresh_id(NOW), spec=spec())
    return json.dumps(json.loads(msgspec.json.encode(command)) | changes)


JOB_OF_ALICE = "belongs to 12301"
NOT_ADMIN = f"{MALLORY} is not an admin; only admins may"
COMMANDS = [
    sends("cancel another's job", JOB_OF_ALICE, on_jobs(c.Cancel)),
    sends("cancel it at once", JOB_OF_ALICE, on_jobs(c.Cancel, now=True)),
    sends("hold it", JOB_OF_ALICE, on_jobs(c.Hold)),
    sends("release it", JOB_OF_ALICE, on_jobs(c.Release)),
    sends("requeue it", JOB_OF_ALICE, on_jobs(c.Requeue)),
    sends("lower its priority", JOB_OF_ALICE, on_jobs(c.SetPriority, priority=-9)),
    sends("cancel a running one", JOB_OF_ALICE, lambda p: c.Cancel(time=NOW, job_ids=(p.runs,))),
    sends("cancel a task of another's array", JOB_OF_ALICE, lambda p: c.Cancel(time=NOW, job_ids=(f"{p.array}_2",))),
    sends("hide it among one's own", JOB_OF_ALICE, lambda p: c.Hold(time=NOW, job_ids=(p.own, p.waits))),
    sends("all jobs by a wildcard", "no such job", lambda p: c.Cancel(time=NOW, job_ids=("%", "*", ""))),
    sends("SQL in an id", "no such job", lambda p: c.Cancel(time=NOW, job_ids=("' OR 1=1 --",))),
    sends("raise one's own priority", "needs an admin", lambda p: c.SetPriority(
        time=NOW, job_ids=(p.own,), priority=5)),
    sends("drain a node", NOT_ADMIN, lambda p: c.Drain(time=NOW, nodes=("n0",), reason="x")),
    sends("resume a node", NOT_ADMIN, lambda p: c.Resume(time=NOW, nodes=("n0",))),
    sends("reserve nodes", NOT_ADMIN, lambda p: c.Reserve(
        time=NOW, reservation=Reservation(name="m", nodes=("n0",), begin=NOW, end=NOW + 60))),
    sends("change a reservation", NOT_ADMIN, lambda p: c.ChangeReservation(
        time=NOW, name="r", users=(str(MALLORY),))),
    sends("cancel a reservation", NOT_ADMIN, lambda p: c.CancelReservation(time=NOW, name="r")),
    sends("promote a policy", NOT_ADMIN, lambda p: c.Promote(
        time=NOW, partition="p", path="/tmp/mine", version="x", reason="x", forced=True)),
    sends("roll a policy back", NOT_ADMIN, lambda p: c.Rollback(time=NOW, partition="p", reason="x")),
    sends("run a shadow", NOT_ADMIN, lambda p: c.ShadowOn(time=NOW, partition="p", path="/etc/shadow", version="x")),
    sends("end a shadow", NOT_ADMIN, lambda p: c.ShadowOff(time=NOW, partition="p")),
    sends("forge an audit entry", "add entries to the audit log", lambda p: c.RecordAudit(time=NOW, action="exec")),
    sends("forge one about another", "add entries", lambda p: c.RecordAudit(
        time=NOW, action="exec", uid=ALICE, user="alice")),
    sends("pose as a job's request", "only the controller forwards", lambda p: c.RelayedCommand(
        time=NOW, job_id=p.runs, attempt=1, act="cancel", job_ids=(p.waits,))),
    sends("requeue as a job", "only the controller forwards", lambda p: c.RelayedCommand(
        time=NOW, job_id=p.runs, attempt=1, act="requeue", job_ids=(p.waits,))),
    sends("submit as another's job, for its secrets", "only the controller forwards", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(secret_names=("TOKEN",)), asked_by=p.waits)),
    sends("take another's id", "already exists", lambda p: c.Submit(time=NOW, id=p.waits, spec=spec())),
    sends("a secret without its name", "secrets named and secrets passed differ", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(), secrets={"TOKEN": "x"})),
    sends("a name without its secret", "secrets named and secrets passed differ", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(secret_names=("TOKEN",)))),
    sends("a program without a function", "needs its program", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(), program="x")),
    sends("indices below zero", "array indices must be", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(), array=(-1,))),
    sends("a million tasks", "different indices", lambda p: c.Submit(
        time=NOW, id=fresh_id(NOW), spec=spec(), array=tuple(range(300_000)))),
    *(Attack(f"the id {job_id!r}", places(raw(id=job_id)), "is not a job id", "submit")
      for job_id in ("../../../etc/x", "a/b", "0123456789a_1", "", "x\n", "0123456789a;id", "-rf")),
    submits("priority above 0", "needs an admin", priority=1),
    submits("nice below 0", "needs an admin", nice=-1),
    submits("a priority beyond reason", "--priority and --nice", priority=-10**12),
    mounts("mount /etc", "allows /data", "/etc"),
    mounts("mount /", "allows /data", "/"),
    mounts("mount a sibling of an allowed folder", "allows /data", "/data2"),
    mounts("leave an allowed folder", "without '..'", "/data/../etc"),
    mounts("leave it by the target", "without '..'", "/data", "/mnt/../etc"),
    mounts("a relative source", "needs absolute paths", "etc"),
    mounts("options in a source", "without ':'", "/data:/etc:rw"),
    mounts("options in a target", "without ':'", "/data", "/mnt,src=/etc"),
    mounts("a line break in a source", "needs absolute paths", "/data/\n/etc"),
    mounts("quotes in a source", "and quotes", '/data/"'),
    submits("two mounts at one place", "two mounts at /mnt", mounts=(Mount("/data", "/mnt"), Mount("/data/a", "/mnt"))),
    submits("a relative working folder", "must be an absolute path", workdir="../x"),
    submits("a line break in a working folder", "must be an absolute path", workdir="/x\nid"),
    submits("output to a relative path", "must be an absolute path", output="x"),
    submits("a line break in an output", "must be an absolute path", output="/x\r/etc/passwd"),
    submits("a control sequence in a name", "printable characters", name="\x1b[2J"),
    submits("a line break in a name", "printable characters", name="a\nb"),
    submits("text that runs backwards in a name", "printable characters", name="a\u202eb"),
    submits("a name of a megabyte", "1 to ", name="x" * 1_000_000),
    submits("NUL in a command", "NUL character", command=("sh", "-c", "x\0y")),
    Attack("half a character in a command", places('{"command":"submit","time":1,"id":"x","spec":"\\ud800"}'),
           "not a command", "malformed"),
    submits("a variable's name with =", "not a name for an environment variable", env={"A=B": "x"}),
    submits("a line break in one", "not a name for an environment variable", env={"A\nB": "x"}),
    submits("NUL in a variable", "NUL character", env={"A": "\0"}),
    submits("a variable of 10 MB", "maximum", env={"A": "x" * 3_900_000}),
    submits("a secret's name with $()", "not a name for an environment variable", secret_names=("$(id)",)),
    submits("an option as an image", "--image must be one word", image="--privileged"),
    submits("two words as an image", "--image must be one word", image="a --volume=/:/x"),
    submits("a file as root by an image", "docker-archive", image="docker-archive:/etc/shadow"),
    submits("a folder as root by an image", "dir", image="dir:/root"),
    submits("an unknown partition", "there is no partition", partition="../p"),
    submits("an unknown node", "there is no node", nodelist=("n0;id",)),
    submits("a group of others", "group", group="wheel"),
    submits("a class of others", "class", qos="high"),
    submits("a reservation of others", "reservation", reservation="r"),
    submits("mail with a second header", "expected an address", mail="a@b.c\nBcc: x@y.z"),
    submits("an option as a mail address", "expected an address", mail="-oQ/tmp"),
    submits("a signal by number", "there is no signal", signal="9; id"),
    submits("less than no GPU", "at least", gpus_per_node=-1),
    submits("more nodes than there are", "is more than the largest flavor", nodes=1000),
    submits("a time limit of zero", "greater than zero", time_limit_s=0),
    submits("a control sequence in the folder of submission", "must be an absolute path", submit_dir="/\x1b[2J\n"),
    submits("one in a function's name", "unprintable characters", function="\x1b[2J"),
    submits("one in a notice's kind", "unknown notice", notify=("\x1b[2J",)),
    submits("a line break in a GPU's type", "GPU", gpu_types=("a\nb",)),
    submits("an option of ssh as a node to avoid", "there is no node", exclude=("-oProxyCommand=id",)),
    submits("a shell's words as a profile", "expected a profile", profile="1g.10gb;id"),
    submits("traversal in a flavor", "flavor", flavor="../../x"),
    mounts("an option of podman as a source", "needs absolute paths", "--privileged"),
    submits("NUL in a script", "NUL", script="#!/bin/sh\n\0"),
    submits("a script without its program", "#!", script="id"),
    submits("a script of 3 MB", "the maximum is 262144", script="#!/bin/sh\n" + "x" * 3_000_000),
    sends("ten thousand ids", "no such job", lambda p: c.Cancel(time=NOW, job_ids=("x\x1b",) * 10_000)),
    sends("a hundred thousand ids", "at most 10000 jobs", lambda p: c.Cancel(time=NOW, job_ids=("x\x1b",) * 100_000)),
    submits("traversal in a dependency", "is not a job id", dependencies=(
        Dependency(DependencyKind.AFTER, "../../x"),)),
]  # fmt: skip
W = os.O_WRONLY
FORGED = [
    Attack("a forged owner: uid", places(raw(uid=0)), "not a command", "malformed"),
    Attack("a forged owner: user", places(raw(user="root")), "not a command", "malformed"),
    Attack("a forged origin", places(raw(origin="a\nroot did it")), "not a command", "malformed"),
    Attack("a command that is none", places('{"command": "shutdown", "time": 1}'), "not a command", "malformed"),
    Attack("no JSON", places(b"\xff\xfe\0"), "not a command", "malformed"),
    Attack("JSON a hundred thousand deep", places("[" * 100_000), "not a command", "malformed"),
    Attack("a number of a million digits", places('{"command":"cancel","job_ids":[],"time":' + "9" * 1_000_000 + "}"),
           "not a command", "malformed"),
    Attack("more than fits", places(b" " * (MAX_COMMAND_BYTES + 1)), "bytes, at most", "malformed"),
    Attack("a gigabyte of nothing", lambda p: os.truncate(_new(p, "0sparse.submit"), 1 << 30), "bytes, at most",
           "malformed"),
    Attack("a link to a file of root", lambda p: os.symlink("/etc/shadow", p.world.inbox.new / "0link.submit"),
           "cannot be read", "malformed"),
    Attack("a link to another's log", lambda p: os.symlink(p.log, p.world.inbox.new / "0link2.submit"),
           "cannot be read", "malformed"),
    Attack("a hard link", lambda p: os.link(_new(p, "0one.submit"), p.world.inbox.new / "0two.submit"), "hard link",
           "malformed"),
    Attack("a pipe", lambda p: os.mkfifo(p.world.inbox.new / "0pipe.submit"), "not a regular file", "malformed"),
    Attack("a socket", lambda p: socket.socket(socket.AF_UNIX).bind(str(p.world.inbox.new / "0s.submit")),
           "cannot be read", "malformed"),
    Attack("a folder", lambda p: os.mkdir(p.world.inbox.new / "0dir.submit"), "not a regular file", "malformed"),
    Attack("a name that is no text", lambda p: os.close(os.open(
        os.fsencode(p.world.inbox.new) + b"/0\xff\x1b.submit", os.O_CREAT | W)), "not a command", "malformed"),
    Attack("a setuid file", lambda p: os.chmod(_new(p, "0suid.submit"), 0o6777), "not a command", "malformed"),
]  # fmt: skip


def _new(place: Place, name: str) -> Path:
    path = place.world.inbox.new / name
    path.touch()
    return path


ASKED = [
    asks("run a command in another's job", "are private", lambda p: Exec(job=p.runs, rank=0, argv=("id",)), "exec"),
    asks("read another's output on its node", "are private", lambda p: NodeLog(job=p.runs, attempt=1, rank=0), "log"),
    asks("read another's kept output", "are private", lambda p: KeptLog(job=p.runs, attempt=1, rank=0), "kept"),
    asks("read another's result", "are private", lambda p: KeptLog(job=p.runs, attempt=1, rank=0, result=True), "kept"),
    asks("attach to another's terminal", "are private", lambda p: Attach(job=p.runs, attempt=1), "attach"),
    asks("reach another's port", "are private", lambda p: Forward(job=p.runs, attempt=1, port=22), "forward"),
    asks("traversal in the relay's job", "there is no job", lambda p: KeptLog(job="../..", attempt=1, rank=0), "kept"),
    asks("a forged user in a request", "not a request", lambda p: frame(
        REQUEST, b'{"type":"kept","job":"x","attempt":1,"rank":0,"uid":0}'), "malformed"),
    asks("an attempt below zero", "not a request", lambda p: frame(
        REQUEST, b'{"type":"kept","job":"x","attempt":-1,"rank":0}'), "malformed"),
    asks("a frame of 4 GiB", "not a request", lambda p: struct.pack("!BI", REQUEST, 2**32 - 1), "malformed"),
    asks("input before a request", "not a request", lambda p: frame(ord("i"), b"x"), "malformed"),
    asks("no JSON", "not a request", lambda p: frame(REQUEST, b"\xff" * 1000), "malformed"),
]  # fmt: skip


def opens(name: str, path: Callable[[Place], Path], flags: int = os.O_RDONLY, line: str = "EACCES") -> Attack:
    return Attack(name, lambda place: os.open(path(place), flags), line)


def _alices(place: Place) -> Path:
    return place.world.inbox.new / ALICES


ALICES = "0123456789z.hold"
KERNEL = [
    opens("read the queue's database", lambda p: p.state / "gpusched.db"),
    opens("write it", lambda p: p.state / "gpusched.db", os.O_RDWR),
    opens("lock its index", lambda p: p.state / "gpusched.db-shm", os.O_RDWR),
    opens("read what was written last", lambda p: p.state / "gpusched.db-wal"),
    opens("lock the controller out", lambda p: p.state / "controller.lock"),
    opens("read secrets", lambda p: p.state / "secrets" / f"{p.waits}.json"),
    opens("list secrets", lambda p: p.state / "secrets"),
    opens("read another's output", lambda p: p.log),
    opens("list all output", lambda p: p.state / "logs"),
    opens("write another's output", lambda p: p.log, W),
    opens("read the audit log", lambda p: p.state / audit.FOLDER / audit.CURRENT),
    opens("empty it", lambda p: p.state / audit.FOLDER / audit.CURRENT, W | os.O_TRUNC),
    Attack("remove it", lambda p: (p.state / audit.FOLDER / audit.CURRENT).unlink(), "EACCES"),
    Attack("put another in its place", lambda p: (p.state / audit.FOLDER).rename(p.state / "x"), "EACCES"),
    opens("write the published copy", lambda p: p.state / PUBLISHED / CURRENT, os.O_RDWR),
    Attack("exchange it", lambda p: (p.state / PUBLISHED / "link").symlink_to("/tmp"), "EACCES"),
    Attack("remove the relay's socket", lambda p: (p.state / "relay.sock").unlink(), "EACCES"),
    Attack("a lease of its own", lambda p: (p.state / "lease").mkdir(), "EACCES"),
    Attack("a file in the state folder", lambda p: (p.state / "inventory.yaml").touch(), "EACCES"),
    opens("list the inbox", lambda p: p.world.inbox.new),
    opens("list refused files", lambda p: p.world.inbox.refused),
    opens("read another's command", _alices),
    opens("change another's command", _alices, W),
    opens("take another's name", _alices, W | os.O_CREAT | os.O_EXCL, "EEXIST"),
    Attack("remove another's command", lambda p: _alices(p).unlink(), "EPERM"),
    Attack("replace another's command", lambda p: _new(p, "0mine").replace(_alices(p)), "EPERM"),
    Attack("link to another's command", lambda p: os.link(_alices(p), p.world.inbox.new / "0again.hold"), "EPERM"),
    Attack("give a file to root", lambda p: os.chown(_new(p, "0gift"), 0, -1), "EPERM"),
    opens("read the controller's environment", lambda p: Path(f"/proc/{os.getppid()}/environ")),
    opens("read the controller's memory", lambda p: Path(f"/proc/{os.getppid()}/mem")),
    Attack("stop the controller", lambda p: os.kill(os.getppid(), 0), "EPERM"),
]  # fmt: skip


def titled(attacks: list[Attack]) -> Any:
    return pytest.mark.parametrize("attack", attacks, ids=[attack.name for attack in attacks])


@titled(COMMANDS + FORGED)
def test_a_command_file_is_refused_and_recorded(place: Place, attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.queue.arrivals.LINKING_S", 0.0)
    before, jobs = len(place.entries()), {job.id: job for job in place.world.store.jobs()}
    other = place.world.store.node_records(), place.world.store.live_changes()
    assert as_mallory(lambda: attack.act(place)) == "None"
    place.world.apply_inbox()
    new = place.entries()[before:]
    assert new, "it has an entry"
    assert all(entry.result == "refused" for entry in new)
    assert any(attack.line in entry.reason for entry in new), new
    assert attack.entry in ("any", new[0].command)
    assert not any("\n" in entry.reason or len(entry.reason) > 1000 for entry in new)
    why = [event.data["why"] for event in place.world.refusals()]
    assert any(attack.line in text for text in why)
    now = {job.id: job for job in place.world.store.jobs()}
    assert now | {place.own: jobs[place.own]} == jobs, "the attacker's own job may be held"
    assert (place.world.store.node_records(), place.world.store.live_changes()) == other


@titled(ASKED)
def test_the_relay_refuses_and_records(place: Place, attack: Attack) -> None:
    place.limiter._context.audit._refusals.clear()
    before = len(place.entries())
    assert attack.line in as_mallory(lambda: attack.act(place))
    place.world.apply_inbox()
    (entry,) = place.entries()[before:]
    assert (entry.command, entry.result, entry.via) == (attack.entry, "refused", "relay")
    assert attack.line in entry.reason


@titled(KERNEL)
def test_the_kernel_refuses(place: Place, attack: Attack) -> None:
    alices = place.world.inbox.new / ALICES
    alices.write_bytes(msgspec.json.encode(c.Hold(time=NOW, job_ids=(place.own,))))
    os.chown(alices, ALICE, -1)
    alices.chmod(0o640)
    content = alices.read_bytes()
    with sqlite3.connect(place.state / "gpusched.db") as db:  # so that WAL and index exist
        db.execute("SELECT 1 FROM meta")
    assert as_mallory(lambda: attack.act(place)) == attack.line
    assert alices.read_bytes() == content
    for path in place.world.inbox.new.iterdir():
        path.unlink()


def test_a_file_leased_by_its_owner_blocks_nothing(place: Place) -> None:
    """A reader of such a file waits until its owner, or 45 s later the kernel, gives it up (fcntl's F_SETLEASE)."""
    held, go = os.pipe(), os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgid(MALLORY)
            os.setuid(MALLORY)
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            file = os.open(place.world.inbox.new / "0leased.submit", os.O_CREAT | os.O_RDWR)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(held[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(held[1])
    assert os.read(held[0], 1) == b"x"
    before = len(place.entries())
    place.world.apply_inbox()
    os.close(go[1])
    os.waitpid(pid, 0)
    os.close(held[0])
    os.close(go[0])
    assert "cannot be read" in place.entries()[before].reason


def test_a_replayed_command_changes_nothing(place: Place) -> None:
    submit = c.Submit(time=NOW, id=fresh_id(NOW), spec=spec())
    content, name = msgspec.json.encode(submit), f"{submit.id}.submit"
    assert as_mallory(lambda: places(content, name)(place)) == "None"
    place.world.apply_inbox()
    assert place.world.job(submit.id).uid == MALLORY
    place.world.put(submit.id, JobState.COMPLETED)
    before = len(place.entries())
    assert as_mallory(lambda: places(content, name)(place)) == "None"
    place.world.apply_inbox()
    assert len(place.entries()) == before, "the same file: neither done nor recorded twice"
    assert as_mallory(lambda: places(content, "0replayed.submit")(place)) == "None"
    place.world.apply_inbox()
    assert "is not in" in place.entries()[-1].reason
    assert place.world.job(submit.id).state is JobState.COMPLETED


def test_an_owner_in_the_job_is_ignored(place: Place) -> None:
    submit = c.Submit(time=NOW, id=fresh_id(NOW), spec=spec())
    content = msgspec.json.encode(submit).replace(b'"name"', b'"uid":0,"user":"root","name"', 1)
    assert as_mallory(lambda: places(content, f"{submit.id}.submit")(place)) == "None"
    place.world.apply_inbox()
    assert place.world.job(submit.id).uid == MALLORY


def test_an_early_date_does_not_jump_the_queue(place: Place) -> None:
    submit = c.Submit(time=1.0, id=fresh_id(NOW), spec=spec())
    assert as_mallory(lambda: place.world.inbox.deliver(submit)) == "None"
    place.world.apply_inbox()
    assert place.world.job(submit.id).submit_time > 1e9


def test_a_flood_is_refused_and_delays_no_other_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.queue.arrivals.MAX_WAITING", 50)

    def flood(place: Place) -> None:
        for number in range(400):
            (place.world.inbox.new / f"0flood{number:05d}.submit").write_bytes(b"{")

    before = len(place.entries())
    assert as_mallory(lambda: flood(place)) == "None"
    place.world.lay(c.Hold(time=NOW, job_ids=(place.waits,)), ALICE)
    place.world.apply_inbox()
    assert place.world.job(place.waits).held_by == "user", "in the same cycle"
    place.world.say(c.Release(time=NOW, job_ids=(place.waits,)), ALICE)
    while any(place.world.inbox.new.iterdir()):
        place.world.apply_inbox()
    assert 1 <= len(place.entries()) - before < 200


def test_too_many_sessions_of_one_leave_room_for_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.controller.peers.REQUEST_S", 600.0)  # for which a session is held

    def hold(place: Place) -> str:
        socks = []
        for _ in range(relay.MAX_SESSIONS_PER_USER + 3):
            socks.append(socket.socket(socket.AF_UNIX))
            socks[-1].settimeout(300)
            socks[-1].connect(str(place.state / "relay.sock"))
        refused = answer(socks[-1])
        return f"{refused}; another: {place.ask(AuditQuery()) == 'closed'}"

    place.limiter._context.audit._refusals.clear()
    before = len(place.entries())
    got = as_mallory(lambda: hold(place))
    assert "too many sessions (at most 32 per user" in got
    place.world.apply_inbox()
    assert any("too many sessions" in entry.reason for entry in place.entries()[before:])
    assert place.ask(AuditQuery()).count("\n") > 10, "root still has a session"


def test_users_read_only_their_own_audit_entries(place: Place) -> None:
    read = as_mallory(lambda: place.ask(AuditQuery())).splitlines()
    assert read
    assert {msgspec.json.decode(line, type=AuditEntry).uid for line in read} == {MALLORY}


def test_the_secret_is_in_its_file_alone(place: Place) -> None:
    place.sync()
    kept = place.state / "secrets" / f"{place.waits}.json"
    files = [path for path in place.state.rglob("*") if path.is_file() and path != place.log]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [kept]
    assert SECRET.encode() not in (place.state / PUBLISHED / CURRENT).read_bytes()


def test_there_are_more_than_eighty() -> None:
    assert len(COMMANDS + FORGED + ASKED + KERNEL) > 80
