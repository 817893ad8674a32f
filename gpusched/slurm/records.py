"""Parsers of Slurm's output, into the types of `gpusched.model.slurm`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from gpusched.model.slurm import SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm.hostlist import expand, numbers

UNSET = frozenset(("", "(null)", "N/A", "None", "NONE", "Unknown", "n/a"))
_NO_LIMIT = ("UNLIMITED", "INFINITE", "NOT_SET", "PARTITION_LIMIT", "INVALID")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_PAIR = re.compile(r"(?:^| )([A-Za-z_]+)=(\S*)")


def nodes(text: str) -> list[SlurmNode]:
    """Parse ``scontrol -d -o show node``."""
    found = []
    for line in _records(text, "NodeName="):
        fields, _, reason = line.partition(" Reason=")
        pairs = _pairs(fields)
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
                partitions=comma_separated(pairs.get("Partitions", "")),
                features=comma_separated(pairs.get("ActiveFeatures", pairs.get("AvailableFeatures", ""))),
                version=optional_text(pairs.get("Version", "")),
            )
        )
    return found


def partitions(text: str) -> list[SlurmPartition]:
    """Parse ``scontrol -o show partition``."""
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
    """Parse ``scontrol -o show reservation``."""
    return [
        SlurmReservation(
            name=pairs["ReservationName"],
            nodes=hosts(pairs.get("Nodes", "")),
            start_time=float(pairs["StartTime"]),
            end_time=float(pairs["EndTime"]),
            accounts=comma_separated(pairs.get("Accounts", "")),
            users=comma_separated(pairs.get("Users", "")),
            flags=comma_separated(pairs.get("Flags", "")),
            state=pairs.get("State", ""),
        )
        for pairs in map(_pairs, _records(text, "ReservationName="))
    ]


def config(text: str) -> dict[str, str]:
    """Parse ``scontrol show config`` into settings by name."""
    lines = (line.partition("=") for line in text.splitlines() if re.match(r"[A-Za-z_/]+ *= ", line))
    return {key.strip(): value.strip() for key, _, value in lines}


_BLOCK = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
_IDX = re.compile(r"gpu(?::[^,(:]+)*:\d+\(IDX:([\d,-]+)\)")


def positions(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """Return node -> gres.conf positions of one job's GPUs, from its record of ``scontrol -d -o show job``.

    Args:
        text: The record, which begins with the id and the name.
        name: The job's name from squeue. It is skipped, so that a name cannot fake GPUs.
    """
    _, found, rest = text.partition(f"JobName={name} UserId=")
    if not found:
        return {}
    found_at: dict[str, tuple[int, ...]] = {}
    for host_list, gres_text in _BLOCK.findall(re.split(r" MinCPUsNode=", rest, maxsplit=1)[0]):
        indices = tuple(int(n) for spans in _IDX.findall(gres_text) for n in numbers(spans))
        if indices:
            found_at.update((node, tuple(sorted({*found_at.get(node, ()), *indices}))) for node in hosts(host_list))
    return found_at


@lru_cache(4096)
def hosts(text: str) -> tuple[str, ...]:
    """Return the cached result of `gpusched.slurm.hostlist.expand`."""
    return expand(text)


@lru_cache(4096)
def duration_s(text: str) -> int | None:
    """Return the seconds of ``3-04:05:06``, ``04:05:06``, ``05:06`` or ``7`` (minutes); None: no limit, or not given.

    Raises:
        ValueError: The text is not a duration.
    """
    if text in UNSET or text.upper() in _NO_LIMIT:
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
    """Return GPUs by type of ``gpu:a100:8(S:0-1),shard:4``, ``gres:gpu:2`` or ``gres/gpu:a100=8``, ignoring other GRES.

    Type "": not given.
    """
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        parts = re.split(r"[:=/]", item.strip())
        if parts[0] == "gres":
            del parts[0]
        if not parts or parts[0] != "gpu":
            continue
        number = 1
        if len(parts) > 1 and re.fullmatch(r"\d+[KM]?", parts[-1]):
            number = count(parts.pop())
        kind = parts[1] if len(parts) > 1 else ""
        if number:
            found[kind] = found.get(kind, 0) + number
    return found


def size_bytes(text: str) -> int:
    """Return the bytes of ``500M``, ``1.50G`` or ``2000`` (MiB)."""
    found = _NUMBER.match(text)
    if not found:
        raise ValueError(f"{text!r} is no amount of memory")
    return int(float(found[1]) * _UNITS[found[2] or "M"])


def count(text: str) -> int:
    """Return the number, or the minimum of ``2-4``; 0 where none is given (``*``, ``N/A``)."""
    if text.isdecimal():
        return int(text)
    found = _NUMBER.match(text)
    return int(float(found[1]) * (_UNITS.get(found[2], 1))) if found else 0


def unix_time(text: str) -> float | None:
    """Return a time in Unix seconds; None: not given."""
    return float(text) if text.isdecimal() and text != "0" else None


def optional_text(text: str) -> str:
    """Return the text, or "" where Slurm reports none."""
    return "" if text in UNSET else text


@lru_cache(4096)
def comma_separated(text: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list."""
    return () if text in UNSET else tuple(text.split(","))


_MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "$": "MAINTENANCE"}


def _marks(state: str) -> tuple[str, ...]:
    """Return the flags that a state's suffixes stand for: older Slurm prints ``DOWN*`` for DOWN+NOT_RESPONDING."""
    return tuple(word for sign, word in _MARKS.items() if sign in state and word not in state)


def _records(text: str, first: str) -> list[str]:
    """Return the records, which begin with the key ``first``; other lines continue the one before."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(first):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line
    return lines


def _pairs(line: str) -> dict[str, str]:
    return {key: value for key, value in reversed(_PAIR.findall(line))}  # the first wins: texts come last
