"""Prepare the writer's database file: restrict it to its owner, and see what kind of filesystem it is on.

A user who can open a file can lock it, and block its writer.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path


def create_private(path: Path) -> None:
    """Create an empty file that only its owner and root can open.

    Raises:
        OSError: It exists, or cannot be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def make_private(path: Path) -> None:
    """Restrict a database's files to the owner and root.

    Earlier versions let all users open them. Some may have them open still, so the database moves to a new file.
    """
    files = [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
    try:
        create_private(path)
        return
    except FileExistsError:
        there = [file for file in files if file.exists()]
    if not any(file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) for file in there):
        return
    part = path.with_name(path.name + ".private")
    try:
        _copy_whole(path, part)
    except OSError:  # no space for a second one: processes that have it open may lock it until they end
        part.unlink(missing_ok=True)
        for file in there:
            file.chmod(0o600)
        return
    # Between these two steps the old WAL or journal lies beside the new file: it holds nothing that this has not.
    part.replace(path)
    for file in files[1:]:
        file.unlink(missing_ok=True)


def _copy_whole(path: Path, part: Path) -> None:
    """Copy an idle database with its WAL or journal into one synced file, without taking a lock."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        file, copy = path.with_name(path.name + suffix), part.with_name(part.name + suffix)
        copy.unlink(missing_ok=True)
        if suffix != "-shm" and file.exists():
            create_private(copy)
            shutil.copyfile(file, copy)
    db = sqlite3.connect(part, isolation_level=None)
    try:
        db.executescript("PRAGMA synchronous=FULL; PRAGMA journal_mode=DELETE;")
    except sqlite3.Error as error:
        raise OSError(f"{part}: {error}") from error
    finally:
        db.close()
    with part.open("rb+") as whole:
        status = path.stat()
        os.fchown(whole.fileno(), status.st_uid, status.st_gid)  # root may have come by, with a tick
        os.fsync(whole.fileno())


# Of FUSE all: it may drop what was written to a mapping of a file, and WAL's index goes back by that.
_WITHOUT_SHARED_MEMORY = (
    "fuse", "nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2", "9p", "afs",
)  # fmt: skip


def lacks_shared_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether a mapping of a file there may differ between processes; False where that cannot be found out."""
    try:
        device = folder.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    types = {words[words.index("-") + 1] for words in lines if words[2] == wanted and "-" in words}
    return any(kind.startswith(_WITHOUT_SHARED_MEMORY) for kind in types)
