"""Collection of job output: which users may read it, and when to retry after a failure."""

from __future__ import annotations

import contextlib
import os
import pwd

from gpusched.cluster.base import RankKey
from gpusched.config.users import user_name
from gpusched.model.jobs import JobRecord
from gpusched.model.resources import Inventory

MAX_FAILURES = 5
MIN_BACKOFF_S, MAX_BACKOFF_S = 2.0, 600.0


class CollectionRetries:
    """Failed collections since start-up, and when to retry them: the delay doubles with each failure."""

    def __init__(self) -> None:
        self._failures: dict[RankKey, tuple[int, float]] = {}  # count, time of the last

    def is_due(self, key: RankKey, now: float) -> bool:
        """Return whether this output may be collected now."""
        count, last = self._failures.get(key, (0, 0.0))
        pause = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(count - 1, 30))
        return not count or not 0 <= now - last < pause  # a clock that was set back delays nothing

    def failed(self, key: RankKey, now: float) -> int:
        """Count a failure; return the number so far."""
        count = self._failures.get(key, (0,))[0] + 1
        self._failures[key] = (count, now)
        return count

    def forget(self, key: RankKey) -> None:
        """Forget an output that was collected or given up."""
        self._failures.pop(key, None)


def readers_of(job: JobRecord | None, inventory: Inventory) -> tuple[int, ...]:
    """Return the user ids that may read a job's output besides the controller: its user's first, then the admins'."""
    found = [job.uid] if job is not None else []
    for name in inventory.settings.admins:
        with contextlib.suppress(KeyError):
            found.append(pwd.getpwnam(name).pw_uid)
    return tuple(found)


def may_see(uid: int, job: JobRecord, inventory: Inventory) -> bool:
    """Return whether a user may see a job's output and processes: its user and operators."""
    return uid == job.uid or is_operator(uid, inventory)


def is_operator(uid: int, inventory: Inventory) -> bool:
    """Return whether a user is root, the controller's user or an admin."""
    return uid in (0, os.geteuid()) or user_name(uid) in inventory.settings.admins
