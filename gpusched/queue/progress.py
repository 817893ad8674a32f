"""What the store keeps of jobs' own progress: a row for each attempt that wrote progress.json or saved.json."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from gpusched.model.jobs import ENDED
from gpusched.model.progress import JobProgress
from gpusched.queue.damage import KINDS, TableCheck, json_of
from gpusched.queue.rows import JobReads


class ProgressReads(JobReads):
    """The part of a store's reader that is about progress. A store from before there was such a table has none."""

    _db: sqlite3.Connection

    def progress_of_unended(self) -> dict[str, tuple[JobProgress, ...]]:
        """Job -> progress of its attempts that tell of any, the latest last; of jobs that have not ended."""
        return _by_job(self._progress("WHERE open = 1 ORDER BY attempt", ()))

    def progress_of_all(self) -> dict[str, tuple[JobProgress, ...]]:
        """Job -> progress of its attempts that tell of any, the latest last; of all jobs there ever were."""
        return _by_job(self._progress("ORDER BY attempt", ()))

    def progress_of_job(self, job_id: str) -> list[JobProgress]:
        """Of all its attempts, the latest one last."""
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
    """The part of the store's writer that is about progress."""

    def put_progress(self, found: Iterable[JobProgress]) -> None:
        """Insert or replace the rows of these attempts."""
        self._db.executemany(
            "INSERT OR REPLACE INTO progress VALUES (?, ?, 1, ?)",
            ((one.job_id, one.attempt, msgspec.json.encode(one)) for one in found),
        )

    def close_progress(self) -> None:
        """Of jobs that have ended since."""
        ended = f"SELECT id FROM jobs WHERE id = progress.job_id AND state IN ({','.join('?' * len(ENDED))})"
        self._db.execute(f"UPDATE progress SET open = 0 WHERE open = 1 AND EXISTS ({ended})", tuple(ENDED))

    def shift_progress(self, by_s: float) -> None:
        """Move the times of jobs that have not ended: the clock was set."""
        self.put_progress([one.shifted(by_s) for all_ in self.progress_of_unended().values() for one in all_])


KINDS.append(TableCheck("progress", ("job_id", "attempt"), ("data",), json_of(JobProgress)))
