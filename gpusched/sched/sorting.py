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
def by_priority(jobs: Ints, priority: Ints) -> Ints:
    """Return the jobs by ``priority: int64[jobs]``, largest first; equal ones stay as they stand. Empty: all are."""
    if priority.size > 0:
        for i in range(1, jobs.size):
            if priority[jobs[i]] != priority[jobs[0]]:
                ordered: Ints = jobs[stable_order(-priority[jobs])]
                return ordered
    return jobs


@jit
def ascending(numbers: Ints) -> Ints:
    """Return ``numbers`` in ascending order, a copy."""
    return np.sort(numbers)
