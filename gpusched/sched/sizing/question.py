"""The sizing problem as arrays, for rules and agents alike, live and in replays.

An agent that chooses sizes has in its module ``live``, beside ``prepare``::

    choose_sizes(prepared, question: Question) -> Sequence[int]     # GPUs by job of the question; 0: it waits

An agent that also chooses cores and memory returns ``int64[jobs, 3]``: GPUs, cores and MiB of the whole job, the latter
two at most what it gets where it has ranges of them; 0: as much as there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.sched.state import Flags, Floats, Ints, Records

_I8, _F8 = np.int64, np.float64

# A job of a partition: the resizable ones that run, then all that wait, in the queue's order. held: its GPUs; 0: it
# waits. menu: row of `Menus`. rigid: it has one size. may: it runs, and no brake forbids to resize it. resume: it was
# stopped to go on with so many GPUs; 0: it was not. restarts: how often it was resized. base: GPUs that it was tuned
# for; cores, memory: that it was submitted with for each of these. first, last: its `PART`s. submit: when. left_s: time
# that it has to go as reported, else by its limit; work: steps that it has to go, NaN: not reported. cost_s: as in
# `Claims`. job: its row in what is kept of all jobs. admitted, least: set by `settle.gather`: it is to start; its
# least size here. rank_gpus: GPUs of each rank of a hot job, one on each of its PARTs in order; 0: a resize places
# all of the job anew. rank_shape: of one that runs, the request of one more rank.
ROW = np.dtype(
    [(name, _I8) for name in ("held", "menu", "rigid", "may", "resume", "restarts", "base", "first", "last")]
    + [(name, _I8) for name in ("admitted", "least", "job", "rank_gpus", "rank_shape")]
    + [(name, _F8) for name in ("submit", "work", "cores", "memory", "left_s", "cost_s")]
)
# What a running job gives back on one node (row of the nodes' arrays).
PART = np.dtype([(name, _I8) for name in ("node", "gpus", "cores", "memory")])
CLAIM = np.dtype(
    [(name, _I8) for name in ("row", "held", "count", "base", "restarts", "wished", "cores", "memory")]
    + [(name, _F8) for name in ("left_s", "age_s", "cost_s", "share")]
)

COUNT, CAPACITY, FREE, TOTAL, OTHERS, NUMBERS = range(6)  # positions in `Claims.number`


class Menus(NamedTuple):
    """The sizes of the kinds of requests: ``int64[menus, most]`` each.

    Attributes:
        sizes: GPUs, ascending; -1 beyond the last.
        shape: Index of the request at that size; -1: no nodes can give it.
        least, widest: ``int64[menus, most, 2]``: cores and MiB on each node at that size, where they have ranges.
    """

    sizes: Ints
    shape: Ints
    least: Ints
    widest: Ints


class Scene(NamedTuple):
    """One partition, as filled in from a snapshot or a replay.

    Attributes:
        rows: ``ROW[jobs]``. parts: ``PART[...]``.
        unusable: ``uint8[jobs, most]``: sizes of its menu at which the job did not start up; here and below by ``job``.
        reported: ``float64[jobs, most]``: steps a second that it reported at a size; NaN: it never reported at that.
        menus: What sizes there are.
    """

    rows: Records
    parts: Records
    unusable: Flags
    reported: Floats
    menus: Menus


class Claims(NamedTuple):
    """Jobs that compete for GPUs: the resizable ones that run or are to start.

    Attributes:
        jobs: ``CLAIM[n]``: ``held``: GPUs now (0: it waits); ``count``: how many sizes it has; ``base``: GPUs it was
            tuned for; ``restarts``: how often it was resized; ``left_s``: seconds to go at its present size (of one
            that waits at its least one), as reported, else what is left of its limit, or an hour; ``age_s``: since its
            submission; ``cost_s``: of one more stop, by its own so far; ``share``: its dominant share of one GPU
            (``gpus * share`` is its share of what the partition has most scarcely for it); ``wished``: the answer;
            ``cores``, ``memory``: of the whole job, where the answer limits them; 0: it does not.
        sizes: ``int64[n, most]``: GPUs that it could have, ascending; ``count`` of them, here and below 0 beyond.
        shape: ``int64[n, most]``: index of the request at that size.
        allowed: ``uint8[n, most]``: whether the brakes allow that size now; always its present one, or one that waits
            any of its sizes.
        pace: ``float64[n, most]``: steps a second at that size: as reported, else from other sizes; of one that never
            reported ``gpus ** 0.8``.
        reported: ``uint8[n, most]``: whether the job reported that itself.
        number: ``int64[NUMBERS]``: ``n``; ``CAPACITY``: GPUs that all of them may have together; ``FREE``: of these
            free now, negative where rigid jobs that are to start need more than is free; ``TOTAL``: of the
            partition; ``OTHERS``: jobs that wait and are none of these.
    """

    jobs: Records
    sizes: Ints
    shape: Ints
    allowed: Flags
    pace: Floats
    reported: Flags
    number: Ints


class SizingNodes(NamedTuple):
    """The partition's nodes, and what the claims hold and ask of them; nodes are counted from the partition's first.

    Attributes:
        rack: ``int64[nodes]``: number of the node's rack; empty: the cluster has no racks.
        usable, free: ``int64[nodes, 3]``: GPUs, cores and MiB: of the empty node; free now. An unavailable node has
            none.
        asks: ``int64[n, most, 4]``: of each claim at each size: nodes, then the least GPUs, cores and MiB on each;
            0 nodes: it cannot have that size.
        widest: ``int64[n, most, 2]``: the most cores and MiB on each node.
        base: ``float64[n, 2]``: cores and MiB for each GPU that it was submitted with.
        mask: ``int64[n]``: row of ``may``; -1: it may use any node. may: ``uint8[masks, nodes]``.
        first, last: ``int64[n]``: of a running claim, its entries of ``parts`` (``PART[...]``).
    """

    rack: Ints
    usable: Ints
    free: Ints
    asks: Ints
    widest: Ints
    base: Floats
    mask: Ints
    may: Flags
    first: Ints
    last: Ints
    parts: Records


class Question(NamedTuple):
    """One partition's resizable jobs, for an agent; arrays are cut to the number of jobs.

    Every job can have its least size: ``capacity`` is enough for that. An answer is one size a job, an allowed one, and
    no more than ``capacity`` in all; 0 keeps a pending job pending, and means its least allowed size for a running one.

    Attributes:
        partition, now: The partition, and the time (seconds).
        claims: The jobs.
        names: The jobs' names (their kind, where a trace has models); "" where not known.
        capacity, free, total, others: As in ``claims.number``.
        find_nodes: Returns the partition's nodes, which few agents look at; None: not modelled.
    """

    partition: str
    now: float
    claims: Claims
    names: tuple[str, ...]
    capacity: int
    free: int
    total: int
    others: int
    find_nodes: Callable[[], SizingNodes] | None = None

    @property
    def nodes(self) -> SizingNodes | None:
        """The partition's nodes as they are now, found anew at each reading; None: not modelled."""
        return None if self.find_nodes is None else self.find_nodes()


Amounts = tuple[tuple[int, int], tuple[int, int]]
"""The least and the most cores and MiB on each node."""


def menus_of(found: Sequence[dict[int, int]], amounts: Sequence[dict[int, Amounts]]) -> Menus:
    """Build the menus from each kind of request: GPUs -> index of the request, or -1; and its amounts."""
    most = max(map(len, found), default=1)
    sizes, shape = (np.full((len(found), most), -1, _I8) for _ in range(2))
    least, widest = np.zeros((2, len(found), most, 2), _I8)
    for row, (indices, given) in enumerate(zip(found, amounts, strict=True)):
        sizes[row, : len(indices)] = sorted(indices)
        for k, gpus in enumerate(sorted(indices)):
            shape[row, k] = indices[gpus]
            if gpus in given:
                least[row, k], widest[row, k] = given[gpus]
    return Menus(sizes, shape, least, widest)


def new_claims(jobs: int, most: int) -> Claims:
    """Allocate claims for that many jobs of that many sizes."""
    sizes, shape = (np.zeros((jobs, most), _I8) for _ in range(2))
    allowed, reported = (np.zeros((jobs, most), np.uint8) for _ in range(2))
    return Claims(
        np.zeros(jobs, CLAIM), sizes, shape, allowed, np.zeros((jobs, most)), reported, np.zeros(NUMBERS, _I8)
    )


def question_of(
    claims: Claims, partition: str, now: float, names: tuple[str, ...],
    find_nodes: Callable[[], SizingNodes] | None = None,
) -> Question:  # fmt: skip
    """Build the question for an agent; ``names``: of the actual jobs."""
    count, capacity, free, total, others = claims.number.tolist()
    jobs, sizes, shape, allowed, pace, reported, number = claims
    cut = Claims(
        jobs[:count], sizes[:count], shape[:count], allowed[:count], pace[:count], reported[:count], number
    )
    return Question(partition, now, cut, names, capacity, free, total, others, find_nodes)
