"""Whether a request fits: now, on the partition as it is, on the empty partition; and what is short."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BAD_CONSTRAINTS,
    FIRST_FIT,
    NOT_AVAILABLE,
    OK,
    RESERVED,
    WHOLE,
    Calendar,
    ClusterState,
    Flags,
    Ints,
    PlacementRequest,
    QueueJobs,
    Requests,
    Resources,
    Scratch,
)

ALLOWED, GPUS, CORES, MEMORY = 0, 1, 2, 3


@jit
def entry(column: Ints | None, shape: int, without: int) -> int:
    """Return an entry of a column that may be None (`Requests`)."""
    return without if column is None else int(column[shape])


@jit
def part_asked(milli: Ints | None, shape: int) -> int | None:
    """Return `PlacementRequest.milli`."""
    if milli is None:
        return None
    return int(milli[shape])


@jit
def gpus_asked(milli: int | None, gpus: int) -> float:
    """Return how many GPUs a request is for on each node, parts of one included."""
    if milli is None:
        return float(gpus)
    return gpus * milli / WHOLE


@jit
def request_of(requests: Requests, shape: int) -> PlacementRequest:
    """Return the request with index ``shape``."""
    return PlacementRequest(
        requests.lo[shape],
        requests.hi[shape],
        requests.parts[shape],
        requests.gpus[shape],
        requests.cores[shape],
        requests.memory[shape],
        requests.mask[shape],
        entry(requests.spread, shape, 0),
        part_asked(requests.milli, shape),
    )


@jit
def with_gpus(request: PlacementRequest, gpus: int) -> PlacementRequest:
    """Return the same request for another number of GPUs."""
    return PlacementRequest(
        request.lo, request.hi, request.parts, gpus, request.cores, request.memory, request.mask, request.spread,
        request.milli,
    )  # fmt: skip


@jit
def with_mask(request: PlacementRequest, mask: int) -> PlacementRequest:
    """Return the same request for nodes of another row of the masks."""
    return PlacementRequest(
        request.lo, request.hi, request.parts, request.gpus, request.cores, request.memory, mask, request.spread,
        request.milli,
    )  # fmt: skip


@jit
def set_feasibility(total: Resources, usable: Resources, requests: Requests, jobs: QueueJobs, scratch: Scratch) -> None:
    """Set ``jobs.feasibility``: whether each request can ever run.

    BAD_CONSTRAINTS: not even on ``total``, the nodes as declared, all of them empty and well. NOT_AVAILABLE: not on
    ``usable``, without those that are not available and without blocked GPUs, empty of jobs. RESERVED: only when
    reservations are over. Else OK. Of a request with looser ones: whether any of them can.
    """
    for shape in range(jobs.feasibility.size):
        set_feasibility_of(shape, total, usable, requests, jobs, scratch)


@jit
def set_feasibility_of(
    shape: int, total: Resources, usable: Resources, requests: Requests, jobs: QueueJobs, scratch: Scratch
) -> None:
    """Do so for one request; that of its looser ones must be set already."""
    masks, feasibility = jobs.masks, jobs.feasibility
    request, looser = request_of(requests, shape), entry(requests.looser, shape, -1)
    if (looser >= 0 and feasibility[looser] == OK) or choose(usable, masks, request, FIRST_FIT, scratch):
        feasibility[shape] = OK
    elif looser >= 0 and feasibility[looser] == RESERVED:
        feasibility[shape] = RESERVED
    elif choose(usable, masks, unreserved(scratch.calendar, request), FIRST_FIT, scratch):
        feasibility[shape] = RESERVED
    elif looser >= 0 and feasibility[looser] == NOT_AVAILABLE:
        feasibility[shape] = NOT_AVAILABLE
    elif choose(total, masks, unreserved(scratch.calendar, request), FIRST_FIT, scratch):
        feasibility[shape] = NOT_AVAILABLE
    else:
        feasibility[shape] = BAD_CONSTRAINTS


@jit
def fitting(state: ClusterState, queue: Ints) -> Flags:
    """Return ``uint8[shapes]``: which of the queue's shapes could start now."""
    jobs = state.jobs
    fits, seen = np.zeros((2, jobs.feasibility.size), np.uint8)
    for job in queue:
        shape = jobs.shape[job]
        if seen[shape] == 0:
            seen[shape] = 1
            if jobs.feasibility[shape] == OK:
                request = request_of(state.requests, shape)
                fits[shape] = choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch)
    return fits


@jit
def unreserved(calendar: Calendar | None, request: PlacementRequest) -> PlacementRequest:
    """Return the request as if nothing were reserved for others."""
    return with_mask(request, unreserved_row(calendar, request.mask))


@jit
def unreserved_row(calendar: Calendar | None, row: int) -> int:
    """Return the row of the masks for jobs of ``row`` if nothing were reserved for others."""
    if calendar is None or row < 0 or calendar.base.size == 0:
        return row
    return int(calendar.base[row])


@jit
def shortfall(resources: Resources, masks: Flags, request: PlacementRequest) -> tuple[int, int, int]:
    """Return what is short: (dimension, count of nodes with enough up to it, nearest node or -1).

    The dimension is the first of ALLOWED, GPUS, CORES, MEMORY of which fewer than ``parts`` nodes have enough, among
    the nodes that have enough of those before it; -1 where the request fits.
    """
    columns, needs = (resources.gpus, resources.cores, resources.memory), (request.gpus, request.cores, request.memory)
    counts = [0, 0, 0, 0]
    nearest = [-1, -1, -1, -1]
    for node in range(request.lo, request.hi):
        if resources.gpus[node] < 0 or (request.mask >= 0 and not masks[request.mask, node]):
            continue
        counts[ALLOWED] += 1
        for dimension in range(GPUS, MEMORY + 1):
            has = columns[dimension - 1]
            if nearest[dimension] < 0 or has[node] > has[nearest[dimension]]:
                nearest[dimension] = node
            if has[node] < needs[dimension - 1]:
                break
            counts[dimension] += 1
    for dimension in range(4):
        if counts[dimension] < request.parts:
            return dimension, counts[dimension], nearest[dimension]
    return -1, counts[MEMORY], -1
