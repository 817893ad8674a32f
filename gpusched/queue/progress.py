"""Stored progress of jobs: one row per attempt that wrote progress.json or saved.json."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from gpusched.model.jobs import ENDED
from gpusched.model.progress import JobProgress
from gpusched.queue.damage import TABLE_CHECKS, TableCheck, json_of
from gpusched.queue.rows import JobReads


class ProgressReads(JobReads):
    """Queries for progress."""

    _db: sqlite3.Connection

    def progress_of_unended(self) -> dict[str, tuple[JobProgress, ...]]:
        """Return job -> progress of its attempts, latest last, for jobs that have not ended."""
        return _by_job(self._progress("WHERE open = 1 ORDER BY attempt", ()))

    def progress_since(self, since: float) -> dict[str, tuple[JobProgress, ...]]:
        """Return job -> progress of its attempts, latest last, for jobs that ran at or after ``since``."""
        ran = "SELECT job_id FROM runs WHERE end_time >= ? UNION SELECT job_id FROM runs WHERE end_time IS NULL"
        return _by_job(self._progress(f"WHERE job_id IN ({ran}) ORDER BY attempt", (since,)))

    def progress_of_job(self, job_id: str) -> list[JobProgress]:
        """Return the progress of all attempts of a job, latest last."""
        return self._progress("WHERE job_id = ? ORDER BY attempt", (job_id,))

    def _progress(self, rest: str, values: Sequence[object]) -> list[JobProgress]:
        rows = self._rows(f"SELECT data FROM progress {rest}", values)
        return [msgspec.json.decode(row[0], type=JobProgress) for row in rows]


def _by_job(found: Iterable[JobProgress]) -> dict[str, tuple[JobProgress, ...]]:
    by_job: dict[str, tuple[JobProgress, ...]] = {}
    for one in found:
        by_job[one.job_id] = (*by_job.get(one.job_id, ()), one)
    return by_job


class ProgressWrites(ProgressReads):
    """Writes of progress."""

    def put_progress(self, found: Iterable[JobProgress]) -> None:
        """Insert or replace the rows of these attempts."""
        self._db.executemany(
            "INSERT OR REPLACE INTO progress VALUES (?, ?, 1, ?)",
            ((one.job_id, one.attempt, msgspec.json.encode(one)) for one in found),
        )

    def close_progress(self) -> None:
        """Close the rows of jobs that have ended."""
        ended = f"SELECT id FROM jobs WHERE id = progress.job_id AND state IN ({','.join('?' * len(ENDED))})"
        self._db.execute(f"UPDATE progress SET open = 0 WHERE open = 1 AND EXISTS ({ended})", tuple(ENDED))

    def shift_progress(self, by_s: float) -> None:
        """Shift the times of jobs that have not ended, after the clock was set."""
        self.put_progress([one.shifted(by_s) for all_ in self.progress_of_unended().values() for one in all_])


TABLE_CHECKS.append(TableCheck("progress", ("job_id", "attempt"), ("data",), json_of(JobProgress)))
