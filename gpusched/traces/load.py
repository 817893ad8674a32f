"""Recorded workloads read as a `Trace`: one module per format, guessed from the file, parsed once."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import cast

from gpusched.errors import GpuschedError, UsageError
from gpusched.traces.trace import Trace

FORMATS: dict[str, str] = {  # what reads it
    "philly-csv": "gpusched.traces.readers.philly_csv.read",
    "philly": "gpusched.traces.readers.philly.read",
    "helios": "gpusched.traces.readers.slurm_like.read_helios",
    "pai2020": "gpusched.traces.readers.pai2020.read",
    "openb": "gpusched.traces.readers.openb.read",
    "acme": "gpusched.traces.readers.slurm_like.read_acme",
    "swf": "gpusched.traces.readers.swf.read",
    "sacct": "gpusched.traces.readers.sacct.read",
    "gavel": "gpusched.traces.readers.gavel.read",
    "history": "gpusched.traces.readers.history.read",
    "gpusched": "gpusched.traces.file.read",
}
_NOT_KEPT = frozenset({"history", "gpusched"})  # changes all the time; is quick already


def load(
    path: Path | str,
    format: str | None = None,
    *,
    vc: str | None = None,
    since: float | str | None = None,
    until: float | str | None = None,
    strict: bool = False,
) -> Trace:
    """The workload of a file, of a folder (formats of several tables; gpusched's state), compressed or not.

    ``format``: a name of `FORMATS`; None guesses it from the content. ``vc``, ``since``, ``until``: see `slice_trace`.
    ``strict`` refuses the first bad row instead of keeping it out.

    Raises:
        FileError: Not of that format; or strict, and a row is bad (file:line).
        GpuschedError: It cannot be read, its format cannot be detected, or no job is left.
    """
    from gpusched.traces.slicing import slice_trace

    trace = _load(Path(path), format, strict=strict)
    if vc is None and since is None and until is None:
        return trace
    return slice_trace(trace, vc=vc, since=since, until=until)


def resolve(path: Path, format: str | None = None) -> tuple[str, Path]:
    """The format of a file or folder, and the file (for several tables: the folder) to read.

    Raises:
        UsageError: The format is unknown, or cannot be guessed.
        GpuschedError: The file cannot be read.
    """
    from gpusched.traces.readers.guess import find_in_folder, guess

    if format is not None and format not in FORMATS:
        from gpusched.model.suggest import did_you_mean

        raise UsageError(f"no trace format '{format}'{did_you_mean(format, FORMATS)}")
    try:
        if path.is_dir():
            return find_in_folder(path, format)
        name = format or guess(path)
    except (OSError, ValueError) as error:
        raise GpuschedError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if name is None:
        raise UsageError(f"{path}: its format cannot be detected", f"use --format ({', '.join(FORMATS)})")
    return name, path


def _load(path: Path, format: str | None, *, strict: bool) -> Trace:
    from gpusched.traces.readers import cache

    name, source = resolve(path, format)
    # sacct's times are of this machine's zone
    kind = f"{name} {time.tzname}" if name == "sacct" else name
    kept = None if name in _NOT_KEPT else cache.place(_sources(source), kind)
    if not strict and (trace := cache.get(kept)) is not None:
        return trace
    module, _, read = FORMATS[name].rpartition(".")
    try:
        trace = cast(Trace, getattr(importlib.import_module(module), read)(source, strict=strict))
    except OSError as error:
        raise GpuschedError(f"{error.filename or source}: {error.strerror or error}") from None
    cache.put(kept, trace)
    return trace


def _sources(source: Path) -> list[Path]:
    if source.is_dir() or source.name.startswith("pai_"):
        folder = source if source.is_dir() else source.parent
        return sorted(f for f in folder.glob("pai_*_table*") if f.is_file())
    return [source]
