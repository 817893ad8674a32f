"""The files of collected output: never writable by users, and readable for nobody else before their first byte.

`logs` and `logs/JOB` are the controller's, with mode 0711. A file is written in `logs/.collecting` (mode 0700) and
renamed to its place when it is whole. It stays the controller's; an access list lets its job's user and the operators
read it. Everything goes by descriptors of folders that were looked at, and follows no link: the controller may be root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_OPEN = 0o711  # who knows a name may ask for the file, nobody may list or write
_DRAFTS = ".collecting"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL, _DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER, _NOBODY = 1, 2, 4, 16, 32, 0xFFFFFFFF


@contextlib.contextmanager
def log_file(path: Path, readers: Iterable[int]) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends without an exception, durably.

    ``readers`` are user ids that may read it, besides the controller's.

    Raises:
        OSError: It cannot be written here.
    """
    with _own_folder(path.parent.parent, _OPEN) as logs, _own_folder(_DRAFTS, 0o700, logs) as drafts:
        name = f"{path.parent.name}.{path.name}.{os.urandom(8).hex()}"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=drafts)
            with open(descriptor, "w+b") as file:
                yield file
                _let_read(file.fileno(), readers)
                file.flush()
                os.fsync(file.fileno())
            with _own_folder(path.parent.name, _OPEN, logs) as folder:
                if _is_folder(path.name, folder):  # made by a user, as long as the folder was his
                    shutil.rmtree(path.name, dir_fd=folder)
                os.replace(name, path.name, src_dir_fd=drafts, dst_dir_fd=folder)
                os.fsync(folder)  # its original is removed from the node next
            os.fsync(logs)
        finally:
            with contextlib.suppress(FileNotFoundError):  # on a full disk above all
                os.unlink(name, dir_fd=drafts)


@contextlib.contextmanager
def _own_folder(name: Path | str, mode: int, within: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is ours, made or taken back where need be. Only the topmost may be a link."""
    with contextlib.suppress(FileExistsError):
        if within is None:
            Path(name).mkdir(mode, parents=True)
        else:
            os.mkdir(name, mode, dir_fd=within)
    descriptor = os.open(name, _FOLDER if within is not None else _FOLDER & ~os.O_NOFOLLOW, dir_fd=within)
    try:
        _take(descriptor, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, mode: int) -> None:
    """Make a file or folder ours, with this mode and no access list."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        os.fchown(descriptor, os.geteuid(), -1)
    elif stat.S_IMODE(status.st_mode) == mode:
        return
    for name in (_ACL, _DEFAULT_ACL):
        with contextlib.suppress(OSError):
            os.removexattr(descriptor, name)
    os.fchmod(descriptor, mode)


def _is_folder(name: str, within: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _let_read(descriptor: int, readers: Iterable[int]) -> None:
    """Add readers to a file of ours of mode 0600."""
    uids = [uid for uid in dict.fromkeys(readers) if uid not in (0, os.geteuid())]
    if not uids:
        return
    entries = [(_USER_OBJ, 6, _NOBODY), *((_USER, 4, uid) for uid in sorted(uids)), (_GROUP_OBJ, 0, _NOBODY)]
    entries += [(_MASK, 4, _NOBODY), (_OTHER, 0, _NOBODY)]
    try:
        os.setxattr(descriptor, _ACL, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries))
    except OSError:  # a file system without access lists: the job's user owns it then, in a folder that is not his
        if os.geteuid() == 0:
            os.fchmod(descriptor, 0o400)
            os.fchown(descriptor, uids[0], -1)


def secure(logs: Path, readers: Callable[[str], Iterable[int]]) -> None:
    """At the start of a controller: remove what a killed one left, take back what earlier versions gave away.

    ``readers`` tells the user ids that may read a job's output.

    Raises:
        OSError: Something cannot be taken back.
    """
    if not logs.is_dir():
        return
    problem: OSError | None = None
    with _own_folder(logs, _OPEN) as top:
        for name in os.listdir(top):
            try:
                _secure_in(top, name, readers)
            except (NotADirectoryError, FileNotFoundError):
                continue
            except OSError as error:  # the others' output is not left open for that
                problem = error
    if problem is not None:
        raise problem


def _secure_in(top: int, name: str, readers: Callable[[str], Iterable[int]]) -> None:
    descriptor = os.open(name, _FOLDER, dir_fd=top)
    try:
        if name == _DRAFTS:
            for draft in os.listdir(descriptor):
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=descriptor)
        else:
            _secure_folder(descriptor, lambda: readers(name))
    finally:
        os.close(descriptor)


def _secure_folder(folder: int, readers: Callable[[], Iterable[int]]) -> None:
    status = os.fstat(folder)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == _OPEN:
        return
    _take(folder, 0o700)
    allowed = tuple(readers())
    for name in os.listdir(folder):
        _secure_entry(folder, name, status.st_uid, allowed)
    os.fchmod(folder, _OPEN)  # last: it says that this was done


def _secure_entry(folder: int, name: str, owner: int, readers: tuple[int, ...]) -> None:
    """Take back an old log; what the controller did not write is removed, drafts of a killed one too."""
    if _is_folder(name, folder):
        shutil.rmtree(name, dir_fd=folder)
        return
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # a link, a socket
        os.unlink(name, dir_fd=folder)
        return
    try:
        status = os.fstat(descriptor)
        theirs = owner != os.geteuid() and (status.st_uid not in (owner, os.geteuid()) or status.st_nlink > 1)
        if theirs or not stat.S_ISREG(status.st_mode) or name.endswith(".part"):
            os.unlink(name, dir_fd=folder)  # `theirs`: perhaps a second name of another's file
        else:
            _take(descriptor, 0o600)
            _let_read(descriptor, readers)
    finally:
        os.close(descriptor)
