"""Waiting for jobs to end, and the exit code that tells how they did."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

from gpusched.client.context import Client
from gpusched.client.resolve import Resolver, refusal, stored_jobs, surplus_refusal
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord, JobState

POLL_S = 0.5
OUTPUT_S = 30.0
"""After the end: a node that cannot bring the rest of an ``-o`` file by then is not waited for."""
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


def exit_code(job: JobRecord) -> int:
    """0..255: a COMPLETED or FAILED job's own code, else the code of its state."""
    code = EXIT_CODES[job.state]
    if job.state is JobState.FAILED and job.exit_code:
        code = job.exit_code if 0 < job.exit_code < 256 else 1
    return code


def worst_exit_code(jobs: Iterable[JobRecord]) -> int:
    """The highest of the jobs' codes."""
    return max(map(exit_code, jobs), default=0)


def wait_for(client: Client, texts: Iterable[str], timeout_s: float | None) -> list[JobRecord]:
    """Wait until all of the jobs (tasks of arrays included) have ended and their ``-o`` files are whole; the jobs then.

    Raises:
        UsageError: No such job.
        GpuschedError: Not ended in time, or refused by the controller.
    """
    return wait_for_ids(client, [t.id for t in Resolver(client).targets(texts)], timeout_s)


def wait_for_ids(client: Client, targets: list[str], timeout_s: float | None) -> list[JobRecord]:
    """The same for whole ids, which the store need not know yet: a shared inbox shows nobody what lies in it.

    Raises:
        GpuschedError: Not ended in time, or refused by the controller.
    """
    until = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    ended: dict[str, list[JobRecord]] = {}
    for _ in _changes(client, until):
        for target in targets:
            if target not in ended and (jobs := _ended(client, target)) is not None:
                ended[target] = jobs
        if len(ended) == len(targets):
            jobs = [job for target in targets for job in ended[target]]
            _wait_for_output(client, jobs, min(until, time.monotonic() + OUTPUT_S))
            return jobs
    left = [t for t in targets if t not in ended]
    raise GpuschedError(f"still running after {timeout_s:g} s: {', '.join(left[:8])}")


def _wait_for_output(client: Client, jobs: Iterable[JobRecord], until: float) -> None:
    """Wait until the nodes have written the rest of the jobs' ``-o`` files.

    A container's output reaches its file through the engine, whose last lines come after the end: GPUs are not held
    for them, but who reads the file next counts on it.
    """
    ids = {job.id for job in jobs if job.spec.output is not None or job.spec.error is not None}
    if not ids:
        return
    for _ in _changes(client, until):
        ranks = client.reader.ranks() if client.reader else []
        if not any(rank.job_id in ids and rank.output is not None and not rank.collected for rank in ranks):
            return


def _changes(client: Client, until: float) -> Iterator[None]:
    """At once, then whenever the store has changed or was opened anew, until a time of the monotonic clock."""
    opened, seen = 0.0, None
    yield
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(POLL_S, left))
        anew = time.monotonic() - opened > REOPEN_S
        if anew:
            client.reopen()
            opened = time.monotonic()
        reader = client.reader
        version = reader.data_version() if reader else None  # SQLite's count of others' commits: one cheap look
        if anew or version != seen:
            seen = version
            yield


def _ended(client: Client, target: str) -> list[JobRecord] | None:
    """The jobs of an id once all have ended; None before.

    Raises:
        GpuschedError: The controller refused the submission.
    """
    # before the store: what is folded meanwhile is seen there
    waits = client.inbox.has_submission(target.partition("_")[0])
    reader = client.reader
    if reader is None or reader.has_unended(target):  # a look that costs the same for any array
        return None
    jobs = stored_jobs(reader, target)
    if not jobs:
        if (why := refusal(reader, target) or (None if waits else surplus_refusal(reader))) is not None:
            raise GpuschedError(f"job {target} was refused: {why}")
        return None
    return jobs if all(j.state in ENDED for j in jobs) else None
