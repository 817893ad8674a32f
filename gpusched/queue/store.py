"""The SQLite store, which only the controller writes; `gpusched.queue.reading` opens it for readers."""

from __future__ import annotations

import math
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpusched.errors import GpuschedError
from gpusched.estimation import REMEMBERED
from gpusched.model import ids
from gpusched.model.arrays import split_task_ids, tasks_of
from gpusched.model.backups import BACKUP_META, BackupResult
from gpusched.model.events import Event
from gpusched.model.health import NodeHealth
from gpusched.model.indices import Spans, intersection, parse
from gpusched.model.jobs import ACTIVE, ENDED, HOUR_S, JobRecord, JobState
from gpusched.model.metrics import MetricTotals
from gpusched.model.readings import NodeReading, NodeState, Wiring
from gpusched.model.resources import Node
from gpusched.model.slices import Cut
from gpusched.model.slurm import TROUBLE, Trouble
from gpusched.queue import reading
from gpusched.queue.attempts import AttemptReads
from gpusched.queue.audit import AuditReads, AuditWrites
from gpusched.queue.beliefs import BeliefReads, BeliefWrites
from gpusched.queue.damage import TABLE_CHECKS, UNREADABLE, TableCheck, damage_or_disk_error, disk_error, json_of
from gpusched.queue.eventlines import POSITION, EventLineReads, EventLineWrites
from gpusched.queue.healthchecks import HealthCheckReads, HealthCheckWrites
from gpusched.queue.lease import STANDBYS, TERM, superseded
from gpusched.queue.locks import LockWait, LockWaitingConnection, connect_to_write, lock_holders
from gpusched.queue.metrics import TOTALLED, TOTALS, MetricReads, MetricWrites
from gpusched.queue.notices import EVENT_DATA, NoticeReads, NoticeWrites
from gpusched.queue.overlaps import HeldGpus, overlaps
from gpusched.queue.predictions import PredictionReads, PredictionWrites
from gpusched.queue.progress import ProgressReads, ProgressWrites
from gpusched.queue.promotions import Fallback, PolicyReads, PolicyWrites
from gpusched.queue.quotas import QuotaReads
from gpusched.queue.reading import DATABASE as DATABASE
from gpusched.queue.reservations import ReservationReads, ReservationWrites
from gpusched.queue.rows import BEGUN, NEVER_BEGUN, JobWrites
from gpusched.queue.schema import FIRST_VERSION, MIGRATIONS, SCHEMA, SCHEMA_VERSION

ACTIVE_CONTROLLER = "active_controller"  # key of meta: host and process of the controller that has the term
INVENTORY_TROUBLE = "inventory_trouble"  # key of meta: why the present inventory.yaml or policy is not in use; ""
MAX_IDLE_WAL_BYTES = 16 * 1024 * 1024  # after a large transaction, the WAL file is truncated to this
SUSPENDED_BY = "gpusched"
"""`NodeRecord.drained_by` of a node that the controller itself took out of service."""
DRAINED_BY_HEALTH = "gpusched health"
"""`NodeRecord.drained_by` of a node drained because of a condition; no user can have this name."""


class FailedLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A failed launch on a node that is not clearly the job's fault.

    Attributes:
        image: "" for the partition's image.
        gpus: Whether the job requests GPUs.
        verdict: ``node``: the same job ran elsewhere; ``job``: it, or a similar job, failed on other nodes too; "": not
            known yet.
        own: It failed because of the job's own request (a mount, its output, a limit).
    """

    job: str
    user: str
    image: str = ""
    gpus: bool = True
    verdict: str = ""
    own: bool = False


class CutState(msgspec.Struct, frozen=True, kw_only=True):
    """A cut of a GPU: under way, or failed.

    Attributes:
        began: When the intent was recorded (Unix seconds, the controller's clock).
        ended: When the node answered; None until then.
        error: The node's error, or what the GPU shows instead of the cut.
        failures: Number of failures in a row. retry_at: Time of the next try; None: it has not failed.
    """

    cut: Cut
    began: float
    ended: float | None = None
    error: str = ""
    failures: int = 0
    retry_at: float | None = None

    @property
    def under_way(self) -> bool:
        """Return whether the GPU may still be changing."""
        return self.retry_at is None


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the store keeps of a node between two probes.

    Attributes:
        state, reason: As shown by ``gpusched nodes``.
        drain_reason: Why ``drained_by`` drained it; None: in service.
        last_seen: When it last answered (Unix seconds).
        down_since: Since when it has not answered (Unix seconds); None: it answers.
        failed_launches: Failed launches since a similar one last succeeded.
        cuts: GPU index -> its cut that is under way, or failed.
        links, wired: As last read; most probes do not request them. ``wired`` is JSON (see `wiring`), since decoding it
            takes longer than all the rest, and few callers need it.
        declared: The node as last in inventory.yaml; None: unknown.
        left: It was removed from inventory.yaml, but is still probed because of attempts on it.
        health: Conditions of the node and its GPUs, and the state needed to detect them.
    """

    name: str
    state: NodeState = NodeState.UNKNOWN
    reason: str = ""
    drain_reason: str | None = None
    drained_by: str | None = None
    last_seen: float | None = None
    down_since: float | None = None
    failed_launches: tuple[FailedLaunch, ...] = ()
    cuts: dict[int, CutState] = {}
    links: dict[int, dict[int, int]] = {}
    wired: msgspec.Raw = msgspec.Raw(b"null")
    reading: NodeReading | None = None
    declared: Node | None = None
    left: bool = False
    health: NodeHealth = NodeHealth()

    @property
    def may_be_drained(self) -> bool:
        """Return whether the controller may drain it; a suspension may become a drain, since it ends by itself."""
        return self.drain_reason is None or self.drained_by == SUSPENDED_BY

    @property
    def wiring(self) -> Wiring | None:
        """Return how its GPUs and NICs are connected; None: unknown."""
        return _wiring(bytes(self.wired))


@lru_cache(maxsize=8192)
def _wiring(data: bytes) -> Wiring | None:
    try:
        return msgspec.json.decode(data, type=Wiring | None)
    except msgspec.MsgspecError:  # damaged, or of another version; it is read again
        return None


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt on one node, from the intent to launch until nothing of it is left there.

    Attributes:
        runtime: The runtime that launched it (the inventory may change meanwhile).
        gpus: NVML indices of its GPUs.
        intended_at: When the intent to launch was recorded (Unix seconds, like all times; controller's clock).
        launched_at: When the node accepted the launch (controller's clock); None until then.
        signalled: Last signal to end that was delivered; "FENCE": a leftover that is being ended.
        output: The file given by ``-o``, expanded; None: the output is collected.
        collected: Its output is in the state folder (or in its file).
        gone: It has ended, or its node is given up.
        exit_code, oom_killed, finished_at: As last seen.
        boot_id: The node's boot when it was launched.
        tries, tried_at: Failed attempts to start, kill or remove it, and the time of the last.
        trouble: The node's error when an operation on it last failed.
        refusals: How often the node answered that it cannot send the output.
        stuck: It cannot be killed; its GPUs stay blocked until it is gone.
        sharing: How it was prepared to share its GPUs with another job ("mps", "time-slicing"); "": not.
        hot: Of a rank that joins or leaves a running hot job: ``joins`` until it runs, ``leaves`` until it has ended,
            then ``left``: the job continues without it. "": it belongs to the job.
        leave_by: When a leaving rank is killed.
        checks_passed: Names of the ``before_job`` checks that passed for it on its node.
        check_error: The failed check because of which it must not start there; "": none failed.
        idle_signalled_at: When it was last signalled because its job's GPUs were idle.
        warned_at: When it got the job's own signal, before the time limit.
    """

    job_id: str
    attempt: int
    rank: int
    node: str
    runtime: str
    gpus: tuple[int, ...] = ()
    intended_at: float | None = None
    launched_at: float | None = None
    signalled: str | None = None
    output: str | None = None
    collected: bool = False
    gone: bool = False
    exit_code: int | None = None
    oom_killed: bool = False
    finished_at: float | None = None
    boot_id: str | None = None
    tries: int = 0
    tried_at: float | None = None
    trouble: str = ""
    refusals: int = 0
    stuck: bool = False
    sharing: str = ""
    hot: Literal["", "joins", "leaves", "left"] = ""
    leave_by: float | None = None
    checks_passed: tuple[str, ...] = ()
    check_error: str = ""
    idle_signalled_at: float | None = None
    warned_at: float | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One started attempt, or of a hot job the part of one between two resizes.

    Attributes:
        share: Its fraction of the partition, λ in Eq. 4 of Narantuya et al. (CMC 2022).
        start_time, end_time: Unix seconds; None: it has not ended.
        outcome: The attempt's end state; None: it has not ended.
        nodes: Node -> number of GPUs.
        worked_until: End of its useful work, if it was stopped for a resize; None: its end.
        shareable: Node -> GPU indices, of an attempt that may share its GPUs.
        group, qos: Group and class: it counts for their limits.
    """

    job_id: str
    attempt: int
    user: str
    partition: str
    flavor: str | None
    share: float
    gpus: float
    start_time: float
    end_time: float | None
    outcome: str | None
    nodes: dict[str, int]
    worked_until: float | None = None
    shareable: dict[str, tuple[int, ...]] = {}
    group: str = ""
    qos: str = ""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one node, job and time bucket; ``job_id`` "": unallocated GPUs.

    Attributes:
        bucket: Start of the time bucket (Unix seconds).
        gpu_s: GPU seconds.
        energy_j: Measured joules. energy_unknown_s: GPU seconds without a measurement of energy.
        util_s: Integral of utilization (0..1) over the ``util_known_s`` GPU seconds with a measurement.
        idle_s: GPU seconds with (nearly) no utilization. idle_energy_j: Joules measured in these.
            idle_energy_unknown_s: GPU seconds of these without a measurement of energy.
    """

    bucket: int
    node: str
    job_id: str
    user: str
    partition: str
    gpu_s: float = 0.0
    energy_j: float = 0.0
    energy_unknown_s: float = 0.0
    util_s: float = 0.0
    util_known_s: float = 0.0
    idle_s: float = 0.0
    idle_energy_j: float = 0.0
    idle_energy_unknown_s: float = 0.0


class UsageSum(NamedTuple):
    """Usage of one user on all nodes in one bin of time (its start, Unix seconds); ``user`` "": unallocated GPUs."""

    bin: int
    user: str
    gpu_s: float
    energy_j: float
    energy_unknown_s: float
    util_s: float
    util_known_s: float
    idle_s: float
    idle_energy_j: float
    idle_energy_unknown_s: float


_NODE = msgspec.json.Decoder(NodeRecord)
_ENDED_RUNS = (
    "WHERE end_time <= ? AND state NOT IN ('NODE_FAIL', 'PREEMPTED') AND instr(data, ?) > 0 AND instr(data, ?) = 0 "
    "ORDER BY end_time DESC LIMIT ?"
)
_USAGE = UsageRow.__struct_fields__
_SUMS = _USAGE[5:]
_ADDED_UP = f"ON CONFLICT DO UPDATE SET {', '.join(f'{f} = {f} + excluded.{f}' for f in _SUMS)}"


def _sorted_by_id(jobs: list[JobRecord]) -> list[JobRecord]:
    """Order jobs submitted at the same time by id as a number; SQL orders ids as text (100 before 36)."""
    found = list[JobRecord]()
    for _, some in groupby(jobs, attrgetter("submit_time")):
        same = list(some)
        found += sorted(same, key=lambda job: ids.id_key(job.id)) if same[1:] else same
    return found


_Sharing = tuple[int, tuple[str, str]]
"""An attempt that shared GPUs: its number among such, its user and group."""


class Reader(
    AttemptReads,
    AuditReads,
    BeliefReads,
    EventLineReads,
    HealthCheckReads,
    MetricReads,
    NoticeReads,
    PolicyReads,
    PredictionReads,
    ProgressReads,
    QuotaReads,
    ReservationReads,
):
    """Read-only view of the store."""

    # of attempts that ended before an hour began: (hour, half-life, since), see `gpu_seconds_by_user`
    _ended_usage: (
        tuple[tuple[float, float, float], dict[tuple[str, str], float], dict[_Sharing, HeldGpus]] | None
    ) = None

    def __init__(self, connection: sqlite3.Connection, copy_of: Path | None = None) -> None:
        self._db = connection
        self._copy_of = copy_of  # the state folder, if this reads a published copy, which is replaced from time to time
        self._copy: reading.Stamp | None = None

    @classmethod
    def open(cls, state: Path) -> Reader | None:
        """Open the store of a state folder (see `gpusched.queue.reading`), or return None where none exists yet.

        Raises:
            GpuschedError: It is there but cannot be read.
        """
        path = state / DATABASE
        if not path.exists():
            return None
        try:
            opened = reading.open_to_read(state)
            reader = cls(opened.db, state if opened.stamp is not None else None)
            reader._copy = opened.stamp
            # Version 0: the writer has created the file but not yet filled it.
            if version := opened.db.execute("PRAGMA user_version").fetchone()[0]:
                _check_not_too_old(path, version)
                return reader
            _check_never_filled(path)
            return None
        except PermissionError as error:
            hint = "other users can read it only with settings.shared: true in inventory.yaml; ask the administrator"
            raise GpuschedError(f"no permission to read {path}: {error}", hint) from error
        except (*UNREADABLE, OSError) as error:
            why = disk_error(path, error) or error
            raise GpuschedError(f"{path} cannot be read: {why}", "see 'gpusched check'") from error

    def data_version(self) -> int:
        """Return a number that changes when another connection changes the store (SQLite's data_version).

        A reader of a published copy switches to the latest copy first.
        """
        if self._copy_of is None:
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])
        latest = reading.current_stamp(self._copy_of)
        if latest not in (None, self._copy):
            opened = reading.open_to_read(self._copy_of)
            self._db.close()
            self._db, self._copy = opened
        return 0 if self._copy is None else self._copy[1]

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Let all reads inside see one state, so that a job that starts meanwhile is in exactly one list."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            with suppress(sqlite3.OperationalError):  # SQLite rolls back by itself after an input/output error
                self._db.execute("ROLLBACK")

    def lag_s(self) -> float:
        """Return how far this view may lag behind the store, in seconds; 0.0 unless it reads a copy."""
        return 0.0 if self._copy_of is None else float(self.meta(reading.COPY_EVERY) or 0.0)

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def meta(self, key: str) -> str | None:
        """Return a value of the meta table (``cluster_id``, ``heartbeat``, ``controller_pid``...)."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def number(self, key: str, otherwise: float) -> float:
        """Return a numeric value of the meta table."""
        return float(self.meta(key) or otherwise)

    def array_limits(self) -> dict[str, int]:
        """Return array id -> maximum of its tasks that run at once, for arrays with such a limit."""
        return self.numbers("array_limit:")

    def standbys(self) -> str:
        """Return a sentence on the active controller and its standbys; "" if there was never a standby."""
        if (hosts := self.meta(STANDBYS)) is None:
            return ""
        active = f"the controller of {self.meta(ACTIVE_CONTROLLER)}"
        return f"{active} is active; standby: {hosts}" if hosts else f"{active} is active; no standby is running"

    def misses_standby(self) -> bool:
        """Return whether there was a standby, and none runs now."""
        return self.meta(STANDBYS) == ""

    def slurm_trouble(self) -> Trouble | None:
        """Return why Slurm (``engine: slurm``) cannot be read; None: it can."""
        noted = self.meta(TROUBLE)
        return msgspec.json.decode(noted, type=Trouble) if noted else None

    def matching(self, prefix: str, limit: int = 20) -> list[str]:
        """Return up to ``limit`` ids (an array's id once) that begin with ``prefix``, oldest first."""
        # One query per id, each past the id found before: an array may have 100,000 rows with the prefix.
        query = "SELECT id, array_id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT 1"
        found: list[str] = []
        begin = prefix
        while len(found) < limit and (row := self._db.execute(query, (begin, prefix + "~")).fetchone()):
            found.append(row[1] or row[0])
            begin = f"{row[1]}_~" if row[1] else f"{row[0]}\0"  # past all tasks of an array
        return sorted(dict.fromkeys(found))

    def neighbours(self, base: str) -> list[str]:
        """Return the ids just before and after that of a job or array: at most two."""
        before = self._db.execute("SELECT id FROM jobs WHERE id < ? ORDER BY id DESC LIMIT 1", (base,))
        behind = self._db.execute("SELECT id FROM jobs WHERE id > ? ORDER BY id LIMIT 1", (base + "~",))
        return [row[0] for row in (*before, *behind)]

    def jobs(
        self,
        *,
        states: Iterable[JobState] | None = None,
        user: str | None = None,
        partition: str | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> list[JobRecord]:
        """Return jobs by state, user and partition, the newest submissions last.

        Args:
            states: Only in these.
            user: Only this user's.
            partition: Only in this one.
            since: Only jobs that have not ended, or ended at or after this time (Unix seconds).
            limit: Only so many of the newest.
        """
        rows = self.rows(states=states, user=user, partition=partition, since=since, limit=limit)
        if limit is None:
            return list(tasks_of(rows))
        # One row may be many tasks: expand the newest rows first, until there are enough.
        found: list[JobRecord] = []
        for row in reversed(rows):
            found = [*islice(tasks_of([row]), limit - len(found)), *found]
        return found

    def rows(
        self,
        *,
        states: Iterable[JobState] | None = None,
        user: str | None = None,
        partition: str | None = None,
        since: float | None = None,
        limit: int | None = None,
        oldest: bool = False,
    ) -> list[JobRecord]:
        """Return jobs as `jobs` does, but identical pending tasks of an array as one row (`JobRecord.tasks`).

        ``oldest``: ``limit`` selects the oldest submissions.
        """
        where, values = ["1"], list[object]()
        if states is not None:
            chosen = [str(s) for s in states]
            where.append(f"state IN ({','.join('?' * len(chosen))})")
            values += chosen
        ended_since = "(end_time >= ? OR end_time IS NULL)"
        for condition, value in (("user = ?", user), ("partition = ?", partition), (ended_since, since)):
            if value is not None:
                where.append(condition)
                values.append(value)
        limit_clause = "" if limit is None else f" LIMIT {int(limit)}"
        order = "submit_time, id" if oldest else "submit_time DESC, id DESC"
        found = self._jobs_of(f"WHERE {' AND '.join(where)} ORDER BY {order}{limit_clause}", values)
        return _sorted_by_id(found if oldest else found[::-1])

    def recently_ended(self, limit: int) -> list[JobRecord]:
        """Return the jobs that ended last, in order of end."""
        return list(islice(tasks_of(self.rows_recently_ended(limit)[::-1]), limit))[::-1]

    def rows_recently_ended(self, limit: int) -> list[JobRecord]:
        """Return `recently_ended` with array tasks that were cancelled together as one row (`JobRecord.tasks`)."""
        return self._jobs_of("WHERE end_time IS NOT NULL ORDER BY end_time DESC LIMIT ?", (limit,))[::-1]

    def ended_runs(self, limit: int = REMEMBERED, until: float = math.inf) -> list[JobRecord]:
        """Return the last jobs that ran and ended by ``until`` (Unix seconds), in order of end, for run time estimates.

        Jobs that ended by node failure or preemption are excluded: their run times are truncated.
        """
        return self._jobs_of(_ENDED_RUNS, (until, BEGUN, NEVER_BEGUN, limit))[::-1]

    def has_unended(self, job_id: str) -> bool:
        """Return whether the job, or any task of the array, has not ended."""
        ended = ",".join("?" * len(ENDED))
        query = f"SELECT 1 FROM jobs WHERE {{}} = ? AND state NOT IN ({ended}) LIMIT 1"
        columns = ("id", "array_id")
        if any(self._db.execute(query.format(c), (job_id, *ENDED)).fetchone() for c in columns):
            return True
        one = self.job(job_id) if "_" in job_id else None
        return one is not None and one.state not in ENDED

    def counts(self, *, user: str | None = None, partition: str | None = None) -> dict[str, int]:
        """Return the number of jobs by state, optionally of one user or partition."""
        where, values = _condition(user, partition)
        if values:
            query = f"SELECT state, sum(tasks) FROM jobs WHERE {where} GROUP BY state"
            return dict(self._db.execute(query, values).fetchall())
        # Two queries that read indexes only: there may be many jobs.
        found = Counter(dict(self._db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()))
        shared = "SELECT state, sum(tasks - 1) FROM jobs INDEXED BY jobs_shared WHERE tasks > 1 GROUP BY state"
        found.update(dict(self._db.execute(shared).fetchall()))
        return dict(found)

    def preempted_pending(self, *, user: str | None = None, partition: str | None = None) -> int:
        """Return the number of preempted jobs that are pending again, optionally of one user or partition."""
        # No job can forge the match, since quotes in its texts are escaped. The condition is that of the partial index.
        where = "state = 'PENDING' AND instr(data, CAST('\"preemptions\":{' AS BLOB)) > 0"
        only, values = _condition(user, partition)
        query = f"SELECT count(*) FROM jobs INDEXED BY jobs_stopped WHERE {where} AND {only}"
        return int(self._db.execute(query, values).fetchone()[0])

    def active(self) -> list[JobRecord]:
        """Return active jobs (STARTING, RUNNING, COMPLETING)."""
        return self.jobs(states=ACTIVE)

    def pending(self) -> list[JobRecord]:
        """Return pending jobs."""
        return self.jobs(states=[JobState.PENDING])

    def pending_rows(self) -> list[JobRecord]:
        """Return pending jobs, identical tasks of an array as one row (`JobRecord.tasks`)."""
        return self.rows(states=[JobState.PENDING])

    def events(self, *, job_id: str | None = None, node: str | None = None, limit: int = 1000) -> list[Event]:
        """Return the latest events of a job, a node or all, oldest first.

        A task's events include those of its array that concern it.
        """
        where, values = "1", list[object]()
        array_id, spans = ("", ()) if job_id is None else split_task_ids(job_id)
        if spans:
            where, values = "job_id IN (?, ?)", [job_id, array_id]
        elif job_id is not None:
            where, values = "job_id = ?", [job_id]
        elif node is not None:
            where, values = "node = ?", [node]
        rows = self._db.execute(
            f"SELECT time, kind, job_id, node, user, data FROM events WHERE {where} ORDER BY seq DESC LIMIT ?",
            (*values, limit),
        ).fetchall()
        found = [
            Event(time=t, kind=k, job_id=j, node=n, user=u, data=EVENT_DATA.decode(d))
            for t, k, j, n, u, d in reversed(rows)
        ]
        return [event for event in found if _concerns(event, array_id, spans)] if spans else found

    def ended_since(self, since: int) -> tuple[int, list[str]]:
        """Return the number of the latest event, and ids of jobs that ended or were refused after event ``since``."""
        latest = self.latest_event()
        rows = self._db.execute(
            "SELECT DISTINCT job_id FROM events WHERE seq > ? AND seq <= ? AND kind IN ('ended', 'refused_command')",
            (since, latest),
        )
        return latest, [row[0] for row in rows if row[0] is not None]

    def latest_event(self) -> int:
        """Return the number of the latest event; 0 without any."""
        return int(self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])

    def node_records(self) -> dict[str, NodeRecord]:
        """Return all node records by name."""
        rows = self._db.execute("SELECT data FROM nodes").fetchall()
        return {record.name: record for record in [_NODE.decode(data) for (data,) in rows]}

    def node_readings(self) -> dict[str, NodeReading]:
        """Return the last reading of each node that has one."""
        return {name: r.reading for name, r in self.node_records().items() if r.reading is not None}

    def node_record(self, name: str) -> NodeRecord | None:
        """Return the record of one node; None if there is none."""
        row = self._db.execute("SELECT data FROM nodes WHERE name = ?", (name,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=NodeRecord)

    def ranks(self, *, job_id: str | None = None) -> list[RankRecord]:
        """Return the ranks of which something may be left on a node, of one job or of all."""
        where, values = ("", ()) if job_id is None else (" WHERE job_id = ?", (job_id,))
        rows = self._db.execute(f"SELECT data FROM ranks{where}", values)
        return [msgspec.json.decode(r[0], type=RankRecord) for r in rows]

    def left_nodes(self) -> list[NodeRecord]:
        """Return nodes removed from inventory.yaml on which attempts remain."""
        rows = self._db.execute("SELECT data FROM nodes WHERE instr(data, ?) > 0", (b'"left":true',))
        return [msgspec.json.decode(row[0], type=NodeRecord) for row in rows]

    def nodes_of_ranks(self) -> set[str]:
        """Return names of the nodes on which something of a rank may be left."""
        return {row[0] for row in self._db.execute("SELECT DISTINCT node FROM ranks")}

    def runs(self, since: float, until: float) -> list[RunRecord]:
        """Return started attempts that overlap [since, until), by start."""
        return self._runs(lambda columns: self._overlapping(columns, since, until, "ORDER BY start_time"))

    def runs_of_attempt(self, job_id: str, attempt: int) -> list[RunRecord]:
        """Return a started attempt; of a hot job its parts, by start."""
        where = "job_id = ? AND attempt = ? ORDER BY start_time"
        return self._runs(
            lambda columns: self._db.execute(f"SELECT {columns} FROM runs WHERE {where}", (job_id, attempt))
        )

    def _runs(self, select: Callable[[str], sqlite3.Cursor]) -> list[RunRecord]:
        columns = "job_id, attempt, user, partition, flavor, share, gpus, start_time, end_time, outcome, allocation"
        rows = select(f"{columns}, worked_until")
        return [
            RunRecord(
                job_id=r[0], attempt=r[1], user=r[2], partition=r[3], flavor=r[4], share=r[5], gpus=r[6],
                start_time=r[7], end_time=r[8], outcome=r[9], nodes=nodes, worked_until=r[11], shareable=shareable,
            )
            for r in rows
            for nodes, shareable in (_allocation(r[10]),)
        ]  # fmt: skip

    def _overlapping(self, columns: str, since: float, until: float, rest: str = "") -> sqlite3.Cursor:
        """Select columns of started attempts that overlap [since, until)."""
        return self._db.execute(
            f"SELECT {columns} FROM runs WHERE end_time IS NULL AND start_time < :until UNION ALL "
            f"SELECT {columns} FROM runs WHERE end_time > :since AND start_time < :until {rest}",
            {"since": since, "until": until},
        )

    def first_starts(self) -> dict[str, float]:
        """Return partition -> start of its first job (Unix seconds), from which Eq. 3 of Narantuya et al. counts."""
        return dict(self._db.execute("SELECT partition, min(start_time) FROM runs GROUP BY partition").fetchall())

    def usage(self, since: float, until: float = math.inf) -> list[UsageRow]:
        """Return usage rows of buckets that begin in [since, until)."""
        return self._usage_rows(self._usage_columns(), "WHERE bucket >= ? AND bucket < ?", (since, until))

    def usage_by_job(self, since: float, until: float) -> list[UsageRow]:
        """Return `usage` summed by node and job, each with its first bucket; rows of a month may be millions."""
        keys, sums = ("min(bucket)", *_USAGE[1:5]), (f"sum({column})" for column in self._usage_columns()[5:])
        rest = "WHERE bucket >= ? AND bucket < ? GROUP BY node, job_id, user, partition"
        return self._usage_rows((*keys, *sums), rest, (since, until))

    def _usage_rows(self, columns: Sequence[str], rest: str, values: Sequence[object]) -> list[UsageRow]:
        rows = self._db.execute(f"SELECT {', '.join(columns)} FROM usage {rest}", values)
        return [UsageRow(**dict(zip(_USAGE, r, strict=True))) for r in rows]

    def _usage_columns(self) -> tuple[str, ...]:
        """Return the SQL of `UsageRow`'s fields; older stores lack the last two columns."""
        known = {row[1] for row in self._db.execute("PRAGMA table_info(usage)")}
        return _USAGE if "idle_energy_j" in known else (*_USAGE[:-2], "0.0", "idle_s")

    def usage_sums(self, since: float, bin_s: int) -> list[UsageSum]:
        """Return usage since ``since`` (Unix seconds), summed by bins of ``bin_s`` seconds and by user."""
        sums = ", ".join(f"sum({column})" for column in self._usage_columns()[5:])
        rows = self._db.execute(
            f"SELECT bucket - bucket % ?, user, {sums} FROM usage WHERE bucket >= ? GROUP BY 1, 2",
            (bin_s, since),
        )
        return [UsageSum(*row) for row in rows]

    def usage_of_job(self, job_id: str) -> list[UsageRow]:
        """Return usage rows of one job, by time."""
        return self._usage_rows(self._usage_columns(), "WHERE job_id = ? ORDER BY bucket", (job_id,))

    def gpu_seconds_by_user(
        self, since: float, half_life_s: float, now: float, leaf: Callable[[str, str], str] = lambda user, group: user
    ) -> dict[str, float]:
        """Return GPU seconds of started attempts by user, decayed by half in each half-life since their use.

        The integral is exact: an attempt's GPU seconds between two times decay continuously. Two attempts that share a
        GPU are charged half of it each. Attempts that ended before the present hour are summed up once an hour.
        ``leaf``: (user, the attempt's group) -> the account that is charged.
        """
        hour, rate = now // HOUR_S * HOUR_S, math.log(2) / half_life_s
        key = hour, half_life_s, since // HOUR_S
        if self._ended_usage is None or self._ended_usage[0] != key:
            ended = self._decayed("end_time > :since AND end_time <= :until", since, hour, rate, {})
            self._ended_usage = key, *ended
        found, older = self._ended_usage[1:]
        sums: dict[str, float] = {}
        recent, _ = self._decayed(
            "(end_time IS NULL OR (end_time > :hour AND end_time > :since)) AND start_time < :until", since, now, rate,
            older, hour,
        )  # fmt: skip
        for used, kept in ((found, math.exp(-rate * (now - hour))), (recent, 1.0)):
            for whose, gpu_s in used.items():
                sums[leaf(*whose)] = sums.get(leaf(*whose), 0.0) + gpu_s * kept
        return sums

    def _decayed(
        self, which: str, since: float, until: float, rate: float, older: Mapping[_Sharing, HeldGpus], hour: float = 0.0
    ) -> tuple[dict[tuple[str, str], float], dict[_Sharing, HeldGpus]]:
        """Return GPU seconds from ``since`` to ``until`` by user and group, and those attempts that shared GPUs.

        ``rate``: by which they decay until then, per second; ``older``: further attempts, for what these shared.
        """
        sums: dict[tuple[str, str], float] = {}
        sharing: dict[_Sharing, HeldGpus] = {}

        exp = math.exp

        def weight(begin: float, end: float) -> float:  # integral of exp(-rate * (until - t)) over t
            return (exp(rate * (end - until)) - exp(rate * (begin - until))) / rate if end > begin else 0.0

        # SQLite does what it can: a large site has hundreds of thousands of attempts.
        columns = (
            "user, coalesce(account, ''), gpus, max(start_time, :since), min(coalesce(end_time, :until), :until), "
            "CASE WHEN instr(allocation, '[') THEN allocation END"
        )
        rows = self._db.execute(
            f"SELECT {columns} FROM runs WHERE {which}", {"since": since, "until": until, "hour": hour}
        )
        for name, group, gpus, begin, end, allocation in rows:
            whose = name, group
            sums[whose] = sums.get(whose, 0.0) + gpus * weight(begin, end)
            if allocation is not None:
                sharing[len(older) + len(sharing), whose] = HeldGpus(_allocation(allocation)[1], begin, end)
        first = min((one.begin for one in sharing.values()), default=math.inf)
        known = {key: one for key, one in older.items() if one.end > first}
        for (i, a), (j, b), gpus, begin, end in overlaps(known | sharing):
            for whose in (a, b) if max(i, j) >= len(older) else ():
                sums[whose] = sums.get(whose, 0.0) - gpus * weight(begin, end) / 2
        return sums, sharing

    def energy_of_jobs(self) -> dict[str, float]:
        """Return measured joules per active job."""
        rows = self._db.execute(
            "SELECT job_id, sum(energy_j) FROM usage WHERE job_id IN "
            f"(SELECT id FROM jobs WHERE state IN ({','.join('?' * len(ACTIVE))})) "
            "GROUP BY job_id HAVING sum(gpu_s) > sum(energy_unknown_s)",
            tuple(ACTIVE),
        )
        return dict(rows.fetchall())


class NewerStore(GpuschedError):
    """The store is of a newer gpusched. A restart would not help: systemd's unit knows EX_CONFIG (sysexits.h)."""

    exit_code = 78

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the database has version {version}, this gpusched supports {SCHEMA_VERSION}", "use the newer gpusched"
        )


class Store(
    Reader,
    AuditWrites,
    BeliefWrites,
    EventLineWrites,
    HealthCheckWrites,
    JobWrites,
    MetricWrites,
    NoticeWrites,
    PolicyWrites,
    PredictionWrites,
    ProgressWrites,
    ReservationWrites,
):
    """The store as used by its single writer."""

    @classmethod
    def create_or_open(cls, state: Path, waiting: LockWait | None = None, term: int | None = None) -> Store:
        """Open for writing, and create the database on first use. Then only its owner and root can open its files.

        Args:
            state: The state folder.
            waiting: Decides how long to wait for locks; None: 30 seconds.
            term: The controller's term. Controllers with a lower term can no longer write, nor can this one once there
                is a higher term.

        Raises:
            Superseded: There is a higher term.
            GpuschedError: Not a database of this version, or not writable.
        """
        from gpusched.queue.private import lacks_shared_memory, make_private  # readers start faster without it

        path = state / DATABASE
        try:
            state.mkdir(parents=True, exist_ok=True)
            _check_never_filled(path)
            make_private(path)
            db = connect_to_write(path, waiting)
            # The WAL's index is memory shared by the processes of one machine. After a take-over by another machine,
            # its index may be stale. A rollback journal needs locks only.
            journal = "DELETE" if lacks_shared_memory(state) else "WAL"
            try:
                sqlite3.Connection.execute(db, f"PRAGMA journal_mode={journal}")
            except sqlite3.OperationalError as error:
                if journal == "WAL" or error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise  # else a reader has the WAL of an earlier version open: a later start will switch
            # Overwritten, as others can read copies: what a row held before, such as the URLs of receivers.
            db.executescript("PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON; PRAGMA secure_delete=ON;")
            db.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_WAL_BYTES}")
            store = cls(db)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise NewerStore(version)
            if term is not None and version:
                store._claim(db, term)  # first: a controller that was superseded must not migrate
            store._migrate(path)
            if term is not None and not version:
                store._claim(db, term)
            return store
        except (*UNREADABLE, OSError) as error:
            who = "".join(f"; locked by {one}" for one in lock_holders(path))
            why = disk_error(path, error) or error
            raise GpuschedError(f"{path} cannot be opened for writing: {why}{who}", "see 'gpusched check'") from error

    def _migrate(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if 0 < version < SCHEMA_VERSION:
            from gpusched.queue.backup import copy_before_migration  # readers start faster without it

            _check_not_too_old(path, version)
            copy_before_migration(self._db, path, version)
        if version < SCHEMA_VERSION:
            # All steps in one transaction: if killed between two, the store would have a version without a backup.
            steps = "".join(MIGRATIONS[version - FIRST_VERSION :] if version else (SCHEMA, *MIGRATIONS))
            self._db.executescript(f"BEGIN; {steps} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        if self.meta("cluster_id") is None:  # new, or its creator died before this line
            import secrets  # readers start faster without it

            self.set_meta("cluster_id", "".join(secrets.choice(ids.ALPHABET) for _ in range(8)))

    def raise_term(self, term: int) -> None:
        """Continue with a higher term.

        Raises:
            Superseded: Another controller has a higher one.
        """
        assert isinstance(self._db, LockWaitingConnection)
        self._claim(self._db, term)

    def _claim(self, db: LockWaitingConnection, term: int) -> None:
        """Store ``term``, and from now on check it within each transaction that writes."""

        def check(_: object = None) -> None:
            stored = int(self.number(TERM, 0))
            if stored > term:
                raise superseded(self.meta(ACTIVE_CONTROLLER) or "another controller", stored)

        with self.transaction():
            check()
            self.set_meta(TERM, str(term))
            self.set_meta(ACTIVE_CONTROLLER, f"{os.uname().nodename}, pid {os.getpid()}")
        db.fence = check

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Apply all writes inside, or none."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            self._summed = self._ended_usage = None  # these caches may hold values that are rolled back
            self._decoded_rows = {}, {}
            if self._db.in_transaction:  # SQLite rolls back by itself when the disk is full
                self._db.execute("ROLLBACK")
            if type(error) is sqlite3.DatabaseError:
                raise damage_or_disk_error(self._db, error) from error
            raise

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Apply all writes inside, or none, within a transaction that continues either way."""
        self._db.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO part")
                self._db.execute("RELEASE part")
            raise
        self._db.execute("RELEASE part")

    def set_meta(self, key: str, value: str) -> None:
        """Set a value of the meta table."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def append(self, events: Iterable[Event]) -> None:
        """Append events."""
        self._db.executemany(
            "INSERT INTO events (time, kind, job_id, node, user, data) VALUES (?, ?, ?, ?, ?, ?)",
            ((e.time, e.kind, e.job_id, e.node, e.user, msgspec.json.encode(e.data)) for e in events),
        )

    def append_after_gap(self, event: Event, numbers: int) -> None:
        """Append an event, skipping ``numbers`` numbers: receivers may know lost events by them."""
        self._db.execute(
            "INSERT INTO events (seq, time, kind, data) VALUES (?, ?, ?, ?)",
            (self.latest_event() + numbers, event.time, event.kind, msgspec.json.encode(event.data)),
        )

    def put_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Insert or replace node records."""
        self._db.executemany(
            "INSERT OR REPLACE INTO nodes VALUES (?, ?)", ((r.name, msgspec.json.encode(r)) for r in records)
        )

    def put_ranks(self, records: Iterable[RankRecord]) -> None:
        """Insert or replace rank records."""
        self._db.executemany(
            "INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, ?, ?)",
            ((r.job_id, r.attempt, r.rank, r.node, msgspec.json.encode(r)) for r in records),
        )

    def remove_rank(self, rank: RankRecord) -> None:
        """Delete the record of a rank of which nothing is left on its node."""
        self._db.execute(
            "DELETE FROM ranks WHERE job_id = ? AND attempt = ? AND rank = ?", (rank.job_id, rank.attempt, rank.rank)
        )

    def open_run(self, run: RunRecord) -> None:
        """Record a started attempt, or its next part after `close_run`."""
        self._db.execute(
            "INSERT OR REPLACE INTO runs VALUES (?1, ?2, "
            "(SELECT count(*) FROM runs WHERE job_id = ?1 AND attempt = ?2 AND end_time IS NOT NULL), "
            "?3, ?4, ?5, ?6, ?7, ?8, NULL, NULL, ?9, NULL, ?10, ?11)",
            (
                run.job_id, run.attempt, run.user, run.partition, run.flavor, run.share, run.gpus, run.start_time,
                msgspec.json.encode(run.nodes | run.shareable), run.group or None, run.qos or None,
            ),
        )  # fmt: skip

    def close_run(
        self, job_id: str, attempt: int, end_time: float, outcome: JobState, worked_until: float | None = None
    ) -> None:
        """Record the end of an attempt."""
        self._summed = None if self._summed is not None and end_time <= self._summed[0] else self._summed
        ended = self._ended_usage
        self._ended_usage = None if ended is not None and end_time <= ended[0][0] else ended
        self._db.execute(
            "UPDATE runs SET end_time = max(start_time, ?), outcome = ?, worked_until = max(start_time, ?) "
            "WHERE job_id = ? AND attempt = ? AND end_time IS NULL",
            (end_time, outcome, worked_until, job_id, attempt),
        )

    def shift_rows(self, step: float, since: float) -> None:
        """Shift times by ``step`` seconds, after the clock was set.

        These are times of attempts that had not ended at ``since``, and of all else that is counted from.
        """
        self._summed = self._ended_usage = None
        self._db.execute(
            "UPDATE runs SET start_time = start_time + :step, end_time = end_time + :step, "
            "worked_until = worked_until + :step WHERE end_time IS NULL OR end_time >= :since",
            {"step": step, "since": since},
        )
        self._db.execute(
            "UPDATE predictions SET made = made + :step, median = median + :step, low = low + :step, "
            "high = high + :step, by_limits = by_limits + :step "
            "WHERE job_id IN (SELECT id FROM jobs WHERE state = :state)",
            {"step": step, "state": JobState.PENDING},
        )
        self._db.execute("UPDATE applied_files SET time = time + ?", (step,))
        self.shift_progress(step)
        self.shift_checks(step)
        self.shift_notices(step)

    def add_usage(self, rows: Iterable[UsageRow]) -> None:
        """Add usage to the sums of its buckets and to the totals of its partition."""
        rows = list(rows)
        self._put_usage(rows)
        totals: dict[tuple[str, bool], list[float]] = {}
        for row in rows:
            sums = totals.setdefault((row.partition, row.job_id != ""), [0.0] * len(TOTALLED))
            for place, name in enumerate(TOTALLED):
                sums[place] += getattr(row, name)
        self.add_usage_totals(totals)

    def move_usage(self, rows: Iterable[UsageRow]) -> None:
        """Move usage from jobs to unallocated GPUs, since they did not hold them. Totals never decrease, and stay."""
        for row in rows:
            less = {name: -getattr(row, name) for name in _SUMS}
            self._put_usage([msgspec.structs.replace(row, **less), msgspec.structs.replace(row, job_id="", user="")])

    def _put_usage(self, rows: Iterable[UsageRow]) -> None:
        self._db.executemany(
            f"INSERT INTO usage ({', '.join(_USAGE)}) VALUES ({', '.join('?' * len(_USAGE))}) {_ADDED_UP}",
            map(msgspec.structs.astuple, rows),
        )

    def compact_usage(self, before: float, bucket_s: int) -> None:
        """Merge rows of buckets before ``before`` (Unix seconds) into buckets of ``bucket_s`` seconds."""
        old = "bucket < ? AND bucket % ? != 0"
        self._db.execute(
            f"INSERT INTO usage ({', '.join(_USAGE)}) SELECT bucket - bucket % ?, node, job_id, user, partition, "
            f"{', '.join(f'sum({f})' for f in _SUMS)} FROM usage WHERE {old} GROUP BY 1, 2, 3 {_ADDED_UP}",
            (bucket_s, before, bucket_s),
        )
        self._db.execute(f"DELETE FROM usage WHERE {old}", (before, bucket_s))

    def was_applied(self, file_name: str) -> bool:
        """Return whether this command file was already applied."""
        return self._db.execute("SELECT 1 FROM applied_files WHERE file_name = ?", (file_name,)).fetchone() is not None

    def mark_applied(self, file_name: str, now: float) -> None:
        """Record that a command file was applied."""
        self._db.execute("INSERT OR REPLACE INTO applied_files VALUES (?, ?)", (file_name, now))

    def forget_applied(self, before: float) -> None:
        """Forget command files applied before ``before`` (Unix seconds); they must have left the inbox."""
        self._db.execute("DELETE FROM applied_files WHERE time < ?", (before,))

    def job_energy(self, job_id: str) -> float | None:
        """Return the joules measured of a job so far; None: none were."""
        row = self._db.execute(
            "SELECT sum(energy_j), sum(gpu_s - energy_unknown_s) FROM usage WHERE job_id = ?", (job_id,)
        ).fetchone()
        return row[0] if row[1] else None


def _check_not_too_old(path: Path, version: int) -> None:
    if version < FIRST_VERSION:
        raise GpuschedError(f"{path} has version {version}; the earliest that can be opened is {FIRST_VERSION}")


def _check_never_filled(path: Path) -> None:
    """Raise `GpuschedError` for an empty database beside logs of jobs, which SQLite would treat as new."""
    if path.exists() and not path.stat().st_size and any(path.parent.glob("logs/*")):
        raise GpuschedError(
            f"{path} is empty, but jobs have run here",
            "gpusched recover rebuilds it; remove the file to start without history",
        )


def _concerns(event: Event, array_id: str, spans: Spans) -> bool:
    """Return whether an event of an array or one of its tasks concerns these tasks."""
    tasks = event.data.get("tasks") if event.job_id == array_id else None
    return tasks is None or bool(intersection(parse(str(tasks)), spans))


def _allocation(data: bytes) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Return node -> number of GPUs, and node -> GPU indices where recorded."""
    found: dict[str, int | list[int]] = msgspec.json.decode(data)
    which = {node: tuple(gpus) for node, gpus in found.items() if isinstance(gpus, list)}
    return {node: len(gpus) if isinstance(gpus, list) else gpus for node, gpus in found.items()}, which


def _condition(user: str | None, partition: str | None) -> tuple[str, list[str]]:
    """Return an SQL condition on user and partition, and its values."""
    named = {column: value for column, value in (("user", user), ("partition", partition)) if value is not None}
    return " AND ".join(["1", *(f"{column} = ?" for column in named)]), list(named.values())


def _read_node(data: bytes) -> None:
    msgspec.json.decode(bytes(msgspec.json.decode(data, type=NodeRecord).wired), type=Wiring | None)


def _read_event(data: bytes, time: float) -> None:
    EVENT_DATA.decode(data)
    math.isfinite(time)


def _read_run(allocation: bytes, *numbers: float) -> None:
    _allocation(allocation)
    sum(numbers)


def _read_meta(key: str, value: str) -> None:
    if key in ("heartbeat", "tick_s", "slurm_read_at"):
        float(value)
    elif key == "notices_seen" or key.startswith(("array_limit:", POSITION)):
        int(value)
    elif value and key == TROUBLE:
        msgspec.json.decode(value, type=Trouble)
    elif value and key == BACKUP_META:
        msgspec.json.decode(value, type=BackupResult)
    elif key == TOTALS:
        msgspec.json.decode(value, type=MetricTotals)
    elif value and key == "fallbacks":
        msgspec.json.decode(value, type=tuple[Fallback, ...])
    elif value and key in ("slurm_ordered", "slurm_missing"):
        msgspec.json.decode(value, type=dict[str, Any])


TABLE_CHECKS.append(TableCheck("nodes", ("name",), ("data",), _read_node))
TABLE_CHECKS.append(TableCheck("ranks", ("job_id", "attempt", "rank"), ("data",), json_of(RankRecord)))
_OF_RUN = ("allocation", "start_time", "coalesce(end_time, 0)", "gpus", "share")
TABLE_CHECKS.append(TableCheck("runs", ("job_id", "attempt", "span"), _OF_RUN, _read_run))
TABLE_CHECKS.append(TableCheck("meta", ("key",), ("key", "value"), _read_meta))
TABLE_CHECKS.append(TableCheck("events", ("seq",), ("data", "time"), _read_event))
