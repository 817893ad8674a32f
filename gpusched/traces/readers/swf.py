"""Reads Standard Workload Format 2.2 (Feitelson's Parallel Workloads Archive): 18 numbers per line, ``;`` comments.

Processors count as GPUs. Fields: https://www.cs.huji.ac.il/labs/parallel/workload/swf.html
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from gpusched.model.units import count_of
from gpusched.traces.readers.columns import open_text, read_fields, stem
from gpusched.traces.readers.draft import MAX_WHOLE, Draft
from gpusched.traces.trace import Floats, Ints, Trace

FIELDS = (
    "job number", "submit time", "wait time", "run time", "allocated processors", "average CPU time", "used memory",
    "requested processors", "requested time", "requested memory", "status", "user", "group", "executable", "queue",
    "partition", "preceding job", "think time",
)  # fmt: skip
STATUSES = ("FAILED", "COMPLETED", "PARTIAL", "PARTIAL_LAST", "PARTIAL_FAILED", "CANCELLED")
_PARTIAL = (2, 3, 4)
_CANCELLED = 5
_HEADER = re.compile(r";\s*(UnixStartTime|MaxNodes|MaxProcs)\s*:\s*([0-9]{1,12})(?![0-9])")


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace; times are those of the log. The group is the partition if the log has any, else the queue.

    Skips jobs cancelled before they ran, and partial records (status 2 to 4): their job has a whole record too.

    Raises:
        FileError: ``strict`` is set and a row is invalid.
    """
    draft = Draft(read_fields(path, FIELDS, None, ";"), strict=strict)
    header = _header(path)
    status = draft.whole("status", "a status from -1 to 5", minimum=-1)
    draft.reject(status > _CANCELLED, "status", "a status from -1 to 5")
    draft.leave_out(np.isin(status, _PARTIAL), "status", "a whole job, not a part of one")
    no_run = draft.where("run time", lambda t: t.startswith("-") or t in ("0", "0.0"))
    draft.leave_out((status == _CANCELLED) & no_run, "run time", "a job that ran")
    ids = draft.ids("job number")
    submit = draft.numbers("submit time", "seconds since the log's start", minimum=0)
    duration = draft.numbers("run time", "a run time of more than 0 s", above=0)
    gpus = _processors(draft)
    limit, wait = _known(draft, "requested time", above=True), _known(draft, "wait time", above=False)
    memory_kib = _known(draft, "requested memory", above=True)
    # Requested memory is per processor; a value that no machine can have is invalid, unknown ones are -1.
    memory_mib = np.ceil(np.where(np.isfinite(memory_kib), memory_kib * gpus, -1.0) / 1024)
    draft.reject(memory_mib > MAX_WHOLE, "requested memory", "an amount that a machine can have")
    memory_mib = np.where((memory_mib > 0) & (memory_mib <= MAX_WHOLE), memory_mib, -1)
    start = header.get("UnixStartTime")
    if "MaxProcs" in header:
        draft.notes.append(f"the log's machine has {header['MaxProcs']} processors")
    return draft.trace(
        stem(path), epoch=None if start is None else float(start), ids=ids, submit=submit, duration=duration,
        gpus=gpus, depends_on=_preceding(draft, ids), columns={
            "limit": limit, "wait": wait, "memory_mib": memory_mib.astype(np.int64),
        }, names={
            "user": _numbered(draft, "user"), "group": _group(draft),
            "status": (np.maximum(status, -1), STATUSES),
        },
    )  # fmt: skip


def _header(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with open_text(path) as text:
        for line in text:
            if line.strip() and not line.startswith(";"):
                break
            if match := _HEADER.match(line):
                found[match[1]] = int(match[2])
    return found


def _known(draft: Draft, field: str, *, above: bool) -> Floats:
    """Return a field, NaN where unknown: -1, and with ``above`` also 0."""
    values = draft.numbers(field, "a number, or -1", minimum=-1)
    return np.where(values > 0 if above else values >= 0, values, np.nan)


def _processors(draft: Draft) -> Ints:
    """Return the requested processors, or the allocated ones if unknown."""
    requested = draft.whole("requested processors", "a whole number, or -1", minimum=-1)
    allocated = draft.whole("allocated processors", "a whole number, or -1", minimum=-1)
    processors = np.where(requested > 0, requested, allocated)
    draft.reject(processors < 1, "allocated processors", "at least one processor, requested or allocated")
    return processors.astype(np.int64)


def _numbered(draft: Draft, field: str) -> tuple[Ints, tuple[str, ...]]:
    """Return each row's index into the distinct numbers of a field (-1: unknown), and these numbers as names."""
    numbers = draft.whole(field, "a whole number, or -1", minimum=-1)
    distinct, index = np.unique(numbers, return_inverse=True)
    unknown = int(np.count_nonzero(distinct < 0))
    return index.astype(np.int64) - unknown, tuple(map(str, distinct[unknown:].tolist()))


def _group(draft: Draft) -> tuple[Ints, tuple[str, ...]]:
    index, names = _numbered(draft, "partition")
    return (index, names) if names else _numbered(draft, "queue")


def _preceding(draft: Draft, ids: tuple[str, ...]) -> Ints:
    """Return rows of the preceding jobs; think times are dropped."""
    preceding = draft.whole("preceding job", "a job number, or -1", minimum=-1)
    rows = {job: row for row, job in enumerate(ids)}
    found = np.full(len(ids), -1, np.int64)
    for row in np.flatnonzero(preceding > 0).tolist():
        found[row] = rows.get(str(preceding[row]), -1)
    if (known := int(np.count_nonzero(found >= 0))) and np.any(draft.numbers("think time", minimum=-1) > 0):
        draft.notes.append(f"{count_of(known, 'job')} with a preceding job; think times are dropped")
    return found
