"""Bringing output home: whole, cut in the middle, or not at all, but never half of it as if it were whole."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from gpusched.cluster.base import Operation
from gpusched.cluster.collecting import collect_log, rotate
from gpusched.cluster.logfiles import remove_drafts
from gpusched.cluster.ssh import SshCluster
from gpusched.controller.outputs import may_see, readers_of
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.resources import LogSettings, RuntimeName
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.transport import CommandResult, RemoteScript, TransportError
from gpusched.queue.store import RankRecord
from tests.builders import spec
from tests.controller.imagined import inventory
from tests.testbed import wait_until

MIB = 1024 * 1024
CAPS = LogSettings(max_mib_per_job=1, max_total_mib=1)


def collect(tmp_path: Path, shell: str) -> tuple[str, bytes | None]:
    target = tmp_path / "logs" / "job" / "1.0.log"
    error = collect_log(LocalTransport("here"), RemoteScript(("sh", "-c", shell)), target, CAPS)
    assert files(tmp_path / "logs") == [target.name] * target.exists()
    return error, target.read_bytes() if target.exists() else None


def test_outputs_that_take_long_delay_nothing_else_on_their_node(tmp_path: Path) -> None:
    let_go = threading.Event()

    class Slow(SshCluster):
        def _collect(self, *_: object) -> str:
            assert let_go.wait(300)
            return ""

    site = inventory(1)
    node = msgspec.structs.replace(site.nodes[0], transport="local", runtime=RuntimeName.PROCESS)
    site = msgspec.structs.replace(site, partitions=(msgspec.structs.replace(site.partitions[0], nodes=(node,)),))
    cluster = Slow(site, "c", tmp_path)
    ranks = [RankRecord(job_id=f"j{n}", attempt=1, rank=0, node=node.name, runtime="process") for n in range(20)]
    try:
        cluster.perform(Operation(verb="collect", node=node.name, rank=rank) for rank in ranks[1:])
        cluster.perform([Operation(verb="signal", node=node.name, rank=ranks[0], signal="TERM")])
        ended = wait_until(cluster.finished, 15, "the signal")
        assert [(one.operation.verb, one.error) for one in ended or ()] == [("signal", "")]
        assert len(cluster.busy()) == 19
    finally:
        let_go.set()
        cluster.wait_for_operations(60.0)
        cluster.close()


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if not p.is_dir())


@pytest.mark.parametrize("output", [None, "/data/out"])
@pytest.mark.parametrize("finish", [False, True])
def test_collecting_completes_the_jobs_own_files_if_asked(
    tmp_path: Path, finish: bool, output: str | None
) -> None:
    """Of a job with --error alone its output is collected, too."""
    log, whole, site = tmp_path / "log", tmp_path / "whole", inventory(1)
    runtime = Mock()
    runtime.log.return_value = RemoteScript(("echo", "out"))
    runtime.finish_output.return_value = RemoteScript(("touch", str(whole)))
    rank = RankRecord(job_id="j", attempt=1, rank=0, node=site.nodes[0].name, runtime="process", output=output)
    operation = Operation(
        verb="collect", node=rank.node, rank=rank, destination=str(log) if output is None else None, finish=finish
    )
    with contextlib.closing(SshCluster(site, "c", tmp_path)) as cluster:
        assert cluster._collect(operation, runtime, LocalTransport("here"), Mock()) == ""
    assert (log.exists(), whole.exists()) == (output is None, finish)


@pytest.mark.parametrize("text", ["", "x", "no end of line", "two\nlines\n", "\\0gpusched-output-ended 0\\n", "é" * 99])
def test_small_outputs_come_as_they_are(tmp_path: Path, text: str) -> None:
    error, content = collect(tmp_path, f"printf '{text}'")
    assert error == ""
    assert content == text.encode().replace(b"\\0", b"\0").replace(b"\\n", b"\n")


def test_both_streams_count(tmp_path: Path) -> None:
    assert collect(tmp_path, "echo out; echo err >&2")[1] == b"out\nerr\n"


def numbers(count: int) -> str:
    return f"{sys.executable} -c 'for i in range({count}): print(\"%09d\" % i)'"


@pytest.mark.parametrize("extra", [0, 1, 3 * MIB])
def test_of_a_large_output_the_beginning_and_the_end_are_kept(tmp_path: Path, extra: int) -> None:
    error, content = collect(tmp_path, f"head -c {MIB + extra} /dev/zero | tr '\\0' x")
    assert (error, content is not None) == ("", True)
    assert content is not None
    if extra == 0:
        assert content == b"x" * MIB
    else:
        assert f"[gpusched: {extra} bytes left out here".encode() in content
        assert MIB <= len(content) < MIB + 200


def test_head_and_tail_are_the_right_ones(tmp_path: Path) -> None:
    _, content = collect(tmp_path, numbers(500_000))
    assert content is not None
    head, _, rest = content.partition(b"\n[gpusched: ")
    middle, _, tail = rest.partition(b"]\n")
    assert head == b"".join(b"%09d\n" % i for i in range(500_000))[: MIB // 4]
    assert tail == b"".join(b"%09d\n" % i for i in range(400_000, 500_000))[-(MIB - MIB // 4) :]
    assert int(middle.split()[0]) + len(head) + len(tail) == 5_000_000


def test_an_engine_that_fails_does_not_pass_for_an_empty_output(tmp_path: Path) -> None:
    error, content = collect(tmp_path, "echo half; echo 'database is locked' >&2; exit 125")
    assert error == "the output cannot be read (exit code 125): database is locked"
    assert content is None


class Broken:
    """A connection that goes away in the middle, without an exception."""

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        raise NotImplementedError

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        yield b"half of"

    def close(self) -> None: ...


def test_an_interrupted_transfer_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "logs" / "job" / "1.0.log"
    target.parent.mkdir(parents=True)
    target.write_text("before")
    with pytest.raises(TransportError, match="was cut off"):
        collect_log(Broken(), RemoteScript(("true",)), target, CAPS)
    assert target.read_text() == "before"
    assert files(tmp_path / "logs") == ["1.0.log"]


def test_a_full_disk_here_is_our_own_trouble(tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            collect(tmp_path, "head -c 100000 /dev/zero")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert files(tmp_path / "logs") == []


class Counting(LocalTransport):
    """Counts what would travel."""

    travelled = 0

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        for chunk in super().stream(script):
            self.travelled += len(chunk)
            yield chunk


class Oversized(LocalTransport):
    """A node that sends more than it was asked for."""

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        for number in range(60):
            yield bytes([number]) * (MIB // 16)
        yield b"\0gpusched-output-ended 0 5\n"


def test_a_node_that_sends_too_much_is_cut_to_the_limit_here(tmp_path: Path) -> None:
    target = tmp_path / "logs" / "job" / "1.0.log"
    assert collect_log(Oversized("here"), RemoteScript(("true",)), target, CAPS) == ""
    blocks = [bytes([number]) * (MIB // 16) for number in range(60)]
    line = f"\n[gpusched: {44 * MIB // 16 + 5} bytes left out here, settings.logs.max_per_job]\n".encode()
    assert target.read_bytes() == b"".join(blocks[:4]) + line + b"".join(blocks[-12:])


def test_omitted_output_is_not_transferred(tmp_path: Path) -> None:
    target, node = tmp_path / "logs" / "job" / "1.0.log", Counting("here")
    assert collect_log(node, RemoteScript(("sh", "-c", "head -c 200000001 /dev/zero")), target, CAPS) == ""
    assert node.travelled < MIB + 200
    assert f"[gpusched: {200_000_001 - MIB} bytes left out here".encode() in target.read_bytes()


def readable(path: Path, uid: int) -> bool:
    words = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "cat", str(path)]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpusched-logs-", dir="/tmp"))  # where others can get to, unlike tmp_path
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


OWNER, OPERATOR, OTHER = 64001, 64002, 64003
as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to others")


class Watching(LocalTransport):
    """Looks at the files while the output comes."""

    def __init__(self, state: Path) -> None:
        super().__init__("here")
        self.state, self.modes = state, set[int]()

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        for chunk in super().stream(script):
            self.modes |= {p.stat().st_mode & 0o7777 for p in self.state.rglob("*.log*")}
            yield chunk


@as_root
def test_output_is_private_to_its_owner_and_the_operators(state: Path) -> None:
    target, node = state / "logs" / "job" / "1.0.log", Watching(state)
    assert collect_log(node, RemoteScript(("echo", "x")), target, CAPS, (OWNER, OPERATOR)) == ""
    assert node.modes == {0o600}
    assert (target.stat().st_uid, target.parent.stat().st_uid) == (0, 0)
    assert [readable(target, uid) for uid in (OWNER, OPERATOR, OTHER)] == [True, True, False]
    folders = {path.name: path.stat().st_mode & 0o777 for path in (target.parent, state / "logs")}
    assert folders == {"job": 0o711, "logs": 0o711}


def test_permissions_of_a_jobs_output(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = msgspec.structs.replace(inventory().settings, admins=("daemon", "nobody-of-that-name", "sys"))
    declared = msgspec.structs.replace(inventory(), settings=settings)
    daemon, sys_ = (pwd.getpwnam(name).pw_uid for name in ("daemon", "sys"))
    job = JobRecord(id="j", user="u", uid=OWNER, spec=spec(), state=JobState.RUNNING, submit_time=0.0)
    assert readers_of(job, declared) == (OWNER, daemon, sys_)
    assert readers_of(None, declared) == (daemon, sys_)
    monkeypatch.setattr(os, "geteuid", lambda: 64009)
    who = (0, 64009, OWNER, sys_, OTHER, pwd.getpwnam("nobody").pw_uid)
    assert [may_see(uid, job, declared) for uid in who] == [True] * 4 + [False] * 2


@as_root
def test_without_access_lists_the_owner_alone_reads(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    target = state / "logs" / "job" / "1.0.log"
    assert collect_log(LocalTransport("here"), RemoteScript(("echo", "x")), target, CAPS, (OWNER, OPERATOR)) == ""
    assert [readable(target, uid) for uid in (OWNER, OPERATOR, OTHER)] == [True, False, False]
    assert (target.stat().st_mode & 0o777, target.parent.stat().st_uid) == (0o400, 0)


@as_root
def test_a_folder_that_belongs_to_the_user_is_taken_back(state: Path) -> None:
    victim = state / "victim"
    victim.write_text("root's own")
    job = state / "logs" / "job"
    job.mkdir(parents=True)
    for name in ("2.0.part", "2.0.log", "9.9.log", "job.2.0.log"):
        (job / name).symlink_to(victim if name[0] == "2" else "nowhere")
    for path in (job, *job.iterdir()):
        os.chown(path, OWNER, OWNER, follow_symlinks=False)
    target = job / "2.0.log"
    assert collect_log(LocalTransport("here"), RemoteScript(("echo", "x")), target, CAPS, (OWNER,)) == ""
    assert (target.is_symlink(), target.read_text()) == (False, "x\n")
    assert (victim.read_text(), victim.stat().st_uid, victim.stat().st_mode & 0o777) == ("root's own", 0, 0o644)
    assert (job.stat().st_uid, job.stat().st_mode & 0o777) == (0, 0o711)


def test_a_start_removes_what_a_killed_one_left_half_written(state: Path) -> None:
    drafts = state / "logs" / ".collecting"
    remove_drafts(drafts.parent)
    (drafts.parent / "job").mkdir(parents=True)
    (drafts.parent / "job" / "1.0.log").write_text("out")
    drafts.mkdir()
    (drafts / "job.2.0.log.abc").write_text("half")
    remove_drafts(drafts.parent)
    assert files(drafts.parent) == ["1.0.log"]


def test_rotation_removes_the_oldest_until_the_rest_fits(tmp_path: Path) -> None:
    for age, (job, size) in enumerate([("a", 0.4), ("b", 0.4), ("c", 0.4), ("c", 0.3)]):
        path = tmp_path / job / f"{age}.0.log"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * int(size * MIB))
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "b" / "1.0.log").rename(tmp_path / "b" / "1.0.result")
    assert [p.name for p in rotate(tmp_path, CAPS)] == ["0.0.log", "1.0.result"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    assert rotate(tmp_path, CAPS) == []
    assert rotate(tmp_path / "nowhere", CAPS) == []


def test_rotation_passes_over_junk(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "9.9.log").symlink_to("nowhere")
    (job / "8.8.log").mkdir()
    for age in (1, 2):
        (job / f"{age}.0.log").write_bytes(b"x" * MIB)
        os.utime(job / f"{age}.0.log", (age, age))
    assert [p.name for p in rotate(tmp_path, CAPS)] == ["1.0.log"]
