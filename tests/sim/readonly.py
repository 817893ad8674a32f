"""Inputs in pages that the kernel protects against writing: replays of several threads share them.

A write ends the process, even one that is undone at once, which comparing before and after would miss. numpy's own flag
would not do: compiled passes do not look at it, and are compiled anew for arrays that have it.

``python -m tests.sim.readonly FOLDER`` prints the digests of all recorded replays, each with its inputs so.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.sim.replay import replay
from tests.sim import recorded


def protected(value: Any) -> Any:
    """Return the same with all arrays in it, however deep, in pages of their own that cannot be written to."""
    if isinstance(value, np.ndarray):
        return _protected_array(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(protected, value))
    if isinstance(value, tuple | list):
        return type(value)(map(protected, value))
    if isinstance(value, Mapping):
        return {key: protected(of) for key, of in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{of.name: protected(getattr(value, of.name)) for of in fields(value) if of.init})
    return value


def _protected_array(array: np.ndarray) -> np.ndarray:
    if array.size == 0:
        return array
    pages = mmap.mmap(-1, array.nbytes)
    copy: np.ndarray = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    libc = ctypes.CDLL(None, use_errno=True)
    whole = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(copy.ctypes.data), ctypes.c_size_t(whole), mmap.PROT_READ) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def main(folder: Path) -> None:
    """Print the digests, with every input protected."""
    recorded.replay = lambda *inputs, **options: replay(*protected(inputs), **protected(options))
    print(json.dumps(recorded.record(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
