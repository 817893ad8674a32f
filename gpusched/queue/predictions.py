"""What the store keeps of forecasts: when waiting jobs were expected to start, to be held against when they did."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from gpusched.model.jobs import JobState


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


class PredictionReads:
    """The part of a store's reader that is about forecasts. A store from before there was such a table has none."""

    _db: sqlite3.Connection

    def unpredicted(self) -> tuple[int, list[str]]:
        """How many jobs are in the queue, and the ids of those of which no start was predicted yet."""
        query = "SELECT id, id IN (SELECT job_id FROM predictions) FROM jobs WHERE state = ?"
        rows = self._db.execute(query, (JobState.PENDING,)).fetchall()
        return len(rows), [job_id for job_id, known in rows if not known]

    def predicted_starts(self, since: float, until: float) -> list[PredictedStart]:
        """What was predicted in [since, until), oldest first, and what became of it."""
        query = (
            "SELECT p.job_id, p.partition, p.made, p.median, p.low, p.high, p.by_limits, (SELECT min(start_time) "
            "FROM runs WHERE runs.job_id = p.job_id AND runs.start_time >= p.made), coalesce(jobs.state, '') "
            "FROM predictions p LEFT JOIN jobs ON jobs.id = p.job_id WHERE p.made >= ? AND p.made < ? "
            "ORDER BY p.made, p.job_id"
        )
        try:
            rows = self._db.execute(query, (since, until)).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
        waiting = (JobState.PENDING, JobState.STARTING)
        return [PredictedStart(Prediction(*row[:7]), started=row[7], waits=row[8] in waiting) for row in rows]


class PredictionWrites:
    """The part of the store's writer that is about forecasts."""

    _db: sqlite3.Connection

    def put_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Remember what was predicted; the first of each job counts."""
        self._db.executemany("INSERT OR IGNORE INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?)", predictions)
