"""Stored forecasts: each pending job's estimated run time and predicted start, both made once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from gpusched.model.jobs import JobRecord, JobState
from gpusched.queue.array_limit import MAX_SIMULATED_PARTS
from gpusched.queue.rows import JobReads


class Prediction(NamedTuple):
    """A predicted start (Unix seconds); ``high`` or ``by_limits`` None: beyond the horizon."""

    job_id: str
    partition: str
    made: float
    median: float
    low: float
    high: float | None
    by_limits: float | None


class PredictedStart(NamedTuple):
    """A prediction, the actual start (None: not started), and whether the job still waits."""

    prediction: Prediction
    started: float | None
    waits: bool


class Estimate(NamedTuple):
    """A job's expected run time in seconds, and the digest of the predictor."""

    job_id: str
    seconds: float
    predictor: str


class PredictionReads(JobReads):
    """Queries for forecasts."""

    def unpredicted(self) -> tuple[int, list[str]]:
        """Return the number of pending jobs, and the ids of those without a predicted start.

        The first of an array's tasks in one row stands for all. A row counts for at most `MAX_SIMULATED_PARTS` jobs,
        and a larger one gets no prediction until it is smaller.
        """
        first = "array_id || '_' || CAST(substr(id, length(array_id) + 3) AS INTEGER)"  # of ID_[3-9]
        query = (
            "SELECT name, count, name IN (SELECT job_id FROM predictions) FROM (SELECT "
            f"CASE WHEN tasks > 1 THEN {first} ELSE id END AS name, tasks AS count FROM jobs WHERE state = ?)"
        )
        rows = self._db.execute(query, (JobState.PENDING,)).fetchall()
        return sum(min(count, MAX_SIMULATED_PARTS) for _, count, _ in rows), [
            job_id for job_id, count, known in rows if not known and count <= MAX_SIMULATED_PARTS
        ]

    def predicted_starts(self, since: float, until: float) -> list[PredictedStart]:
        """Return predictions made in [since, until), oldest first, with their outcomes."""
        query = (
            "SELECT p.job_id, p.partition, p.made, p.median, p.low, p.high, p.by_limits, (SELECT min(start_time) "
            "FROM runs WHERE runs.job_id = p.job_id AND runs.start_time >= p.made), coalesce(jobs.state, '') "
            "FROM predictions p LEFT JOIN jobs ON jobs.id = p.job_id WHERE p.made >= ? AND p.made < ? "
            "ORDER BY p.made, p.job_id"
        )
        rows = self._rows(query, (since, until))
        waiting = (JobState.PENDING, JobState.STARTING)
        return [PredictedStart(Prediction(*row[:7]), started=row[7], waits=row[8] in waiting) for row in rows]

    def estimates(self) -> dict[str, float]:
        """Return job or array id -> estimated seconds, for pending jobs that have an estimate."""
        if not self._rows("SELECT 1 FROM estimates LIMIT 1"):
            return {}  # no estimates in use: skip scanning the queue
        query = "SELECT job_id, seconds FROM jobs CROSS JOIN estimates ON job_id = {} WHERE state = :state"
        query = f"{query.format('id')} UNION {query.format('array_id')}"
        return dict(self._rows(query, {"state": JobState.PENDING}))

    def unestimated(self) -> list[JobRecord]:
        """Return pending jobs without an estimate; tasks that share a row as one job with the array's id."""
        none_yet = "id NOT IN (SELECT job_id FROM estimates)"
        none_yet += " AND (array_id IS NULL OR array_id NOT IN (SELECT job_id FROM estimates))"
        rows = self._jobs_of(f"WHERE state = ? AND {none_yet}", (JobState.PENDING,))
        return [replace(job, id=job.array_id, tasks=()) if job.tasks else job for job in rows]


class PredictionWrites:
    """Writes of forecasts."""

    _db: sqlite3.Connection

    def put_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Insert predictions; the first of each job is kept."""
        self._db.executemany("INSERT OR IGNORE INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?)", predictions)

    def put_estimates(self, estimates: Iterable[Estimate]) -> None:
        """Insert or replace estimates."""
        self._db.executemany("INSERT OR REPLACE INTO estimates VALUES (?, ?, ?)", estimates)
