"""gpusched's own trace file: a npz of columns, never executed, validated when read.

Entries: ``header`` (JSON as bytes: format, version, name, epoch, jobs, notes); one array per column, of the smallest
whole type that holds it, or of one element where all are equal; those of `ProgressRecords` as ``told.X``; every list
of texts as ``X.bytes`` (UTF-8, joined) and ``X.ends`` (the byte offset at which each ends).
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusched.config.paths import write_atomic
from gpusched.errors import FileError, GpuschedError, UnreadableFile
from gpusched.model.slices import is_profile
from gpusched.traces.trace import ProgressRecords, Trace

SUFFIX = ".gpusched.npz"
VERSION = 1
_KINDS = {f.name: f.type for f in fields(Trace)}  # as text
FLOATS, INTS = (tuple(name for name, kind in _KINDS.items() if kind == of) for of in ("Floats", "Ints"))
NAMES = {"user": "users", "group": "groups", "model": "models", "gpu_type": "gpu_types", "status": "statuses"}
# columns that most sources do not have
_FLAGS, _SOME_FLOATS, _SOME_INTS = (
    tuple(name for name, kind in _KINDS.items() if kind == f"{of} | None") for of in ("Flags", "Floats", "Ints")
)
SOME = (*_SOME_INTS, *_SOME_FLOATS, *_FLAGS)
_SOME_NAMES = {
    "account": "accounts", "qos": "classes", "policy": "policies", "profile": "profiles", "nodelist": "node_lists",
    "exclude": "node_lists", "ran_on": "node_lists",
}  # fmt: skip
_FORMAT = "gpusched-trace"
_SMALLEST = {"gpus": 0, "gpu_milli": 1, "nodes": 0}  # all others: -1
_PROGRESS = "told."  # begins their names in files
_PROGRESS_INTS = ("size_job", "size_gpus", "run_job", "run_gpus", "rank_gpus")
_PROGRESS_SOME = ("rank_gpus",)  # columns that files without such jobs do not have
_Arrays = dict[str, npt.NDArray[Any]]


def write(path: Path, trace: Trace) -> None:
    """Write a trace atomically.

    Raises:
        GpuschedError: It cannot be written.
    """
    header = {
        "format": _FORMAT, "version": VERSION, "name": trace.name, "epoch": trace.epoch, "jobs": len(trace),
        "notes": trace.notes,
    }  # fmt: skip
    arrays: _Arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for column in (*FLOATS, *INTS):
        arrays[column] = _compact(getattr(trace, column))
    for column in SOME:
        if (rows := getattr(trace, column)) is not None:
            arrays[column] = _compact(rows.astype(np.int8) if rows.dtype == np.bool_ else rows)
            if column in _SOME_NAMES:
                _put_texts(arrays, _SOME_NAMES[column], getattr(trace, _SOME_NAMES[column]))
    if trace.progress is not None:
        progress = {f"{_PROGRESS}{f.name}": getattr(trace.progress, f.name) for f in fields(ProgressRecords)}
        arrays |= {name: rows for name, rows in progress.items() if rows is not None}
    for column in ("ids", *NAMES.values()):
        _put_texts(arrays, column, getattr(trace, column))
    arrays["rejected.lines"] = np.array([line for line, _ in trace.rejected], np.int64)
    _put_texts(arrays, "rejected", [why for _, why in trace.rejected])
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    try:
        write_atomic(path, buffer.getbuffer())
    except OSError as error:
        raise GpuschedError(f"{path}: cannot be written: {error.strerror or error}") from None


def read(path: Path, *, strict: bool = False) -> Trace:
    """Read a trace; ``strict`` has no effect: rows were validated on import.

    Raises:
        FileError: Not such a file, of a later version, or damaged.
    """
    del strict
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _trace(arrays)
    except OSError as error:
        raise UnreadableFile(str(path), error.strerror or str(error), "a trace written by gpusched") from None
    except (
        ValueError, KeyError, TypeError, EOFError, AttributeError, RuntimeError, OverflowError, zipfile.BadZipFile,
        zlib.error, MemoryError,
    ) as error:  # fmt: skip
        raise FileError(str(path), None, "", f"a damaged file ({error})", "a trace written by gpusched") from None


def _trace(arrays: Mapping[str, npt.NDArray[Any]]) -> Trace:
    header = json.loads(bytes(arrays["header"]))
    if header["format"] != _FORMAT or header["version"] != VERSION:
        raise ValueError(f"{header['format']} version {header['version']}, this gpusched reads version {VERSION}")
    count = int(header["jobs"])
    if len(arrays["ids.ends"]) != count:  # before any column is spread to as many rows
        raise ValueError(f"{len(arrays['ids.ends'])} ids of {count} jobs")
    columns: dict[str, Any] = {name: _spread(arrays[name], count, np.float64) for name in FLOATS}
    columns |= {name: _spread(arrays[name], count, np.int64) for name in INTS}
    columns |= {plural: _texts(arrays, plural) for plural in NAMES.values()}
    for names, kind in (((*_SOME_INTS, *_FLAGS), np.int64), (_SOME_FLOATS, np.float64)):
        columns |= {name: _spread(arrays[name], count, kind) for name in names if name in arrays}
    columns |= {name: columns[name] != 0 for name in _FLAGS if name in columns}
    columns |= {plural: _texts(arrays, plural) for column, plural in _SOME_NAMES.items() if column in columns}
    if f"{_PROGRESS}steps" in arrays:
        columns["progress"] = ProgressRecords(
            **{
                f.name: _whole(arrays[f"{_PROGRESS}{f.name}"], f.name in _PROGRESS_INTS)
                for f in fields(ProgressRecords)
                if f.name not in _PROGRESS_SOME or f"{_PROGRESS}{f.name}" in arrays
            }
        )
    lines = _integers(arrays, "rejected.lines", np.int64).tolist()
    epoch = header["epoch"]
    trace = Trace(
        name=str(header["name"]),
        epoch=None if epoch is None else float(epoch),
        ids=_texts(arrays, "ids"),
        rejected=tuple(zip(lines, _texts(arrays, "rejected"), strict=True)),
        notes=tuple(map(str, header["notes"])),
        **columns,
    )
    check(trace)
    return trace


def check(trace: Trace) -> None:
    """Raise ValueError for a trace that violates `Trace`'s invariants: the engine indexes without checks."""
    count = len(trace)
    if count == 0 or len(trace.ids) != count:
        raise ValueError(f"{len(trace.ids)} ids of {count} jobs")
    finite = np.all(np.isfinite(trace.submit)) and np.all(np.isfinite(trace.arrivals))
    if not finite or np.any(np.diff(trace.arrivals) < 0):
        raise ValueError("submit times that are not in order")
    if not np.all(np.isfinite(trace.duration)) or np.any(trace.duration <= 0):
        raise ValueError("run times that are not above 0")
    for column in INTS:
        if np.any(getattr(trace, column) < _SMALLEST.get(column, -1)):
            raise ValueError(f"{column} out of range")
    for column, plural in NAMES.items():
        if np.any(getattr(trace, column) >= len(getattr(trace, plural))):
            raise ValueError(f"{column} out of range")
    for column, plural in _SOME_NAMES.items():
        rows = getattr(trace, column)
        if rows is not None and np.any((rows < -1) | (rows >= len(getattr(trace, plural)))):
            raise ValueError(f"{column} out of range")
    if trace.array_limit is not None and (
        trace.array is None or np.any((trace.array_limit >= 0) & (trace.array < 0))
    ):  # replays would take such jobs for one array
        raise ValueError("array_limit of jobs without an array")
    if not all(map(is_profile, trace.profiles)):
        raise ValueError("profiles that are not MIG profiles")
    if np.any(trace.gpu_milli > 1000) or np.any(trace.depends_on >= np.arange(count)):
        raise ValueError("gpu_milli or depends_on out of range")
    if trace.progress is not None:
        _check_progress(trace.progress, count)


def _check_progress(progress: ProgressRecords, count: int) -> None:
    lengths = {
        len(progress.steps) == len(progress.cost_s) == len(progress.cooldown_s) == count,
        len(progress.size_job) == len(progress.size_gpus) == len(progress.steps_per_s),
        len(progress.run_job) == len(progress.run_gpus) == len(progress.run_after_s) == len(progress.run_s),
    }
    if lengths != {True}:
        raise ValueError("progress: tables of several lengths")
    for jobs in (progress.size_job, progress.run_job):
        if np.any(np.diff(jobs) < 0) or np.any(jobs < 0) or np.any(jobs >= count):
            raise ValueError("progress: jobs out of order or range")
    if np.any(progress.size_gpus < 0) or np.any(progress.steps_per_s <= 0) or np.any(progress.cost_s < 0):
        raise ValueError("progress: sizes, speeds or costs out of range")
    if not np.all(progress.cooldown_s >= 0):
        raise ValueError("progress: cool-downs out of range")
    if len(np.unique(progress.size_job)) != count:
        raise ValueError("progress: jobs without a size")
    again = np.diff(progress.size_job) == 0
    if np.any(np.diff(progress.size_gpus)[again] <= 0):
        raise ValueError("progress: sizes out of order")
    if (ranks := progress.rank_gpus) is not None:
        of = np.maximum(ranks, 1)[progress.size_job] if len(ranks) == count else np.zeros(0)
        if not len(of) or np.any(ranks < 0) or np.any(progress.size_gpus % of):
            raise ValueError("progress: sizes that are not whole ranks")


def _compact(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if len(column) and (np.all(column == column[0]) or (column.dtype.kind == "f" and np.all(np.isnan(column)))):
        return column[:1].copy()
    if column.dtype.kind == "f":
        return column
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    types = (np.int8, np.int16, np.int32, np.int64)
    return column.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


def _spread(column: npt.NDArray[Any], count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if column.ndim != 1 or column.dtype.kind not in "if" or len(column) not in (1, count):
        raise ValueError(f"a column of shape {column.shape} for {count} jobs")
    return np.full(count, column[0], dtype) if len(column) != count else column.astype(dtype)


def _integers(arrays: Mapping[str, npt.NDArray[Any]], name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    column = arrays[name]
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(f"{name} of shape {column.shape} and type {column.dtype}")
    return column.astype(dtype)


def _whole(column: npt.NDArray[Any], ints: bool) -> npt.NDArray[Any]:
    if column.ndim != 1 or column.dtype.kind not in ("i" if ints else "f"):
        raise ValueError(f"progress: a column of shape {column.shape} and type {column.dtype}")
    return column.astype(np.int64 if ints else np.float64)


def _put_texts(arrays: _Arrays, name: str, texts: Sequence[str]) -> None:
    joined = "".join(texts)
    encoded = joined.encode("utf-8", "surrogateescape")
    if len(encoded) == len(joined):  # ASCII: characters are bytes
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    else:
        sizes = np.array([len(text.encode("utf-8", "surrogateescape")) for text in texts], np.int64)
    arrays[f"{name}.bytes"] = np.frombuffer(encoded, np.uint8)
    arrays[f"{name}.ends"] = np.cumsum(sizes, dtype=np.int64)


def _texts(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> tuple[str, ...]:
    data = _integers(arrays, f"{name}.bytes", np.uint8).tobytes()
    ends = _integers(arrays, f"{name}.ends", np.int64).tolist()
    if any(b < a for a, b in pairwise([0, *ends])) or (ends[-1] if ends else 0) != len(data):
        raise ValueError(f"{name}: offsets that do not fit")
    if data.isascii():
        text = data.decode("ascii")
        return tuple([text[a:b] for a, b in pairwise([0, *ends])])
    return tuple([data[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise([0, *ends])])
