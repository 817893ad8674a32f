"""The inbox: how clients ask, without a lock and without the controller being up (Maildir's way).

A command is written to ``inbox/tmp``, synced, and linked into ``inbox/new`` under a name that sorts by time. The
kernel's owner of the file is the proof of who asked. In a shared installation both folders are sticky and write-only
for others (mode 1733), so that nobody reads or removes another's commands.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import AnyCommand, Submit

MAX_COMMAND_BYTES = 4 * 1024 * 1024
MAX_REFUSED, MAX_REFUSED_BYTES, KEEP_REFUSED_S = 1000, 64 * 1024 * 1024, 30 * 86400.0
KEEP_DRAFTS_S = 86400.0
LINKING_S = 60.0  # how long a command may have two names, the draft's and its own
PUT_OFF_S = 15.0
_DECODER = msgspec.json.Decoder(AnyCommand)


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A command file as the controller finds it.

    Attributes:
        uid: The file's owner.
        written: When the kernel last saw the file change (Unix seconds).
    """

    file_name: str
    uid: int
    written: float = 0.0
    command: AnyCommand


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the inbox that is no command; ``why`` is one line."""

    file_name: str
    uid: int
    why: str


class Inbox:
    """The folder of command files below the state folder."""

    def __init__(self, state: Path) -> None:
        self.tmp, self.new, self.refused = state / "inbox/tmp", state / "inbox/new", state / "inbox/refused"
        self._stuck: set[str] = set()
        self._put_off: dict[str, float] = {}

    def create(self, *, shared: bool = False) -> None:
        """Make the folders; ``shared`` lets other users of the machine drop commands."""
        for folder in (self.tmp, self.new, self.refused):
            folder.mkdir(parents=True, exist_ok=True)
        if shared:
            self.tmp.parent.chmod(0o755)
            for folder in (self.tmp, self.new):
                folder.chmod(0o3733)  # setgid: a controller that is not root reads through the folder's group
            self.refused.chmod(0o700)

    def deliver(self, command: AnyCommand) -> None:
        """Put one command in; when this returns it is on disk.

        Raises:
            FileExistsError: A `Submit` with this job id is already waiting (mint another id).
            GpuschedError: The inbox cannot be written.
        """
        job_id = command.id if isinstance(command, Submit) else None
        try:
            while True:
                name = job_id or ids.mint(command.time)
                try:
                    self._link(f"{name}.{type(command).__struct_config__.tag}", msgspec.json.encode(command))
                    return
                except FileExistsError:
                    if job_id:
                        raise
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            raise GpuschedError(
                f"{self.new.parent} is not there, so nothing can be queued",
                "set GPUSCHED_STATE to the state folder, or make one by running 'gpusched tick' once",
            ) from error
        except PermissionError as error:
            raise GpuschedError(
                f"{self.new.parent} cannot be written by you", "ask whoever runs the controller, or set GPUSCHED_STATE"
            ) from error
        except OSError as error:
            raise GpuschedError(f"{self.new.parent} cannot be written: {error.strerror}") from error

    def _link(self, name: str, content: bytes) -> None:
        # The owner alone may read it, except where the folder's group is the controller's (setgid).
        mode = 0o640 if self.tmp.stat().st_mode & stat.S_ISGID else 0o600
        draft = self.tmp / f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.link(draft, self.new / name)  # unlike rename, fails when the name is taken
        finally:
            draft.unlink()
        self._sync_new()

    def _sync_new(self) -> None:
        try:
            folder = os.open(self.new, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return  # a write-only folder cannot be opened to sync it; the file itself is synced
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def waiting(self) -> Iterator[Received | Malformed]:
        """What lies in the inbox, oldest first. Files that cannot be read yet as commands come as `Malformed`."""
        try:
            names = sorted(os.listdir(self.new))
        except (FileNotFoundError, PermissionError):
            return
        for name in names:
            if name.startswith(".") or name in self._stuck or time.monotonic() < self._put_off.get(name, 0.0):
                continue
            try:
                yield self._read(name)
            except (FileNotFoundError, _NotYet):
                continue  # folded by the controller since we listed, or being put there

    def submission(self, job_id: str) -> Received | None:
        """The submission with this id, if it waits; needs no permission to list the folder."""
        try:
            found = self._read(f"{job_id}.submit")
        except (FileNotFoundError, _NotYet):
            return None
        return found if isinstance(found, Received) else None

    def _read(self, name: str) -> Received | Malformed:
        uid = -1
        try:
            descriptor = os.open(self.new / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                uid = status.st_uid
                if why := _no_command(status):
                    return Malformed(file_name=name, uid=uid, why=why)
                with open(descriptor, "rb", closefd=False) as file:
                    content = file.read(MAX_COMMAND_BYTES)
            finally:
                os.close(descriptor)
            command = _DECODER.decode(content)
            return Received(file_name=name, uid=uid, command=command, written=status.st_ctime)
        except (FileNotFoundError, _NotYet):
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Malformed(file_name=name, uid=uid, why=f"not a command: {error}")
        except OSError as error:
            return Malformed(file_name=name, uid=uid, why=f"cannot be read: {error.strerror}")

    def remove(self, file_name: str) -> None:
        """Take a folded command out; taking it out twice is fine."""
        (self.new / file_name).unlink(missing_ok=True)
        self._put_off.pop(file_name, None)

    def put_off(self, file_name: str) -> None:
        """Let a command wait for a while that cannot be recorded now, so that it holds up no other."""
        self._put_off[file_name] = time.monotonic() + PUT_OFF_S

    def refuse(self, file_name: str) -> None:
        """Set a malformed file aside, where a person can look at it; what cannot be moved is passed over."""
        try:
            os.replace(self.new / file_name, self.refused / file_name)
        except FileNotFoundError:
            pass
        except OSError:  # a folder, say, that belongs to another or stands in the way
            self._stuck.add(file_name)

    def tidy(self) -> None:
        """Keep of what was set aside the latest, within bounds; remove drafts whose clients died."""
        now, size = time.time(), 0
        for kept, (path, status) in enumerate(_newest_first(self.refused), start=1):
            size += status.st_size
            if kept > MAX_REFUSED or size > MAX_REFUSED_BYTES or status.st_ctime < now - KEEP_REFUSED_S:
                _remove(path)
        for path, status in _newest_first(self.tmp):
            if status.st_ctime < now - KEEP_DRAFTS_S:
                _remove(path)


class _NotYet(Exception):
    """A command that is just being linked into place."""


def _no_command(status: os.stat_result) -> str:
    """Why this is no file that a client wrote for us, or ""."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_nlink != 1:
        # A client links its draft into place and then removes the draft. A file that keeps another name may be a link
        # to somebody else's: who asked is told by the file's owner.
        if time.time() - status.st_ctime < LINKING_S:
            raise _NotYet
        return "a file with another name (hard link)"
    return f"{status.st_size} bytes, at most {MAX_COMMAND_BYTES}" if status.st_size > MAX_COMMAND_BYTES else ""


def _newest_first(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
    return sorted(found, key=lambda item: item[1].st_ctime, reverse=True)


def _remove(path: Path) -> None:
    """Remove a file, or a folder that somebody put there; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # follows no links, also not such as are put there meanwhile
        else:
            path.unlink()


def deliver_submit(inbox: Inbox, make: Callable[[str], Submit], mint: Callable[[], str]) -> str:
    """Deliver a submission under a fresh id, minting again where the id is taken; returns the id."""
    while True:
        job_id = mint()
        try:
            inbox.deliver(make(job_id))
            return job_id
        except FileExistsError:
            continue
