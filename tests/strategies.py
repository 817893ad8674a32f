"""Strategies that many properties draw from."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@lru_cache(maxsize=None, typed=True)  # 1 is not 1.0
def among(*values: T) -> st.SearchStrategy[T]:
    """Return `sampled_from` these values, made once: to make one takes longer than to draw from it."""
    return st.sampled_from(values)
