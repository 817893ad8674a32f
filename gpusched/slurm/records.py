"""What Slurm's commands print, read into the words of `gpusched.model.slurm`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from gpusched.model.slurm import SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm.hostlist import expand, numbers

NOTHING = frozenset(("", "(null)", "N/A", "None", "NONE", "Unknown", "n/a"))
_NO_LIMIT = ("UNLIMITED", "INFINITE", "NOT_SET", "PARTITION_LIMIT", "INVALID")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_PAIR = re.compile(r"(?:^| )([A-Za-z_]+)=(\S*)")


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
                partitions=words(pairs.get("Partitions", "")),
                features=words(pairs.get("ActiveFeatures", pairs.get("AvailableFeatures", ""))),
                version=said(pairs.get("Version", "")),
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
            accounts=words(pairs.get("Accounts", "")),
            users=words(pairs.get("Users", "")),
            flags=words(pairs.get("Flags", "")),
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
    if text in NOTHING or text.upper() in _NO_LIMIT:
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
        parts = re.split(r"[:=/]", item.strip())
        if parts[0] == "gres":
            del parts[0]
        if not parts or parts[0] != "gpu":
            continue
        many = 1
        if len(parts) > 1 and re.fullmatch(r"\d+[KM]?", parts[-1]):
            many = count(parts.pop())
        kind = parts[1] if len(parts) > 1 else ""
        if many:
            found[kind] = found.get(kind, 0) + many
    return found


def size_bytes(text: str) -> int:
    """Bytes of ``500M``, ``1.50G``, ``2000`` (MiB)."""
    found = _NUMBER.match(text)
    if not found:
        raise ValueError(f"{text!r} is no amount of memory")
    return int(float(found[1]) * _UNITS[found[2] or "M"])


def count(text: str) -> int:
    """The number, or the least of ``2-4``; 0 where none is said (``*``, ``N/A``)."""
    if text.isdecimal():
        return int(text)
    found = _NUMBER.match(text)
    return int(float(found[1]) * (_UNITS.get(found[2], 1))) if found else 0


def when(text: str) -> float | None:
    """A time in Unix seconds; None: not said."""
    return float(text) if text.isdecimal() and text != "0" else None


def said(text: str) -> str:
    """The text, or "" where Slurm says that there is none."""
    return "" if text in NOTHING else text


@lru_cache(4096)
def words(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return () if text in NOTHING else tuple(text.split(","))


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
