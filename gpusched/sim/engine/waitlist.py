"""Waiting jobs in a static order, found without walking the queue.

Every shape's jobs are the leaves of a tree of smallest expected run times, in order of rank, so that "the next job of
this shape that would end in time" is found in logarithmic time however long the queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.heaps import Heap, new_heap
from gpusched.sched.state import Floats, Ints


class Waitlist(NamedTuple):
    """The waiting jobs.

    Attributes:
        tree: ``float64``: a binary tree per shape (root at ``base + 1``, leaves from ``base + width``); infinite where
            no job waits.
        base, width: ``int64[shapes]``. place: ``int64[jobs]``: a job's leaf within its shape.
        at: ``int64[jobs]``: jobs by (shape, rank); those of shape s begin at ``begin[s]``.
        waiting: ``int64[shapes]``: how many wait.
        heads: All waiting jobs by rank, for strict orders (where kept).
        by_rank: ``int64[jobs]``: jobs by place in the static order.
        order: ``int64[shapes]``: shapes by partition; those of partition q are ``first[q] <= i < first[q + 1]``.
        shapes: Space for a heap of shapes (by the rank of a job of each).
    """

    tree: Floats
    base: Ints
    width: Ints
    place: Ints
    at: Ints
    begin: Ints
    waiting: Ints
    heads: Heap
    by_rank: Ints
    order: Ints
    first: Ints
    shapes: Heap


def new_waitlist(shape: Ints, rank: Ints, queue: Ints, queues: int, strict: bool) -> Waitlist:
    """Return an empty list for these jobs (``shape``: -1 never waits); if ``strict``, only ``heads`` is kept."""
    shapes = len(queue)
    count = np.bincount(shape[shape >= 0], minlength=shapes)[:shapes]
    at = np.lexsort((rank, shape))[int((shape < 0).sum()) :].astype(np.int64)
    begin = np.concatenate(([0], np.cumsum(count)))[:-1].astype(np.int64)
    place = np.zeros(len(shape), np.int64)
    place[at] = np.arange(len(at)) - begin[shape[at]]
    width = np.array([1 << max(0, int(c) - 1).bit_length() for c in count], dtype=np.int64)
    base = np.concatenate(([0], np.cumsum(2 * width)))
    order = np.argsort(queue, kind="stable").astype(np.int64)
    return Waitlist(
        tree=np.full(1 if strict else int(base[-1]), np.inf),
        base=base[:-1].astype(np.int64),
        width=width,
        place=place,
        at=at,
        begin=begin,
        waiting=np.zeros(shapes, np.int64),
        heads=new_heap(len(shape) if strict else 1),
        by_rank=np.argsort(rank).astype(np.int64),
        order=order,
        first=np.searchsorted(queue[order], np.arange(queues + 1)).astype(np.int64),
        shapes=new_heap(shapes + len(shape) + 1),
    )


@jit
def set_leaf(waitlist: Waitlist, shape: int, job: int, value: float) -> None:
    """Set a job's leaf to its expected run time, or remove the job (infinite)."""
    tree, base = waitlist.tree, waitlist.base[shape]
    at = waitlist.width[shape] + waitlist.place[job]
    tree[base + at] = value
    at >>= 1
    while at > 0:
        smaller = min(tree[base + 2 * at], tree[base + 2 * at + 1])
        if tree[base + at] == smaller:
            break
        tree[base + at] = smaller
        at >>= 1


@jit
def following(waitlist: Waitlist, shape: int, begin: int, now: float, until: float) -> int:
    """Return the first waiting job of ``shape`` from leaf ``begin`` on with ``now`` + expected <= ``until``, or -1."""
    tree, base, width = waitlist.tree, waitlist.base[shape], waitlist.width[shape]
    if begin >= width:
        return -1
    at = 1 if begin == 0 else width + begin
    while not now + tree[base + at] <= until:
        while at & 1:
            at >>= 1
        if at == 0:
            return -1
        at += 1
    while at < width:
        at *= 2
        if not now + tree[base + at] <= until:
            at += 1
    return int(waitlist.at[waitlist.begin[shape] + at - width])
