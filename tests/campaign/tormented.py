"""A controller that can be tormented, with what is known about it besides gpusched's own records."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord
from tests import commands
from tests.campaign.ledger import Ledger
from tests.campaign.schedule import Work, jobs_of
from tests.campaign.shim import SERVER, Shim
from tests.e2e.conftest import Cluster
from tests.testbed import processes
from tests.testbed.fuse import FuseMount

STATE_KIB = 96 << 10


class Tormented(Cluster):
    """A cluster with its state folder on a file system of its own.

    Attributes:
        ledger: The jobs' own.
        shim: Orders to the controller's disk operations.
        stranger: A file that nothing may change.
        wrong: What was found to be wrong.
        flood: How many files `inbox.Many` writes at most.
        backed_up: What was accepted when the last good backup began; None: there is none.
        may_lose: Jobs accepted after the last backup and not started when the state folder was lost.
        accepted: Job or array id -> work that a client said was submitted.
    """

    accepted: dict[str, Work]
    on_fuse = False
    """Whether the state folder is on `fuse`."""

    def set_up(self) -> None:
        """Make folders and file systems."""
        self.ledger = Ledger(self.folder / "share")
        self.state.mkdir()
        self.stranger = self.folder / "stranger"
        self.stranger.write_text("not gpusched's")
        self.shim = Shim(self.folder / "controller.orders", self.state)
        self._clock = Shim(self.folder / "clock.orders", self.state)
        self.wrong: list[str] = []
        self.flood = 1800
        self.starts_of_controller = 0
        self._crash_points: dict[str, int] = {}
        self.mounts: list[Path] = []
        self.backups, self.temp = self.folder / "backups", self.folder / "temp"
        self.backed_up: set[str] | None = None
        self.may_lose: set[str] = set()
        self._disk = self.folder / "disk" if self.on_fuse else self.state
        for path in (self._disk, self.backups, self.temp):
            path.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STATE_KIB}k", "campaign", path], check=True)
            self.mounts.append(path)
        self.backups.chmod(0o700)  # all users may write to a new tmpfs, and backups are refused there
        self.temp.chmod(0o1777)
        self.fuse = FuseMount(self._disk, self.state) if self.on_fuse else None

    def close(self) -> None:
        """Stop everything; nodes see what was mounted until they are started again."""
        try:
            super().close()
        finally:
            self.ledger.close()
            if self.fuse is not None:
                self.fuse.close()
            for mount in self.mounts:
                subprocess.run(["umount", "-l", mount], check=False)

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

    # ---- the controller -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the controller unless it runs, without waiting for it; its orders to fail are gone."""
        if self.is_up():
            return
        self.shim.clear()
        self._run("controller")

    def begin_standby(self) -> None:
        """Start a standby, which is `controller` from now on."""
        self._run("controller", "--standby", "--takeover-after", "5")

    def _run(self, *words: str) -> None:
        self.starts_of_controller += 1
        with self._log.open("ab") as log, open(os.devnull) as nothing:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            env = self.env(CAMPAIGN_SHIM=str(self.shim.path))
            self.controller = commands.start(list(words), env, "/", files, session=True)

    def leads(self) -> bool:
        """Whether `controller` runs the cycle, by the store."""
        with suppress(Exception), self.reader() as reader:
            found = reader.meta("controller_pid") if reader else None
            return self.controller is not None and self.controller.poll() is None and found == str(self.controller.pid)
        return False

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
        own = {"CAMPAIGN_SHIM": str(self._clock.path), "TMPDIR": str(self.temp)}
        return super().env(**SERVER | own | more)

    def set_clock(self, ahead_s: int) -> None:
        """Set the wall clock of controller and clients."""
        self.shim.clock_s = self._clock.clock_s = ahead_s

    # ---- the state folder -----------------------------------------------------------------------------------

    def resize_backups(self, left_kib: int | None) -> None:
        """Leave so much room for backups; None: as at first."""
        resize(self.backups, STATE_KIB, left_kib)

    def resize_temp(self, left_kib: int | None) -> None:
        """Leave so much room in the temporary folder; None: as at first."""
        resize(self.temp, STATE_KIB, left_kib)

    def back_up(self) -> bool:
        """Make a backup, and note what it must have; False: a fault prevented it, as one line says."""
        had = set(self.accepted)
        done = self.cli("backup", "--to", str(self.backups), check=False)
        if done.returncode == 0:
            self.backed_up = had
            return True
        errors = [line for line in done.stderr.splitlines() if "using the last good copy" not in line]
        one_fault = len(errors) == 1 and "can write to" not in errors[0]
        self.expect(done.returncode == 1 and one_fault, f"backup: {done}")
        return False

    def lose_state(self) -> bool:
        """Delete the state folder's content and recover it as an operator would; False: there is no backup."""
        if self.backed_up is None:
            self.back_up()
        if self.backed_up is None:
            return False
        self.kill()
        self.shim.clear()
        self.ledger.read()
        new = [one for job, work in self.accepted.items() if job not in self.backed_up for one in jobs_of(job, work)]
        self.may_lose |= set(new) - {line.job for line in self.ledger.lines}
        for path in self.state.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.write_inventory()
        words = ["recover", "--from", str(self.backups), "--inventory", str(self.inventory), "-y"]
        done = self.cli(*words, check=False, timeout=300)
        self.expect(done.returncode == 0, f"recover: {done}")
        self.order_again()
        self.begin()
        return True

    def resize_state(self, left_kib: int | None) -> None:
        """Leave so much room in the state folder; None: as at first."""
        resize(self._disk, STATE_KIB, left_kib)

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

    def order_again(self) -> None:
        """Give all orders again."""
        raise NotImplementedError

    def records(self) -> list[JobRecord]:
        """All jobs of the store; none while it cannot be read."""
        try:
            with self.reader() as reader:
                return list(reader.jobs()) if reader else []
        except (GpuschedError, sqlite3.Error):
            if self.fuse is None:
                raise
            return []

    def job(self, job: str) -> JobRecord | None:
        """As `Cluster.job`; None, too, while the store cannot be read."""
        return next((one for one in self.records() if one.id == job), None)

    def unfinished(self) -> int:
        """How many have not ended."""
        return sum(job.state not in ENDED for job in self.records())


def resize(folder: Path, most_kib: int, left_kib: int | None) -> None:
    """Leave so much room in a tmpfs; None: the most."""
    found = os.statvfs(folder)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize // 1024
    size = most_kib if left_kib is None else max(4, used + left_kib)
    for more in (0, 64, 512):  # it grows as we look
        done = subprocess.run(["mount", "-o", f"remount,size={size + more}k", folder], capture_output=True, check=False)
        if done.returncode == 0:
            return
    raise OSError(errno.EINVAL, done.stderr.decode(), str(folder))
