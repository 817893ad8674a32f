"""numba's sorts, each compiled once for all passes: inlined, they would be most of what some passes compile.

In: arrays. Out: the same in order. May import: `compiled`. Begin with `stable_order`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.sched.state import Ints


@jit
def stable_order(keys: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the order in which ``keys`` ascend, ``int64[keys]``; equal ones stay as they stand."""
    return np.argsort(keys, kind="mergesort")


@jit
def ascending(numbers: Ints) -> Ints:
    """Return ``numbers`` in ascending order, a copy."""
    return np.sort(numbers)
