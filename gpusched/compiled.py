"""The door to numba: one decorator, and a cache folder that is never stale.

numba notices changes of a function's own file only, not of the files of the functions it calls. So the cache folder's
name carries a digest of all sources that hold compiled passes: an upgrade compiles once more, and never runs old code.
``NUMBA_DISABLE_JIT=1`` runs the same functions as plain Python; ``NUMBA_CACHE_DIR`` is honoured as numba does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")
_COMPILED_FOLDERS = ("sched", "sim", "learn")


def _cache_folder() -> Path:
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(f for folder in _COMPILED_FOLDERS for f in (package / folder).rglob("*.py")):
        digest.update(f"{source.relative_to(package)}\0".encode() + source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gpusched" / "numba" / digest.hexdigest()[:16]


def _prepare_cache() -> bool:
    """Whether compiled code can be kept on disk; a read-only home only costs compile time."""
    try:
        folder = Path(os.environ.setdefault("NUMBA_CACHE_DIR", str(_cache_folder())))
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        os.environ.pop("NUMBA_CACHE_DIR", None)
        return False
    return os.access(folder, os.W_OK)


_CACHE = _prepare_cache()

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when imported)


def is_cached() -> bool:
    """Whether some passes were compiled before and kept, so that using them does not take seconds."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR", ""))
    return _CACHE and next(folder.rglob("*.nbi"), None) is not None


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` compiled on first use, without Python objects, kept on disk."""
    return cast(Callable[_P, _R], numba.njit(cache=_CACHE, error_model="numpy")(function))
