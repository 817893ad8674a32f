"""GPU selection inside a node: the closest GPUs, leaving the remaining ones close to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb

from gpusched.model.snapshot import NodeView

Links = tuple[tuple[int, ...], ...]
_MAX_COMBINATIONS = 2000


def links_matrix(gpus: Sequence[int], links: Mapping[int, Mapping[int, int]]) -> Links:
    """Return ``links`` as a square matrix over ``gpus`` in their order; unknown links are 0.

    Where the two directions differ, the farther counts.
    """
    rows = []
    for a in gpus:
        near = links.get(a, {})
        rows.append(tuple([near.get(b, 0) if a != b else 0 for b in gpus]))
    matrix, mirrored = tuple(rows), tuple(zip(*rows, strict=True))
    if matrix == mirrored:
        return matrix
    return tuple(tuple(map(min, row, column)) for row, column in zip(matrix, mirrored, strict=True))


def picked(node: NodeView, free: Sequence[int], count: int, matrices: dict[str, Links]) -> tuple[int, ...]:
    """Return so many of a node's ``free`` GPUs, the nearest to each other; ``matrices``: of links, each built once."""
    free = sorted(free)
    if not node.links or count == 0 or count >= len(free):
        return tuple(free[:count])
    gpus = sorted(node.gpus)
    matrix = matrices.get(node.name) or matrices.setdefault(node.name, links_matrix(gpus, node.links))
    return tuple(gpus[i] for i in nearest_gpus(matrix, tuple(gpus.index(gpu) for gpu in free), count))


@lru_cache(maxsize=4096)
def nearest_gpus(matrix: Links, free: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return ``count`` of the ``free`` positions of ``matrix`` with the greatest sum of mutual closeness.

    Ties: the choice with the best link of the worst connected GPU (a ring is as fast as its slowest link); then the one
    that leaves the greatest closeness among the GPUs that stay free (so that larger NVLink islands stay whole), then
    the lowest positions. Exact up to 2000 combinations (8 GPUs have at most 70), else greedy from every first GPU.
    """
    if count <= 0 or count >= len(free):
        return free[: max(count, 0)]
    exact = comb(len(free), count) <= _MAX_COMBINATIONS
    candidates = combinations(free, count) if exact else (_grow(matrix, free, first, count) for first in free)
    scored = [(_closeness(matrix, chosen), chosen) for chosen in candidates]
    most = max(closeness for closeness, _ in scored)
    equal = [chosen for closeness, chosen in scored if closeness == most]
    return max(equal, key=lambda chosen: (*_merit(matrix, free, chosen), tuple(-g for g in chosen)))


def _merit(matrix: Links, free: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[int, int]:
    left = [g for g in free if g not in chosen]
    worst = min(sum(matrix[a][b] for b in chosen) for a in chosen)
    return worst, _closeness(matrix, left)


def _closeness(matrix: Links, gpus: Sequence[int]) -> int:
    return sum(matrix[a][b] for a, b in combinations(gpus, 2))


def _grow(matrix: Links, free: tuple[int, ...], first: int, count: int) -> tuple[int, ...]:
    chosen = [first]
    while len(chosen) < count:
        others = (g for g in free if g not in chosen)
        chosen.append(max(others, key=lambda g: (sum(matrix[g][c] for c in chosen), -g)))
    return tuple(sorted(chosen))
