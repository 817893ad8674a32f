"""The cluster that a campaign torments, and what is known about it besides gpusched's own records."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from gpusched.model.jobs import ENDED, JobRecord
from tests import commands
from tests.campaign.faults.base import environment
from tests.campaign.ledger import Ledger
from tests.campaign.schedule import Work
from tests.campaign.shim import SERVER, Shim
from tests.e2e.conftest import SETTINGS, Cluster
from tests.testbed import Testbed, TestNode, processes

STATE_KIB, HOME_KIB = 96 << 10, 64 << 10
NODE_FAIL_AFTER_S = 14.0


class Site(Cluster):
    """A cluster with its state folder and its nodes' homes on file systems of their own.

    Attributes:
        ledger: The jobs' own.
        shim: Orders to the controller's disk operations.
        client_shim: To those of the clients of `submit_anyhow`.
        accepted: Job or array id -> work that a client said was submitted.
        perhaps: Names of jobs whose clients died or failed: each is there once, or not at all.
        wrong: What was found to be wrong.
        struck: Jobs of which a process was killed by a stranger.
        ordered: Jobs that were cancelled.
        unordered: Work whose cancellation or release found no room.
        stranger: A file that nothing may change.
        flood: How many files `inbox.Many` writes at most.
    """

    settings: Mapping[str, object] = SETTINGS | {
        "tick": "2s", "probe_timeout": "5s", "connect_timeout": "4s", "down_after": "6s",
        "node_fail_after": f"{NODE_FAIL_AFTER_S}s", "grace": "3s", "max_retries": 50,
    }  # fmt: skip

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        super().__init__(testbed, folder)
        self.ledger = Ledger(folder / "share")
        self.settings = {**self.settings, "allowed_mounts": [str(folder / "share")]}
        self.state.mkdir()
        self.stranger = folder / "stranger"
        self.stranger.write_text("not gpusched's")
        self.shim = Shim(folder / "controller.orders", self.state)
        self.client_shim = Shim(folder / "client.orders", self.state / "inbox")
        self._clock = Shim(folder / "clock.orders", self.state)
        self.accepted: dict[str, Work] = {}
        self.perhaps: list[str] = []
        self.wrong: list[str] = []
        self.struck: set[str] = set()
        self.ordered: set[str] = set()
        self.unordered: list[Work] = []
        self.flood = 1800
        self.starts_of_controller = 0
        self._clients = 0
        self._crash_points: dict[str, int] = {}
        self._mounts = [self.state]
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STATE_KIB}k", "campaign", self.state], check=True)
        for node in testbed.nodes:
            home = node.disk / "home"
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={HOME_KIB}k,mode=700", "campaign", home], check=True)
            self._mounts.append(home)
            node.reboot()  # what is mounted now it sees only then
        self.write_inventory()

    def close(self) -> None:
        """Stop everything; whatever was mounted is gone."""
        try:
            super().close()
        finally:
            self.ledger.close()
            for mount in self._mounts:
                subprocess.run(["umount", "-l", mount], check=False)
            for node in self.testbed.nodes:
                node.reboot()

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note that something is wrong, unless it holds."""
        if not holds:
            self.wrong.append(otherwise)

    def note(self, said: str) -> None:
        """Put a line of ours into the controller's log."""
        with self._log.open("a") as log:
            log.write(f"campaign: {said}\n")

    def attempt(self, action: Callable[[], object]) -> None:
        """Do it where the disk allows it."""
        with suppress(OSError):
            action()

    def write_file(self, path: Path, content: bytes, size: int = 0) -> None:
        """Write it where the disk allows it; never through a link, which may lead out of the campaign's folder."""
        assert path.is_relative_to(self.folder)

        def write() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.write(content)
                file.truncate(max(size, len(content)))

        self.attempt(write)

    # ---- the inventory --------------------------------------------------------------------------------------

    def write_inventory(  # type: ignore[override]
        self, settings: Mapping[str, object] | None = None, *, leave_out: Iterable[str] = (), **more: object
    ) -> None:
        """Partition A100 runs containers, V100 processes."""
        runtimes = {n.name: {"runtime": "process"} for i, n in enumerate(self.testbed.nodes) if i % 2}
        super().write_inventory(settings, nodes=runtimes, leave_out=leave_out)

    # ---- the controller -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the controller unless it runs, without waiting for it; its orders to fail are gone."""
        if self.is_up():
            return
        self.shim.clear()
        self.starts_of_controller += 1
        with self._log.open("ab") as log, open(os.devnull) as nothing:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            env = self.env(CAMPAIGN_SHIM=str(self.shim.path))
            self.controller = commands.start(["controller"], env, "/", files, session=True)

    def is_up(self) -> bool:
        """Whether the controller runs."""
        return self.controller is not None and self.controller.poll() is None

    def kill(self) -> None:
        """``kill -9`` of the controller, if it runs."""
        if self.is_up():
            self.kill_controller()

    def signal(self, number: int) -> None:
        """Send the controller a signal, if it runs."""
        if self.is_up():
            assert self.controller is not None
            self.controller.send_signal(number)

    def children(self) -> list[int]:
        """The controller's child processes."""
        return processes.tree(self.controller.pid)[1:] if self.controller is not None and self.is_up() else []

    def next_crash_point(self, kind: str, most: int) -> int:
        """0, 1, 2 .. of this kind of crash, beginning again at ``most``: so that each point is passed."""
        found = self._crash_points.get(kind, -1) + 1
        self._crash_points[kind] = found
        return found % most

    def env(self, **more: str) -> dict[str, str]:
        """As `Cluster.env`, with the site's clock."""
        return super().env(**SERVER | {"CAMPAIGN_SHIM": str(self._clock.path)} | more)

    def set_clock(self, ahead_s: int) -> None:
        """Set the wall clock of controller and clients."""
        self.shim.clock_s = self.client_shim.clock_s = self._clock.clock_s = ahead_s

    # ---- disks ----------------------------------------------------------------------------------------------

    def resize_state(self, left_kib: int | None) -> None:
        """Leave so much room in the state folder; None: as at first."""
        _resize(self.state, STATE_KIB, left_kib)

    def resize_home(self, node: TestNode, left_kib: int | None) -> None:
        """Leave so much room in a node's home; None: as at first."""
        _resize(node.disk / "home", HOME_KIB, left_kib)

    # ---- the database ---------------------------------------------------------------------------------------

    @property
    def database(self) -> Path:
        """gpusched.db."""
        return self.state / "gpusched.db"

    def copy_database(self) -> Path:
        """A copy of it with its log, made while no controller runs."""
        copy = self.folder / "kept"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for path in self.state.glob("gpusched.db*"):
            shutil.copy2(path, copy)
        return copy

    def restore_database(self, copy: Path) -> None:
        """Put a copy back, as a person would."""
        for path in self.state.glob("gpusched.db*"):
            path.unlink()
        for path in copy.glob("gpusched.db*"):
            shutil.copy2(path, self.state)

    def is_disturbed(self) -> bool:
        """Whether the state folder is full or cannot be written."""
        found = os.statvfs(self.state)
        return found.f_bavail * found.f_frsize < (8 << 20)

    # ---- jobs -----------------------------------------------------------------------------------------------

    def words(self, work: Work, name: str) -> list[str]:
        """The command line that submits it."""
        options = ["submit", "--json", "-p", work.partition, "--job-name", name]
        if work.gpus:
            options += ["--gpus", str(work.gpus * (2 if work.shape == "gang" else 1))]
        else:
            options += ["--cpus", "1"]
        options += {
            "gang": ["-N", "2"], "array": ["--array", "0-2"], "limit": ["-t", "0:00:02"], "held": ["--hold"],
            "once": ["--no-requeue"],
        }.get(work.shape, [])  # fmt: skip
        share = str(self.ledger.folder)
        if work.partition == "A100":
            options += ["--mount", f"{share}:/share"]
            share = "/share"
        return [*options, "--", "sh", f"{share}/job.sh", str(work.seconds), str(work.code)]

    def submit_work(self, work: Work) -> None:
        """Submit it; where the client fails it may be there or not."""
        name = f"w{work.number}"
        done = self.cli(*self.words(work, name), check=False)
        found = re.search(r'"id": *"([^"]+)"', done.stdout) if done.returncode == 0 else None
        if found is not None:
            self.accepted[found[1]] = work
            return
        # On stderr may stand that the last good inventory is used.
        self.expect(done.returncode == 1 and done.stdout.count("\n") == 1, f"submit: {done}")
        self.perhaps.append(name)

    def submit_anyhow(self) -> None:
        """Submit a short job by a client with the client's orders."""
        self._clients += 1
        name = f"c{self._clients}"
        work = Work(-1, "V100", 1, 0.2, 0, "plain")
        done = self.cli(*self.words(work, name), check=False, env={"CAMPAIGN_SHIM": str(self.client_shim.path)})
        found = re.search(r'"id": *"([^"]+)"', done.stdout) if done.returncode == 0 else None
        if found is not None:
            self.accepted[found[1]] = work
            return
        failed = done.returncode == 1 and done.stdout.count("\n") == 1
        self.expect(failed or done.returncode == -signal.SIGKILL, f"a client that failed: {done}")
        self.perhaps.append(name)

    def order(self, work: Work) -> None:
        """Cancel, or release, what was submitted; again until the disk takes it."""
        for job, one in self.accepted.items():
            if one is work:
                verb = "release" if work.shape == "held" else "cancel"
                done = self.cli(verb, job, check=False)
                if verb == "cancel":
                    self.ordered.add(job)
                if done.returncode and self.state_of(job) not in ENDED:
                    self.unordered.append(work)

    def killed(self, pid: int) -> None:
        """A stranger kills this process."""
        self.struck.add(environment(pid).get(b"GPUSCHED_JOB_ID", b"").decode())

    def records(self) -> list[JobRecord]:
        """All jobs of the store; none while it cannot be read."""
        with self.reader() as reader:
            return list(reader.jobs()) if reader else []

    def unfinished(self) -> int:
        """How many have not ended."""
        return sum(job.state not in ENDED for job in self.records())

    def holds(self, node: str) -> bool:
        """Whether the node has jobs, by the store."""
        with suppress(Exception), self.reader() as reader:
            jobs = reader.active() if reader else []
            return any(part.node == node for job in jobs if job.allocation for part in job.allocation.parts)
        return False


def _resize(folder: Path, most_kib: int, left_kib: int | None) -> None:
    found = os.statvfs(folder)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize // 1024
    size = most_kib if left_kib is None else max(4, used + left_kib)
    for more in (0, 64, 512):  # it grows as we look
        done = subprocess.run(["mount", "-o", f"remount,size={size + more}k", folder], capture_output=True, check=False)
        if done.returncode == 0:
            return
    raise OSError(errno.EINVAL, done.stderr.decode(), str(folder))


def now() -> float:
    """Seconds since the machine's start, as jobs write them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
