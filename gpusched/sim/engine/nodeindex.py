"""Nodes by free GPUs: picks the same nodes as `sched.place.choose` without looking at every node.

For pools where only GPUs bind (`Demand.gpus_only`). One bitmap of nodes per number of free GPUs; a node that is not
available is in none. A test holds `pick_nodes` and `choose` together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import BEST_FIT, FIRST_FIT, Ints, PlacementRequest, Resources

_BITS = 32
_FULL = (1 << _BITS) - 1
_MOST_LEVELS = 65


class NodeIndex(NamedTuple):
    """The bitmaps.

    Attributes:
        words: ``int64[levels, words]``: bit ``node % 32`` of word ``node // 32`` of level f: the node has f GPUs free.
        counts: ``int64[levels]``: nodes of each level.
    """

    words: Ints
    counts: Ints


def new_index(resources: Resources, useful: bool = True) -> NodeIndex:
    """Return the nodes' index; without levels (unused) if not useful or if nodes have more than 64 GPUs."""
    levels = int(resources.gpus.max(initial=0)) + 1
    if not useful or levels > _MOST_LEVELS:
        return NodeIndex(np.zeros((0, 0), np.int64), np.zeros(0, np.int64))
    index = NodeIndex(np.zeros((levels, len(resources.gpus) // _BITS + 1), np.int64), np.zeros(levels, np.int64))
    for node, free in enumerate(resources.gpus.tolist()):
        add_node(index, node, free)
    return index


@jit
def add_node(index: NodeIndex, node: int, free: int) -> None:
    """Add a node with ``free`` GPUs (negative: do not add it)."""
    if free >= 0:
        index.words[free, node // _BITS] |= 1 << (node % _BITS)
        index.counts[free] += 1


@jit
def move_node(index: NodeIndex, node: int, before: int, after: int) -> None:
    """Move ``node`` from ``before`` free GPUs to ``after``."""
    if before >= 0:
        index.words[before, node // _BITS] &= ~(1 << (node % _BITS))
        index.counts[before] -= 1
    add_node(index, node, after)


@jit
def can_fit(index: NodeIndex, gpus: int, parts: int) -> bool:
    """Return whether ``parts`` nodes of the pool have ``gpus`` free: necessary; sufficient without partitions."""
    found = 0
    for free in range(gpus, index.counts.size):
        found += index.counts[free]
        if found >= parts:
            return True
    return False


@jit
def pick_nodes(index: NodeIndex, request: PlacementRequest, rule: int, chosen: Ints) -> bool:
    """Select nodes as `place.choose` for first fit, best fit and spread, where only GPUs bind; into ``chosen``."""
    if not can_fit(index, request.gpus, request.parts):
        return False
    first, last = request.lo // _BITS, (request.hi - 1) // _BITS
    levels = index.counts.size
    found = 0
    # First fit takes nodes in order, however many of their GPUs are free: the union of all levels with enough.
    if rule == FIRST_FIT:
        for word in range(first, last + 1):
            bits = 0
            for free in range(request.gpus, levels):
                bits |= index.words[free, word]
            found = _collect(bits, word, request, found, chosen)
            if found == request.parts:
                return True
        return False
    # Best fit begins with the fewest free GPUs, spread with the most; within a level, nodes in order.
    for step in range(levels - request.gpus):
        free = request.gpus + step if rule == BEST_FIT else levels - 1 - step
        if index.counts[free] == 0:
            continue
        for word in range(first, last + 1):
            found = _collect(index.words[free, word], word, request, found, chosen)
            if found == request.parts:
                return True
    return False


@jit
def _collect(bits: int, word: int, request: PlacementRequest, found: int, chosen: Ints) -> int:
    """Append one word's nodes to ``chosen``, up to ``request.parts``; return the new count."""
    if bits == 0:
        return found
    base = word * _BITS
    if base < request.lo:
        bits &= _FULL << (request.lo - base)
    if base + _BITS > request.hi:
        bits &= _FULL >> (base + _BITS - request.hi)
    while bits != 0 and found < request.parts:
        chosen[found] = base + _lowest(bits)
        found += 1
        bits &= bits - 1
    return found


@jit
def _lowest(bits: int) -> int:
    """Return the index of the lowest set bit of ``0 < bits < 2**32``."""
    at = 0
    if bits & 0xFFFF == 0:
        bits >>= 16
        at = 16
    if bits & 0xFF == 0:
        bits >>= 8
        at += 8
    if bits & 0xF == 0:
        bits >>= 4
        at += 4
    if bits & 0x3 == 0:
        bits >>= 2
        at += 2
    return at + 1 - (bits & 1)
