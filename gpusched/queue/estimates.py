"""What the store keeps of run times: a trained predictor's estimate for each waiting job, as of its submission."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from gpusched.model.jobs import Job, JobState
from gpusched.queue.rows import JobReads


class Estimate(NamedTuple):
    """How long a job is expected to run, seconds, and the digest of the predictor."""

    job_id: str
    seconds: float
    predictor: str


class EstimateReads(JobReads):
    """The part of a store's reader that is about run times. A store from before there was such a table has none."""

    _db: sqlite3.Connection

    def estimates(self) -> dict[str, float]:
        """Job -> seconds, of the jobs in the queue that have an estimate."""
        try:
            if self._db.execute("SELECT 1 FROM estimates LIMIT 1").fetchone() is None:
                return {}  # nobody asks for estimates here: the queue need not be gone through
            return dict(
                self._db.execute(
                    "SELECT job_id, seconds FROM jobs JOIN estimates ON job_id = id WHERE state = ?",
                    (JobState.PENDING,),
                ).fetchall()
            )
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return {}
            raise

    def unestimated(self) -> list[Job]:
        """The jobs in the queue that have none yet."""
        return self._jobs_of("WHERE state = ? AND id NOT IN (SELECT job_id FROM estimates)", (JobState.PENDING,))


class EstimateWrites:
    """The part of the store's writer that is about run times."""

    _db: sqlite3.Connection

    def put_estimates(self, estimates: Iterable[Estimate]) -> None:
        """Keep these; the first of each job counts."""
        self._db.executemany("INSERT OR IGNORE INTO estimates VALUES (?, ?, ?)", estimates)
