"""Names of the array types of compiled passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Records = npt.NDArray[Any]


def filled(dtype: np.dtype[Any], size: int, **columns: npt.ArrayLike) -> Records:
    """Return a record array with these columns, the others 0."""
    records = np.zeros(size, dtype)
    for name, column in columns.items():
        records[name] = column
    return records
