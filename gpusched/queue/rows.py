"""Jobs as rows: what was asked for is kept once for all jobs that ask for the same, beside what differs."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpusched.model.jobs import Job, JobSpec

SINCE_VERSION = 5  # of the schema: before it, a job's data held its spec
_AT_ONCE = 500  # SQLite takes 999 parameters where it is old


class _Bare(Job, frozen=True, kw_only=True, omit_defaults=True):
    """A job as its row holds it: the spec lies apart, and what says nothing is left out."""

    spec: int = 0  # type: ignore[assignment]


_FIELDS = tuple(name for name in Job.__struct_fields__ if name != "spec")
_BARE = msgspec.json.Decoder(_Bare)
_WHOLE = msgspec.json.Decoder(Job)
_SPEC = msgspec.json.Decoder(JobSpec)


class JobReads:
    """The part of a store's reader that is about jobs."""

    _db: sqlite3.Connection

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """All rows; none where the store is from before there was such a table."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise

    def _jobs_of(self, rest: str, values: Sequence[object] = ()) -> list[Job]:
        """The jobs that ``SELECT ... FROM jobs`` and ``rest`` find. Those that ask for the same share one spec."""
        rows = self._db.execute(f"SELECT data, {self._spec_column()} FROM jobs {rest}", values).fetchall()
        specs = self._specs({digest for _, digest in rows if digest is not None})
        return [_WHOLE.decode(data) if digest is None else _joined(data, specs[digest]) for data, digest in rows]

    def _spec_column(self) -> str:
        """What stands for a job's spec in a query: a store whose writer is of an earlier version has no such column."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        return "jobs.spec" if version >= SINCE_VERSION else "NULL"

    def _specs(self, digests: set[bytes]) -> dict[bytes, JobSpec]:
        found: dict[bytes, JobSpec] = {}
        wanted = sorted(digests)
        for begin in range(0, len(wanted), _AT_ONCE):
            some = wanted[begin : begin + _AT_ONCE]
            query = f"SELECT digest, data FROM specs WHERE digest IN ({','.join('?' * len(some))})"
            found.update((digest, _SPEC.decode(data)) for digest, data in self._db.execute(query, some))
        return found


class JobWrites:
    """The part of the store's writer that is about jobs."""

    _db: sqlite3.Connection

    def put_jobs(self, jobs: Iterable[Job]) -> None:
        """Insert or replace jobs."""
        known: dict[int, tuple[JobSpec, bytes]] = {}  # by identity; the spec is held so that it stays the same one
        self._db.executemany(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    j.id, j.array_id, j.state, j.user, j.spec.partition, j.submit_time, j.end_time,
                    msgspec.json.encode(_bare(j)), self._put_spec(j.spec, known),
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

    def waiting_of_users(self) -> dict[str, tuple[int, int]]:
        """User -> how many jobs of theirs wait, and how many bytes these take in the store."""
        rows = self._db.execute("SELECT user, count(*), sum(length(data)) FROM jobs WHERE state = 'PENDING' GROUP BY 1")
        own = {user: (jobs, size) for user, jobs, size in rows}
        shared = self._db.execute(
            "SELECT user, sum(length(specs.data)) FROM (SELECT DISTINCT user, spec FROM jobs WHERE state = 'PENDING') "
            "JOIN specs ON digest = spec GROUP BY user"
        )
        return own | {user: (own[user][0], own[user][1] + size) for user, size in shared}


def _bare(job: Job) -> _Bare:
    return _Bare(**{name: getattr(job, name) for name in _FIELDS})


def _joined(data: bytes, spec: JobSpec) -> Job:
    bare = _BARE.decode(data)
    return Job(spec=spec, **{name: getattr(bare, name) for name in _FIELDS})
