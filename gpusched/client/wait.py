"""Waiting for jobs to end, and the exit code that tells how they did."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from gpusched.client.context import Client
from gpusched.client.resolve import Resolver, refusal
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, Job, JobState
from gpusched.queue.store import Reader

POLL_S = 0.5
REOPEN_S = 5.0
"""A store opened while nobody wrote it (no WAL) never shows later changes; opening it anew does."""

EXIT_CODES = {
    JobState.COMPLETED: 0,
    JobState.FAILED: 1,  # where the job has no code of its own
    JobState.TIMEOUT: 124,
    JobState.NODE_FAIL: 125,
    JobState.OUT_OF_MEMORY: 137,
    JobState.CANCELLED: 143,
    JobState.PREEMPTED: 143,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs ended; ``exit_code`` is the highest of theirs."""

    jobs: tuple[Job, ...]

    @property
    def exit_code(self) -> int:
        """The highest of the jobs' codes."""
        return max((exit_code(job) for job in self.jobs), default=0)


def exit_code(job: Job) -> int:
    """0..255: a COMPLETED or FAILED job's own code, else the code of its state."""
    code = EXIT_CODES[job.state]
    if job.state is JobState.FAILED and job.exit_code:
        code = job.exit_code if 0 < job.exit_code < 256 else 1
    return code


def wait_for(client: Client, texts: Iterable[str], timeout_s: float | None) -> Outcome:
    """Wait until all of the jobs (tasks of arrays included) have ended.

    Raises:
        UsageError: No such job.
        GpuschedError: Not ended in time, or refused by the controller.
    """
    return wait_for_ids(client, [t.id for t in Resolver(client).targets(texts)], timeout_s)


def wait_for_ids(client: Client, targets: list[str], timeout_s: float | None) -> Outcome:
    """The same for whole ids, which the store need not know yet: a shared inbox shows nobody what lies in it.

    Raises:
        GpuschedError: Not ended in time, or refused by the controller.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    watch = _Watch(client)
    ended: dict[str, list[Job]] = {}
    while True:
        for target in targets:
            if target not in ended and (jobs := _ended(client, target)) is not None:
                ended[target] = jobs
        if len(ended) == len(targets):
            return Outcome(jobs=tuple(j for t in targets for j in ended[t]))
        if not watch.changed(end):
            left = [t for t in targets if t not in ended]
            raise GpuschedError(f"not ended within {timeout_s:g} s: {', '.join(left[:8])}")


class _Watch:
    """Sleeps until the store has changed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader: Reader | None = None
        self._version: int | None = None
        self._opened = 0.0

    def changed(self, end: float | None) -> bool:
        """Wait for a change (or for a store newly opened); False once ``end`` has passed."""
        while end is None or time.monotonic() < end:
            left = POLL_S if end is None else min(POLL_S, max(0.0, end - time.monotonic()))
            time.sleep(left)
            if time.monotonic() - self._opened > REOPEN_S:
                self._client.reopen()
                self._opened = time.monotonic()
                self._version = self._look()
                return True
            version = self._look()
            if version != self._version:
                self._version = version
                return True
        return False

    def _look(self) -> int | None:
        """SQLite's count of others' commits: one cheap look, no query."""
        reader = self._client.reader
        return reader.data_version() if reader else None


def _ended(client: Client, target: str) -> list[Job] | None:
    """The jobs of an id once all have ended; None before.

    Raises:
        GpuschedError: The controller refused the submission.
    """
    reader = client.reader
    if reader is None:
        return None
    single = reader.job(target)
    jobs = [single] if single else reader.jobs_of_array(target)
    if not jobs:
        if (why := refusal(reader, target)) is not None:
            raise GpuschedError(f"job {target} was refused: {why}")
        return None
    return jobs if all(j.state in ENDED for j in jobs) else None
