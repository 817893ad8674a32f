"""Slurm's accounting: the output of ``sacct -X -P``, one line per run of a job, after a header line.

Columns in any order, by ``|`` or another separator; needed are an id, Submit, Start, End, State and AllocTRES or
ReqTRES. Fields: https://slurm.schedmd.com/sacct.html
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.errors import GpuschedError
from gpusched.model.units import count_of, whole_number
from gpusched.traces.readers.columns import open_text, read_lines, stem
from gpusched.traces.readers.draft import Draft, Mask, Names, intern, to_numbers, to_times
from gpusched.traces.trace import Floats, Ints, Trace

_IDS, _TRES = ("JobID", "JobIDRaw"), ("AllocTRES", "ReqTRES")
_NEEDED = ("Submit", "Start", "End", "State")
_MORE = (
    "Eligible", "User", "Partition", "Timelimit", "TimelimitRaw", "NNodes", "AllocCPUS", "Suspended", "JobName",
)  # fmt: skip
_NO_TIME = frozenset({"", "Unknown", "None", "0"})
_NOT_ENDED = (
    "PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING", "REQUEUE_HOLD", "REQUEUE_FED",
    "SPECIAL_EXIT", "STAGE_OUT", "SIGNALING", "STOPPED", "RESV_DEL_HOLD",
)  # fmt: skip
_CLOCK = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+(?:\.[0-9]+)?)")
_MIB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_MAX_AMOUNT = 10**15  # of a resource
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTP]?)")
_YEAR_S = 365 * 86400.0  # what Slurm's backfill takes for the run time of a job without a limit
_HOUR_S = 3600
ADD_GPUS = "add gres/gpu to AccountingStorageTRES in slurm.conf: jobs from then on have their GPUs"


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace; the group is the partition, the model the job's name where given.

    A job counts as submitted when it became eligible: what it waited for its dependencies, its begin time or a hold was
    not for want of nodes. It runs from Start to End, also while suspended, since that keeps its GPUs, and its limit is
    longer by as much. Times without a zone are of this machine's. Each run of a requeued job (``-D``) is a job of its
    own, ``1234~2``, that waits for the end of the one before.

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
        GpuschedError: No row has GPUs.
    """
    with open_text(path) as text:
        rows = rows_of(text, str(path), strict=strict)
    trace = trace_of(rows, stem(path))
    if not trace.gpus.any():
        raise GpuschedError(f"{path}: no row has gres/gpu in AllocTRES or ReqTRES", ADD_GPUS)
    return trace


class Rows(NamedTuple):
    """Parsed rows, one entry each; unusable or invalid ones are marked in ``draft``.

    Attributes:
        submit, start, end: Unix seconds; ``submit``: when it became eligible.
        limit: Seconds; NaN: not known.
        wait: Seconds from ``submit`` to ``start``.
        running: It has not ended.
        notes: (jobs, remark on their number).
    """

    draft: Draft
    ids: Sequence[str]
    submit: Floats
    start: Floats
    end: Floats
    limit: Floats
    wait: Floats
    running: Mask
    notes: tuple[tuple[Mask, str], ...]


def rows_of(lines: Iterable[str], path: str, *, strict: bool = False, until: float | None = None) -> Rows:
    """Parse lines; errors call them ``path``.

    ``until``: when rows that have begun and not ended are taken to end (Unix seconds); None: they are left out.

    Raises:
        FileError: Not such lines.
    """
    draft = Draft(read_lines(path, lines, "what sacct -X -P prints", _NEEDED, (_IDS, _TRES), _MORE), strict=strict)
    ids = _without_steps(draft)
    running = _leave_out_without_run(draft, until is not None)
    submitted, start, end = (_times(draft, column) for column in ("Submit", "Start", "End"))
    start = _not_before(submitted, start)
    end = _not_before(start, end)
    end[running] = np.nan if until is None else until
    draft.reject(np.isnan(submitted), "Submit", "a time")
    draft.reject(start < submitted, "Start", "a time not before Submit")
    draft.reject(end < start, "End", "a time not before Start")
    draft.leave_out(end == start, "End", "a job that ran for a second at least")
    eligible = _times(draft, "Eligible")
    submit = np.maximum(submitted, np.minimum(np.where(np.isnan(eligible), submitted, eligible), start))
    limit, suspended = _limits(draft)
    return Rows(
        draft, ids, submit, start, end, limit + suspended, start - submit, running, notes=(
            (submit > submitted, "eligible only after submission, counted as submitted then"),
            (limit == _YEAR_S, "without a time limit: a year, as Slurm assumes"),
            (np.isnan(limit), "without a time limit in the file"),
            (suspended > 0, "suspended: GPUs were kept, and the limit is longer by that time"),
        ),
    )  # fmt: skip


def trace_of(rows: Rows, name: str) -> Trace:
    """Build the trace of the kept rows.

    Raises:
        FileError: Strict, and a row is bad.
        GpuschedError: No row is left.
    """
    draft = rows.draft
    asked, given = _tres(draft, "ReqTRES"), _tres(draft, "AllocTRES")
    own, before = _runs(draft, rows.ids, rows.start)
    again = (before >= 0, "run again after a requeue, or under an id that was used before")
    for where, what in (*rows.notes, again):
        if count := int(np.count_nonzero(where & draft.kept)):
            draft.notes.append(f"{count_of(count, 'job')} {what}")
    return draft.trace(
        name, epoch=None, rebase=True, ids=own, submit=rows.submit, duration=rows.end - rows.start, depends_on=before,
        gpus=_amount(draft, asked, given, "gres/gpu", 0),
        columns={
            "limit": rows.limit, "wait": rows.wait,
            "nodes": _amount(draft, asked, given, "node", 0, "NNodes"),
            "cores": _amount(draft, asked, given, "cpu", -1, "AllocCPUS"),
            # Where memory is not counted, all that a node has is in ReqTRES, and none in AllocTRES.
            "memory_mib": _amount(draft, given, given, "mem", -1),
        },
        names={
            "user": draft.names("User", optional=True), "group": draft.names("Partition", optional=True),
            "model": draft.names("JobName", optional=True), "gpu_type": _types(draft, asked),
            "status": intern([state.partition(" ")[0] for state in draft.text("State")]),  # CANCELLED by 1000
        },
    )  # fmt: skip


def _without_steps(draft: Draft) -> Sequence[str]:
    column = next(c for c in _IDS if draft.has(c))
    draft.reject(draft.where(column, lambda text: not text), column, "a job id")
    draft.leave_out(draft.where(column, lambda text: "." in text), column, "a job, not a step (sacct -X)")
    return draft.text(column)


def _leave_out_without_run(draft: Draft, running_too: bool) -> Mask:
    """Exclude jobs that never ran, and running ones unless wanted; return the running ones."""
    draft.reject(draft.where("State", lambda state: not state), "State", "a state such as COMPLETED")
    running = draft.where("State", lambda s: s.startswith(_NOT_ENDED)) | draft.where("End", _NO_TIME.__contains__)
    if not running_too:
        draft.leave_out(running, "State", "a job that has ended")
    draft.leave_out(draft.where("Start", _NO_TIME.__contains__), "Start", "a job that ran")
    return running


def _runs(draft: Draft, ids: Sequence[str], start: Floats) -> tuple[tuple[str, ...], Ints]:
    """Return an id for each run, and the row of the same job's previous run, or -1."""
    found, before, last = list(ids), np.full(len(draft), -1, np.int64), dict[str, int]()
    count: dict[str, int] = {}
    rows = np.flatnonzero(draft.kept)
    again = np.zeros(len(draft), np.bool_)
    for row in rows[np.argsort(start[rows], kind="stable")].tolist():
        job = ids[row]
        if (other := last.get(job)) is not None:
            if start[row] == start[other]:
                again[row] = True
                continue
            before[row] = other
            count[job] = count.get(job, 1) + 1
            found[row] = f"{job}~{count[job]}"
        last[job] = row
    draft.reject(again, next(c for c in _IDS if draft.has(c)), "each run of a job once")
    return tuple(found), before


# Fields


def _times(draft: Draft, column: str) -> Floats:
    """Parse times (Unix seconds or local times); NaN for unknown. Other text is rejected."""
    texts = draft.text(column)
    known = np.fromiter((text not in _NO_TIME for text in texts), np.bool_, len(texts))
    found = np.full(len(texts), np.nan)
    rows = np.flatnonzero(known)
    chosen = texts if len(rows) == len(texts) else [texts[row] for row in rows.tolist()]
    numbers = all(map(str.isdecimal, chosen[:1]))
    found[rows] = to_numbers(chosen) if numbers else _local(to_times(chosen), chosen)
    draft.reject(known & np.isnan(found), column, "a time such as 2026-11-20T18:00:00, or seconds since 1970")
    return found


def _local(seconds: Floats, texts: Sequence[str]) -> Floats:
    """Convert clock times read as UTC to this machine's zone; times with a zone are unchanged."""
    hours, index = np.unique(np.floor(seconds / _HOUR_S), return_inverse=True)
    offsets = np.array([_offset(hour * _HOUR_S) for hour in hours.tolist()], np.float64)
    bare = np.fromiter((len(text) == _CLOCK_TIME for text in texts), np.bool_, len(texts))
    found: Floats = np.where(bare, seconds + offsets[index.reshape(-1)], seconds)
    return found


def _offset(seconds: float) -> float:
    try:
        found = time.mktime((*time.gmtime(seconds)[:8], -1))
        return found - seconds - (_HOUR_S if _read_alike(found - _HOUR_S, found) else 0)  # the first of two such hours
    except (ValueError, OverflowError, OSError):  # NaN, or years that no clock has
        return np.nan


def _not_before(earlier: Floats, later: Floats) -> Floats:
    """Return the later times, an hour later where clocks went back between the two, and local times say so only so."""
    found = later.copy()
    for row in np.flatnonzero((later < earlier) & (earlier < np.inf)).tolist():
        if _read_alike(later[row], later[row] + _HOUR_S):
            found[row] += _HOUR_S
    return found


def _read_alike(one: float, other: float) -> bool:
    """Return whether this machine's clocks show the same at both times (Unix seconds)."""
    try:
        return time.localtime(one)[:6] == time.localtime(other)[:6]
    except (ValueError, OverflowError, OSError):  # years that no clock has
        return False


_CLOCK_TIME = len("2026-11-20T18:00:00")


def _limits(draft: Draft) -> tuple[Floats, Floats]:
    """Return time limits in seconds, NaN where only the partition's applies; and suspended seconds."""
    column = "TimelimitRaw" if draft.has("TimelimitRaw") else "Timelimit"
    limit = _seconds(draft, column, _limit, "minutes, a time such as 1-00:00:00, UNLIMITED or Partition_Limit")
    suspended = _seconds(draft, "Suspended", _clock, "a time such as 00:10:00")
    return np.where(limit > 0, limit, np.nan), np.nan_to_num(suspended)


def _seconds(draft: Draft, column: str, read: Callable[[str], float | None], expected: str) -> Floats:
    """Convert a column's distinct texts; None rejects a row."""
    texts = draft.text(column)
    known = {text: read(text) for text in set(texts)}
    wrong = {text for text, value in known.items() if value is None}
    if wrong:
        draft.reject(draft.where(column, wrong.__contains__), column, expected)
    values = {text: np.nan if value is None else value for text, value in known.items()}
    return np.fromiter((values[text] for text in texts), np.float64, len(texts))


def _limit(text: str) -> float | None:
    if (minutes := whole_number(text)) is not None:
        return minutes * 60.0
    if text.upper() == "UNLIMITED":
        return _YEAR_S
    return np.nan if text in ("", "Partition_Limit") else _clock(text)


def _clock(text: str) -> float | None:
    """Parse ``[DAYS-][HOURS:]MINUTES:SECONDS`` into seconds; NaN for empty text; None if invalid."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return np.nan if text == "" else None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# Resources


Tres = tuple[npt.NDArray[np.int64], list[dict[str, str]]]  # of each row the index of its text, and what these say


def _tres(draft: Draft, column: str) -> Tres:
    """Parse allocated or requested TRES: ``billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1``."""
    texts = draft.text(column)
    index: dict[str, int] = {}
    rows = np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int64, len(texts))
    said = [dict(part.partition("=")[::2] for part in text.split(",") if part) for text in index]
    wrong = np.array([any(not value for value in one.values()) for one in said], np.bool_)
    draft.reject(wrong[rows], column, "resources such as cpu=8,gres/gpu=2,mem=64G,node=1")
    return rows, said


def _amount(draft: Draft, asked: Tres, given: Tres, what: str, unknown: int, column: str = "") -> Ints:
    """Return a resource of the whole job: its own column's, else as allocated, else as requested."""
    found = np.full(len(draft), -1, np.int64)
    if column and draft.has(column):
        found = draft.whole(column, "a whole number", optional=True)
        found[found == 0] = -1
    for key, (rows, said) in (("AllocTRES", given), ("ReqTRES", asked)):
        amounts = [_mib(one) if what == "mem" else _count(one, what) for one in said]
        wrong = np.array([amount is None for amount in amounts], np.bool_)
        draft.reject(wrong[rows], key, f"{what} as a number")
        values = np.array([-1 if amount is None else amount for amount in amounts], np.int64)
        found = np.where(found < 0, values[rows], found)
    return np.where(found < 0, unknown, found)


def _count(said: dict[str, str], what: str) -> int | None:
    """Return a TRES count, summed over types where only these are given; -1 if missing; None if invalid."""
    texts = [said[what]] if what in said else [text for key, text in said.items() if key.startswith(f"{what}:")]
    counts = [number for number in map(whole_number, texts) if number is not None]
    if len(counts) < len(texts) or sum(counts) > _MAX_AMOUNT:
        return None
    return sum(counts) if texts else -1


def _mib(said: dict[str, str]) -> int | None:
    match = _MEMORY.fullmatch(said.get("mem", "0"))
    mib = np.inf if match is None else float(match[1]) * _MIB[match[2]]
    return (round(mib) or -1) if mib <= _MAX_AMOUNT else None


def _types(draft: Draft, asked: Tres) -> Names:
    """Return the GPU type that each job requested, if any."""
    rows, said = asked
    types = [[key.partition(":")[2] for key in one if key.startswith("gres/gpu:")] for one in said]
    index, words = intern([one[0] if len(one) == 1 else "" for one in types])
    return index[rows], words
