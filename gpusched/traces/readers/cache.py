"""Parsed traces in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.traces import file as tracefile
from gpusched.traces.trace import Trace

MAX_FILES = 32


def folder() -> Path:
    """Return ``$XDG_CACHE_HOME/gpusched/traces``, else ~/.cache/gpusched/traces."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "gpusched" / "traces"


def place(sources: list[Path], format: str) -> Path | None:
    """Return the cache path for the trace of these files; None where none is possible.

    The name depends on the files' paths, sizes and times of change, on the format, and on the importers' own code.
    """
    digest = hashlib.sha256(_code() + format.encode())
    try:
        for source in sources:
            found = source.stat()
            digest.update(os.fsencode(f"\0{source.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"))
        return folder() / f"{digest.hexdigest()[:32]}{tracefile.SUFFIX}"
    except (OSError, RuntimeError):
        return None


def get(file: Path | None) -> Trace | None:
    """Return the cached trace, or None if missing or damaged."""
    if file is None or not file.exists():
        return None
    try:
        trace = tracefile.read(file)
        os.utime(file)  # the least recently used are dropped first
    except (GpuschedError, OSError):
        return None
    return trace


def put(file: Path | None, trace: Trace) -> None:
    """Cache a trace, and at most `MAX_FILES` of them; write errors are ignored."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tracefile.write(file, trace)
        kept = sorted(file.parent.glob(f"*{tracefile.SUFFIX}"), key=lambda f: f.stat().st_mtime)
        for old in kept[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except (GpuschedError, OSError):
        return


def _code() -> bytes:
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "trace.py", here.parent / "file.py"]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).digest()
