"""Bringing output home, as the cycle sees it: who may read it, and when to ask again after a failure."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

from gpusched.cluster.base import RankKey
from gpusched.cluster.logfiles import secure
from gpusched.config.users import user_name
from gpusched.model.jobs import JobRecord
from gpusched.model.resources import Inventory
from gpusched.queue.store import Store

MAX_FAILURES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 600.0


class Collecting:
    """What failed since the start, and when it may be tried again: twice as long after each failure."""

    def __init__(self) -> None:
        self._failures: dict[RankKey, tuple[int, float]] = {}  # how many, when the last one was

    def is_due(self, key: RankKey, now: float) -> bool:
        """Whether this output may be asked for."""
        count, last = self._failures.get(key, (0, 0.0))
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count - 1, 30))
        return not count or not 0 <= now - last < pause  # a clock that was set back makes nobody wait

    def failed(self, key: RankKey, now: float) -> int:
        """Count a failure; returns how many there were."""
        count = self._failures.get(key, (0,))[0] + 1
        self._failures[key] = (count, now)
        return count

    def done(self, key: RankKey) -> None:
        """It is here, or nobody waits for it."""
        self._failures.pop(key, None)


def readers_of(job: JobRecord | None, inventory: Inventory) -> tuple[int, ...]:
    """User ids that may read a job's output besides the controller: its user's first, then the operators'."""
    found = [job.uid] if job is not None else []
    for name in inventory.settings.admins:
        with contextlib.suppress(KeyError):
            found.append(pwd.getpwnam(name).pw_uid)
    return tuple(found)


def secure_logs(state: Path, store: Store, inventory: Inventory) -> None:
    """See `gpusched.cluster.logfiles.secure`; OSError where something cannot be taken back."""
    secure(state / "logs", lambda job_id: readers_of(store.job(job_id), inventory))


def may_see(uid: int, job: JobRecord, inventory: Inventory) -> bool:
    """Whether a user may see a job's output and its inside: its own, root, the controller's, the operators."""
    return uid in (0, os.geteuid(), job.uid) or user_name(uid) in inventory.settings.admins
