"""Set unreadable rows aside, so that one damaged row does not stop other users' jobs.

The row's content is kept in an event, up to `KEPT_BYTES`. A damaged job becomes FAILED, and its running attempt a
leftover; a damaged node is drained; other rows are removed.
"""

from __future__ import annotations

import contextlib
import pwd
from typing import Any

import msgspec

from gpusched.model.arrays import split_task_ids
from gpusched.model.events import Event
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, JobSpec, JobState
from gpusched.queue.damage import DatabaseDamaged, UnreadableRow, unreadable
from gpusched.queue.rows import SPEC
from gpusched.queue.store import SUSPENDED_BY, NodeRecord, RankRecord, Store

KEPT_BYTES = 64 * 1024


def set_aside_damaged(store: Store, now: float) -> list[UnreadableRow]:
    """Set aside all unreadable rows in one transaction, and return them.

    Raises:
        sqlite3.Error: A page is damaged, too, or nothing can be written.
    """
    found = list(unreadable(store._db, limit_s=float("inf")))
    if not found:
        return []
    with store.transaction():
        for row in found:
            try:
                _set_aside(store, row, now)
            except UnicodeError:
                raise DatabaseDamaged(row) from None  # not even its key is readable
    return found


def _set_aside(store: Store, row: UnreadableRow, now: float) -> None:
    values = _values(store, row)
    _drop(store, row)
    job_id, node = None, None
    match row.table:
        case "jobs":
            job = _job(store, values, row, now)
            job_id = job.id
            store.put_row(job)
            if values["state"] in ACTIVE:
                store.close_run(job.id, job.attempt, now, job.state)
        case "nodes":
            node = str(row.key["name"])
            reason = "its record in the database was damaged: look at the node, then resume it"
            store.put_nodes([NodeRecord(name=node, drain_reason=reason, drained_by=SUSPENDED_BY)])
        case "ranks":
            job_id, node = str(row.key["job_id"]), str(values["node"])
            store.put_ranks([_rank(store, values)])
        case "events":
            time = values["time"] if isinstance(values["time"], float) else now
            row_of = (row.key["seq"], time, str(values["kind"]), values["job_id"], values["node"], values["user"])
            store._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, CAST('{}' AS BLOB))", row_of)
    was = {name: _shown(value) for name, value in values.items()}
    data = {"table": row.table, "why": row.line, "was": was}
    store.append([Event(time=now, kind="row_set_aside", job_id=job_id, node=node, data=data)])


def _where(row: UnreadableRow) -> tuple[str, tuple[Any, ...]]:
    return " AND ".join(f"{name} = ?" for name in row.key), tuple(row.key.values())


def _values(store: Store, row: UnreadableRow) -> dict[str, Any]:
    where, key = _where(row)
    cursor = store._db.execute(f"SELECT * FROM {row.table} WHERE {where}", key)
    return dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))


def _drop(store: Store, row: UnreadableRow) -> None:
    where, key = _where(row)
    store._db.execute(f"DELETE FROM {row.table} WHERE {where}", key)


def _shown(value: Any) -> Any:
    return value[:KEPT_BYTES].decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _job(store: Store, values: dict[str, Any], row: UnreadableRow, now: float) -> JobRecord:
    """Return the job with all known fields; FAILED unless it had ended."""
    job_id, state = str(values["id"]), values["state"]
    ended = state in [*ENDED]
    (attempt,) = store._db.execute("SELECT coalesce(max(attempt), 0) FROM runs WHERE job_id = ?", (job_id,)).fetchone()
    spans = split_task_ids(job_id)[1]
    uid = -1
    with contextlib.suppress(KeyError):
        uid = pwd.getpwnam(str(values["user"])).pw_uid
    several = bool(spans) and job_id.endswith("]")
    return JobRecord(
        id=job_id,
        array_id=values["array_id"],
        array_index=spans[0][0] if spans and not several else None,
        tasks=spans if several else (),
        user=str(values["user"]),
        uid=uid,
        spec=_spec_of(store, values),
        state=JobState(state) if ended else JobState.FAILED,
        attempt=attempt,
        submit_time=_number(values["submit_time"], now),
        end_time=_number(values["end_time"], now),
        reason="InternalError",
        message=f"set aside: its {row.line}",
    )


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise


def _spec_of(store: Store, values: dict[str, Any]) -> JobSpec:
    found = store._db.execute("SELECT data FROM specs WHERE digest = ?", (values["spec"],)).fetchone()
    with contextlib.suppress(msgspec.MsgspecError, TypeError):
        if found is not None:
            return SPEC.decode(found[0])
    return JobSpec(
        name="?", partition=str(values["partition"]), gpus_per_node=0, cores_per_node=0, memory_mib_per_node=0,
        time_limit_s=0,
    )  # fmt: skip


def _rank(store: Store, values: dict[str, Any]) -> RankRecord:
    """Return a record of a rank that may still run, with its assigned GPUs; where unknown, all of the node's."""
    job_id, attempt, rank, node = (values[name] for name in ("job_id", "attempt", "rank", "node"))
    record = store.node_records().get(node)
    declared = record.declared if record is not None else None
    gpus = tuple(range(declared.gpus)) if declared is not None else ()
    job = store.job(job_id)
    if job is not None and job.allocation is not None and job.attempt == attempt:
        gpus = next((part.gpus for part in job.allocation.parts if part.rank == rank), gpus)
    runtime = declared.runtime if declared is not None else "podman"
    return RankRecord(job_id=job_id, attempt=attempt, rank=rank, node=node, runtime=runtime, gpus=gpus)
