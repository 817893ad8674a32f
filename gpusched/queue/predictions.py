"""What the store keeps of forecasts: how long each waiting job will run, estimated once, and when it was to start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from gpusched.model.jobs import JobRecord, JobState
from gpusched.queue.array_limit import MOST_AHEAD
from gpusched.queue.rows import JobReads


class Prediction(NamedTuple):
    """A start that was predicted once (Unix seconds); ``high``, ``by_limits`` None: later than could be predicted."""

    job_id: str
    partition: str
    made: float
    median: float
    low: float
    high: float | None
    by_limits: float | None


class PredictedStart(NamedTuple):
    """A prediction; when the job really started (None: it has not), and whether it still waits."""

    prediction: Prediction
    started: float | None
    waits: bool


class Estimate(NamedTuple):
    """How long a job is expected to run, seconds, and the digest of the predictor."""

    job_id: str
    seconds: float
    predictor: str


class PredictionReads(JobReads):
    """The part of a store's reader that is about forecasts. A store from before there were such tables has none."""

    def unpredicted(self) -> tuple[int, list[str]]:
        """How many jobs are in the queue, and the ids of those of which no start was predicted yet.

        Of tasks of an array that share a row the first stands for all. More than are run forward one by one count as
        so many, and nothing is predicted of them before they are fewer.
        """
        first = "array_id || '_' || CAST(substr(id, length(array_id) + 3) AS INTEGER)"  # of ID_[3-9]
        count = self._tasks_column()
        query = (
            "SELECT name, count, name IN (SELECT job_id FROM predictions) FROM (SELECT "
            f"CASE WHEN {count} > 1 THEN {first} ELSE id END AS name, {count} AS count FROM jobs WHERE state = ?)"
        )
        rows = self._db.execute(query, (JobState.PENDING,)).fetchall()
        return sum(min(count, MOST_AHEAD) for _, count, _ in rows), [
            job_id for job_id, count, known in rows if not known and count <= MOST_AHEAD
        ]

    def predicted_starts(self, since: float, until: float) -> list[PredictedStart]:
        """What was predicted in [since, until), oldest first, and what became of it."""
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
        """Job, or array -> seconds, of the jobs in the queue that have an estimate."""
        if not self._rows("SELECT 1 FROM estimates LIMIT 1"):
            return {}  # nobody asks for estimates here: the queue need not be gone through
        query = "SELECT job_id, seconds FROM jobs CROSS JOIN estimates ON job_id = {} WHERE state = :state"
        query = f"{query.format('id')} UNION {query.format('array_id')}"
        return dict(self._rows(query, {"state": JobState.PENDING}))

    def unestimated(self) -> list[JobRecord]:
        """The jobs in the queue that have none yet; tasks of an array that share a row as one, with the array's id."""
        none_yet = "id NOT IN (SELECT job_id FROM estimates)"
        none_yet += " AND (array_id IS NULL OR array_id NOT IN (SELECT job_id FROM estimates))"
        rows = self._jobs_of(f"WHERE state = ? AND {none_yet}", (JobState.PENDING,))
        return [replace(job, id=job.array_id, tasks=()) if job.tasks else job for job in rows]


class PredictionWrites:
    """The part of the store's writer that is about forecasts."""

    _db: sqlite3.Connection

    def put_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Remember what was predicted; the first of each job counts."""
        self._db.executemany("INSERT OR IGNORE INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?)", predictions)

    def put_estimates(self, estimates: Iterable[Estimate]) -> None:
        """Keep these; the first of each job counts."""
        self._db.executemany("INSERT OR IGNORE INTO estimates VALUES (?, ?, ?)", estimates)
