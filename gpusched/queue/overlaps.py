"""Overlapping use of GPUs by two attempts: each is charged half of that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    for key in sorted(held, key=lambda key: held[key].begin):
        for node, own in held[key].gpus.items():
            for gpu in own:
                by_gpu.setdefault((node, gpu), []).append(key)
    counts: dict[tuple[K, K], int] = {}
    for keys in by_gpu.values():
        # Only those that have not ended yet are compared: a GPU may have had a hundred thousand attempts.
        open_ones: list[K] = []
        for key in keys:
            open_ones = [one for one in open_ones if held[one].end > held[key].begin]
            for one in open_ones:
                counts[one, key] = counts.get((one, key), 0) + 1
            open_ones.append(key)
    for (a, b), gpus in counts.items():
        begin, end = held[b].begin, min(held[a].end, held[b].end)
        if begin < end:
            yield a, b, gpus, begin, end
