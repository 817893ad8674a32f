"""What the store keeps of jobs' own progress: a row for each attempt that wrote progress.json or saved.json."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from gpusched.model.jobs import ACTIVE
from gpusched.model.progress import JobProgress


class ProgressReads:
    """The part of a store's reader that is about progress. A store from before there was such a table has none."""

    _db: sqlite3.Connection

    def progress_of_active(self) -> dict[str, JobProgress]:
        """Job -> progress of its present attempt, where it tells of any."""
        marks = ",".join("?" * len(ACTIVE))
        found = self._progress(
            f"JOIN jobs ON jobs.id = progress.job_id WHERE jobs.state IN ({marks}) ORDER BY attempt", tuple(ACTIVE)
        )
        return {one.job_id: one for one in found}

    def progress_of_job(self, job_id: str) -> list[JobProgress]:
        """Of all its attempts, the latest one last."""
        return self._progress("WHERE job_id = ? ORDER BY attempt", (job_id,))

    def _progress(self, rest: str, values: Sequence[object]) -> list[JobProgress]:
        try:
            rows = self._db.execute(f"SELECT progress.data FROM progress {rest}", values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
        return [msgspec.json.decode(row[0], type=JobProgress) for row in rows]


class ProgressWrites(ProgressReads):
    """The part of the store's writer that is about progress."""

    def put_progress(self, found: Iterable[JobProgress]) -> None:
        """Insert or replace the rows of these attempts."""
        self._db.executemany(
            "INSERT OR REPLACE INTO progress VALUES (?, ?, ?)",
            ((one.job_id, one.attempt, msgspec.json.encode(one)) for one in found),
        )

    def shift_progress(self, by_s: float) -> None:
        """Move the times of the attempts under way: the clock was set."""
        self.put_progress([one.shifted(by_s) for one in self.progress_of_active().values()])
