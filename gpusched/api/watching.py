"""Waits for all jobs of a `Cluster` in one thread, which checks changed jobs whenever the store changes."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpusched.api.jobs import Job
from gpusched.client.context import Client
from gpusched.client.resolve import refusal, stored_jobs
from gpusched.client.results import is_uncollected
from gpusched.client.wait import REOPEN_S
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobState
from gpusched.model.jobs import JobRecord as JobRecord
from gpusched.queue.store import Reader

POLL_S = 0.2
RETRY_S = 2.0
MAX_SAMPLED = 200  # jobs checked at each reopening even without an event
_RANDOM = random.Random()  # of its own, so that the user's program gets the same random numbers as without us
_log = logging.getLogger(__name__)


class Watcher:
    """Completes futures when their jobs end. ``client`` creates the client that reads the store."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self._client = client
        self._waiting: dict[str, dict[str, list[Job[Any]]]] = {}  # by submission, then by id
        self._new: list[Job[Any]] = []
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def watch(self, jobs: Iterable[Job[Any]]) -> None:
        """Watch these jobs until they have ended."""
        if self._process != os.getpid():  # forked, without the thread; it may have held the lock
            self._lock, self._thread, self._process = threading.Condition(), None, os.getpid()
        with self._lock:
            self._new += jobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpusched-jobs", daemon=True)
                self._thread.start()
            self._lock.notify()

    def _run(self) -> None:
        client, opened = self._client(), time.monotonic()
        due, last_event, version = set[str](), -1, -1
        while self._take_new(due):
            if time.monotonic() - opened > REOPEN_S:  # a store opened without a writer never shows later changes
                client.reopen()
                opened, version = time.monotonic(), -1
                due |= self._sample()
            try:
                reader = client.reader
                if reader is not None and (due or reader.data_version() != version):
                    version = reader.data_version()
                    last_event, changed = (
                        (reader.latest_event(), []) if last_event < 0 else reader.ended_since(last_event)
                    )
                    due |= self._affected(changed)
                    due = self._complete_ended(client, reader, due)
            except GpuschedError as error:
                version = -1  # changes may be unread
                _log.warning("%s; retrying", error.line())
                time.sleep(RETRY_S)
            except Exception:  # a dead thread would leave its waiters waiting forever
                version = -1
                _log.exception("waiting for jobs failed; retrying")
                time.sleep(RETRY_S)
            with self._lock:
                if not self._new:
                    self._lock.wait(POLL_S)
        client.reopen()

    def _take_new(self, due: set[str]) -> bool:
        """Add new jobs, which are due at once; return False if there are none to wait for, and the thread must end."""
        with self._lock:
            for job in self._new:
                self._waiting.setdefault(_submission_id(job.id), {}).setdefault(job.id, []).append(job)
                due.add(job.id)
            self._new.clear()
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)

    def _affected(self, changed: Iterable[str]) -> set[str]:
        """Return the ids of watched jobs that changes of these jobs, tasks and arrays affect."""
        found = set[str]()
        for job_id in changed:
            base = _submission_id(job_id)
            waiting = self._waiting.get(base, {}).keys()
            found |= waiting if job_id == base else waiting & {job_id, base}
        return found

    def _sample(self) -> set[str]:
        everything = [job_id for jobs in self._waiting.values() for job_id in jobs]
        return set(_RANDOM.sample(everything, min(len(everything), MAX_SAMPLED)))

    def _complete_ended(self, client: Client, reader: Reader, due: Iterable[str]) -> set[str]:
        """Complete futures of ended jobs, in order of end; return the jobs whose results have not arrived.

        Several jobs may end between two checks; `as_completed` must yield them in order.
        """
        refused: dict[str, str | None] = {}  # submission -> why it was refused, or None; looked up once per round
        found = [(job_id, stored_jobs(reader, job_id)) for job_id in due]
        found.sort(key=lambda entry: (max((job.end_time or 0.0 for job in entry[1]), default=0.0), entry[0]))
        return {job_id for job_id, records in found if not self._complete(client, reader, job_id, records, refused)}

    def _complete(
        self, client: Client, reader: Reader, job_id: str, records: list[JobRecord], refused: dict[str, str | None]
    ) -> bool:
        """Complete the futures of a job if it has ended; return False if its result has not arrived yet."""
        if not records:
            base = _submission_id(job_id)
            if base not in refused:
                refused[base] = refusal(reader, base)
            if (why := refused[base]) is not None:
                for job in self._take_futures(job_id):
                    job._refused(GpuschedError(f"job {job_id} was refused: {why}"))
            return True
        if not all(record.state in ENDED for record in records):
            return True
        returned = (JobState.COMPLETED, JobState.FAILED)
        if any(r.spec.function and r.state in returned and is_uncollected(client, r) for r in records):
            return False
        for job in self._take_futures(job_id):
            job._end(tuple(records))
        return True

    def _take_futures(self, job_id: str) -> list[Job[Any]]:
        """Stop watching a job and return its futures."""
        base = _submission_id(job_id)
        with self._lock:
            found = self._waiting.get(base, {}).pop(job_id, [])
            if not self._waiting.get(base):
                self._waiting.pop(base, None)
        return found


def _submission_id(job_id: str) -> str:
    return job_id.partition("_")[0]
