"""The sharing pass after the policies' own: a job that still waits for resources may share a running job's GPUs.

Two jobs share, and no more: the newcomer has some or all GPUs of the other one, on each of its nodes. Which jobs may
share, and the slowdown of each, are in one table (`Pairings.cost`). Sharing does not delay the first job that does not
start, by the expected ends of running jobs: a GPU that two jobs share is free when the last of them ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import give, reserve_any, take
from gpusched.sched.fit import request_of, with_gpus
from gpusched.sched.kernel.queue_pass import in_order, queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.releases import add, drop
from gpusched.sched.state import (
    BACKFILL,
    EASY,
    FIRST_FIT,
    PRIORITY,
    RESOURCES,
    STARTED,
    ClusterState,
    Flags,
    Floats,
    Ints,
    PassOutcome,
    PlacementRequest,
    Records,
    Releases,
)

MAX_KINDS = 32  # of jobs of a pass: the first of its queue
MAX_FAILED_SEARCHES = 16  # different jobs of a pass: each scans all running jobs
MAX_PLACES = 4  # tried for a job: each scans all nodes

# A job that runs and shares. owner: as in `Releases`. column: of `Pairings.cost`. parts, first: its nodes, in
# `Pairings.nodes`. least, most: how many GPUs on each of them a newcomer may have. taken: 1: it has a partner.
MATE = np.dtype([(n, np.int64) for n in ("owner", "column", "parts", "first", "least", "most", "taken")])
# A job for which nothing was found: what is asked for, and how long it would run at least, seconds.
FAILED_SEARCH = np.dtype([("row", np.int64), ("shape", np.int64), ("limit", np.float64)])


class Pairings(NamedTuple):
    """Which jobs may share the GPUs of which.

    Attributes:
        mates: ``MATE[n]``; of equally good ones the first is taken. nodes: ``int64[...]``: theirs.
        cost: ``float64[kinds, rows, columns]``: what is lost by such a pair on a kind of nodes: the pair that loses
            least is made; infinite: they may not be together.
        kind: ``int64[nodes]``. row: ``int64[jobs]``; -1: it shares nothing.
        tried: ``uint8[rows]``: 1: of the first `MAX_KINDS` of the queue.
        beside: ``int64[n]``: the mates of those that are started, in order of their starts.
        head, fits: ``int64[1]``, ``float64[1]``: the first that does not start (-1: none), and when it fits without
            jobs that are started later.
        failed: ``FAILED_SEARCH[MAX_FAILED_SEARCHES]``: jobs for which no mate was found in this pass.
        counts: ``int64[2]``: how many these are, and how many were started.
    """

    mates: Records
    nodes: Ints
    cost: Floats
    kind: Ints
    row: Ints
    tried: Flags
    beside: Ints
    head: Ints
    fits: Floats
    failed: Records
    counts: Ints


@jit
def wait_for_room(outcome: PassOutcome, queue: Ints) -> Ints:
    """Return the jobs of a queue that after a policy's pass wait for free resources only."""
    found, count = np.empty(queue.size, np.int64), 0
    for job in queue:
        code = outcome.code[job]
        if code == RESOURCES or code == PRIORITY or code == BACKFILL:
            found[count] = job
            count += 1
    return found[:count]


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: Pairings) -> tuple[int, int]:
    """Place beside the mate with the least loss that does not delay the head; else return the code it had."""
    shape, limit, row = state.jobs.shape[job], state.jobs.limit[job], of.row[job]
    code, tried, least, mate = state.outcome.code[job], 0, -np.inf, -1
    if row < 0 or of.tried[row] == 0 or _already_failed(of, row, shape, limit):
        return code, shape
    request = request_of(state.requests, shape)
    while tried < MAX_PLACES:
        least, mate = _next_mate(state, of, row, request, least, mate)
        if mate < 0:
            break
        # a job that ends before the head can fit does not delay it: its mate holds the GPUs as long anyway
        if not late or not _delays(state, of, job, request, mate):
            at = of.mates[mate]["first"]
            for part in range(request.parts):
                state.scratch.chosen[part] = of.nodes[at + part]
            of.beside[of.counts[1]] = mate
            return STARTED, shape
        tried += 1
    failed = of.failed[of.counts[0]]
    failed["row"], failed["shape"], failed["limit"] = row, shape, limit if tried > 0 else 0.0
    of.counts[0] += 1
    return code, shape


@jit
def _already_failed(of: Pairings, row: int, shape: int, limit: float) -> bool:
    """Return whether nothing was found for a similar job that ends as soon: free resources only shrink."""
    for at in range(of.counts[0]):
        failed = of.failed[at]
        if failed["row"] == row and failed["shape"] == shape and limit >= failed["limit"]:
            return True
    return False


@jit
def _next_mate(
    state: ClusterState, of: Pairings, row: int, request: PlacementRequest, lost: float, before: int
) -> tuple[float, int]:
    """Return the next best mate after one with this loss, and its loss; -1: none."""
    best, least = -1, np.inf
    for at in range(of.mates.size):
        mate = of.mates[at]
        if mate["taken"] or mate["parts"] != request.parts or not mate["least"] <= request.gpus <= mate["most"]:
            continue
        cost, first, column = -np.inf, mate["first"], mate["column"]
        for part in range(request.parts):
            cost = max(cost, of.cost[of.kind[of.nodes[first + part]], row, column])
        if cost >= least or cost < lost or (cost == lost and at <= before):
            continue
        if _has_room(state, of, request, first):
            best, least = at, cost
    return least, best


@jit
def _has_room(state: ClusterState, of: Pairings, request: PlacementRequest, first: int) -> bool:
    """Return whether a job may use a mate's nodes, and fits there apart from GPUs."""
    beside = with_gpus(request, 0)
    for part in range(request.parts):
        node = of.nodes[first + part]
        inside = request.lo <= node < request.hi
        if not inside or not node_fits(state.resources, state.jobs.masks, beside, node):
            return False
    return True


@jit
def _delays(state: ClusterState, of: Pairings, job: int, request: PlacementRequest, mate: int) -> bool:
    """Return whether the head would fit later with the job there."""
    beside, first, releases = with_gpus(request, 0), of.mates[mate]["first"], state.releases
    for part in range(request.parts):
        node = of.nodes[first + part]
        take(state.resources, beside, node)
        add(releases, state.now + state.jobs.limit[job], node, beside, job)
    # as if it had started; `reserve_any` asks the releases alone
    _move_release(releases, of.mates[mate]["owner"], job, request.gpus)
    when = _fits(state, of.head[0])
    _move_release(releases, of.mates[mate]["owner"], job, -request.gpus)
    for part in range(request.parts):
        give(state.resources, beside, of.nodes[first + part])
    drop(releases, job)
    return bool(when > of.fits[0])


@jit
def _fits(state: ClusterState, job: int) -> float:
    """Return when a job fits at the latest, by the expected ends of running jobs."""
    jobs = state.jobs
    when, _ = reserve_any(
        state.resources, state.releases, jobs.masks, state.requests, jobs.shape[job], FIRST_FIT, state.now,
        jobs.limit[job], state.scratch,
    )  # fmt: skip
    return when


@jit
def _move_release(releases: Releases, owner: int, job: int, gpus: int) -> None:
    """Move the release of so many GPUs of each node from ``owner`` to ``job``, if that ends later."""
    for i in range(releases.used[0]):
        own_slot = releases.order[i]
        if releases.owner[own_slot] != owner:
            continue
        for j in range(releases.used[0]):
            other_slot = releases.order[j]
            if releases.owner[other_slot] == job and releases.node[other_slot] == releases.node[own_slot]:
                if releases.end[other_slot] > releases.end[own_slot]:
                    releases.gpus[own_slot] -= gpus
                    releases.gpus[other_slot] += gpus
                break


@jit
def _hold(state: ClusterState, job: int, code: int, of: Pairings) -> float:
    """Record the first job that waits: jobs that end before it can fit do not delay it."""
    of.head[0], of.fits[0] = job, _fits(state, job)
    return float(of.fits[0])


@jit
def _taken(state: ClusterState, job: int, request: PlacementRequest, of: Pairings) -> PlacementRequest:
    """Return the request without GPUs: its mate already holds them."""
    return with_gpus(request, 0)


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, of: Pairings) -> None:
    mate = of.mates[of.beside[of.counts[1]]]
    mate["taken"] = 1
    of.counts[1] += 1
    _move_release(state.releases, mate["owner"], job, state.requests.gpus[state.jobs.shape[job]])


@jit
def _following(state: ClusterState, queue: Ints, at: int, head: int, of: Pairings) -> int:
    return -1 if of.counts[0] == MAX_FAILED_SEARCHES else in_order(state, queue, at, head, of)


_pass_beside = queue_pass(_place, _hold, _started, following=_following, taken=_taken, renews=False)


@jit
def pass_beside(state: ClusterState, queue: Ints, pairings: Pairings) -> None:
    """Start jobs of ``queue: int64[jobs]`` beside others, where a policy could not place them (`wait_for_room`).

    As `queue_pass.queue_pass` says. ``resources`` and ``releases`` are as the policy's starts left them, and a GPU that
    two jobs have already is given back only by the one that ends last.
    """
    pairings.counts[0], pairings.head[0], kinds = 0, -1, 0
    pairings.tried[:] = 0
    for job in queue:
        row = pairings.row[job]
        if row >= 0 and kinds < MAX_KINDS and pairings.tried[row] == 0:
            pairings.tried[row] = 1
            kinds += 1
    _pass_beside(state, queue, EASY, pairings)


@jit
def pairings_of(mates: Records, nodes: Ints, cost: Floats, kind: Ints, row: Ints) -> Pairings:
    """Return the arrays that a pass needs."""
    beside, head, fits = np.zeros(mates.size, np.int64), np.full(1, -1), np.full(1, np.inf)
    failed, counts = np.zeros(MAX_FAILED_SEARCHES, FAILED_SEARCH), np.zeros(2, np.int64)
    tried = np.zeros(cost.shape[1], np.uint8)
    return Pairings(mates, nodes, cost, kind, row, tried, beside, head, fits, failed, counts)
