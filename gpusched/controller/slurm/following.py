"""Follows Slurm's jobs from one reading to the next, so that what it says again costs a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpusched.controller.slurm.mirror import (
    MirrorContext,
    MirrorResult,
    forgotten,
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

MAX_DRIFTED = 1000
"""So many priorities and the like are taken up in a cycle: Slurm counts them all anew at once."""


class Missing(NamedTuple):
    """A job that Slurm names no more: when it last did, at the earliest, and since when it does not (Unix seconds)."""

    named_at: float
    since: float


class Mirror:
    """Remembers what was mirrored last, and which of Slurm's jobs is which of the store's.

    Args:
        find: The stored job with an id.
        unended: The stored jobs that have not ended.
        missing: Of these, those that Slurm did not name last time (see there).

    Attributes:
        troubles: Slurm's id -> why a job of it could not be mirrored.
    """

    def __init__(
        self, find: Callable[[str], JobRecord | None], unended: Iterable[JobRecord], missing: Mapping[str, Missing] = {}
    ) -> None:
        self._find = find
        self._names: dict[str, str] = {}  # Slurm's id -> the store's, where that is another one
        self._seen: dict[str, tuple[SlurmJob, Mapping[str, tuple[int, ...]] | None]] = {}
        self._later = dict(self._seen)  # what has changed and was left to a later cycle, as it was
        self._site: tuple[SlurmContext, Mapping[str, tuple[int, ...]]] | None = None
        self._open: dict[str, str] = {}  # the store's id -> Slurm's, of all that have not ended
        self._missing = dict(missing)
        self.troubles: dict[str, str] = {}
        for job in unended:
            if job.slurm is not None:
                own = slurm_id(job.id)
                self._open[job.id] = own
                if own != job.id:
                    self._names[own] = job.id

    def steps(self, jobs: Iterable[SlurmJob], world: MirrorContext) -> list[MirrorResult]:
        """What has changed by what Slurm says of its jobs now; `note` when it is in the store."""
        if (world.site, world.devices) != self._site:
            self._seen.clear()
        self._site = world.site, world.devices
        steps: list[MirrorResult] = []
        self._later = {}
        drifted = 0
        for job in jobs:
            seen = self._seen.get(job.id)
            if seen != (job, world.positions.get(job.id)):
                if seen is not None and _only_drifts(seen[0], job):
                    drifted += 1
                    if drifted > MAX_DRIFTED:
                        self._later[job.id] = seen
                        continue
                try:
                    steps += self._look(job, world)
                except STORE_FAULTS:
                    raise
                except Exception as error:  # what is odd about one job is not to hold up the others
                    self.troubles[job.id] = f"job {job.id} cannot be mirrored: {type(error).__name__}: {error}"[:300]
        return steps

    def _look(self, job: SlurmJob, world: MirrorContext) -> list[MirrorResult]:
        name, stored = self._known(job)
        if stored is None and world.site.partition_of(job) is None and not holds_nodes(job, world.site):
            return []
        before = []
        if stored is not None and not is_same(job, stored):
            if stored.state not in ENDED:
                before = [forgotten(stored, world.now)]
            name, stored = self._another_name(job.id, name), None
        step = step_of(stored, mirrored(job, stored, name, world), world.now)
        if step is None:
            self._seen[job.id] = job, world.positions.get(job.id)
            return before
        return [*before, step]

    def _known(self, job: SlurmJob) -> tuple[str, JobRecord | None]:
        """The store's id of the latest job that had this one's id, and that job."""
        name = self._names.get(job.id, job.id)
        stored = self._find(name)
        while stored is not None and name not in self._open and not is_same(job, stored):
            following = self._find(again := _next(name))
            if following is None:
                break
            name, stored = again, following
        return name, stored

    def _another_name(self, own: str, name: str) -> str:
        while self._find(name) is not None:
            name = _next(name)
        self._names[own] = name
        return name

    def note(self, steps: Iterable[MirrorResult], jobs: Iterable[SlurmJob], world: MirrorContext) -> None:
        """These steps are in the store; what comes next is compared with ``jobs``."""
        for step in steps:
            own = slurm_id(step.job.id)
            if step.job.state in ENDED:
                self._open.pop(step.job.id, None)
            else:
                self._open[step.job.id] = own
            if step.job.id != own:
                self._names[own] = step.job.id
        self._seen = {job.id: (job, world.positions.get(job.id)) for job in jobs} | self._later
        self._missing = {name: since for name, since in self._missing.items() if name in self._open}

    def missing(self, jobs: Iterable[SlurmJob], named_at: float, now: float) -> dict[str, Missing]:
        """By the store's ids: jobs that have not ended and that Slurm, last asked at ``named_at``, names no more."""
        named = {self._names.get(job.id, job.id) for job in jobs}
        first = Missing(named_at, now)
        self._missing = {name: self._missing.get(name, first) for name in self._open if name not in named}
        return dict(self._missing)


def _only_drifts(old: SlurmJob, new: SlurmJob) -> bool:
    """Whether nothing of a waiting job has changed but what Slurm says beside it: its priority goes up with its age."""
    if (
        new.state != "PENDING"
        or not (old.priority and new.priority)
        or blocking_reason(old.reason)
        or blocking_reason(new.reason)
    ):
        return False
    return msgspec.structs.replace(new, priority=old.priority, reason=old.reason) == old


def _next(name: str) -> str:
    """``1234~2`` after ``1234``, ``1234~3`` after that."""
    base, _, number = name.partition("~")
    return f"{base}~{int(number or 1) + 1}"
