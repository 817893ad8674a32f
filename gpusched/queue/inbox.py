"""The inbox: clients submit commands without a lock and without a running controller (as in Maildir).

A command is written to ``inbox/tmp``, synced, and linked into ``inbox/new`` under a name that sorts by time. The
kernel's owner of the file is the proof of who asked. In a shared installation both folders are sticky and write-only
for others (mode 1733), so that users cannot read or remove each other's commands.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import AnyCommand, Submit
from gpusched.queue.arrivals import InboxFiles, is_being_linked

MAX_COMMAND_BYTES = 4 * 1024 * 1024
MAX_REFUSED, MAX_REFUSED_BYTES, KEEP_REFUSED_S = 1000, 64 * 1024 * 1024, 30 * 86400.0
MAX_REFUSED_OF_USER, MAX_REFUSED_BYTES_OF_USER = 100, 8 * 1024 * 1024
KEEP_DRAFTS_S = 86400.0
POSTPONE_S = 15.0
_log = logging.getLogger(__name__)
_OF_THE_MACHINE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors of reading that say nothing of the file, which may be a confirmed submission."""
MAX_REMOVED_PER_CALL = 5000  # files that one call clears away: a folder may hold a million
TIDY_S = 0.5  # how long one call looks through the drafts
_DECODER = msgspec.json.Decoder(AnyCommand)


class ReceivedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command file as the controller reads it.

    Attributes:
        uid: The file's owner.
        written: When the kernel last saw the file change (Unix seconds).
    """

    file_name: str
    uid: int
    written: float = 0.0
    command: AnyCommand


class MalformedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the inbox that is no command; ``why`` is one line."""

    file_name: str
    uid: int
    why: str


class Inbox:
    """The folder of command files below the state folder."""

    def __init__(self, state: Path) -> None:
        self.tmp, self.new, self.refused = state / "inbox/tmp", state / "inbox/new", state / "inbox/refused"
        self._stuck: set[str] = set()
        self._postponed: dict[str, float] = {}
        self._arrivals = InboxFiles(self.new, self.tmp, self._is_postponed)

    def close(self) -> None:
        """Stop listing the folder."""
        self._arrivals.close()

    def create(self, *, shared: bool = False) -> None:
        """Create the folders; ``shared`` lets other users of the machine write commands."""
        for folder in (self.tmp, self.new, self.refused):
            folder.mkdir(parents=True, exist_ok=True)
        if shared:
            # Setgid: a controller that is not root reads through the folder's group. As a hardened unit it cannot set
            # this (RestrictSUIDSGID); the installation has.
            modes = {self.tmp.parent: 0o755, self.tmp: 0o3733, self.new: 0o3733, self.refused: 0o700}
            for folder, mode in modes.items():
                if stat.S_IMODE(folder.stat().st_mode) != mode:
                    folder.chmod(mode)

    def make_private(self) -> None:
        """Withdraw other users' write access to the folders."""
        for folder in (self.new, self.tmp):
            if folder.stat().st_mode & stat.S_IWOTH:
                folder.chmod(0o700)

    def deliver(self, command: AnyCommand, name: str | None = None) -> None:
        """Write one command; on return it is on disk. ``name`` begins its file name; by default one is made.

        A command without an origin gets this process's.

        Raises:
            FileExistsError: A `Submit` with this job id, or this name, is already waiting (mint another id).
            GpuschedError: The inbox cannot be written.
        """
        job_id = command.id if isinstance(command, Submit) else name
        command = command if command.origin else msgspec.structs.replace(command, origin=_origin())
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
                f"{self.new.parent} does not exist, so nothing can be queued",
                "set GPUSCHED_STATE to the state folder, or create one by running 'gpusched tick' once",
            ) from error
        except PermissionError as error:
            raise GpuschedError(
                f"you have no write access to {self.new.parent}",
                "ask the administrator, or set GPUSCHED_STATE",
            ) from error
        except OSError as error:
            raise GpuschedError(f"{self.new.parent} cannot be written: {error.strerror}") from error

    def _link(self, name: str, content: bytes) -> None:
        # The owner alone may read it, except where the folder's group is the controller's (setgid).
        mode = 0o640 if self.tmp.stat().st_mode & stat.S_ISGID else 0o600
        draft = self.tmp / f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            # Closed first: a file that is removed while it is open keeps a second name on NFS (.nfs...).
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.link(draft, self.new / name)  # unlike rename, fails when the name is taken
        finally:
            draft.unlink()
        self._sync_new(name)

    def _sync_new(self, name: str) -> None:
        try:
            descriptor = os.open(self.new, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            # A write-only folder cannot be opened to sync it. Syncing a file also syncs its changed names on the
            # file systems that keep a journal of both.
            try:
                descriptor = os.open(self.new / name, os.O_RDONLY)
            except FileNotFoundError:  # the controller has already taken it
                return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def waiting(self) -> Iterator[ReceivedCommand | MalformedCommand]:
        """Yield the commands in the inbox, oldest first. Unreadable files come as `MalformedCommand`."""
        try:
            names = sorted(os.listdir(self.new))
        except (FileNotFoundError, PermissionError):
            return
        yield from self.read(name for name in names if not name.startswith(".") and not self._is_postponed(name))

    def read(self, names: Iterable[str]) -> Iterator[ReceivedCommand | MalformedCommand]:
        """Read these files; those that are gone, or still being written, are skipped, as are those of a broken disk."""
        for name in names:
            try:
                yield self._read(name)
            except (FileNotFoundError, _StillLinking):
                self._arrivals.forget(name)
            except OSError as error:
                self.postpone(name)
                _log.error("%s cannot be read: %s; retried every %g s", self.new / name, error.strerror, POSTPONE_S)

    def _is_postponed(self, name: str) -> bool:
        return name in self._stuck or time.monotonic() < self._postponed.get(name, 0.0)

    def has_any(self) -> bool:
        """Return whether the controller can take any file now."""
        return self._arrivals.has_any()

    def next_batch(self) -> list[str]:
        """Return the names that the controller takes in this cycle, oldest first; see `InboxFiles.next_batch`."""
        return self._arrivals.next_batch()

    def surplus(self) -> dict[int, list[str]]:
        """Return surplus files by owner; see `InboxFiles.surplus`."""
        return self._arrivals.surplus()

    def discard(self, names: Iterable[str]) -> None:
        """Remove files without reading them; a folder is set aside."""
        for name in names:
            try:
                (self.new / name).unlink()
            except FileNotFoundError:
                pass
            except OSError:
                self.refuse(name)
            self._forget(name)

    def submission(self, job_id: str) -> ReceivedCommand | None:
        """Return the waiting submission with this id, if any; needs no permission to list the folder."""
        try:
            found = self._read(f"{job_id}.submit")
        except (OSError, _StillLinking):
            return None
        return found if isinstance(found, ReceivedCommand) else None

    def has_submission(self, job_id: str) -> bool:
        """Return whether any user's submission with this id waits; needs no permission to list the folder."""
        return os.path.lexists(self.new / f"{job_id}.submit")

    def _read(self, name: str) -> ReceivedCommand | MalformedCommand:
        uid = -1
        try:
            descriptor = os.open(self.new / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                uid = status.st_uid
                if why := _file_error(status, self.tmp):
                    return MalformedCommand(file_name=name, uid=uid, why=why)
                with open(descriptor, "rb", closefd=False) as file:
                    content = file.read(MAX_COMMAND_BYTES)
            finally:
                os.close(descriptor)
            command = _DECODER.decode(content)
            return ReceivedCommand(file_name=name, uid=uid, command=command, written=status.st_ctime)
        except (FileNotFoundError, _StillLinking):
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return MalformedCommand(file_name=name, uid=uid, why=f"not a command: {error}")
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise
            if uid < 0:  # a link, say, which is not followed
                with contextlib.suppress(OSError):
                    uid = os.lstat(self.new / name).st_uid
            return MalformedCommand(file_name=name, uid=uid, why=f"cannot be read: {error.strerror}")

    def remove(self, file_name: str) -> None:
        """Remove an applied command; idempotent. A failed removal is retried later."""
        try:
            (self.new / file_name).unlink(missing_ok=True)
        except OSError:
            self.postpone(file_name)
            return
        self._forget(file_name)

    def _forget(self, file_name: str) -> None:
        self._postponed.pop(file_name, None)
        self._arrivals.forget(file_name)

    def postpone(self, file_name: str, for_s: float = POSTPONE_S) -> None:
        """Postpone a command that cannot be recorded now, so that it does not block others."""
        self._postponed[file_name] = time.monotonic() + for_s

    def is_listed(self, file_name: str) -> bool:
        """Return whether the controller has listed this file and not taken it."""
        return self.owner(file_name) is not None

    def owner(self, file_name: str) -> int | None:
        """Return the owner of a listed file."""
        return self._arrivals.owner(file_name)

    def postponed_of(self, uid: int) -> list[str]:
        """Return names of this user's postponed files."""
        return [name for name in self._postponed if self._arrivals.owner(name) == uid and self._is_postponed(name)]

    def refuse(self, file_name: str) -> None:
        """Move a malformed file to ``refused`` for inspection; skip it where it cannot be moved."""
        try:
            os.replace(self.new / file_name, self.refused / file_name)
        except FileNotFoundError:
            pass
        except OSError:  # a folder, say, that belongs to another or stands in the way
            self._stuck.add(file_name)
            return
        self._forget(file_name)

    def tidy_refused(self) -> None:
        """Keep only the latest refused files, within the bounds per user and overall."""
        before, room = time.time() - KEEP_REFUSED_S, MAX_REMOVED_PER_CALL
        kept, size = 0, 0
        files, sizes = Counter[int](), Counter[int]()
        for path, status in _newest_first(self.refused):
            owner, own = status.st_uid, status.st_size
            fits = kept < MAX_REFUSED and size + own <= MAX_REFUSED_BYTES and status.st_ctime >= before
            fits = fits and stat.S_ISREG(status.st_mode)  # folders are removed: their content is not counted
            if fits and files[owner] < MAX_REFUSED_OF_USER and sizes[owner] + own <= MAX_REFUSED_BYTES_OF_USER:
                kept, size = kept + 1, size + own
                files[owner] += 1
                sizes[owner] += own
            elif room > 0:
                room -= _remove(path, room)

    def tidy(self) -> None:
        """Tidy refused files, and remove drafts whose clients died."""
        self.tidy_refused()
        before, until = time.time() - KEEP_DRAFTS_S, time.monotonic() + TIDY_S
        room = MAX_REMOVED_PER_CALL
        with contextlib.suppress(OSError), os.scandir(self.tmp) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_ctime < before:
                        room -= _remove(Path(entry.path), room)
                if room <= 0 or time.monotonic() > until:
                    return


def _origin() -> str:
    """Return where this process was started from, as far as it can know: ``ssh ADDRESS``, a terminal, or neither."""
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if re.fullmatch(r"[0-9A-Fa-f.:]{2,45}(%[0-9A-Za-z.-]{1,20})?", address):
        return f"ssh {address}"
    return "terminal" if any(map(os.isatty, (0, 1, 2))) else "no terminal"


class _StillLinking(Exception):
    """The command is being linked into place."""


def _file_error(status: os.stat_result, drafts: Path) -> str:
    """Return why a file is not a client's command, or ""."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_nlink != 1:
        # A client links its draft into place and then removes the draft. A file that keeps another name may be a link
        # to another user's: the file's owner is the proof of who sent it.
        if is_being_linked(status, drafts):
            raise _StillLinking
        return "a file with another name (hard link)"
    return f"{status.st_size} bytes, at most {MAX_COMMAND_BYTES}" if status.st_size > MAX_COMMAND_BYTES else ""


def _newest_first(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
    return sorted(found, key=lambda item: item[1].st_ctime, reverse=True)


def _remove(path: Path, room: int) -> int:
    """Remove a file, or a folder with up to ``room`` entries; skip those that cannot be removed.

    No link is followed, whatever its owner changes meanwhile. Folders within are moved up, as they may lie a thousand
    deep.

    Returns:
        How many files and folders that were.
    """
    left, count = [path], 0
    while left and count < room:
        current = left.pop()
        count += 1
        try:
            current.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                for name, folder, is_folder in _entries(current, room - count):
                    if is_folder:
                        left.append(path.with_name(os.urandom(8).hex()))
                        os.rename(name, left[-1], src_dir_fd=folder)
                    else:
                        os.unlink(name, dir_fd=folder)
                        count += 1
                current.rmdir()
    return count


def _entries(path: Path, limit: int) -> Iterator[tuple[str, int, bool]]:
    """Yield up to ``limit`` entries of a folder: name, the folder's descriptor, whether it is a folder."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, limit):
                yield entry.name, folder, entry.is_dir(follow_symlinks=False)
    finally:
        os.close(folder)


def deliver_submit(inbox: Inbox, make: Callable[[str], Submit], mint: Callable[[], str]) -> str:
    """Deliver a submission under a fresh id, minting again where the id is taken; returns the id."""
    while True:
        job_id = mint()
        try:
            inbox.deliver(make(job_id))
            return job_id
        except FileExistsError:
            continue
