"""The files of collected output: never writable by users, and readable by their readers only, from the first byte.

`logs` and `logs/JOB` belong to the controller, with mode 0711. A file is written in `logs/.collecting` (mode 0700) and
renamed into place when complete. It stays the controller's; an ACL lets its job's user and the operators read it. All
access goes through descriptors of checked folders and follows no links, since the controller may be root.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_FOLDER_MODE = 0o711  # users may open a file by name, but not list or write
_DRAFTS = ".collecting"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ACL, _DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER, _NO_ID = 1, 2, 4, 16, 32, 0xFFFFFFFF


@contextlib.contextmanager
def log_file(path: Path, readers: Iterable[int]) -> Iterator[BinaryIO]:
    """Yield a file that durably replaces ``path`` if the block ends without an exception.

    ``readers`` are user ids that may read it, besides the controller's.

    Raises:
        OSError: The file cannot be written.
    """
    with _open_folder(path.parent.parent, _FOLDER_MODE) as logs, _open_folder(_DRAFTS, 0o700, logs) as drafts:
        name = f"{path.parent.name}.{path.name}.{os.urandom(8).hex()}"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=drafts)
            with open(descriptor, "w+b") as file:
                yield file
                _grant_read(file.fileno(), readers)
                file.flush()
                os.fsync(file.fileno())
            with _open_folder(path.parent.name, _FOLDER_MODE, logs) as folder:
                os.replace(name, path.name, src_dir_fd=drafts, dst_dir_fd=folder)
                os.fsync(folder)  # before the original is removed from the node
            os.fsync(logs)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it exists after an error, such as a full disk
                os.unlink(name, dir_fd=drafts)


@contextlib.contextmanager
def _open_folder(name: Path | str, mode: int, within: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder, created or reclaimed if necessary. Only the topmost may be a link."""
    with contextlib.suppress(FileExistsError):
        if within is None:
            Path(name).mkdir(mode, parents=True)
        else:
            os.mkdir(name, mode, dir_fd=within)
    descriptor = os.open(name, _FOLDER if within is not None else _FOLDER & ~os.O_NOFOLLOW, dir_fd=within)
    try:
        _reclaim(descriptor, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def _reclaim(descriptor: int, mode: int) -> None:
    """Make the controller own a file or folder, with this mode and no ACL."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        os.fchown(descriptor, os.geteuid(), -1)
    elif stat.S_IMODE(status.st_mode) == mode:
        return
    for name in (_ACL, _DEFAULT_ACL):
        with contextlib.suppress(OSError):
            os.removexattr(descriptor, name)
    os.fchmod(descriptor, mode)


def _grant_read(descriptor: int, readers: Iterable[int]) -> None:
    """Let ``readers`` read a file of the controller with mode 0600."""
    uids = [uid for uid in dict.fromkeys(readers) if uid not in (0, os.geteuid())]
    if not uids:
        return
    entries = [(_USER_OBJ, 6, _NO_ID), *((_USER, 4, uid) for uid in sorted(uids)), (_GROUP_OBJ, 0, _NO_ID)]
    entries += [(_MASK, 4, _NO_ID), (_OTHER, 0, _NO_ID)]
    try:
        os.setxattr(descriptor, _ACL, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries))
    except OSError:  # no ACLs on this file system: give the file to the job's user, in our folder
        if os.geteuid() == 0:
            os.fchmod(descriptor, 0o400)
            os.fchown(descriptor, uids[0], -1)


def remove_drafts(logs: Path) -> None:
    """Remove what a killed controller left half written; runs at start-up."""
    for draft in (logs / _DRAFTS).glob("*"):
        with contextlib.suppress(OSError):
            draft.unlink()
