"""Load recorded workloads as a `Trace`: one module per format, detected from the file, parsed once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from gpusched.config.openers import refuse_pipe
from gpusched.config.plugins import OURS, components
from gpusched.errors import GpuschedError, UsageError, Warnings
from gpusched.traces.trace import Trace

_NOT_KEPT = frozenset({"history", "gpusched"})  # changes all the time; is quick already


class TraceReader(Protocol):
    """The type of the entry points ``gpusched.traces``: reads a file, or a folder of a multi-table format."""

    def __call__(self, path: Path, *, strict: bool) -> Trace:
        """Return the trace; bad rows are kept out and named (`readers.draft`), or refused when ``strict``.

        Raises:
            FileError: The file is not of the format; or strict, and a row is bad (file:line).
        """


def load(
    path: Path | str,
    format: str | None = None,
    *,
    vc: str | None = None,
    since: float | str | None = None,
    until: float | str | None = None,
    strict: bool = False,
) -> Trace:
    """Load the workload of a file, or of a folder (multi-table formats; gpusched's state), compressed or not.

    Args:
        path: The file or folder.
        format: A name among the `components` of ``traces``; None guesses it from the content.
        vc: See `slice_trace`.
        since: See there.
        until: See there.
        strict: Refuse the first bad row instead of keeping it out.

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
    """Return the format of a file or folder, and the file (for several tables: the folder) to read.

    Raises:
        UsageError: The format is unknown, or cannot be guessed.
        GpuschedError: The file cannot be read.
    """
    from gpusched.traces.readers.guess import detect_format, find_in_folder

    if format is not None and format not in components("traces"):
        from gpusched.model.suggest import did_you_mean

        raise UsageError(f"no trace format '{format}'{did_you_mean(format, components('traces'))}")
    try:
        refuse_pipe(path)
        if path.is_dir():
            return find_in_folder(path, format)
        name = format or detect_format(path) or _claimed(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: No such file or directory") from None
    except (OSError, ValueError) as error:
        raise GpuschedError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if name is None:
        raise UsageError(f"{path}: its format cannot be detected", f"use --format ({', '.join(components('traces'))})")
    return name, path


def _claimed(path: Path) -> str | None:
    """Return another package's format that accepts the file by its reader's function ``matches``, if any."""
    for component in components("traces").values():
        if component.distribution != OURS:
            try:
                matches = getattr(component.load(), "matches", None)
                if matches is not None and matches(path):
                    return component.name
            except Exception as error:  # a broken reader must not keep other traces from loading
                Warnings.give(str(error if isinstance(error, GpuschedError) else component.error(repr(error))))
    return None


def _load(path: Path, format: str | None, *, strict: bool) -> Trace:
    from gpusched.traces.readers import cache

    name, source = resolve(path, format)
    # sacct's times are of this machine's zone
    kind = f"{name} {time.tzname}" if name == "sacct" else name
    kept = None if name in _NOT_KEPT else cache.place(_sources(source), kind)
    if not strict and (trace := cache.get(kept)) is not None:
        return trace
    component = components("traces")[name]
    read: TraceReader = component.load()
    try:
        trace = read(source, strict=strict)
    except OSError as error:
        raise GpuschedError(f"{error.filename or source}: {error.strerror or error}") from None
    except MemoryError:
        raise GpuschedError(f"{source}: too large for this machine's memory", "cut it into smaller files") from None
    except Exception as error:
        if component.distribution == OURS or isinstance(error, GpuschedError):
            raise
        raise component.failed(error) from error
    if not isinstance(trace, Trace):
        raise component.error(f"it returned {type(trace).__name__}, not a Trace")
    cache.put(kept, trace)
    return trace


def _sources(source: Path) -> list[Path]:
    if source.is_dir() or source.name.startswith("pai_"):
        folder = source if source.is_dir() else source.parent
        return sorted(f for f in folder.glob("pai_*_table*") if f.is_file())
    return [source]
