"""Parser of squeue's job records."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypedDict

import msgspec

from gpusched.model.slurm import SlurmJob
from gpusched.slurm import records
from gpusched.slurm.hostlist import numbers

_FIELDS = (
    "JobID", "ArrayTaskID", "JobArrayID", "ArrayJobID", "UserName", "UserID", "Account", "QOS", "Partition", "State",
    "Reason", "PriorityLong", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit", "NumNodes", "NodeList",
    "NumCPUs", "NumTasks", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-socket",
    "tres-per-task", "Sockets", "ReqNodes", "Feature", "Reservation", "Dependency", "OverSubscribe", "Requeue",
    "RestartCnt", "exit_code", "Name",
)  # fmt: skip
_TASK_FIELDS = 3  # the leading fields that differ between tasks of an array; the others are shared
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
          "DEADLINE")  # fmt: skip


class JobReader:
    """Parses squeue's output and caches the result: an unchanged record yields the same object.

    Attributes:
        format: For ``squeue --array --Format``. A job name may hold any byte, so a secret string separates the fields.
    """

    def __init__(self) -> None:
        token = secrets.token_urlsafe(6)
        self._field_end, self._record_end = f"\x1f{token}", f"\x1e{token}"
        ends = [self._field_end] * (len(_FIELDS) - 1) + [self._record_end]
        self.format = ",".join(f"{field}:{end}" for field, end in zip(_FIELDS, ends, strict=True))
        self._cache: dict[str, SlurmJob] = {}
        self._pending: dict[str, PendingDetails] = {}

    def read(self, text: str, pending: str, site_factors: Mapping[str, int], memory: bool) -> list[SlurmJob]:
        """Return the jobs of one reading.

        Args:
            text: Output of squeue with `format`.
            pending: Output of squeue for pending jobs with `PENDING_FORMAT`.
            site_factors: By JobId.
            memory: Whether Slurm schedules memory; if not, `memory_mib` is None whatever the record holds.

        Raises:
            ValueError: A field cannot be parsed.
        """
        details = self._pending = pending_details(pending, self._pending)
        read: dict[str, SlurmJob] = {}
        arrays: dict[str, SlurmJob] = {}
        for record in text.split(self._record_end + "\n")[:-1]:
            job = self._cache.get(record) or self._job(record, arrays, memory)
            read[record] = _with_details(job, details, site_factors.get(job.raw_id, 0))
        self._cache = read
        jobs = list(read.values())
        return jobs + _omitted_tasks(jobs, details)

    def _job(self, record: str, arrays: dict[str, SlurmJob], memory: bool) -> SlurmJob:
        """Parse a job's record; the fields that an array's tasks share are parsed once, even for 100,000 tasks."""
        *task_fields, rest = record.split(self._field_end, _TASK_FIELDS)
        try:
            if same := arrays.get(rest):
                return msgspec.structs.replace(same, **_identity(*task_fields))
            job = _job([*task_fields, *rest.split(self._field_end)])
        except ValueError as error:
            raise ValueError(f"job {task_fields[0]}: {error}") from None
        if not memory:
            job = msgspec.structs.replace(job, memory_mib=None)
        if job.array_id:
            arrays[rest] = job
        return job


def _job(fields: Sequence[str]) -> SlurmJob:
    """Parse one record of ``squeue --array``: a job or an array task.

    Args:
        fields: In the order of `_FIELDS`.

    Raises:
        ValueError: A field cannot be parsed.
    """
    (
        raw_id, task, shown_id, array_id, user, uid, account, qos, partitions, state,
        reason, priority, submit, eligible, start, end, limit, nodes, node_list,
        cpus, ntasks, tres, per_job, per_node, per_socket,
        per_task, sockets, req_nodes, features, reservation, dependency, share, requeue,
        restarts, exit_code, name,
    ) = fields  # fmt: skip
    in_array = task not in records.UNSET
    return SlurmJob(
        **_identity(raw_id, task, shown_id),
        array_id=array_id if in_array else "",
        user=user,
        uid=int(uid),
        account=records.optional_text(account),
        qos=records.optional_text(qos),
        partitions=records.comma_separated(partitions),
        name=name,
        state=state,
        reason=reason,
        priority=int(priority),
        submit_time=float(submit),
        eligible_time=records.unix_time(eligible),
        start_time=records.unix_time(start),
        end_time=records.unix_time(end),
        time_limit_s=records.duration_s(limit),
        nodes=records.count(nodes),
        node_names=records.hosts(node_list),
        cpus=records.count(cpus),
        memory_mib=_memory_mib(tres),
        gpus=_gpus((tres, per_job, per_node, per_socket, per_task), *map(records.count, (nodes, ntasks, sockets))),
        req_nodes=records.hosts(req_nodes),
        features=records.optional_text(features),
        reservation=records.optional_text(reservation),
        dependency=records.optional_text(dependency),
        exclusive=share in ("NO", "EXCLUSIVE", "USER", "MCS"),
        requeue=requeue != "0",
        restarts=records.count(restarts),
        exit_code=_exit_code(exit_code) if state.startswith(_ENDED) else None,
    )


class _Identity(TypedDict):
    """The fields that differ between tasks of an array."""

    id: str
    raw_id: str
    array_index: int | None


def _identity(raw_id: str, task: str, shown_id: str) -> _Identity:
    """Parse the first `_TASK_FIELDS` fields: id ``1234``, ``1234_5`` of an array, ``1234+1`` of a heterogeneous job."""
    index = int(task) if task.isdecimal() else None
    return {"id": raw_id if index is None and "+" not in shown_id else shown_id, "raw_id": raw_id, "array_index": index}


class PendingDetails(msgspec.Struct, frozen=True):
    """Facts that ``squeue -O`` has no field for: an array's limit of running tasks, excluded nodes, pending tasks."""

    array_limit: int | None = None
    exc_nodes: tuple[str, ...] = ()
    tasks: str = ""


_NO_DETAILS = PendingDetails()
PENDING_FORMAT = "%A %F %K %x"


def pending_details(text: str, previous: Mapping[str, PendingDetails]) -> dict[str, PendingDetails]:
    """Return JobId -> details, from ``squeue --format`` with `PENDING_FORMAT`.

    Args:
        text: One line per job; the line of an array's id holds for its tasks that have no line of their own.
        previous: The last result. Once a single task is left in an array's record, squeue omits the limit.
    """
    found: dict[str, PendingDetails] = {}
    for line in text.splitlines():
        raw_id, array_id, tasks, excluded = line.split(" ", 3)
        limit = previous.get(array_id, _NO_DETAILS).array_limit
        if raw_id == array_id and not tasks.isdecimal() and tasks not in records.UNSET:
            tasks, _, limit_text = tasks.partition("%")
            limit = int(limit_text) if limit_text.isdecimal() else None
        else:
            tasks = ""
        details = PendingDetails(limit, records.hosts(excluded), tasks)
        if raw_id != array_id or details != _NO_DETAILS:
            found[raw_id] = details
            found.setdefault(array_id, details)  # versions that print an array in one line may name any of its tasks
    return found


def _with_details(job: SlurmJob, details: Mapping[str, PendingDetails], site_factor: int) -> SlurmJob:
    """Return the job with what other commands report about it; the same object if nothing changes."""
    of_array = details.get(job.array_id or job.raw_id, _NO_DETAILS)
    limit, excluded = of_array.array_limit, details.get(job.raw_id, of_array).exc_nodes
    if (job.array_limit, job.exc_nodes, job.site_factor) == (limit, excluded, site_factor):
        return job
    return msgspec.structs.replace(job, array_limit=limit, exc_nodes=excluded, site_factor=site_factor)


def _omitted_tasks(jobs: Sequence[SlurmJob], details: Mapping[str, PendingDetails]) -> list[SlurmJob]:
    """Return the array tasks that ``squeue --array`` omits: with 22.05, the last of 1-97:3."""
    arrays = {array for array, detail in details.items() if ":" in detail.tasks}
    known: dict[str, dict[int | None, SlurmJob]] = {}
    for job in jobs if arrays else ():
        if job.array_id in arrays:
            known.setdefault(job.array_id, {})[job.array_index] = job
    found: list[SlurmJob] = []
    for array, tasks in known.items():
        missing = sorted(set(map(int, numbers(details[array].tasks))).difference(tasks))
        for template in [job for job in tasks.values() if job.raw_id == array][:1]:
            found += [msgspec.structs.replace(template, id=f"{array}_{n}", array_index=n) for n in missing]
    return found


def _exit_code(status: str) -> int:
    """Return the exit code of a wait status: 768 is 3; a signal is 128 plus its number."""
    code, signal = divmod(int(status), 256)
    return 128 + (signal & 0x7F) if signal & 0x7F else code


@lru_cache(8192)
def _gpus(texts: tuple[str, str, str, str, str], nodes: int, ntasks: int, sockets: int) -> dict[str, int]:
    """Return the whole job's GPUs by type: those that Slurm counted, otherwise those requested."""
    tres, per_job, per_node, per_socket, per_task = texts
    factors = ((per_job, 1), (per_node, nodes), (per_task, ntasks), (per_socket, nodes * max(1, sockets)))
    requested: dict[str, int] = {}
    for text, factor in factors:
        if text not in records.UNSET and (each := records.gres(text)):
            requested = {kind: count * max(1, factor) for kind, count in each.items()}
            break  # --gpus with --gpus-per-node says the same thing twice
    counted = dict(records.gres(tres))
    total = counted.pop("", sum(counted.values()))
    if not total:
        return requested
    if sum(counted.values()) == total:
        return counted
    if sum(requested.values()) == total:
        return requested
    kinds = [kind for kind in {**counted, **requested} if kind]
    return {kinds[0] if len(kinds) == 1 else "": total}


@lru_cache(4096)
def _memory_mib(tres: str) -> int | None:
    found = re.search(r"(?:^|,)mem=([^,]+)", tres)
    return records.size_bytes(found[1]) >> 20 if found else None
