"""Wait for jobs to end, and the exit code that reports how they ended."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

from gpusched.client.context import Client
from gpusched.client.resolve import Resolver, excess_refusal, refusal, stored_jobs
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord, JobState

POLL_S = 0.5
OUTPUT_S = 30.0
"""After the end: a node that cannot bring the rest of an ``-o`` file by then is not waited for."""
REOPEN_S = 5.0
"""A store opened without a writer (no WAL) never shows later changes; it must be reopened to see them."""

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
    """Return 0 to 255: the job's own code if COMPLETED or FAILED, else the code of its state."""
    code = EXIT_CODES[job.state]
    if job.state is JobState.FAILED and job.exit_code:
        code = job.exit_code if 0 < job.exit_code < 256 else 1
    return code


def worst_exit_code(jobs: Iterable[JobRecord]) -> int:
    """Return the highest exit code of the jobs."""
    return max(map(exit_code, jobs), default=0)


def wait_for(client: Client, texts: Iterable[str], timeout_s: float | None) -> list[JobRecord]:
    """Wait until all jobs (and tasks of arrays) have ended and their ``-o`` files are complete; return the jobs.

    Raises:
        UsageError: No such job.
        GpuschedError: Not ended in time, or refused by the controller.
    """
    return wait_for_ids(client, [t.id for t in Resolver(client).targets(texts)], timeout_s)


def wait_for_ids(client: Client, targets: list[str], timeout_s: float | None) -> list[JobRecord]:
    """Wait as `wait_for` does, for whole ids that may still be in a shared inbox, which users cannot list.

    Raises:
        GpuschedError: Not ended in time, or refused by the controller.
    """
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    ended: dict[str, list[JobRecord]] = {}
    for _ in _changes(client, deadline):
        for target in targets:
            if target not in ended and (jobs := _ended(client, target)) is not None:
                ended[target] = jobs
        if len(ended) == len(targets):
            jobs = [job for target in targets for job in ended[target]]
            _wait_for_output(client, jobs, min(deadline, time.monotonic() + OUTPUT_S))
            return jobs
    unended = [t for t in targets if t not in ended]
    raise GpuschedError(f"still running after {timeout_s:g} s: {', '.join(unended[:8])}")


def _wait_for_output(client: Client, jobs: Iterable[JobRecord], deadline: float) -> None:
    """Wait until the nodes have written the rest of the jobs' ``-o`` files.

    A container's last lines reach its file after its end. GPUs are not held for them, but callers read the file next.
    """
    ids = {job.id for job in jobs if job.spec.output is not None or job.spec.error is not None}
    if not ids:
        return
    for _ in _changes(client, deadline):
        ranks = client.reader.ranks() if client.reader else []
        if not any(rank.job_id in ids and rank.output is not None and not rank.collected for rank in ranks):
            return


def _changes(client: Client, deadline: float) -> Iterator[None]:
    """Yield at once, then whenever the store has changed or was reopened, until a time of the monotonic clock."""
    opened, last_version = 0.0, None
    yield
    while (remaining_s := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_S, remaining_s))
        must_reopen = time.monotonic() - opened > REOPEN_S
        if must_reopen:
            client.reopen()
            opened = time.monotonic()
        reader = client.reader
        version = reader.data_version() if reader else None  # SQLite's count of others' commits: a cheap query
        if must_reopen or version != last_version:
            last_version = version
            yield


def _ended(client: Client, target: str) -> list[JobRecord] | None:
    """Return the jobs of an id once all have ended; None before.

    Raises:
        GpuschedError: The controller refused the submission.
    """
    # Read before the store: a submission queued in between is then in both, never in neither.
    is_in_inbox = client.inbox.has_submission(target.partition("_")[0])
    reader = client.reader
    if reader is None or reader.has_unended(target):  # costs the same for any array
        return None
    jobs = stored_jobs(reader, target)
    if not jobs:
        if (why := refusal(reader, target) or (None if is_in_inbox else excess_refusal(reader, target))) is not None:
            raise GpuschedError(f"job {target} was refused: {why}")
        return None
    return jobs if all(j.state in ENDED for j in jobs) else None
