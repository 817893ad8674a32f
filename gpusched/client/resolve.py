"""Resolve what users type to job ids: unique prefixes, arrays and their tasks, including jobs still in the inbox."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from gpusched.client.context import Client
from gpusched.client.inbox import inbox_jobs, inbox_submission
from gpusched.config.users import user_name
from gpusched.errors import GpuschedError, UsageError
from gpusched.model import ids
from gpusched.model.arrays import indices_of, restricted_rows
from gpusched.model.indices import parse, text_of
from gpusched.model.jobs import JobRecord

if TYPE_CHECKING:
    from gpusched.queue.store import Reader

SHOWN_CANDIDATES = 8
NAMED_JOBS = 500
"""So many of the latest jobs are looked at for a name."""
_POLL_S = 0.1
_CLOCKS_DIFFER_S = 600.0
_DAY_S = 86400.0


class ResolvedJobs(msgspec.Struct, frozen=True):
    """The id (an array's own if all tasks are meant) and its jobs in their current state."""

    id: str
    jobs: tuple[JobRecord, ...]


def stored_jobs(reader: Reader, job_id: str) -> list[JobRecord]:
    """Return the job, or the tasks that a whole id names (`Reader.rows_of`); none if the store does not know it."""
    return reader.rows_of(job_id)


def refusal(reader: Reader, job_id: str) -> str | None:
    """Return why the controller refused this submission, or None if it did not."""
    for event in reader.events(job_id=job_id.partition("_")[0]):
        if event.kind == "refused_command":
            return str(event.data.get("why", "no reason given"))
    return None


def excess_refusal(reader: Reader, job_id: str) -> str | None:
    """Return why this user's excess submissions were refused since this one was made, or None if none was."""
    me, base = user_name(os.getuid()), job_id.partition("_")[0]
    since = ids.minted_at(base) - _CLOCKS_DIFFER_S if ids.is_job_id(base) else 0.0
    for event in reversed(reader.events()):
        if event.time < since:
            return None  # earlier ones were of other submissions: this one is on its way to the copy of the store
        if event.kind == "refused_command" and event.user == me and event.data.get("surplus"):
            return str(event.data["why"])
    return None


class Refused(GpuschedError):
    """The controller refused the job's submission."""


class Resolver:
    """Resolves prefixes against one view of the inbox and the store."""

    def __init__(self, client: Client) -> None:
        self._waiting = inbox_jobs(client)  # read before the store: a job queued in between is then in both
        self._client = client

    def targets(self, texts: Iterable[str]) -> list[ResolvedJobs]:
        """Return the `target` of each, without repeats, in order."""
        found: dict[str, ResolvedJobs] = {}
        for text in texts:
            target = self.target(text)
            found.setdefault(target.id, target)
        return list(found.values())

    def target(self, text: str) -> ResolvedJobs:
        """Return the job, array or array task that ``text`` names.

        Raises:
            UsageError: No such job, or more than one.
            Refused: Its submission was refused by the controller.
        """
        if ids.is_slurms(text.strip()) and (known := self._of_slurm(text.strip())) is not None:
            return known
        normalized = ids.normalise(text)
        if not ids.is_prefix(normalized):
            raise UsageError(f"{text[:60]!r} is not a job id", self._by_name(text))
        prefix, index = normalized.partition("_")[0], normalized.partition("_")[2].strip("[]")
        if ids.is_job_id(prefix) and not any(prefix in (j.id, j.array_id) for j in self._waiting):
            self._waiting += inbox_submission(self._client, prefix)
        base = self._unique(text, prefix)
        if not index:
            return ResolvedJobs(base, tuple(self._jobs(base)))
        try:
            spans = parse(index)
        except ValueError:
            raise UsageError(f"{text[:60]!r} is not a job id", "tasks are ID_7, ID_[3-9] or ID_[1,4-6]") from None
        reader = self._client.reader  # only these tasks: the array may have 100,000 others
        stored = stored_jobs(reader, f"{base}_[{text_of(spans)}]") if reader else []
        found = restricted_rows(stored or self._jobs(base), spans)
        if not found:
            problem = "is not an array" if self._jobs(base)[0].array_id is None else f"has no task {text_of(spans)}"
            raise UsageError(f"job {base} {problem}")
        if len(found) == 1:
            spans = indices_of(found[0])  # a row's own id does not name all of its tasks where they lie scattered
        single = len(found) == 1 and not found[0].tasks
        return ResolvedJobs(found[0].id if single else f"{base}_[{text_of(spans)}]", tuple(found))

    def _comes_later(self, reader: Reader, job_id: str) -> bool:
        """Return whether a later copy of the store has the job: a new job is not in the current copy yet.

        Another user's may still be in the inbox, which this user cannot read. How new it is, its id says.
        """
        if not (lag_s := reader.lag_s()):
            return False
        least_s = 2 * lag_s + 1.0  # it may have been in the inbox for long, while no controller ran
        most_s = reader.number("tick_s", 5.0) + least_s
        age_s = time.time() - ids.minted_at(job_id)
        end = time.monotonic() + max(min(most_s, most_s - age_s), least_s if age_s < _DAY_S else 0.0)
        while time.monotonic() < end:
            reader.data_version()  # switches to the latest copy
            if reader.matching(job_id) or refusal(reader, job_id) is not None:
                return True
            time.sleep(_POLL_S)
        return False

    def _of_slurm(self, wanted: str) -> ResolvedJobs | None:
        """Return the Slurm job or array of exactly this id; the latest if Slurm reused it; None if there is none."""
        reader = self._client.reader
        if reader is None:
            return None
        found, number = reader.job(wanted), 2
        while found is not None and "~" not in wanted and (later := reader.job(f"{wanted}~{number}")) is not None:
            found, number = later, number + 1
        jobs = [found] if found is not None else reader.jobs_of_array(wanted)
        return ResolvedJobs(found.id if found is not None else wanted, tuple(jobs)) if jobs and jobs[0].slurm else None

    def _unique(self, text: str, prefix: str) -> str:
        reader = self._client.reader
        stored = reader.matching(prefix) if reader else []
        queued = (j.array_id or j.id for j in self._waiting)
        candidates = sorted({*(i.partition("_")[0] for i in stored), *(i for i in queued if i.startswith(prefix))})
        candidates = [i for i in candidates if not ids.is_slurms(i)]  # Slurm's numbers are whole ids
        if prefix in candidates:
            return prefix
        if not candidates:
            if reader and ids.is_job_id(prefix) and (why := refusal(reader, prefix)) is not None:
                raise Refused(f"job {prefix} was refused: {why}")
            if reader and ids.is_job_id(prefix) and self._comes_later(reader, prefix):
                return self._unique(text, prefix)
            raise UsageError(f"there is no job {text[:60]!r}", self._by_name(text) or "see 'gpusched status --all'")
        if len(candidates) > 1:
            listed = ", ".join(candidates[:SHOWN_CANDIDATES]) + (", ..." if len(candidates) > SHOWN_CANDIDATES else "")
            raise UsageError(f"{text[:60]!r} matches several jobs: {listed}", "type more characters")
        return candidates[0]

    def _by_name(self, text: str) -> str:
        """Return what to do where ``text`` is not an id but the name of some of this user's latest jobs, else ""."""
        reader, mine = self._client.reader, os.getuid()
        latest = reader.jobs(user=user_name(mine), limit=NAMED_JOBS) if reader else []
        jobs = [*latest, *(job for job in self._waiting if job.uid == mine)]
        named = sorted({job.array_id or job.id for job in jobs if job.spec.name == text.strip()}, reverse=True)
        if not named:
            return ""
        more = ", ..." if len(named) > SHOWN_CANDIDATES else ""
        return f"name jobs by id; you have jobs of this name: {', '.join(named[:SHOWN_CANDIDATES])}{more}"

    def _jobs(self, base: str) -> list[JobRecord]:
        reader = self._client.reader
        if reader and (stored := stored_jobs(reader, base)):
            return stored
        jobs = [j for j in self._waiting if base in (j.id, j.array_id)]
        if not jobs:
            raise GpuschedError(f"job {base} is still being queued", "try again")
        return jobs
