"""Passes compiled, cached and called by numba's public interface: for versions unknown to `compiling`.

In: a function over arrays. Out: numba's own dispatcher for it. Importing this takes some 0.5 s, loading a pass longer
than `loading` takes; what passes answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numba

from gpusched.compiled.folders import cache_folder

_njit: Any = numba.njit  # with options that its types leave out


def compiled_by_numba(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first use, cached in its module's folder, which no change leaves stale."""
    made = _njit(error_model="numpy", nogil=True)(function)
    folder = cache_folder(function.__module__)
    if folder is not None:
        config = cast(Any, numba).config
        usual, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            made.enable_caching()
        finally:
            config.CACHE_DIR = usual
        cache: Any = getattr(made, "_cache", None)  # not public: a version without it only lacks this
        if hasattr(cache, "save_overload"):
            cache.save_overload = _if_possible(cache.save_overload)
    return made


def _if_possible(save: Callable[..., None]) -> Callable[..., None]:
    """Return the function without its input/output errors: without disk space every process compiles for itself."""

    def run(*version: Any) -> None:
        with suppress(OSError):
            save(*version)

    return run
