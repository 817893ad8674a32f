"""Files waiting in the inbox, by owner: listed in bounded steps and taken round-robin, so that no user starves others.

A user with 100,000 files waits for them; a user with one file is served in the next cycle. A user's files beyond
`MAX_WAITING` are refused unread.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

MAX_WAITING = 100_000  # files of one user; as many jobs may wait in the queue (settings.max_queued_jobs_per_user)
MAX_REFUSED_AT_ONCE = 10_000  # surplus files refused in one cycle
FILES_OF_USER, BYTES_OF_USER = 1000, 16 << 20  # that one cycle takes
FILES_OF_ALL, BYTES_OF_ALL = 4000, 64 << 20
WALK_S = 1.0  # CPU time in which one cycle reads the folder (some 200,000 files); it goes on in the next one
LINKING_S = 60.0  # how long a command may have two names, the draft's and its own
UNKNOWN_OWNER = -1  # of a file with several names: a hard link needs no right to the file
_NFS = ".nfs"  # what NFS makes of a file that was removed while it was open; removing it makes another


class InboxFiles:
    """The files of a folder by owner. Existence and ownership are checked again when a file is read."""

    def __init__(self, folder: Path, drafts: Path, is_postponed: Callable[[str], bool]) -> None:
        self._folder, self._drafts, self._is_postponed = folder, drafts, is_postponed
        self._of_user: dict[int, dict[str, int]] = {}  # owner -> name -> bytes
        self._owner: dict[str, int] = {}
        self._walk: os._ScandirIterator[str] | None = None
        self._unlisted: set[str] = set()  # known files that this walk has not listed yet

    def close(self) -> None:
        """Stop listing the folder."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def forget(self, name: str) -> None:
        """Drop a file that was taken or no longer exists."""
        owner = self._owner.pop(name, None)
        if owner is not None:
            self._of_user[owner].pop(name, None)
            if not self._of_user[owner]:
                del self._of_user[owner]

    def owner(self, name: str) -> int | None:
        """Return the owner's user id; None: the file does not exist or was not listed yet."""
        return self._owner.get(name)

    def has_any(self) -> bool:
        """Return whether any file can be taken now."""
        if self._any_takable():
            return True
        self._continue_walk()
        return self._any_takable()

    def _any_takable(self) -> bool:
        return any(not self._is_postponed(name) for names in self._of_user.values() for name in names)

    def next_batch(self) -> list[str]:
        """Return the names that this cycle takes, oldest first: one of each owner in turn, within the bounds."""
        self._continue_walk()
        heads = {owner: self._oldest(owner) for owner in self._of_user}
        # Round-robin: one file of each owner per pass, until all owners are exhausted or a bound of all is reached.
        sizes, size, taken = dict.fromkeys(heads, 0), 0, list[str]()
        while heads:
            for owner, names in list(heads.items()):
                name = next(names, None)
                own = 0 if name is None else self._of_user[owner][name]
                full = sizes[owner] + own > BYTES_OF_USER and sizes[owner]  # one is taken, however large
                if name is None or full:
                    del heads[owner]
                    continue
                if taken and (len(taken) >= FILES_OF_ALL or size + own > BYTES_OF_ALL):
                    return sorted(taken)
                sizes[owner] += own
                size += own
                taken.append(name)
        return sorted(taken)

    def _oldest(self, owner: int) -> Iterator[str]:
        names = (name for name in self._of_user[owner] if not self._is_postponed(name))
        return iter(heapq.nsmallest(FILES_OF_USER, names))

    def surplus(self) -> dict[int, list[str]]:
        """Return the surplus files by owner: the latest ones, at most `MAX_REFUSED_AT_ONCE`."""
        found, room = {}, MAX_REFUSED_AT_ONCE
        for owner, names in self._of_user.items():
            if (count := min(len(names) - MAX_WAITING, room)) <= 0:
                continue
            found[owner] = heapq.nlargest(count, (name for name in names if not self._is_postponed(name)))
            room -= count
        return found

    def _continue_walk(self) -> None:
        """Continue listing the folder, or start again."""
        until = time.thread_time() + WALK_S
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if self._walk is None:
                self._walk, self._unlisted = os.scandir(self._folder), set(self._owner)
            while chunk := list(islice(self._walk, 500)):
                for entry in chunk:
                    self._record(entry)
                if time.thread_time() > until:
                    return
            self.close()
            for name in self._unlisted:
                self.forget(name)

    def _record(self, entry: os.DirEntry[str]) -> None:
        self._unlisted.discard(entry.name)
        if entry.name in self._owner or entry.name.startswith(_NFS):
            return
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # removed meanwhile
            return
        owner = status.st_uid
        if status.st_nlink != 1 and not stat.S_ISDIR(status.st_mode):
            if is_being_linked(status, self._drafts):
                return
            owner = UNKNOWN_OWNER
        names = self._of_user.setdefault(owner, {})
        if len(names) < 2 * MAX_WAITING:  # the rest is found again once these are gone
            names[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else 0
            self._owner[entry.name] = owner


def is_being_linked(status: os.stat_result, drafts: Path) -> bool:
    """Return whether a client may still be linking a command with two names from ``drafts`` into place.

    Its age is by the clock of the file system, which is a file server's on NFS.
    """
    now = time.time()
    if now - status.st_ctime >= LINKING_S:
        with contextlib.suppress(OSError):
            os.utime(drafts)
            now = drafts.stat().st_mtime
    return now - status.st_ctime < LINKING_S
