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
        save = made._cache.save_overload

        def save_if_possible(*version: Any) -> None:
            with suppress(OSError):  # without disk space every process compiles it
                save(*version)

        made._cache.save_overload = save_if_possible
    return made
