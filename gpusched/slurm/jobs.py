"""Jobs, as squeue prints them."""

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
_OWN_FIELDS = 3  # so many tell one task of an array from another; the rest they share
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
          "DEADLINE")  # fmt: skip


class JobReader:
    """Reads jobs from what squeue prints, and remembers them: a record that did not change is the same object again.

    Attributes:
        format: For ``squeue --array --Format``. A name may hold any byte: what stands between the fields no user knows.
    """

    def __init__(self) -> None:
        secret = secrets.token_urlsafe(6)
        self._between, self._behind = f"\x1f{secret}", f"\x1e{secret}"
        ends = [self._between] * (len(_FIELDS) - 1) + [self._behind]
        self.format = ",".join(f"{field}:{end}" for field, end in zip(_FIELDS, ends, strict=True))
        self._read: dict[str, SlurmJob] = {}
        self._waiting: dict[str, PendingDetails] = {}

    def read(self, text: str, waiting: str, site_factors: Mapping[str, int], memory: bool) -> list[SlurmJob]:
        """The jobs of one look.

        Args:
            text: What squeue printed by `format`.
            waiting: What it printed of waiting jobs by `WAITING_FORMAT`.
            site_factors: By JobId.
            memory: Slurm counts memory; else none is said of any job, whatever its record holds.

        Raises:
            ValueError: A field is not what Slurm is known to print.
        """
        beside = self._waiting = waiting_jobs(waiting, self._waiting)
        read: dict[str, SlurmJob] = {}
        arrays: dict[str, SlurmJob] = {}
        for record in text.split(self._behind + "\n")[:-1]:
            job = self._read.get(record) or self._job(record, arrays, memory)
            read[record] = _with(job, beside, site_factors.get(job.raw_id, 0))
        self._read = read
        jobs = list(read.values())
        return jobs + _left_out(jobs, beside)

    def _job(self, record: str, arrays: dict[str, SlurmJob], memory: bool) -> SlurmJob:
        """A job's record; of an array of 100,000 tasks all but what each has for itself is read once."""
        *own, rest = record.split(self._between, _OWN_FIELDS)
        try:
            if same := arrays.get(rest):
                return msgspec.structs.replace(same, **_identity(*own))
            job = _job([*own, *rest.split(self._between)])
        except ValueError as error:
            raise ValueError(f"job {own[0]}: {error}") from None
        if not memory:
            job = msgspec.structs.replace(job, memory_mib=None)
        if job.array_id:
            arrays[rest] = job
        return job


def _job(fields: Sequence[str]) -> SlurmJob:
    """One record of ``squeue --array``: a job, or a task of an array.

    Args:
        fields: As `_FIELDS` names them.

    Raises:
        ValueError: A field is not what Slurm is known to print.
    """
    (
        raw_id, task, shown_id, array_id, user, uid, account, qos, partitions, state,
        reason, priority, submit, eligible, start, end, limit, nodes, node_list,
        cpus, ntasks, tres, per_job, per_node, per_socket,
        per_task, sockets, req_nodes, features, reservation, dependency, share, requeue,
        restarts, exit_code, name,
    ) = fields  # fmt: skip
    in_array = task not in records.NOTHING
    return SlurmJob(
        **_identity(raw_id, task, shown_id),
        array_id=array_id if in_array else "",
        user=user,
        uid=int(uid),
        account=records.said(account),
        qos=records.said(qos),
        partitions=records.words(partitions),
        name=name,
        state=state,
        reason=reason,
        priority=int(priority),
        submit_time=float(submit),
        eligible_time=records.when(eligible),
        start_time=records.when(start),
        end_time=records.when(end),
        time_limit_s=records.duration_s(limit),
        nodes=records.count(nodes),
        node_names=records.hosts(node_list),
        cpus=records.count(cpus),
        memory_mib=_memory_mib(tres),
        gpus=_gpus((tres, per_job, per_node, per_socket, per_task), *map(records.count, (nodes, ntasks, sockets))),
        req_nodes=records.hosts(req_nodes),
        features=records.said(features),
        reservation=records.said(reservation),
        dependency=records.said(dependency),
        exclusive=share in ("NO", "EXCLUSIVE", "USER", "MCS"),
        requeue=requeue != "0",
        restarts=records.count(restarts),
        exit_code=_exit_code(exit_code) if state.startswith(_ENDED) else None,
    )


class _Identity(TypedDict):
    """What a record has for itself alone, beside its array."""

    id: str
    raw_id: str
    array_index: int | None


def _identity(raw_id: str, task: str, shown_id: str) -> _Identity:
    """Of the first `_OWN_FIELDS` fields: ``1234``, ``1234_5`` of an array, ``1234+1`` of a heterogeneous job."""
    index = int(task) if task.isdecimal() else None
    return {"id": raw_id if index is None and "+" not in shown_id else shown_id, "raw_id": raw_id, "array_index": index}


class PendingDetails(msgspec.Struct, frozen=True):
    """What ``squeue -O`` has no field for: how many tasks of an array may run at once, excluded nodes, the tasks."""

    array_limit: int | None = None
    exc_nodes: tuple[str, ...] = ()
    tasks: str = ""


_UNSAID = PendingDetails()
WAITING_FORMAT = "%A %F %K %x"


def waiting_jobs(text: str, before: Mapping[str, PendingDetails]) -> dict[str, PendingDetails]:
    """JobId -> what is said there, from ``squeue --format`` with `WAITING_FORMAT`.

    Args:
        text: A line for each job; what stands at an array's id is for those of its tasks that have no line.
        before: What was said last: once a single task of an array is left in its record, the limit is said no more.
    """
    found: dict[str, PendingDetails] = {}
    for line in text.splitlines():
        raw_id, array_id, tasks, excluded = line.split(" ", 3)
        limit = before.get(array_id, _UNSAID).array_limit
        if raw_id == array_id and not tasks.isdecimal() and tasks not in records.NOTHING:
            tasks, _, said = tasks.partition("%")
            limit = int(said) if said.isdecimal() else None
        else:
            tasks = ""
        told = PendingDetails(limit, records.hosts(excluded), tasks)
        if raw_id != array_id or told != _UNSAID:
            found[raw_id] = told
            found.setdefault(array_id, told)  # versions that print an array in one line may name any of its tasks
    return found


def _with(job: SlurmJob, beside: Mapping[str, PendingDetails], site_factor: int) -> SlurmJob:
    """The job with what other commands say of it; the same object where it has that already."""
    of_array = beside.get(job.array_id or job.raw_id, _UNSAID)
    limit, excluded = of_array.array_limit, beside.get(job.raw_id, of_array).exc_nodes
    if (job.array_limit, job.exc_nodes, job.site_factor) == (limit, excluded, site_factor):
        return job
    return msgspec.structs.replace(job, array_limit=limit, exc_nodes=excluded, site_factor=site_factor)


def _left_out(jobs: Sequence[SlurmJob], beside: Mapping[str, PendingDetails]) -> list[SlurmJob]:
    """Tasks that ``squeue --array`` leaves out: of 1-97:3 the last (22.05)."""
    arrays = {array for array, told in beside.items() if ":" in told.tasks}
    known: dict[str, dict[int | None, SlurmJob]] = {}
    for job in jobs if arrays else ():
        if job.array_id in arrays:
            known.setdefault(job.array_id, {})[job.array_index] = job
    found: list[SlurmJob] = []
    for array, tasks in known.items():
        missing = sorted(set(map(int, numbers(beside[array].tasks))).difference(tasks))
        for like in [job for job in tasks.values() if job.raw_id == array][:1]:
            found += [msgspec.structs.replace(like, id=f"{array}_{n}", array_index=n) for n in missing]
    return found


def _exit_code(status: str) -> int:
    """Of a wait status: 768 is 3; of a signal it is 128 and more."""
    code, signal = divmod(int(status), 256)
    return 128 + (signal & 0x7F) if signal & 0x7F else code


@lru_cache(8192)
def _gpus(texts: tuple[str, str, str, str, str], nodes: int, ntasks: int, sockets: int) -> dict[str, int]:
    """GPUs of the whole job by type: what Slurm counted where it counts them, else what was asked for."""
    tres, per_job, per_node, per_socket, per_task = texts
    times = ((per_job, 1), (per_node, nodes), (per_task, ntasks), (per_socket, nodes * max(1, sockets)))
    asked: dict[str, int] = {}
    for text, factor in times:
        if text not in records.NOTHING and (each := records.gres(text)):
            asked = {kind: count * max(1, factor) for kind, count in each.items()}
            break  # --gpus with --gpus-per-node says the same thing twice
    counted = dict(records.gres(tres))
    total = counted.pop("", sum(counted.values()))
    if not total:
        return asked
    if sum(counted.values()) == total:
        return counted
    if sum(asked.values()) == total:
        return asked
    kinds = [kind for kind in {**counted, **asked} if kind]
    return {kinds[0] if len(kinds) == 1 else "": total}


@lru_cache(4096)
def _memory_mib(tres: str) -> int | None:
    found = re.search(r"(?:^|,)mem=([^,]+)", tres)
    return records.size_bytes(found[1]) >> 20 if found else None
