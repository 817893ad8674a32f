"""Overlapping use of GPUs by two attempts: each is charged half of that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple, TypeVar

K = TypeVar("K")


class HeldGpus(NamedTuple):
    """GPUs by node that an attempt held between two times (Unix seconds), shared or not."""

    gpus: Mapping[str, Iterable[int]]
    begin: float
    end: float


def overlaps(held: Mapping[K, HeldGpus]) -> Iterator[tuple[K, K, int, float, float]]:
    """Yield each pair of attempts that held the same GPUs at once: both keys, number of GPUs, begin, end."""
    by_gpu: dict[tuple[str, int], list[K]] = {}
    for key, one in held.items():
        for node, own in one.gpus.items():
            for gpu in own:
                by_gpu.setdefault((node, gpu), []).append(key)
    counts: dict[tuple[K, K], int] = {}
    for keys in by_gpu.values():
        for pair in combinations(keys, 2):
            counts[pair] = counts.get(pair, 0) + 1
    for (a, b), gpus in counts.items():
        begin, end = max(held[a].begin, held[b].begin), min(held[a].end, held[b].end)
        if begin < end:
            yield a, b, gpus, begin, end
