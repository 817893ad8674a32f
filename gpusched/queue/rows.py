"""Jobs as rows: a spec is stored once for all jobs that share it, apart from their other fields.

Tasks of an array that differ in nothing are one row (`model.arrays`). A writer of one of them, or some, takes them
out of that row in the same transaction: a task is never in two rows, nor in none.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from gpusched.model.arrays import indices_of, jobs_named, restricted_row, restricted_rows, split_task_ids, tasks_of
from gpusched.model.indices import Spans, count, difference, expand_spans, intersection, union
from gpusched.model.jobs import ACTIVE, ENDED, Dependency, JobRecord, JobSpec, JobState
from gpusched.queue.damage import TABLE_CHECKS, TableCheck, guard

MAX_SHARED_ROWS, MAX_SHARED_SPANS = 50, 1000  # rows that several tasks of one array share, and pieces of them in all
_AT_ONCE = 500  # SQLite takes 999 parameters where it is old
_MAX_BY_ID = 100_000  # tasks that are looked up by their ids: as many as an array has at most


class _JobWithoutSpec(JobRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A job as stored in its row: without its spec, defaults omitted."""

    spec: int = 0  # type: ignore[assignment]


class _Dependent(msgspec.Struct):
    """The dependencies of a stored spec."""

    dependencies: tuple[Dependency, ...] = ()


_FIELDS = tuple(name for name in JobRecord.__struct_fields__ if name != "spec")
JOB_WITHOUT_SPEC = msgspec.json.Decoder(_JobWithoutSpec)
SPEC = msgspec.json.Decoder(JobSpec)
_DEPENDENT = msgspec.json.Decoder(_Dependent)
_MAY_NOT_HAVE_BEGUN = (JobState.FAILED, JobState.NODE_FAIL, JobState.CANCELLED)
BEGUN, NEVER_BEGUN = b'"start_time":', b'"start_time":null'  # in texts quotes are escaped


class JobReads:
    """Queries for jobs."""

    _db: sqlite3.Connection

    def __init_subclass__(cls) -> None:
        guard(cls)

    def _rows(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
        """Return all rows; none where the store lacks the table."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise

    def _jobs_of(self, rest: str, values: Sequence[object] = ()) -> list[JobRecord]:
        """Return the jobs that ``SELECT ... FROM jobs`` and ``rest`` select. Equal specs are one object."""
        rows = self._db.execute(f"SELECT data, spec FROM jobs {rest}", values).fetchall()
        specs = self._specs({digest for _, digest in rows})
        return [_joined(data, specs[digest]) for data, digest in rows]

    def _shared_rows(self, array_id: str) -> list[JobRecord]:
        """Return the rows of an array that hold several tasks each."""
        # The planner would go through all tasks that have run.
        return self._jobs_of("INDEXED BY jobs_shared WHERE array_id = ? AND tasks > 1", (array_id,))

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job with exactly this id."""
        for job in self._jobs_of("WHERE id = ?", (job_id,)):
            return job
        array_id, spans = split_task_ids(job_id)
        found = restricted_rows(self._shared_rows(array_id), spans) if spans else []
        return found[0] if len(found) == 1 and found[0].id == job_id else None

    def rows_of(self, job_id: str) -> list[JobRecord]:
        """Return the job or tasks named by ``ID``, ``ID_7`` or ``ID_[3-9]``, by index; tasks of one row as one."""
        if (one := self.job(job_id)) is not None and not one.tasks:
            return [one]
        array_id, spans = split_task_ids(job_id)
        if not spans:
            rows = self._jobs_of("WHERE array_id = ?", (array_id,))
        else:  # an array may have 100,000 rows, of which few are asked for
            rows = restricted_rows(self._shared_rows(array_id), spans)
            spans = difference(spans, union(span for row in rows for span in row.tasks))
            rows += self._single_tasks(array_id, spans)
        return sorted(rows, key=lambda job: indices_of(job) or ((-1, -1),))

    def _single_tasks(self, array_id: str, spans: Spans) -> list[JobRecord]:
        """Return those of an array's tasks that have rows of their own."""
        if count(spans) > _MAX_BY_ID:
            return restricted_rows(self._jobs_of("WHERE array_id = ?", (array_id,)), spans)
        names, found = (f"{array_id}_{index}" for index in expand_spans(spans)), list[JobRecord]()
        while some := list(islice(names, _AT_ONCE)):
            found += self._jobs_of(f"WHERE id IN ({','.join('?' * len(some))})", some)
        return found

    def waiting_of_array(self, array_id: str) -> list[JobRecord]:
        """Return an array's pending tasks; those of one row as one."""
        return self._jobs_of("WHERE array_id = ? AND state = ?", (array_id, JobState.PENDING))

    def jobs_of_array(self, array_id: str) -> list[JobRecord]:
        """Return all tasks of an array, by index."""
        found = tasks_of(self._jobs_of("WHERE array_id = ?", (array_id,)))
        return sorted(found, key=lambda job: job.array_index or 0)

    def dependency_rows(self, job_id: str) -> list[JobRecord]:
        """Return `rows_of` for dependencies: of ended array tasks, one per outcome, started or not.

        An array's tasks that have run are rows, as many as there are, and they are asked for in every cycle.
        """
        if "_" in job_id or self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone():
            return self.rows_of(job_id)
        ended = ",".join("?" * len(ENDED))
        found = self._jobs_of(f"WHERE array_id = ? AND state NOT IN ({ended})", (job_id, *ENDED))
        query = f"SELECT state FROM jobs WHERE array_id = ? AND state IN ({ended}) GROUP BY state"
        for (state,) in self._db.execute(query, (job_id, *ENDED)).fetchall():
            of_state = "WHERE array_id = ? AND state = ?"
            found += self._jobs_of(f"{of_state} LIMIT 1", (job_id, state))
            if state in _MAY_NOT_HAVE_BEGUN:
                found += self._jobs_of(f"{of_state} AND instr(data, ?) = 0 LIMIT 1", (job_id, state, BEGUN))
        return found

    def completed_tasks(self, array_id: str, indices: Sequence[int]) -> dict[int, bool]:
        """Return task index -> whether it ended COMPLETED, for those of these tasks that have ended."""
        found: dict[int, bool] = {}
        ended = ",".join("?" * len(ENDED))
        for begin in range(0, len(indices), _AT_ONCE):
            names = {f"{array_id}_{index}": index for index in indices[begin : begin + _AT_ONCE]}
            query = f"SELECT id, state FROM jobs WHERE id IN ({','.join('?' * len(names))}) AND state IN ({ended})"
            rows = self._db.execute(query, (*names, *ENDED)).fetchall()
            found |= {names[name]: state == JobState.COMPLETED for name, state in rows}
        return found

    def _specs(self, digests: set[bytes]) -> dict[bytes, JobSpec]:
        found: dict[bytes, JobSpec] = {}
        wanted = sorted(digests)
        for begin in range(0, len(wanted), _AT_ONCE):
            some = wanted[begin : begin + _AT_ONCE]
            query = f"SELECT digest, data FROM specs WHERE digest IN ({','.join('?' * len(some))})"
            found.update((digest, SPEC.decode(data)) for digest, data in self._db.execute(query, some))
        return found


guard(JobReads)


@lru_cache(maxsize=256)
def _read_spec(data: bytes) -> object:
    return SPEC.decode(data)


def _read_job(data: bytes, spec: bytes | None, state: str, *numbers: float) -> None:
    JobState(state)
    sum(numbers)
    if spec is None:
        raise ValueError("what it asked for is gone")
    JOB_WITHOUT_SPEC.decode(data)
    _read_spec(spec)


_SPEC_OF_JOB = "(SELECT specs.data FROM specs WHERE digest = jobs.spec)"
_COLUMNS = ("data", _SPEC_OF_JOB, "state", "submit_time", "tasks", "coalesce(end_time, 0)")
TABLE_CHECKS.append(TableCheck("jobs", ("id",), _COLUMNS, _read_job))
TABLE_CHECKS.append(TableCheck("specs", ("digest",), ("data",), _read_spec))


class JobWrites(JobReads):
    """Writes of jobs."""

    def put_jobs(self, jobs: Iterable[JobRecord]) -> None:
        """Insert or replace jobs; a task of an array is taken out of the row that it shared with others."""
        jobs = list(jobs)
        by_array: dict[str, list[JobRecord]] = {}
        for job in jobs:
            if job.array_id is not None and indices_of(job):
                by_array.setdefault(job.array_id, []).append(job)
        apart = [one for array_id, some in by_array.items() for one in self._beside(array_id, some)]
        too_many = {job.array_id for job in apart}
        self._insert([job for job in jobs if not job.tasks or job.array_id not in too_many])
        self._insert(apart)

    def put_row(self, job: JobRecord) -> None:
        """Insert or replace one row as is, whatever other rows of its array hold."""
        self._insert([job])

    def _beside(self, array_id: str, jobs: list[JobRecord]) -> list[JobRecord]:
        """Remove these tasks from rows that they share with other tasks.

        Returns:
            Where these rows have become too many, or too scattered, to be gone through for every task, the tasks of all
            of them one by one, so that a user who changes single tasks cannot slow down commands.
        """
        rows = self._shared_rows(array_id)
        spans = tuple(sorted(span for job in jobs for span in indices_of(job)))
        touched = [row for row in rows if intersection(row.tasks, spans)]
        left = [restricted_row(row, rest) for row in touched if (rest := difference(row.tasks, spans))]
        self._db.executemany("DELETE FROM jobs WHERE id = ?", ((row.id,) for row in touched))
        stay = [row for row in rows if row not in touched]
        # Remains get new ids (these name the indices): the rows that they replace must be deleted above.
        shared = [job for job in (*jobs, *left, *stay) if job.tasks]
        if len(shared) <= MAX_SHARED_ROWS and sum(len(job.tasks) for job in shared) <= MAX_SHARED_SPANS:
            self._insert(left)
            return []
        self._db.executemany("DELETE FROM jobs WHERE id = ?", ((row.id,) for row in stay))
        return list(tasks_of((*(job for job in jobs if job.tasks), *left, *stay)))

    def _insert(self, jobs: Iterable[JobRecord]) -> None:
        known: dict[int, tuple[JobSpec, bytes]] = {}  # by identity; the spec is held so that it stays the same one
        self._db.executemany(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    j.id, j.array_id, j.state, j.user, j.spec.partition, j.submit_time, j.end_time,
                    msgspec.json.encode(_without_spec(j)), self._put_spec(j.spec, known), j.count,
                )
                for j in jobs
            ),
        )  # fmt: skip

    def _put_spec(self, spec: JobSpec, known: dict[int, tuple[JobSpec, bytes]]) -> bytes:
        if id(spec) not in known:
            data = msgspec.json.encode(spec)
            digest = hashlib.blake2b(data, digest_size=20).digest()
            self._db.execute("INSERT OR IGNORE INTO specs VALUES (?, ?)", (digest, data))
            known[id(spec)] = spec, digest
        return known[id(spec)][1]

    def waiting_by_jobs(self, user: str) -> int:
        """Return how many pending jobs of a user were submitted by their own jobs."""
        query = "SELECT sum(tasks) FROM jobs WHERE user = ? AND state = 'PENDING' AND instr(data, ?)"
        return self._db.execute(query, (user, b'"asked_by":')).fetchone()[0] or 0  # in texts quotes are escaped

    def waiting_dependencies(self, user: str) -> int:
        """Return how many dependencies a user's pending jobs have; those of tasks that share a row count once.

        One on several tasks of an array counts as so many.
        """
        specs = "SELECT spec, count(*) AS rows FROM jobs WHERE user = :user AND state = 'PENDING' GROUP BY spec"
        text = "cast(specs.data AS TEXT)"  # in it, quotes of values are escaped
        count = f"(length({text}) - length(replace({text}, :key, ''))) / length(:key)"
        query = f"SELECT sum(rows * ({count})) FROM ({specs}) JOIN specs ON digest = spec WHERE instr(specs.data, :key)"
        values = {"user": user, "key": '"kind":"'}
        found: int = self._db.execute(query, values).fetchone()[0] or 0
        several = f"SELECT rows, data FROM ({specs}) JOIN specs ON digest = spec WHERE instr(specs.data, :key)"
        for rows, data in self._db.execute(several, {"user": user, "key": b"_["}).fetchall():
            names = [dependency.job_id for dependency in _DEPENDENT.decode(data).dependencies]
            found += rows * (jobs_named(names) - len(names))
        return found

    def submissions_with_secrets(self, user: str) -> set[str]:
        """Return the ids of a user's jobs and arrays that have secrets and have not ended."""
        states = (JobState.PENDING, *sorted(ACTIVE))
        query = "SELECT coalesce(array_id, id), spec FROM jobs WHERE user = ? AND state IN (?, ?, ?, ?)"
        rows = self._db.execute(query, (user, *states)).fetchall()
        marked = "SELECT 1 FROM specs WHERE digest = ? AND instr(data, ?)"  # in texts quotes are escaped
        values = {digest: (digest, b'"secret_names":["') for _, digest in rows}
        having = {digest for digest, value in values.items() if self._db.execute(marked, value).fetchone()}
        return {job_id for job_id, digest in rows if digest in having}

    def waiting_of_users(self) -> dict[str, tuple[int, int]]:
        """Return user -> number of pending jobs, and their bytes in the store."""
        rows = self._db.execute(
            "SELECT user, sum(tasks), sum(length(data)) FROM jobs WHERE state = 'PENDING' GROUP BY 1"
        )
        own = {user: (jobs, size) for user, jobs, size in rows}
        shared = self._db.execute(
            "SELECT user, sum(length(specs.data)) FROM (SELECT DISTINCT user, spec FROM jobs WHERE state = 'PENDING') "
            "JOIN specs ON digest = spec GROUP BY user"
        )
        return own | {user: (own[user][0], own[user][1] + size) for user, size in shared}


def _without_spec(job: JobRecord) -> _JobWithoutSpec:
    return _JobWithoutSpec(**{name: getattr(job, name) for name in _FIELDS})


def _joined(data: bytes, spec: JobSpec) -> JobRecord:
    bare = JOB_WITHOUT_SPEC.decode(data)
    return JobRecord(spec=spec, **{name: getattr(bare, name) for name in _FIELDS})
