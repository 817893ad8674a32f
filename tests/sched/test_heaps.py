"""Heaps against a plain sorted list, with equal keys, and with misleading entries behind those that count."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest

from gpusched.sched.heaps import Heap, new_heap, pop, push, remove


class Reference:
    """A heap and a sorted list that hold the same."""

    def __init__(self, capacity: int) -> None:
        self.heap = new_heap(capacity)
        self.pairs: list[tuple[float, int]] = []
        self.mislead()

    def mislead(self) -> None:
        """What lies behind the heap's end would come first, and is of items that are not in it."""
        size = len(self.pairs)
        assert self.heap.size[0] == size
        self.heap.key[size:] = -np.inf
        self.heap.item[size:] = 10**6 + np.arange(self.heap.item.size - size)

    def push(self, key: float, item: int) -> None:
        push(self.heap, key, item)
        self.pairs.append((key, item))
        self.mislead()

    def pop(self) -> None:
        least = min(self.pairs)
        assert pop(self.heap) == least[1]
        self.pairs.remove(least)
        self.mislead()

    def remove(self, item: int) -> None:
        remove(self.heap, item)
        self.pairs = [pair for pair in self.pairs if pair[1] != item]
        self.mislead()
        assert sorted(entries(self.heap)) == sorted(self.pairs)


def entries(heap: Heap) -> list[tuple[float, int]]:
    size = int(heap.size[0])
    return list(zip(heap.key[:size].tolist(), heap.item[:size].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_pushes_pops_and_removals_in_random_order_agree_with_a_sorted_list(seed: int) -> None:
    rng, two = Random(seed), Reference(24)
    unused = rng.sample(range(100), 100)
    for _ in range(120):
        what = rng.random()
        if unused and len(two.pairs) < 24 and what < 0.6:
            two.push(float(rng.randrange(4)), unused.pop())
        elif two.pairs and what < 0.8:
            two.pop()
        elif two.pairs:
            two.remove(rng.choice(two.pairs)[1])
        two.remove(-1)
        two.remove(10**6)  # the number of an entry that no longer counts
    while two.pairs:
        two.pop()


@pytest.mark.parametrize("order", list(permutations([(1.0, 3), (1.0, 4), (2.0, 1), (2.0, 2)])))
@pytest.mark.parametrize("gone", range(1, 5))
def test_whichever_is_removed_the_others_leave_in_order(order: list[tuple[float, int]], gone: int) -> None:
    two = Reference(4)
    for key, item in order:
        two.push(key, item)
    two.remove(gone)
    while two.pairs:
        two.pop()
