"""What metrics are made of: totals that the controller keeps, and sums over the queue."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpusched.model.gpustates import GpuFigures
from gpusched.model.health import Condition
from gpusched.model.healthchecks import HealthCheck
from gpusched.model.indices import count as count_of
from gpusched.model.indices import parse
from gpusched.model.jobs import ACTIVE, Allocation, JobSpec, JobState
from gpusched.model.metrics import MetricTotals, UsageTotal
from gpusched.model.readings import NodeState
from gpusched.queue.rows import JobReads

TOTALS = "metric_totals"
"""Meta: `MetricTotals` as JSON."""
_TOTALS = msgspec.json.Decoder(MetricTotals)
TOTALLED = UsageTotal._fields[2:]
"""Fields of `UsageRow` of which `UsageTotal` has sums."""
COUNTED = ("submitted", "running", "ended", "requeued", "node_down", "gpu_lost", "agent_disabled")
"""Kinds of events that `CountedEvent` is read of."""


class EventFacts(msgspec.Struct, frozen=True):
    """The fields of an event's data that totals need."""

    to: str = ""
    outcome: str = ""
    reason: str = ""
    attempt: int = 1
    start: float | None = None
    tasks: str = ""
    count: int = 0
    partition: str = ""


class CountedEvent(NamedTuple):
    """What totals need of an event.

    Attributes:
        jobs: That it concerns: more than one of tasks of an array.
        submit_time: Of its job, where that is one row.
        data: `EventFacts`.
    """

    seq: int
    time: float
    kind: str
    partition: str
    submit_time: float | None
    jobs: int
    data: EventFacts


class ReadingFigures(msgspec.Struct, frozen=True):
    """The part of a `NodeReading` that metrics need."""

    source: str = "none"
    gpus: tuple[GpuFigures, ...] = ()


class DeclaredFigures(msgspec.Struct, frozen=True):
    """The part of a declared `Node` that metrics need."""

    partition: str = ""
    gpu_type: str = ""
    gpus: int = 0
    gpu_indices: tuple[int, ...] | None = None
    health_checks: tuple[HealthCheck, ...] = ()


class HealthFigures(msgspec.Struct, frozen=True):
    """The part of a `NodeHealth` that metrics need."""

    conditions: tuple[Condition, ...] = ()


class NodeFigures(msgspec.Struct, frozen=True):
    """The part of a `NodeRecord` that metrics need: a fifth of the time that the whole takes to decode."""

    name: str = ""
    state: NodeState = NodeState.UNKNOWN
    declared: DeclaredFigures | None = None
    reading: ReadingFigures | None = None
    health: HealthFigures = HealthFigures()


class _PendingRow(msgspec.Struct, frozen=True):
    reason: str = ""


class GpuHolder(msgspec.Struct, frozen=True):
    """The part of an active job that says which GPUs it holds."""

    id: str
    allocation: Allocation | None = None


class PendingSum(NamedTuple):
    """Pending jobs of one partition with one reason."""

    partition: str
    reason: str
    jobs: int
    gpus: int


_FIGURES = msgspec.json.Decoder(NodeFigures)
_FACTS = msgspec.json.Decoder(EventFacts)
_PENDING = msgspec.json.Decoder(_PendingRow)
_HOLDER = msgspec.json.Decoder(GpuHolder)


class MetricReads(JobReads):
    """Queries for metrics. A store from before these tables has none."""

    _db: sqlite3.Connection

    def metric_totals(self) -> MetricTotals | None:
        """Return the totals; None: no controller has kept any yet."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (TOTALS,)).fetchone()
        return _TOTALS.decode(row[0]) if row else None

    def usage_totals(self) -> list[UsageTotal]:
        """Return the sums of all usage by partition."""
        rows = self._rows(f"SELECT partition, held, {', '.join(TOTALLED)} FROM usage_totals ORDER BY partition, held")
        return [UsageTotal(row[0], bool(row[1]), *row[2:]) for row in rows]

    def counted_events(self, after: int, limit: int) -> list[CountedEvent]:
        """Return later events that totals count, in order."""
        of_array = "(SELECT partition FROM jobs WHERE array_id = e.job_id LIMIT 1)"
        of_node = "(SELECT data FROM nodes WHERE name = e.node)"
        rows = self._db.execute(
            f"SELECT e.seq, e.time, e.kind, coalesce(j.partition, {of_array}, ''), j.submit_time, e.data, "
            f"CASE WHEN e.job_id IS NULL THEN {of_node} END "
            "FROM events e LEFT JOIN jobs j ON j.id = e.job_id "
            f"WHERE e.seq > ? AND e.kind IN ({','.join('?' * len(COUNTED))}) ORDER BY e.seq LIMIT ?",
            (after, *COUNTED, limit),
        ).fetchall()
        return [_counted(*row) for row in rows]

    def pending_sums(self) -> list[PendingSum]:
        """Return the pending jobs by partition and reason."""
        query = "SELECT partition, spec, tasks, data FROM jobs WHERE state = ?"
        found: dict[tuple[str, str], list[int]] = {}
        gpus: dict[bytes, int] = {}
        for partition, digest, tasks, data in self._db.execute(query, (JobState.PENDING,)).fetchall():
            if digest not in gpus:
                gpus[digest] = self._gpus_of(digest)
            sums = found.setdefault((partition, _PENDING.decode(data).reason), [0, 0])
            sums[0] += tasks
            sums[1] += tasks * gpus[digest]
        return [PendingSum(*key, *sums) for key, sums in sorted(found.items())]

    def _gpus_of(self, digest: bytes) -> int:
        (data,) = self._db.execute("SELECT data FROM specs WHERE digest = ?", (digest,)).fetchone()
        return msgspec.json.decode(data, type=JobSpec).gpus

    def unended_counts(self) -> dict[tuple[str, str], int]:
        """Return (partition, state) -> number of jobs that have not ended."""
        states = (JobState.PENDING, *sorted(ACTIVE))
        query = "SELECT partition, state, sum(tasks) FROM jobs WHERE state IN (?, ?, ?, ?) GROUP BY 1, 2"
        return {(partition, state): count for partition, state, count in self._db.execute(query, states)}

    def node_figures(self) -> list[NodeFigures]:
        """Return what metrics need of all nodes; much faster than `node_records`."""
        return [_FIGURES.decode(data) for (data,) in self._db.execute("SELECT data FROM nodes").fetchall()]

    def gpu_holders(self) -> list[GpuHolder]:
        """Return what active jobs hold; much faster than `active`, of which it is a part."""
        rows = self._db.execute("SELECT data FROM jobs WHERE state IN (?, ?, ?)", tuple(ACTIVE)).fetchall()
        return [_HOLDER.decode(data) for (data,) in rows]


def _counted(
    seq: int, time: float, kind: str, partition: str, submit_time: float | None, data: bytes, node: bytes | None
) -> CountedEvent:
    facts = _FACTS.decode(data)
    if node is not None:
        partition = _partition_of_node(node)
    count = facts.count or (count_of(parse(facts.tasks)) if facts.tasks else 1)
    return CountedEvent(seq, time, kind, facts.partition or partition, submit_time, count, facts)


def _partition_of_node(data: bytes) -> str:
    declared = _FIGURES.decode(data).declared
    return declared.partition if declared is not None else ""


class MetricWrites(MetricReads):
    """Writes of metrics."""

    def put_metric_totals(self, totals: MetricTotals) -> None:
        """Replace the totals."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (TOTALS, msgspec.json.encode(totals).decode()))

    def add_usage_totals(self, sums: Mapping[tuple[str, bool], Iterable[float]]) -> None:
        """Add to the sums of partitions; ``sums``: (partition, held) -> fields of `UsageTotal` after these two."""
        added = ", ".join(f"{name} = {name} + excluded.{name}" for name in TOTALLED)
        places = ", ".join("?" * (2 + len(TOTALLED)))
        self._db.executemany(
            f"INSERT INTO usage_totals VALUES ({places}) ON CONFLICT DO UPDATE SET {added}",
            ((*key, *values) for key, values in sums.items()),
        )
