"""Prepare the writer's database file: restrict it to its owner, and see what kind of filesystem it is on.

A user who can open a file can lock it, and block its writer.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def create_private(path: Path) -> None:
    """Create an empty file that only its owner and root can open.

    Raises:
        OSError: It exists, or cannot be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def make_private(path: Path) -> None:
    """Restrict a database's files to the owner and root. Processes that have them open may lock them until they end."""
    try:
        create_private(path)
    except FileExistsError:
        for suffix in ("", "-wal", "-shm", "-journal"):
            file = path.with_name(path.name + suffix)
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    file.chmod(0o600)


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
