"""Who is to blame when a step over many jobs raises: found by halving. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def isolated(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The items with which alone ``fails`` says yes, in their order; about log2(items) questions for each."""
    if not items or not fails(items):
        return []
    if len(items) == 1:
        return list(items)
    half = len(items) // 2
    return isolated(items[:half], fails) + isolated(items[half:], fails)
