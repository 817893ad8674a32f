"""Other users read a copy: no lock of theirs stops the controller. With a real controller, and another user."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpusched.controller.service import LockWait
from gpusched.model.jobs import ENDED
from gpusched.queue.reading import CURRENT, PUBLISHED
from gpusched.queue.store import DATABASE, Reader, Store
from tests import commands
from tests.e2e.people import nobody
from tests.logged import messages
from tests.testbed import wait_until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")

INVENTORY = """\
settings: {tick: 1s, shared: SHARED, root_jobs: true}
partitions:
  p:
    defaults: {gpus: 0, cores: 64, memory: 4G, runtime: process, transport: local}
    nodes: [{name: here}]
"""
HOLD = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = []
for name in ("new/0.submit", "tmp/0"):  # files of his own, which he may keep others from opening
    fd = os.open(os.path.join(sys.argv[1], "inbox", name), os.O_CREAT | os.O_RDWR, 0o666)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.flock(fd, fcntl.LOCK_EX)
for folder, folders, files in os.walk(sys.argv[1]):
    for path in (os.path.join(folder, name) for name in (*folders, *files, ".")):
        for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):
            try:
                fd = os.open(path, flags | os.O_NONBLOCK)
            except OSError:
                continue
            held.append(path)
            for lock in (fcntl.LOCK_SH, fcntl.LOCK_EX):
                for take in (lambda: fcntl.lockf(fd, lock | fcntl.LOCK_NB, 1, 120),
                             lambda: fcntl.lockf(fd, lock | fcntl.LOCK_NB),
                             lambda: fcntl.flock(fd, lock | fcntl.LOCK_NB),
                             lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, lock - 1)):
                    try:
                        take()
                    except OSError:
                        pass
print(sorted(set(map(os.path.basename, held))), flush=True)
sys.stdin.read()
"""
"""Python: lock, in every way, all that can be opened below a folder; say what; hold it until stdin is closed."""
LOCK_SHM = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(fd, fcntl.LOCK_SH, 1, 120)
print("held", flush=True)
sys.stdin.read()
"""

WRITE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


PATIENT = """
from gpusched.queue import locks
locks.LOCK_TIMEOUT_S = 3000.0
from gpusched.__main__ import main
main()
"""
"""Python: gpusched, which would wait longer than a test for a lock."""


class Installation:
    """A controller of its own processes, with one node: this machine."""

    def __init__(self, folder: Path) -> None:
        self.state, self.inventory, self.log = folder / "state", folder / "inventory.yaml", folder / "log"
        self.home = folder / "home"  # of what the jobs leave on the node
        self.controller: subprocess.Popen[bytes] | None = None
        self.holding: list[subprocess.Popen[str]] = []
        self.declare(shared=True)

    def declare(self, *, shared: bool) -> None:
        part = self.inventory.with_suffix(".part")
        part.write_text(INVENTORY.replace("SHARED", str(shared).lower()))
        part.replace(self.inventory)

    @property
    def env(self) -> dict[str, str]:
        ours = {"GPUSCHED_STATE": self.state, "GPUSCHED_INVENTORY": self.inventory, "XDG_STATE_HOME": self.home}
        return os.environ | {name: str(path) for name, path in ours.items()}

    def start(self, *, wait: bool = True) -> None:
        began = time.time()
        with self.log.open("wb") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-c", PATIENT, "controller"], env=self.env, stdout=log, stderr=log
            )
        if wait:
            wait_until(lambda: self.beat() > began, 60, "the first cycle")

    def beat(self) -> float:
        reader = Reader.open(self.state)
        found = reader.meta("heartbeat") if reader else None
        if reader is not None:
            reader.close()
        return float(found or 0.0)

    def stop(self) -> None:
        """End the controller, which waits for no lock then."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGTERM)
        assert self.controller.wait(300) == 0

    def said(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.log.read_text().splitlines())

    def cli(self, *words: str, user: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return commands.run(*words, env=self.env, prefix=user)

    def submit(self, *command: str, user: Sequence[str] = ()) -> str:
        """Submit a job; another user's is held, as only a node that is a container would run it."""
        options = ("--gpus", "0", "-c", "1", "--mem", "64M", "-t", "1m", *(["--hold"] if user else ()))
        done = self.cli("submit", "--json", *options, "--", *command, user=user)
        assert done.returncode == 0, done
        return str(json.loads(done.stdout)["id"])

    def ended(self, job_id: str) -> bool:
        reader = Reader.open(self.state)
        assert reader is not None
        try:
            job = reader.job(job_id)
            return job is not None and job.state in ENDED
        finally:
            reader.close()

    def hold(self, program: str, path: Path, user: Sequence[str] = ()) -> str:
        """Start a program that locks things; what it says once it has."""
        holder = subprocess.Popen(
            [*user, sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.holding.append(holder)
        assert holder.stdout is not None
        return holder.stdout.readline()

    def let_go(self) -> None:
        while self.holding:
            self.holding.pop().communicate()

    def close(self) -> None:
        self.let_go()
        if self.controller is not None and self.controller.poll() is None:
            self.controller.kill()
            self.controller.wait()


@pytest.fixture
def site() -> Iterator[Installation]:
    if "--inh-caps" in nobody():
        pytest.skip("this Python can be read by root only: another user would need root's right to read everything")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest closes its own to other users
        Path(folder).chmod(0o755)
        site = Installation(Path(folder))
        yield site
        print(site.log.read_text())  # shown where the test fails
        site.close()


def test_locks_of_another_user_stop_nothing(site: Installation) -> None:
    """The issue's case: a shared lock on byte 120 of -shm; and every other lock on all that he can open."""
    other = nobody()
    site.start()
    assert site.cli("cancel", site.submit("true", user=other), user=other).returncode == 0
    held = site.hold(HOLD, site.state, other)
    assert CURRENT in held
    assert not {DATABASE, f"{DATABASE}-shm", f"{DATABASE}-wal", "controller.lock"} & set(eval(held))
    job = site.submit("true")
    wait_until(lambda: site.ended(job), 15, "a job from its submission to its end")
    assert site.cli("wait", job, user=other).returncode == 0, "and he sees it, in a later copy than the one he locks"
    site.stop()
    site.start()
    assert not site.said("locked")


def test_a_process_that_locks_the_store_is_named_and_delays_no_end(site: Installation) -> None:
    """Its own user, and root, can still lock it."""
    site.start()
    assert site.hold(LOCK_SHM, site.state / f"{DATABASE}-shm") == "held\n"
    (holder,) = site.holding
    wait_until(lambda: site.said(f"process {holder.pid} (python", "user 0", f"{DATABASE}-shm"), 20, "its name")
    site.stop()
    site.let_go()
    assert site.hold(WRITE, site.state / DATABASE) == "held\n"
    (holder,) = site.holding
    site.start(wait=False)
    assert site.controller is not None
    wait_until(lambda: site.said("waiting for a lock", f"process {holder.pid} "), 30, "its name at the start")
    assert site.controller.poll() is None
    beat = site.beat()
    site.let_go()
    wait_until(lambda: site.said("is free again") and site.beat() > beat, 60, "a cycle")


def test_a_wait_for_a_lock_lasts_as_long_as_its_patience_and_ends_a_frozen_holder_once(tmp_path: Path) -> None:
    ended: list[bool] = []
    waiting = LockWait(tmp_path, patience_s=0.3)
    waiting.end_holder_after(0.1, lambda: bool(ended.append(True)))
    assert [(waiting(s), len(ended)) for s in (0.0, 0.09, 0.1, 0.29)] == [(True, 0), (True, 0), (True, 1), (True, 1)]
    assert (waiting(0.3), waiting(-1.0)) == (False, True)


@pytest.mark.parametrize(("program", "file"), [(LOCK_SHM, f"{DATABASE}-shm"), (WRITE, DATABASE)])
def test_the_holder_of_a_lock_is_named_within_a_second(
    tmp_path: Path, program: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = LockWait(tmp_path, patience_s=0.99)
    with contextlib.closing(Store.create_or_open(tmp_path, waiting)) as store:
        store.set_meta("a", "1")
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.set_meta("a", "2")
        holder.communicate()
        (line,) = messages(caplog)
        assert f"process {holder.pid} (python" in line
        store.set_meta("a", "3")


def test_readers_of_the_copy_see_every_change(site: Installation) -> None:
    other = nobody()
    site.start()
    job = site.submit("sh", "-c", "exit 3")
    assert site.cli("wait", job, user=other).returncode == 3
    assert json.loads(site.cli("show", job, "--json", user=other).stdout)["state"] == "FAILED"
    checked = site.cli("check", "--json", user=other).stdout
    assert [f["status"] for f in json.loads(checked) if f["check"] == "database"] == ["ok"]
    assert site.controller is not None
    site.controller.kill()
    site.controller.wait()
    (site.state / PUBLISHED / "99.part").touch()
    later = site.submit("true")
    assert site.cli("tick").returncode == 0
    assert not list((site.state / PUBLISHED).glob("*.part*")), "what a killed controller left half done"
    assert json.loads(site.cli("show", later, "--json", user=other).stdout)["state"] in ("RUNNING", "COMPLETED")


def test_shared_is_taken_up_and_given_up_by_a_running_controller(site: Installation) -> None:
    other, new = nobody(), site.state / "inbox/new"
    site.declare(shared=False)
    site.start()
    assert "settings.shared" in site.cli("status", user=other).stderr
    assert site.cli("submit", "--gpus", "0", "-c", "1", "--mem", "1M", "-t", "1m", "--", "true", user=other).returncode
    site.declare(shared=True)
    wait_until(lambda: (site.state / "relay.sock").exists(), 30, "the relay")
    job = site.submit("true", user=other)
    wait_until(lambda: json.loads(site.cli("show", job, "--json", user=other).stdout)["reason"] != "InInbox")
    site.declare(shared=False)
    wait_until(lambda: not (site.state / "relay.sock").exists(), 30, "no relay")
    assert not stat.S_IMODE(new.stat().st_mode) & stat.S_IRWXO
    assert "settings.shared" in site.cli("status", user=other).stderr
    assert not (site.state / PUBLISHED).exists()
    assert site.cli("status", "--json").returncode == 0
    with pytest.raises(sqlite3.Error):
        sqlite3.connect(site.state / PUBLISHED / CURRENT)
