"""Strategies that many properties draw from, and how many examples they try."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
_TIMES = int(os.environ.get("GPUSCHED_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Return how many examples to try: ``count``, or as many times more as ``GPUSCHED_EXAMPLES`` says.

    ``count`` is five times as many, or more, as the bugs that were tried needed to be noticed.
    """
    return count * _TIMES


@lru_cache(maxsize=None, typed=True)  # 1 is not 1.0
def among(*values: T) -> st.SearchStrategy[T]:
    """Return `sampled_from` these values, made once: to make one takes longer than to draw from it."""
    return st.sampled_from(values)
