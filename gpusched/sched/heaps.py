"""Binary min-heaps of (time, number) pairs; equal times by number, so that runs are reproducible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints


class Heap(NamedTuple):
    """A heap.

    Attributes:
        key: ``float64[capacity]``. item: ``int64[capacity]``. size: ``int64[1]``.
    """

    key: Floats
    item: Ints
    size: Ints


def new_heap(capacity: int) -> Heap:
    """Return an empty heap."""
    return Heap(np.zeros(capacity), np.zeros(capacity, np.int64), np.zeros(1, np.int64))


@jit
def push(heap: Heap, key: float, item: int) -> None:
    """Add a pair."""
    at = heap.size[0]
    heap.size[0] = at + 1
    while at > 0:
        above = (at - 1) >> 1
        if heap.key[above] < key or (heap.key[above] == key and heap.item[above] < item):
            break
        heap.key[at] = heap.key[above]
        heap.item[at] = heap.item[above]
        at = above
    heap.key[at] = key
    heap.item[at] = item


@jit
def pop(heap: Heap) -> int:
    """Remove the smallest pair and return its item. The heap must not be empty."""
    smallest = heap.item[0]
    size = heap.size[0] - 1
    heap.size[0] = size
    key, item = heap.key[size], heap.item[size]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            heap.key[right] < heap.key[below]
            or (heap.key[right] == heap.key[below] and heap.item[right] < heap.item[below])
        ):
            below = right
        if key < heap.key[below] or (key == heap.key[below] and item < heap.item[below]):
            break
        heap.key[at] = heap.key[below]
        heap.item[at] = heap.item[below]
        at = below
    heap.key[at] = key
    heap.item[at] = item
    return int(smallest)


@jit
def remove(heap: Heap, item: int) -> None:
    """Remove an item wherever it is, in time linear in the heap; do nothing if it is absent."""
    size = heap.size[0]
    at = 0
    while at < size and heap.item[at] != item:
        at += 1
    if at == size:
        return
    key = heap.key[at]
    while at > 0:
        above = (at - 1) >> 1
        heap.key[at] = heap.key[above]
        heap.item[at] = heap.item[above]
        at = above
    heap.key[0] = key
    heap.item[0] = item
    pop(heap)
