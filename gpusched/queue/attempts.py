"""Ended attempts with their GPUs, for statistics of failures."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.queue.rows import JobReads

_MAX_START_DELAY_S = 86400.0  # an attempt's event `starting` is so much older than its start at most: images are pulled
_NODES = msgspec.json.Decoder(dict[str, Any])


class EndedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A started attempt that has ended.

    Attributes:
        outcome: A `gpusched.model.jobs.JobState`; PENDING: stopped to be resized, or requeued.
        gpus: Node -> indices; empty indices: unknown, or it had none.
        name: The job's; ``array_id`` of its array.
    """

    job_id: str
    attempt: int
    user: str
    name: str
    array_id: str | None
    start_time: float
    outcome: str
    gpus: dict[str, tuple[int, ...]]


class AttemptReads(JobReads):
    """Queries for attempts."""

    def ended_attempts(self, since: float) -> list[EndedAttempt]:
        """Return attempts that started and ended since then, by start; of a hot job's parts the last."""
        runs = {
            (job_id, attempt): (start, outcome, tuple(_NODES.decode(allocation)))
            for job_id, attempt, start, outcome, allocation in self._db.execute(
                "SELECT job_id, attempt, start_time, outcome, allocation FROM runs WHERE end_time > ? "
                "AND start_time > ? ORDER BY start_time",
                (since, since),
            )
        }
        gpus = self._gpus_of_starts(since - _MAX_START_DELAY_S)
        jobs = self._names(since)
        return [
            EndedAttempt(
                job_id=job_id, attempt=attempt, start_time=start, outcome=outcome or "",
                user=jobs[job_id][0], array_id=jobs[job_id][1], name=jobs[job_id][2] or "",
                gpus=dict.fromkeys(nodes, ()) | gpus.get((job_id, attempt), {}),
            )
            for (job_id, attempt), (start, outcome, nodes) in runs.items()
            if job_id in jobs
        ]  # fmt: skip

    def _gpus_of_starts(self, since: float) -> dict[tuple[str, int], dict[str, tuple[int, ...]]]:
        rows = self._db.execute("SELECT job_id, data FROM events WHERE kind = 'starting' AND time > ?", (since,))
        found = ((job_id, _NODES.decode(data)) for job_id, data in rows)
        return {
            (job_id, data["attempt"]): {node: tuple(gpus) for node, gpus in data["nodes"].items()}
            for job_id, data in found
            if "nodes" in data and "attempt" in data
        }

    def _names(self, since: float) -> dict[str, tuple[str, str | None, str | None]]:
        """Return job -> user, array and name, of jobs that have not ended before."""
        rows = self._db.execute(
            "SELECT jobs.id, user, array_id, json_extract(CAST(specs.data AS TEXT), '$.name') "
            "FROM jobs LEFT JOIN specs ON jobs.spec = specs.digest WHERE end_time > ? OR end_time IS NULL",
            (since,),
        )
        return {job: (user, array_id, name) for job, user, array_id, name in rows}
