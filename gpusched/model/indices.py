"""Array indices as spans: ascending, disjoint, both ends included: ``((0, 4), (7, 7))`` is 0-4,7."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

Spans = tuple[tuple[int, int], ...]

_SPAN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")


def spans_of(indices: Iterable[int]) -> Spans:
    """Return the spans of these indices, given in any order."""
    found: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if found and index == found[-1][1] + 1:
            found[-1] = found[-1][0], index
        else:
            found.append((index, index))
    return tuple(found)


def parse(text: str) -> Spans:
    """Parse `text_of`'s format, in any order.

    Raises:
        ValueError: It names no indices.
    """
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(text)
        found.append((int(match[1]), int(match[2] or match[1])))
    return union(found)


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the union of these spans, given in any order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def text_of(spans: Spans, width: int = 0) -> str:
    """Format spans as ``0-4,7``, or as ``00-04,07`` with a width of 2."""
    return ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in spans)


def count(spans: Spans) -> int:
    """Return the number of indices."""
    return sum(last - first + 1 for first, last in spans)


def expand_spans(spans: Spans) -> Iterator[int]:
    """Yield the indices, ascending."""
    return (index for first, last in spans for index in range(first, last + 1))


def lowest(spans: Spans, limit: int) -> list[int]:
    """Return the lowest indices, at most ``limit``."""
    return list(islice(expand_spans(spans), limit))


def intersection(one: Spans, other: Spans) -> Spans:
    """Return the intersection."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            found.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(spans: Spans, removed: Spans) -> Spans:
    """Return the indices of ``spans`` that are not in ``removed``."""
    found, j = [], 0
    for first, last in spans:
        while j < len(removed) and removed[j][1] < first:
            j += 1
        k = j
        while k < len(removed) and removed[k][0] <= last:
            if removed[k][0] > first:
                found.append((first, removed[k][0] - 1))
            first = removed[k][1] + 1
            k += 1
        if first <= last:
            found.append((first, last))
    return tuple(found)
