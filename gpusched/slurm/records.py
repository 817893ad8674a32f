"""What Slurm's commands print, read into the words of `gpusched.model.slurm`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypedDict

import msgspec

from gpusched.model.slurm import SlurmJob, SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm.hostlist import expand, numbers

JOB_FIELDS = (
    "JobID", "ArrayTaskID", "JobArrayID", "ArrayJobID", "UserName", "UserID", "Account", "QOS", "Partition", "State",
    "Reason", "PriorityLong", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit", "NumNodes", "NodeList",
    "NumCPUs", "NumTasks", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-socket",
    "tres-per-task", "Sockets", "ReqNodes", "Feature", "Reservation", "Dependency", "OverSubscribe", "Requeue",
    "RestartCnt", "Name",
)  # fmt: skip
"""Fields of ``squeue -O`` that `job` takes, in this order: first what the tasks of an array do not share."""

OWN_FIELDS = 3
"""So many of them tell one task of an array from another."""

_NOTHING = frozenset(("", "(null)", "N/A", "None", "NONE", "Unknown", "n/a"))
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_PAIR = re.compile(r"(?:^| )([A-Za-z_]+)=(\S*)")


def job(fields: Sequence[str]) -> SlurmJob:
    """One record of ``squeue --array``: a job, or a task of an array.

    Args:
        fields: As `JOB_FIELDS` names them.

    Raises:
        ValueError: A field is not what Slurm is known to print.
    """
    (
        raw_id, task, shown_id, array_id, user, uid, account, qos, partitions, state,
        reason, priority, submit, eligible, start, end, limit, nodes, node_list,
        cpus, ntasks, tres, per_job, per_node, per_socket,
        per_task, sockets, req_nodes, features, reservation, dependency, share, requeue,
        restarts, name,
    ) = fields  # fmt: skip
    in_array = task not in _NOTHING
    return SlurmJob(
        **identity(raw_id, task, shown_id),
        array_id=array_id if in_array else "",
        user=user,
        uid=int(uid),
        account=_text(account),
        qos=_text(qos),
        partitions=_words(partitions),
        name=name,
        state=state,
        reason=reason,
        priority=int(priority),
        submit_time=float(submit),
        eligible_time=_time(eligible),
        start_time=_time(start),
        end_time=_time(end),
        time_limit_s=duration_s(limit),
        nodes=_count(nodes),
        node_names=hosts(node_list),
        cpus=_count(cpus),
        memory_mib=_memory_mib(tres),
        gpus=_gpus(tres, per_job, per_node, per_socket, per_task, _count(nodes), _count(ntasks), _count(sockets)),
        req_nodes=hosts(req_nodes),
        features=_text(features),
        reservation=_text(reservation),
        dependency=_text(dependency),
        exclusive=share in ("NO", "EXCLUSIVE", "USER", "MCS"),
        requeue=requeue != "0",
        restarts=_count(restarts),
    )


class Identity(TypedDict):
    """What a record has for itself alone, beside its array."""

    id: str
    raw_id: str
    array_index: int | None


def identity(raw_id: str, task: str, shown_id: str) -> Identity:
    """Of the first `OWN_FIELDS` fields: ``1234``, ``1234_5`` of an array, ``1234+1`` of a heterogeneous job."""
    index = int(task) if task.isdecimal() else None
    return {"id": raw_id if index is None and "+" not in shown_id else shown_id, "raw_id": raw_id, "array_index": index}


class Waiting(msgspec.Struct, frozen=True):
    """What ``squeue -O`` has no field for: how many tasks of an array may run at once, nodes that are excluded."""

    array_limit: int | None = None
    exc_nodes: tuple[str, ...] = ()


_UNSAID = Waiting()
WAITING_FORMAT = "%F %K %x"


def waiting(text: str, before: Mapping[str, Waiting]) -> dict[str, Waiting]:
    """JobId, or that of the array -> what is said there, from ``squeue --format`` with `WAITING_FORMAT`.

    Args:
        text: One line for each job, or array.
        before: What was said last; squeue says an array's limit only until one of its tasks is a job of its own.
    """
    found: dict[str, Waiting] = {}
    for line in text.splitlines():
        array_id, tasks, excluded = line.split(" ", 2)
        limit = tasks.rpartition("%")[2] if "%" in tasks else ""
        known = int(limit) if limit.isdecimal() else before.get(array_id, _UNSAID).array_limit
        told = Waiting(known, hosts(excluded))
        if told != _UNSAID:
            found[array_id] = told
    return found


def nodes(text: str) -> list[SlurmNode]:
    """Nodes of ``scontrol -d -o show node``."""
    found = []
    for line in _records(text, "NodeName="):
        told, _, reason = line.partition(" Reason=")
        pairs = _pairs(told)
        found.append(
            SlurmNode(
                name=pairs["NodeName"],
                address=pairs.get("NodeAddr", pairs["NodeName"]),
                states=tuple(word.rstrip("*~#!%$@^-") for word in pairs["State"].split("+")) + _marks(pairs["State"]),
                reason=re.sub(r" (?:Comment|Extra|InstanceId)=.*", "", reason).strip(),
                cpus=int(pairs["CPUTot"]),
                memory_mib=int(pairs["RealMemory"]),
                gpus=dict(gres(pairs.get("Gres", ""))),
                gpus_used=sum(gres(pairs.get("GresUsed", "")).values()),
                partitions=_words(pairs.get("Partitions", "")),
                features=_words(pairs.get("ActiveFeatures", pairs.get("AvailableFeatures", ""))),
                version=_text(pairs.get("Version", "")),
            )
        )
    return found


def partitions(text: str) -> list[SlurmPartition]:
    """Partitions of ``scontrol -o show partition``."""
    return [
        SlurmPartition(
            name=pairs["PartitionName"],
            nodes=hosts(pairs.get("Nodes", "")),
            is_default=pairs.get("Default") == "YES",
            max_time_s=duration_s(pairs.get("MaxTime", "")),
            default_time_s=duration_s(pairs.get("DefaultTime", "")),
            state=pairs.get("State", "UP"),
            priority_tier=int(pairs.get("PriorityTier", "1")),
            preempt_mode=pairs.get("PreemptMode", "OFF"),
        )
        for pairs in map(_pairs, _records(text, "PartitionName="))
    ]


def reservations(text: str) -> list[SlurmReservation]:
    """Reservations of ``scontrol -o show reservation``."""
    return [
        SlurmReservation(
            name=pairs["ReservationName"],
            nodes=hosts(pairs.get("Nodes", "")),
            start_time=float(pairs["StartTime"]),
            end_time=float(pairs["EndTime"]),
            accounts=_words(pairs.get("Accounts", "")),
            users=_words(pairs.get("Users", "")),
            flags=_words(pairs.get("Flags", "")),
            state=pairs.get("State", ""),
        )
        for pairs in map(_pairs, _records(text, "ReservationName="))
    ]


def config(text: str) -> dict[str, str]:
    """Settings of ``scontrol show config``."""
    lines = (line.partition("=") for line in text.splitlines() if re.match(r"[A-Za-z_/]+ *= ", line))
    return {key.strip(): value.strip() for key, _, value in lines}


_BLOCK = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
_IDX = re.compile(r"gpu(?::[^,(:]+)*:\d+\(IDX:([\d,-]+)\)")


def positions(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """Node -> positions in gres.conf of the GPUs of one job, from its record of ``scontrol -d -o show job``.

    Args:
        text: The record, which begins with the id and the name.
        name: As squeue has it: what a user wrote is skipped, so that nobody can invent GPUs by a name.
    """
    _, found, rest = text.partition(f"JobName={name} UserId=")
    if not found:
        return {}
    told: dict[str, tuple[int, ...]] = {}
    for host_list, held in _BLOCK.findall(re.split(r" MinCPUsNode=", rest, maxsplit=1)[0]):
        held_at = tuple(int(n) for spans in _IDX.findall(held) for n in numbers(spans))
        if held_at:
            told.update((node, tuple(sorted({*told.get(node, ()), *held_at}))) for node in hosts(host_list))
    return told


@lru_cache(4096)
def hosts(text: str) -> tuple[str, ...]:
    """See `gpusched.slurm.hostlist.expand`."""
    return expand(text)


@lru_cache(4096)
def duration_s(text: str) -> int | None:
    """Seconds of ``3-04:05:06``, ``04:05:06``, ``05:06`` or ``7`` (minutes); None: no limit, or none said.

    Raises:
        ValueError: The text is no such time.
    """
    if not text or text[0].isalpha() or text in _NOTHING:  # UNLIMITED, NOT_SET, NONE, Partition_Limit, INVALID
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts.append(0)
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + part
    return int(days or 0) * 86400 + seconds


@lru_cache(4096)
def gres(text: str) -> Mapping[str, int]:
    """GPUs by type of ``gpu:a100:8(S:0-1),shard:4``, ``gres:gpu:2`` or ``gres/gpu:a100=8``; others are left out.

    Type "": not said.
    """
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        words = re.split(r"[:=/]", item.strip())
        if words[0] == "gres":
            del words[0]
        if not words or words[0] != "gpu":
            continue
        words, count = (words[:-1], _count(words[-1])) if words[-1][:1].isdigit() and len(words) > 1 else (words, 1)
        kind = words[1] if len(words) > 1 else ""
        if count:
            found[kind] = found.get(kind, 0) + count
    return found


@lru_cache(8192)
def _gpus(
    tres: str, per_job: str, per_node: str, per_socket: str, per_task: str, nodes: int, ntasks: int, sockets: int
) -> dict[str, int]:
    """GPUs of the whole job by type: what Slurm counted where it counts them, else what was asked for."""
    times = ((per_job, 1), (per_node, nodes), (per_task, ntasks), (per_socket, nodes * max(1, sockets)))
    asked: dict[str, int] = {}
    for text, factor in times:
        if text not in _NOTHING and (each := gres(text)):
            asked = {kind: count * max(1, factor) for kind, count in each.items()}
            break  # --gpus with --gpus-per-node says the same thing twice
    counted = dict(gres(tres))
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
    return _bytes(found[1]) >> 20 if found else None


def _bytes(text: str) -> int:
    """Bytes of ``500M``, ``1.50G``, ``2000`` (MiB)."""
    found = _NUMBER.match(text)
    if not found:
        raise ValueError(f"{text!r} is no amount of memory")
    return int(float(found[1]) * _UNITS[found[2] or "M"])


def _count(text: str) -> int:
    """The number, or the least of ``2-4``; 0 where none is said (``*``, ``N/A``)."""
    if text.isdecimal():
        return int(text)
    found = _NUMBER.match(text)
    return int(float(found[1]) * (_UNITS.get(found[2], 1))) if found else 0


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() and text != "0" else None


def _text(text: str) -> str:
    return "" if text in _NOTHING else text


@lru_cache(4096)
def _words(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(text.split(","))


_MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "$": "MAINTENANCE"}


def _marks(state: str) -> tuple[str, ...]:
    """What the signs behind a state mean: older Slurm writes ``DOWN*`` for DOWN+NOT_RESPONDING."""
    return tuple(word for sign, word in _MARKS.items() if sign in state and word not in state)


def _records(text: str, first: str) -> list[str]:
    """Lines that begin with this key; one that does not goes on with the text of the line before."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(first):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line
    return lines


def _pairs(line: str) -> dict[str, str]:
    return {key: value for key, value in reversed(_PAIR.findall(line))}  # the first one counts: texts come last
