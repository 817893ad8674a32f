"""One thread that waits for all jobs of a `Cluster`: when the store has changed, it looks at what changed."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpusched.api.jobs import Job
from gpusched.client.context import Client
from gpusched.client.resolve import refusal, stored_jobs
from gpusched.client.results import awaited
from gpusched.client.wait import REOPEN_S
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobState
from gpusched.model.jobs import JobRecord as JobRecord
from gpusched.queue.store import Reader

POLL_S = 0.2
TROUBLE_PAUSE_S = 2.0
LOOKED_AT_ANYWAY = 200  # of those that nothing was heard of, from time to time
_DRAWN = random.Random()  # what a program draws from the module is its own
_log = logging.getLogger("gpusched")


class Watcher:
    """Ends futures, with the clients that ``client`` makes."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self._client = client
        self._waiting: dict[str, dict[str, list[Job[Any]]]] = {}  # by submission, then by id
        self._fresh: list[Job[Any]] = []
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, jobs: Iterable[Job[Any]]) -> None:
        """Look after these until they have ended."""
        with self._lock:
            self._fresh += jobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpusched-jobs", daemon=True)
                self._thread.start()
            self._lock.notify()

    def _run(self) -> None:
        client, opened = self._client(), time.monotonic()
        due, seen, version = set[str](), -1, -1
        while self._take_fresh(due):
            if time.monotonic() - opened > REOPEN_S:  # one opened while nobody wrote it never shows later changes
                client.reopen()
                opened, version = time.monotonic(), -1
                due |= self._some()
            try:
                reader = client.reader
                if reader is not None and (due or reader.data_version() != version):
                    version = reader.data_version()
                    seen, told = (reader.latest_event(), []) if seen < 0 else reader.ended_since(seen)
                    due |= self._meant(told)
                    due = self._look_at(client, reader, due)
            except GpuschedError as error:
                _log.warning("%s; retrying", error.line())
                time.sleep(TROUBLE_PAUSE_S)
            except Exception:  # whoever waits must not wait for ever on a thread that is gone
                _log.exception("waiting for jobs failed; retrying")
                time.sleep(TROUBLE_PAUSE_S)
            with self._lock:
                if not self._fresh:
                    self._lock.wait(POLL_S)
        client.reopen()

    def _take_fresh(self, due: set[str]) -> bool:
        """Take up what came in, and look at it; False where nothing is left to wait for, and the thread ends."""
        with self._lock:
            for job in self._fresh:
                self._waiting.setdefault(_base(job.id), {}).setdefault(job.id, []).append(job)
                due.add(job.id)
            self._fresh.clear()
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)

    def _meant(self, told: Iterable[str]) -> set[str]:
        """Those waited for that ids of jobs, tasks and arrays concern."""
        found = set()
        for job_id in told:
            base = _base(job_id)
            for waiting in self._waiting.get(base, ()):
                if job_id in (base, waiting) or waiting == base:
                    found.add(waiting)
        return found

    def _some(self) -> set[str]:
        everything = [job_id for jobs in self._waiting.values() for job_id in jobs]
        return set(_DRAWN.sample(everything, min(len(everything), LOOKED_AT_ANYWAY)))

    def _look_at(self, client: Client, reader: Reader, due: Iterable[str]) -> set[str]:
        """End the futures of those that have ended, in the order in which they did; returns whose results are awaited.

        Those that ended between two looks are found together: `as_completed` is to hear of them one after the other.
        """
        refused: dict[str, str | None] = {}  # why submissions were, as far as that was looked up in this round
        found = [(job_id, stored_jobs(reader, job_id)) for job_id in due]
        found.sort(key=lambda one: (max((job.end_time or 0.0 for job in one[1]), default=0.0), one[0]))
        return {job_id for job_id, records in found if not self._look(client, reader, job_id, records, refused)}

    def _look(
        self, client: Client, reader: Reader, job_id: str, records: list[JobRecord], refused: dict[str, str | None]
    ) -> bool:
        """End the futures of a job that has ended; False where it has, but its result is still on the way."""
        if not records:
            base = _base(job_id)
            if base not in refused:
                refused[base] = refusal(reader, base)
            if (why := refused[base]) is not None:
                for job in self._taken(job_id):
                    job._refused(GpuschedError(f"job {job_id} was refused: {why}"))
            return True
        if not all(record.state in ENDED for record in records):
            return True
        returned = (JobState.COMPLETED, JobState.FAILED)
        if any(r.spec.function and r.state in returned and awaited(client, r) for r in records):
            return False
        for job in self._taken(job_id):
            job._end(tuple(records))
        return True

    def _taken(self, job_id: str) -> list[Job[Any]]:
        """The futures of a job, which are no longer waited for."""
        base = _base(job_id)
        with self._lock:
            found = self._waiting.get(base, {}).pop(job_id, [])
            if not self._waiting.get(base):
                self._waiting.pop(base, None)
        return found


def _base(job_id: str) -> str:
    return job_id.partition("_")[0]
