"""Follows Slurm's jobs from one reading to the next, so that an unchanged job costs one comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpusched.controller.slurm.mirror import (
    MirrorContext,
    MirrorResult,
    ended_unknown,
    holds_nodes,
    is_same,
    mirrored,
    step_of,
)
from gpusched.controller.slurm.requests import SlurmContext
from gpusched.model.ids import slurm_id
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.model.slurm import SlurmJob, blocking_reason
from gpusched.queue.damage import STORE_FAULTS

_log = logging.getLogger(__name__)

MAX_DRIFTS = 1000
"""Jobs per cycle whose priority or reason alone changed: Slurm updates all of them at once."""


class Missing(NamedTuple):
    """A job that Slurm no longer lists: when it last did at the earliest, and since when it does not (Unix seconds)."""

    named_at: float
    since: float


class JobMirror:
    """Tracks the last mirrored state, and which of Slurm's jobs is which of the store's.

    Args:
        find: Returns the stored job with an id.
        unended: The stored jobs that have not ended.
        missing: Those of them absent from the last reading (see `Missing`).

    Attributes:
        troubles: Slurm's id -> why a job could not be mirrored, while Slurm lists it.
    """

    def __init__(
        self, find: Callable[[str], JobRecord | None], unended: Iterable[JobRecord], missing: Mapping[str, Missing] = {}
    ) -> None:
        self._find = find
        self._store_ids: dict[str, str] = {}  # Slurm's id -> the store's, where they differ
        self._last_seen: dict[str, tuple[SlurmJob, Mapping[str, tuple[int, ...]] | None]] = {}
        self._put_off = dict(self._last_seen)  # the previous state of changed jobs put off to a later cycle
        self._site: tuple[SlurmContext, Mapping[str, tuple[int, ...]]] | None = None
        self._open: dict[str, str] = {}  # the store's id -> Slurm's, of jobs that have not ended
        self._missing = dict(missing)
        self.troubles: dict[str, str] = {}
        for job in unended:
            if job.slurm is not None:
                job_id = slurm_id(job.id)
                self._open[job.id] = job_id
                if job_id != job.id:
                    self._store_ids[job_id] = job.id

    def steps(self, jobs: Iterable[SlurmJob], context: MirrorContext) -> list[MirrorResult]:
        """Return the changes since the last reading; call `mark_stored` when they are in the store."""
        if (context.site, context.devices) != self._site:
            self._last_seen.clear()
        self._site = context.site, context.devices
        steps: list[MirrorResult] = []
        self._put_off = {}
        drifted = 0
        for job in jobs:
            seen = self._last_seen.get(job.id)
            if seen != (job, context.positions.get(job.id)):
                if seen is not None and _only_drifts(seen[0], job):
                    drifted += 1
                    if drifted > MAX_DRIFTS:
                        self._put_off[job.id] = seen
                        continue
                try:
                    steps += self._mirror_job(job, context)
                except STORE_FAULTS:
                    raise
                except Exception as error:  # an odd job must not block the others
                    why = f"job {job.id} cannot be mirrored: {type(error).__name__}: {error}"[:300]
                    if self.troubles.get(job.id) != why:
                        _log.warning("%s", why)
                    self.troubles[job.id] = why
        return steps

    def _mirror_job(self, job: SlurmJob, context: MirrorContext) -> list[MirrorResult]:
        name, stored = self._find_stored(job)
        if stored is None and context.site.partition_of(job) is None and not holds_nodes(job, context.site):
            return []
        before = []
        if stored is not None and not is_same(job, stored):
            if stored.state not in ENDED:
                before = [ended_unknown(stored, context.now)]
            name, stored = self._new_store_id(job.id, name), None
        step = step_of(stored, mirrored(job, stored, name, context), context.now)
        if step is None:
            self._last_seen[job.id] = job, context.positions.get(job.id)
            return before
        return [*before, step]

    def _find_stored(self, job: SlurmJob) -> tuple[str, JobRecord | None]:
        """Return the store's id of the latest job with this Slurm id, and that job."""
        name = self._store_ids.get(job.id, job.id)
        stored = self._find(name)
        while stored is not None and name not in self._open and not is_same(job, stored):
            following = self._find(next_name := _next_id(name))
            if following is None:
                break
            name, stored = next_name, following
        return name, stored

    def _new_store_id(self, job_id: str, name: str) -> str:
        while self._find(name) is not None:
            name = _next_id(name)
        self._store_ids[job_id] = name
        return name

    def mark_stored(self, steps: Iterable[MirrorResult], jobs: Iterable[SlurmJob], context: MirrorContext) -> None:
        """Note that these steps are in the store; the next reading is compared with ``jobs``."""
        for step in steps:
            job_id = slurm_id(step.job.id)
            if step.job.state in ENDED:
                self._open.pop(step.job.id, None)
            else:
                self._open[step.job.id] = job_id
            if step.job.id != job_id:
                self._store_ids[job_id] = step.job.id
        self._last_seen = {job.id: (job, context.positions.get(job.id)) for job in jobs} | self._put_off
        self._missing = {name: since for name, since in self._missing.items() if name in self._open}
        self.troubles = {name: why for name, why in self.troubles.items() if name in self._last_seen}

    def missing(self, jobs: Iterable[SlurmJob], named_at: float, now: float) -> dict[str, Missing]:
        """Return the unended jobs, by the store's ids, that Slurm, last read at ``named_at``, no longer lists."""
        named = {self._store_ids.get(job.id, job.id) for job in jobs}
        first = Missing(named_at, now)
        self._missing = {name: self._missing.get(name, first) for name in self._open if name not in named}
        return dict(self._missing)

    def note_silence(self, now: float) -> dict[str, Missing]:
        """Count from now how long jobs are missing, since ends reach the accounting after its silence; return them."""
        self._missing = {name: one._replace(since=now) for name, one in self._missing.items()}
        return dict(self._missing)


def _only_drifts(old: SlurmJob, new: SlurmJob) -> bool:
    """Return whether a pending job changed only in priority, which rises with its age, or in its reason."""
    if (
        new.state != "PENDING"
        or not (old.priority and new.priority)
        or blocking_reason(old.reason)
        or blocking_reason(new.reason)
    ):
        return False
    return msgspec.structs.replace(new, priority=old.priority, reason=old.reason) == old


def _next_id(name: str) -> str:
    """Return ``1234~2`` after ``1234``, ``1234~3`` after that."""
    base, _, number = name.partition("~")
    return f"{base}~{int(number or 1) + 1}"
