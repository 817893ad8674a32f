"""``gpusched install --shared``: one installation for all users of a login node, and its removal.

Each step looks before it acts, so that a second run changes nothing. Files that an administrator changed are kept.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpusched.config.paths import SHARED_STATE, SYSTEM_INVENTORY, write_atomic
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.units import count_of
from gpusched.queue.presence import controller_of
from gpusched.queue.store import DATABASE, Reader

CACHE = Path("/var/cache/gpusched")
SERVICE = "gpusched.service"
_SERVICE_FILE = f"/etc/systemd/system/{SERVICE}"
_SYSUSERS, _TMPFILES = "/etc/sysusers.d/gpusched.conf", "/etc/tmpfiles.d/gpusched.conf"
_SYSTEMD_RUNS = Path("/run/systemd/system")
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_STAMP = re.compile(r"# Written by 'gpusched install' \(([0-9a-f]{16})\)[^\n]*\n")

_UNIT = """\
[Unit]
Description=gpusched controller
Wants=network-online.target
After=network-online.target
# Without its disk the controller would begin anew in the empty folder, as another installation.
RequiresMountsFor={state}
ConditionPathExists={inventory}

[Service]
Type=exec
User={user}
Group={user}
Environment=GPUSCHED_STATE={default_state} GPUSCHED_INVENTORY={inventory} XDG_CACHE_HOME={cache}
# It logs to the journal, which rotates, with priorities; -v adds starts and ends of jobs.
ExecStart={program} controller
Restart=always
RestartSec=5
# The store is of a newer gpusched: only an upgrade helps.
RestartPreventExitStatus=78
# All users read published/; what is private is made so.
UMask=0022
# Jobs of nodes with "transport: local" live in this unit's control group; a restart must not end them.
KillMode=process

CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={state} {cache}
# Policies that users promote are copied from their homes.
ProtectHome=read-only
PrivateTmp=yes
PrivateMounts=yes
PrivateDevices=yes
DevicePolicy=closed
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
KeyringMode=private
RemoveIPC=yes
SystemCallArchitectures=native
# It changes the group of its own files, lowers its own priority and sets its limit of open files.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallFilter=@chown
SystemCallErrorNumber=EPERM
# Not set: MemoryDenyWriteExecute (compiled scheduling passes are machine code, loaded into memory), PrivateUsers (would
# hide who owns a command file, the proof of who sent it), ProcSubset (reads /proc/sys/kernel/random/boot_id).

[Install]
WantedBy=multi-user.target
"""


class Folder(NamedTuple):
    """A folder of the installation."""

    path: Path
    mode: int
    of_root: bool = False


class Step(NamedTuple):
    """One step, as found.

    Attributes:
        what: What it makes or removes.
        act: Does it; None: there is nothing to do.
        note: Why there is nothing to do, or what the administrator must know.
    """

    what: str
    act: Callable[[], object] | None
    note: str = ""


class Installation:
    """A shared installation: where it is, and its steps.

    Args:
        user: The system user of the controller.
        state: The state folder, absolute.
        prefix: A folder that stands for ``/``; nothing outside it is touched, and systemd is not called.

    Raises:
        UsageError: A name or path cannot be used.
    """

    def __init__(self, user: str = "gpusched", state: Path = SHARED_STATE, prefix: Path | None = None) -> None:
        if not _NAME.fullmatch(user) or user == "root":
            raise UsageError(f"--user {user}: not the name of a system user", "such as gpusched")
        if not state.is_absolute() or re.search(r"[\s%\"'\\]", str(state)) or ".." in state.parts:
            raise UsageError(f"--state {state}: not an absolute path without spaces, quotes and '%'")
        self.user, self.state, self.prefix = user, state, prefix

    @classmethod
    def find(cls, prefix: Path | None) -> Installation:
        """Return the installation that is there, by the files it has left; the usual one where there are none."""
        usual = cls(prefix=prefix)
        link, named = usual._at(SHARED_STATE), None
        state = Path(os.readlink(link)) if link.is_symlink() else SHARED_STATE
        with contextlib.suppress(OSError):
            named = re.search(r'^u (\S+) (?:.*" (\S+))?', usual._at(_SYSUSERS).read_text(), re.MULTILINE)
        return cls(named[1], Path(named[2] or state), prefix) if named else cls(usual.user, state, prefix)

    @property
    def state_here(self) -> Path:
        """The state folder as this process finds it, below the prefix."""
        return self._at(self.state)

    def install_steps(self) -> Iterator[Step]:
        """Yield the steps in order; each looks at what the steps before it have left.

        Raises:
            UsageError: Another installation is there, or this gpusched is where others cannot run it, or the state
                folder has something else in it.
            GpuschedError: Something else is where a step's file or folder must be.
        """
        program = self._program()
        self._refuse_others_folder()
        there = self.find(self.prefix)
        if self._at(_SYSUSERS).exists() and (there.user, there.state) != (self.user, self.state):
            raise UsageError(
                f"an installation with the user {there.user} and the state {there.state} is there",
                "name these, or remove it first: gpusched uninstall --shared",
            )
        is_new = not self._at(_SERVICE_FILE).exists()
        link = self._link() if self.state != SHARED_STATE else None
        yield self._file(_SYSUSERS, self._sysusers())
        yield self._account()
        yield self._file(_TMPFILES, self._tmpfiles())
        for folder in self._folders():
            yield self._folder(folder)
        if link is not None:
            yield link
        yield self._ssh_key()
        unit = _UNIT.format(
            state=self.state, default_state=SHARED_STATE, inventory=SYSTEM_INVENTORY, user=self.user, program=program,
            cache=CACHE,
        )  # fmt: skip
        yield self._file(_SERVICE_FILE, unit)
        yield self._inventory()
        yield self._service(is_new)

    def uninstall_steps(self, purge: bool) -> Iterator[Step]:
        """Yield the steps of the removal; ``purge`` also removes all data and the user.

        Raises:
            GpuschedError: systemd cannot stop the controller.
        """
        if self._uses_systemd() and self._at(_SERVICE_FILE).exists():
            yield Step(f"stop and disable {SERVICE}", lambda: _run("systemctl", "disable", "--now", SERVICE))
        yield from map(self._removal, (_SERVICE_FILE, _TMPFILES))
        if self._uses_systemd():
            yield Step("reload systemd", lambda: _run("systemctl", "daemon-reload"))
        link, state = self._at(SHARED_STATE), self._at(self.state)
        if link.is_symlink():
            yield Step(f"remove the link {SHARED_STATE}", link.unlink)
        cache = self._at(CACHE)
        if cache.exists():
            yield Step(f"remove {CACHE}", lambda: shutil.rmtree(cache))
        if not purge:
            yield self._removal(_SYSUSERS)
            yield Step(f"{self.state}, {SYSTEM_INVENTORY.parent} and the user {self.user}", None, "kept; see --purge")
            return
        for real, path in ((state, self.state), (self._at(SYSTEM_INVENTORY.parent), SYSTEM_INVENTORY.parent)):
            if real.exists():
                yield Step(f"remove {path}", lambda real=real: shutil.rmtree(real))  # type: ignore[misc]
        if self._ids() is not None:
            yield Step(f"remove the user {self.user}", lambda: _run("userdel", *self._prefixed(), self.user))
        yield self._removal(_SYSUSERS)  # last: it names the user and the state folder for another attempt

    def _removal(self, name: str) -> Step:
        path = self._at(name)
        there = path.exists()
        return Step(f"remove {name}", path.unlink if there else None, "" if there else "not there")

    def require_idle(self, purge: bool) -> None:
        """Refuse the removal while jobs or an unmanaged controller run.

        Raises:
            GpuschedError: They do, or that cannot be seen.
        """
        state = self._at(self.state)
        if not purge and not self._at(_SERVICE_FILE).exists():
            return  # it was removed before
        try:
            reader = Reader.open(state)
            active = len(reader.active()) if reader is not None else 0
        except GpuschedError as error:
            raise GpuschedError(f"whether jobs run cannot be seen: {error.message}", "--force removes anyway") from None
        if active:
            raise GpuschedError(
                f"{count_of(active, 'job')} on nodes would run on without a controller",
                "cancel or wait for them; --force leaves them to themselves",
            )
        if not self._uses_systemd() and (controller := controller_of(state)) is not None:
            raise GpuschedError(f"a controller (pid {controller.pid}) uses {self.state}", "stop it first")

    def _refuse_others_folder(self) -> None:
        """Refuse a folder with other data: it would become the controller's, and --purge would remove all of it."""
        names = {path.name for path in self.state_here.iterdir()} if self.state_here.is_dir() else set()
        others = sorted(name for name in names if name != "lost+found" and not name.startswith("."))
        if others and not names & {"inbox", DATABASE}:
            raise UsageError(f"--state {self.state}: {others[0]} is already there", f"use {self.state / 'gpusched'}")

    def _at(self, path: str | Path) -> Path:
        return Path(path) if self.prefix is None else self.prefix / str(path).lstrip("/")

    def _prefixed(self) -> tuple[str, ...]:
        return () if self.prefix is None else ("--prefix", str(self.prefix))

    def _uses_systemd(self) -> bool:
        return self.prefix is None and _SYSTEMD_RUNS.is_dir()

    def _program(self) -> str:
        """Return the command line of this gpusched.

        Raises:
            UsageError: The controller's user cannot enter its folder.
        """
        script = Path(sys.prefix) / "bin" / "gpusched"
        words = [script] if script.exists() else [Path(sys.executable)]
        if self.prefix is None:
            for path in (words[0], words[0].resolve(), Path(sys.executable).resolve()):
                closed = next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
                if closed is not None:
                    raise UsageError(
                        f"{path}: other users cannot enter {closed}, so they cannot run this gpusched",
                        "install it elsewhere: python3 -m venv /opt/gpusched && /opt/gpusched/bin/pip install ...",
                    )
        return str(script) if script.exists() else f"{sys.executable} -m gpusched"

    def _ids(self) -> tuple[int, int] | None:
        if self.prefix is None:
            try:
                return pwd.getpwnam(self.user).pw_uid, grp.getgrnam(self.user).gr_gid
            except KeyError:
                return None
        with contextlib.suppress(OSError):
            for line in self._at("/etc/passwd").read_text().splitlines():
                if line.split(":")[0] == self.user:
                    return int(line.split(":")[2]), int(line.split(":")[3])
        return None

    def _account(self) -> Step:
        what = f"system user {self.user}"
        if self._ids() is not None:
            return Step(what, None, "is there")
        options = ("--system", "--user-group", "--home-dir", str(self.state), "--shell", "/usr/sbin/nologin")
        return Step(what, lambda: _run("useradd", *self._prefixed(), *options, self.user))

    def _sysusers(self) -> str:
        return f'u {self.user} - "gpusched controller" {self.state} /usr/sbin/nologin\n'

    def _folders(self) -> tuple[Folder, ...]:
        # Users may write into the inbox and see nothing there; setgid: the controller reads by the folder's group.
        inbox = self.state / "inbox"
        return (
            Folder(self.state, 0o755),
            Folder(inbox, 0o755),
            Folder(inbox / "tmp", 0o3733),
            Folder(inbox / "new", 0o3733),
            Folder(inbox / "refused", 0o700),
            Folder(self.state / ".ssh", 0o700),
            Folder(CACHE, 0o755),
            Folder(SYSTEM_INVENTORY.parent, 0o755, of_root=True),
        )

    def _tmpfiles(self) -> str:
        return "".join(
            f"d {f.path} {f.mode:04o} {' '.join(['root' if f.of_root else self.user] * 2)} -\n" for f in self._folders()
        )

    def _folder(self, folder: Folder) -> Step:
        path, what = self._at(folder.path), f"{folder.path} (mode {folder.mode:04o})"
        ids = (0, 0) if folder.of_root else self._ids()
        try:
            found = path.lstat()
        except FileNotFoundError:
            return Step(what, lambda: self._make_folder(path, folder))
        if not stat.S_ISDIR(found.st_mode):
            raise GpuschedError(f"{path} is not a folder", "move it out of the way")
        if folder.of_root or ((found.st_uid, found.st_gid), stat.S_IMODE(found.st_mode)) == (ids, folder.mode):
            return Step(what, None, "is there")
        return Step(what, lambda: self._make_folder(path, folder), "set owner and mode")

    def _make_folder(self, path: Path, folder: Folder) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        ids = (0, 0) if folder.of_root else self._ids()
        assert ids is not None
        # The user owns what is above it, and must not lead root elsewhere by a link.
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchown(opened, *ids)
            os.fchmod(opened, folder.mode)
        finally:
            os.close(opened)

    def _link(self) -> Step:
        """Let commands of all users find a state folder elsewhere."""
        path, what = self._at(SHARED_STATE), f"link {SHARED_STATE} to {self.state}, where all commands look"
        if path.is_symlink() and Path(os.readlink(path)) == self.state:
            return Step(what, None, "is there")
        if os.path.lexists(path):
            raise GpuschedError(f"{path} is there, so it cannot lead to {self.state}", "move it, or omit --state")

        def act() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self.state)

        return Step(what, act)

    def _ssh_key(self) -> Step:
        key = self.state / ".ssh" / "id_ed25519"
        what = f"SSH key {key}"
        if any(self._at(key.parent).glob("id_*")) or any(self._at(key.parent).glob("config")):
            return Step(what, None, "a key or ssh config is there")
        if self.prefix is not None:
            return Step(what, None, "not made for an image")
        if shutil.which("ssh-keygen") is None:
            return Step(what, None, "ssh-keygen is missing: put a key there")
        return Step(what, lambda: self._make_key(self._at(key)), f"put {key}.pub on the nodes")

    def _make_key(self, key: Path) -> None:
        ids = self._ids()
        assert ids is not None
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.user, "-f", str(key))
        _run(*words, user=ids[0], group=ids[1], extra_groups=())

    def _file(self, name: str, body: str) -> Step:
        """Write a file, unless an administrator changed it: then the new one goes beside it."""
        digest = hashlib.sha256(body.encode()).hexdigest()[:16]
        text = f"# Written by 'gpusched install' ({digest}); a changed file is kept by later versions.\n{body}"
        path = self._at(name)
        try:
            found = path.read_text()
        except FileNotFoundError:
            return Step(name, lambda: _write(path, text))
        if found == text:
            return Step(name, None, "is there")
        stamp = _STAMP.match(found)
        if stamp and hashlib.sha256(found[stamp.end() :].encode()).hexdigest()[:16] == stamp[1]:
            return Step(name, lambda: _write(path, text), "of another version: replaced")
        beside = path.with_name(f"{path.name}.gpusched-new")
        return Step(name, None, f"changed by hand, kept; this version's: {beside}") if (
            beside.exists() and beside.read_text() == text
        ) else Step(f"{name}.gpusched-new", lambda: _write(beside, text), f"{name} was changed by hand and is kept")

    def _inventory(self) -> Step:
        path, what = self._at(SYSTEM_INVENTORY), str(SYSTEM_INVENTORY)
        if not path.exists():
            return Step(what, None, f"not there; write one: gpusched init HOST... -o {SYSTEM_INVENTORY}")
        if not path.stat().st_mode & stat.S_IROTH:
            return Step(what, None, f"users cannot read it: chmod a+r {SYSTEM_INVENTORY}")
        return Step(what, None, "is there")

    def _service(self, is_new: bool) -> Step:
        """Start a new installation; whether one that was there runs is the administrator's decision."""
        start = f"systemctl enable --now {SERVICE}"
        if not self._uses_systemd():
            return Step("start the controller", None, f"systemd does not run here; where it does: {start}")
        if not is_new or not self._at(SYSTEM_INVENTORY).exists():
            return Step("reload systemd", lambda: _run("systemctl", "daemon-reload"), f"to start: {start}")

        def act() -> None:
            _run("systemctl", "daemon-reload")
            _run(*start.split())

        return Step(f"enable and start {SERVICE}", act)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    path.chmod(0o644)


def _run(*words: str, **how: object) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, **how)  # type: ignore[call-overload]
    except FileNotFoundError:
        raise GpuschedError(f"{words[0]} is missing", "install it (passwd, systemd, openssh-client)") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise GpuschedError(f"{' '.join(words)} failed: {said[-1] if said else done.returncode}")
