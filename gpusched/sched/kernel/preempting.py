"""The pass with preemption: which jobs keep their nodes and which get others, live and in replays.

Its queue has running and pending jobs. No job starts in it: a job that is allocated nodes may have to wait until
others have left them. The state's resources are all that can be allocated, its releases those of jobs that keep
their nodes or are allocated some. By these, a place is kept for a job that waits for a reservation's end (`keeping`).
"""

from __future__ import annotations

from typing import NamedTuple

from gpusched.compiled import inlined, jit
from gpusched.sched.backfill import take
from gpusched.sched.bounds import charge
from gpusched.sched.fit import gpus_asked, request_of, with_mask
from gpusched.sched.kernel.queue_pass import KEPT, hold_nothing, in_order, queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.reclaim import Holders, finds, keeps, part_taken
from gpusched.sched.releases import add
from gpusched.sched.state import (
    BEST_FIT,
    FASTEST,
    FIRST_FIT,
    MILP,
    NAIVE,
    PRIORITY,
    RANDOM,
    SKIP,
    STARTED,
    WHOLE,
    Calendar,
    ClusterState,
    Flags,
    Floats,
    Ints,
    PlacementRequest,
    Releases,
    Resources,
    SharedGpus,
)

GIVEN = 101
"""In place of a code: it is given nodes that it does not have, on which others may still be."""


PINNED = 2


def steady_rule(place: int) -> int:
    """Return the placement rule for preemptible jobs: first fit for random rules, best fit for a mapping."""
    return {NAIVE: FIRST_FIT, RANDOM: FIRST_FIT, FASTEST: BEST_FIT, MILP: BEST_FIT}.get(place, place)


class Filling(NamedTuple):
    """Progressive filling, the order of DRF: the user with the least dominant share so far goes next.

    A job that does not fit is passed over. Ties between users go to the job that is first in the queue.

    Attributes:
        share: ``float64[users]``: dominant shares; of size 0: jobs are taken as queued. user: ``int64[jobs]``.
        priority: ``int64[jobs]``: by which the queue is sorted, and only jobs of equal priority take turns; empty: all.
        total: ``float64[3]``: GPUs, cores and MiB of all nodes, each at least 1.
    """

    share: Floats
    user: Ints
    priority: Ints
    total: Floats


class PreemptiveAllocation(NamedTuple):
    """The resources to allocate, and the nodes allocated to jobs.

    Attributes:
        idle: What the jobs before left of the resources that no job uses now.
        usable: The nodes as they are, empty of jobs.
        runs: ``uint8[jobs]``: 1, or PINNED: its nodes were taken for it before all others.
        first: ``int64[jobs]``: where a running job's nodes begin in ``held: int64[...]``.
        ends: ``float64[jobs]``: when a running job ends by its limit, seconds.
        holders: The running jobs in the queue's order. ``through: int64[2]``: how many have been gone through, and all.
            None: the placement rule chooses the jobs to preempt.
        rule: How jobs are placed.
        order: ``int64[jobs]``: the jobs that are allocated nodes, first to last; ``used[0]`` of them.
        nodes: ``int64[parts]``: theirs, of job j from ``offset[j]`` on (``int64[jobs]``); ``used[1]`` in all.
        cleared: ``uint8[jobs]``: whether others have to leave nodes that it is given.
        filling: Chooses the next job. None: jobs are taken as queued, and nothing of it is compiled.
    """

    idle: Resources
    usable: Resources
    runs: Flags
    first: Ints
    held: Ints
    ends: Floats
    holders: Holders | None
    through: Ints
    rule: int
    order: Ints
    nodes: Ints
    offset: Ints
    used: Ints
    cleared: Flags
    filling: Filling | None = None


@jit
def _keeps(state: ClusterState, job: int, of: PreemptiveAllocation) -> bool:
    if of.runs[job] != 1:
        return bool(of.runs[job] == PINNED)
    request = request_of(state.requests, state.jobs.shape[job])
    kept = keeps(state.resources, of.usable, request, of.held, of.first[job], job)
    if kept:
        note_held(state.scratch.calendar, state.releases, request, of.held, of.first[job], of.ends[job], job)
    _note_kept(of.holders, of.through, kept)
    return kept


@jit
def note_held(
    calendar: Calendar | None, releases: Releases, request: PlacementRequest, nodes: Ints, first: int, end: float,
    job: int
) -> None:  # fmt: skip
    """Record until when a job holds ``nodes[first:]``, where nodes are reserved; not used elsewhere."""
    if calendar is not None:
        for part in range(request.parts):
            add(releases, end, nodes[first + part], request, job)


@jit
def _note_kept(holders: Holders | None, through: Ints, kept: bool) -> None:
    if holders is not None:
        holders.kept[through[0]] = kept
        through[0] += 1


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: PreemptiveAllocation) -> tuple[int, int]:
    jobs, scratch, shape = state.jobs, state.scratch, state.jobs.shape[job]
    request, idle, whole = request_of(state.requests, shape), of.idle, state.resources
    if not finds(whole, idle, of.usable, jobs.masks, request, of.rule, scratch, of.holders, of.through, job):
        scratch.failed[shape] = scratch.stamp[0]
        return PRIORITY, shape
    of.order[of.used[0]], of.offset[job] = job, of.used[1]
    for part in range(request.parts):
        node = scratch.chosen[part]
        of.nodes[of.used[1] + part] = node
        if idle.gpus[node] < 0 or idle.cores[node] < 0 or idle.memory[node] < 0:
            of.cleared[job] = 1
    note_held(scratch.calendar, state.releases, request, scratch.chosen, 0, state.now + jobs.limit[job], job)
    of.used[0] += 1
    of.used[1] += request.parts
    if not of.runs[job]:
        charge(jobs.links, jobs.room, jobs.account, job)
    return GIVEN, shape


@jit
def _following(state: ClusterState, queue: Ints, at: int, head: int, of: PreemptiveAllocation) -> int:
    _fill(of.filling, state, queue, at)
    return in_order(state, queue, at, head, of)


@jit
def _fill(filling: Filling | None, state: ClusterState, queue: Ints, at: int) -> None:
    """Account for what the previous job was given, and move the next one to place ``at`` of the queue."""
    if filling is None:
        return
    share, user, total, best = filling.share, filling.user, filling.total, at
    priority = filling.priority
    if share.size == 0:
        return
    if at == 0:
        share[:] = 0.0
    elif state.outcome.code[queue[at - 1]] >= KEPT:
        job = queue[at - 1]
        of = request_of(state.requests, state.jobs.shape[job])
        gpus = gpus_asked(of.milli, of.gpus)
        share[user[job]] += of.parts * max(gpus / total[0], max(of.cores / total[1], of.memory / total[2]))
    for i in range(at + 1, queue.size):
        if priority.size > 0 and priority[queue[i]] != priority[queue[at]]:
            break
        if share[user[queue[i]]] < share[user[queue[best]]]:
            best = i
    for i in range(best, at, -1):
        queue[i], queue[i - 1] = queue[i - 1], queue[i]


preempting_pass = queue_pass(_place, hold_nothing, keeps=_keeps, following=_following)


@inlined
@jit
def plan_starts(state: ClusterState, queue: Ints, free: Resources, shares: PreemptiveAllocation) -> None:
    """Run the pass, and start the waiting jobs whose nodes are free now.

    The others start once jobs have left their nodes, in a later decision. ``free``: what no job uses; changed. Masks
    were checked at the allocation; since then a node may be kept for a later job, so they are not checked again.
    """
    begun, jobs = shares.used[0], state.jobs
    preempting_pass(state, queue, SKIP, shares)
    for job in shares.order[begun : shares.used[0]]:
        request, first = request_of(state.requests, jobs.shape[job]), shares.offset[job]
        fits = shares.runs[job] == 0 and _has_part(state.resources.shared, free, job, shares.nodes[first])
        for part in range(request.parts):
            fits = fits and node_fits(free, jobs.masks, with_mask(request, -1), shares.nodes[first + part])
        if fits:
            state.outcome.code[job] = STARTED
            request = part_taken(state.resources.shared, free.shared, request, job)
            for part in range(request.parts):
                take(free, request, shares.nodes[first + part])


@jit
def _has_part(given: SharedGpus | None, free: Resources, job: int, node: int) -> bool:
    """Return whether the GPU of which a job was given a part has room for it now."""
    if given is None or free.shared is None:
        return True
    if given.milli[job] >= WHOLE:
        return True
    room = free.shared.room[given.on[job]]
    return bool(room >= given.milli[job] and (room < WHOLE or free.gpus[node] > 0))
