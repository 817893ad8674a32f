"""The steps of a pass over a queue: where a job fits, what a start takes, what is reserved for the head.

EASY: Lifka, "The ANL/IBM SP scheduling system" (JSSPP 1995); Mu'alem and Feitelson, IEEE TPDS 12(6), 2001. Here the
head's reservation is on concrete nodes. A later job may start if it fits now and ends (by its limit) no later than the
head's shadow time, or takes only what the head will leave over on its nodes then. So the head starts no later than it
would with nothing started behind it, provided that running jobs keep to their limits. Of a job with several requests
(`Requests.looser`) the one that fits first is reserved, of several at once the tightest: so this holds for it, too.
"""

from __future__ import annotations

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.sched.bounds import charge
from gpusched.sched.fit import entry, request_of, with_gpus, with_mask
from gpusched.sched.place import (
    by_rack,
    choose,
    count_fit,
    draw,
    draw_fitting,
    gives_gpus,
    max_in_rack,
    with_room,
)
from gpusched.sched.releases import add, settle
from gpusched.sched.reservations.calendar import concerns, open_times
from gpusched.sched.state import (
    BACKFILL,
    FIRST_FIT,
    NAIVE,
    POLICY,
    PRIORITY,
    RANDOM,
    STARTED,
    UNLIMITED,
    WHOLE,
    Calendar,
    ClusterState,
    Flags,
    PlacementRequest,
    Releases,
    Requests,
    Resources,
    Scratch,
    SharedGpus,
    Words,
)


@jit
def attempt_any(state: ClusterState, shape: int, rule: int, late: bool, rng: Words) -> tuple[int, int]:
    """Call `attempt` for a request and, if it does not fit, its looser ones; return the code and the request."""
    masks, requests, scratch = state.jobs.masks, state.requests, state.scratch
    stamp, why, at = scratch.stamp[0], PRIORITY, shape
    while at >= 0:
        if scratch.failed[at] == stamp:
            code = PRIORITY
        elif late and scratch.failed_late[at] == stamp:
            code = BACKFILL
        else:
            code = attempt(state.resources, masks, request_of(requests, at), at, rule, late, rng, scratch)
        if code == STARTED:
            return code, at
        why = code if why == PRIORITY else why
        at = entry(requests.looser, at, -1)
    return why, shape


@jit
def attempt(
    resources: Resources,
    masks: Flags,
    request: PlacementRequest,
    shape: int,
    rule: int,
    late: bool,
    rng: Words,
    scratch: Scratch,
) -> int:
    """Set ``scratch.chosen`` and return STARTED, or PRIORITY (no fit), BACKFILL, or POLICY (unlucky draw)."""
    stamp = scratch.stamp[0]
    if rule == NAIVE and request.spread == 0 and not has_parts(resources.shared):
        if draw(scratch.late if late else resources, masks, request, rng, scratch):
            return STARTED
        return POLICY if choose(resources, masks, request, FIRST_FIT, scratch) else PRIORITY
    if rule in (RANDOM, NAIVE) and request.spread == 0:
        if draw_fitting(scratch.late if late else resources, masks, request, rng, scratch):
            return STARTED
    elif choose(scratch.late if late else resources, masks, request, undrawn(rule), scratch):
        return STARTED
    if late:
        scratch.failed_late[shape] = stamp
        if choose(resources, masks, request, FIRST_FIT, scratch):
            return BACKFILL
    scratch.failed[shape] = stamp
    return PRIORITY


@jit
def undrawn(rule: int) -> int:
    """Return the rule, with first fit in place of a random one."""
    return FIRST_FIT if rule == NAIVE or rule == RANDOM else rule


@jit
def launch(state: ClusterState, request: PlacementRequest, job: int, late: bool, guarded: bool) -> None:
    """Start a job on ``scratch.chosen``; ``guarded``: there is a reservation, ``late``: the job outlasts it."""
    resources, releases, _, jobs, scratch, outcome, now = state
    outcome.started[outcome.total[0]] = job
    outcome.offset[job] = outcome.total[1]
    for part in range(request.parts):
        take(resources, request, scratch.chosen[part])
        outcome.nodes[outcome.total[1] + part] = scratch.chosen[part]
    note_release(resources, releases, request, job, now + jobs.limit[job], late, guarded, scratch)
    outcome.total[0] += 1
    outcome.total[1] += request.parts
    charge(jobs.links, jobs.room, jobs.account, job)


@jit
def has_parts(shared: SharedGpus | None) -> bool:
    """Return whether jobs share GPUs in parts."""
    return shared is not None


@jit
def enter(shared: SharedGpus | None, request: PlacementRequest, job: int, node: int) -> PlacementRequest:
    """Give a job its part of a GPU of ``node``, if it is for one; return what it takes of whole GPUs.

    That is the GPU in ``shared.on``, if one is there already.
    """
    if shared is None:
        return request
    if shared.milli[job] >= WHOLE:
        return request
    if shared.on[job] < 0:
        shared.on[job] = with_room(shared, shared.milli[job], node)
    if shared.on[job] < 0:
        gpu = shared.first[node]
        while shared.room[gpu] < WHOLE:
            gpu += 1
        shared.on[job] = gpu
    return with_gpus(request, take_part(shared, shared.on[job], shared.milli[job]))


@jit
def take_part(shared: SharedGpus, gpu: int, milli: int) -> int:
    """Take a part of a GPU; return how many GPUs of its node that takes: none, if others have parts of it."""
    opens = shared.room[gpu] == WHOLE
    shared.room[gpu] -= milli
    return 1 if opens else 0


@jit
def returned(shared: SharedGpus | None, to: SharedGpus | None, job: int, gpus: int) -> int:
    """Give a running job's part of a GPU back to ``to``; return how many whole GPUs that gives, else ``gpus``."""
    if shared is None:
        return gpus
    if to is None:
        return gpus
    gpu = shared.on[job]
    if gpu < 0:
        return gpus
    to.room[gpu] += shared.milli[job]
    return 1 if to.room[gpu] == WHOLE else 0


@jit
def copy_room(to: SharedGpus | None, shared: SharedGpus | None) -> None:
    """Copy what is left of shared GPUs."""
    if to is None:
        return
    if shared is None:
        return
    to.room[:] = shared.room


@inlined
@jit
def note_release(
    resources: Resources, releases: Releases, request: PlacementRequest, job: int, end: float, late: bool,
    guarded: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    """Record what a job started on ``scratch.chosen`` will give back, and what late jobs may take beside it."""
    for part in range(request.parts):
        node = scratch.chosen[part]
        add(releases, end, node, request, job)
        if guarded:
            if late:
                take(scratch.spare, request, node)
            refresh_late(resources, scratch, node)


@jit
def take(resources: Resources, request: PlacementRequest, node: int) -> None:
    """Take one part off ``node``."""
    resources.gpus[node] -= request.gpus
    resources.cores[node] -= request.cores
    resources.memory[node] -= request.memory


@jit
def give(resources: Resources, request: PlacementRequest, node: int) -> None:
    """Give one part back to ``node``."""
    resources.gpus[node] += request.gpus
    resources.cores[node] += request.cores
    resources.memory[node] += request.memory


@jit
def reserve_any(
    resources: Resources,
    releases: Releases,
    masks: Flags,
    requests: Requests,
    shape: int,
    rule: int,
    now: float,
    limit: float,
    scratch: Scratch,
) -> tuple[float, int]:
    """Call `reserve` for the first of a request and its looser ones that fits; return its time and index."""
    best, first, at, last = np.inf, shape, shape, shape
    while at >= 0:
        shadow = reserve(resources, releases, masks, request_of(requests, at), rule, now, limit, scratch)
        if shadow < best:
            best, first = shadow, at
        at, last = entry(requests.looser, at, -1), at
    if first != last:
        reserve(resources, releases, masks, request_of(requests, first), rule, now, limit, scratch)
    return best, first


@inlined
@jit
def reserve(
    resources: Resources, releases: Releases, masks: Flags, request: PlacementRequest, rule: int, now: float,
    limit: float,
    scratch: Scratch,
) -> float:  # fmt: skip
    """Return the shadow time: the earliest at which ``request`` fits, by limits of running jobs (overrun: now).

    Where nodes are reserved, the earliest at which it fits for ``limit`` seconds on such as are its by then.

    Sets ``scratch.future`` to the resources at that time, and ``scratch.chosen`` to the nodes by the placement rule
    (naive, random: first fit). What runs on nodes that are not available gives nothing back. Infinite if it never fits.
    """
    return earliest(scratch.calendar, resources, releases, masks, request, rule, now, limit, scratch)


@jit
def earliest(
    calendar: Calendar | None, resources: Resources, releases: Releases, masks: Flags, request: PlacementRequest,
    rule: int,
    now: float, limit: float, scratch: Scratch,
) -> float:  # fmt: skip
    """Call `reserve` with this calendar; None: nothing is reserved, whatever `Scratch.calendar` holds.

    Where nodes are reserved, the end of a reservation frees nodes, as the end of a job does. The begin of a reservation
    closes nodes: before it, only jobs that end by then may use them. These changes are made in a row of the masks of
    their own (`Calendar.work`), which the placement reads.
    """
    future, ask, between, opens, closes, shut, opened = scratch.future, request, False, -np.inf, np.inf, 0, 0
    kept = 0  # 1: what is kept for another begins to count, 2: and is over
    gpus, cores, memory = future.gpus, future.cores, future.memory  # the loops' own arrays
    if calendar is not None:
        between = calendar.node.size > 0
        if between:
            opens, closes = open_times(calendar, request.mask)
            ask = with_mask(request, calendar.work)
            for node in range(ask.lo, ask.hi):
                calendar.closed[node], masks[ask.mask, node] = 0, masks[calendar.base[request.mask], node]
    copy_room(future.shared, resources.shared)
    fitting, within = 0, not between and by_rack(scratch.racks, FIRST_FIT, request)  # nodes that fit; of one rack
    for node in range(ask.lo, ask.hi):
        gpus[node], cores[node], memory[node] = resources.gpus[node], resources.cores[node], resources.memory[node]
        fitting += _holds(future.shared, gpus[node], cores[node], memory[node], masks, ask, node)
    if within:
        fitting = max_in_rack(scratch.racks, resources, masks, request)
    settle(releases)  # the walk below takes releases in order of their ends
    ends, order, where, at, used = releases.end, releases.order, releases.node, 0, releases.used[0]
    freed_gpus, freed_cores, freed_memory = releases.gpus, releases.cores, releases.memory
    time = max(now, opens)
    until = time if between else -np.inf  # without reservations, free resources may do, even with overdue jobs
    while time < np.inf and not time + limit > closes:
        while at < used and ends[order[at]] <= until:
            slot = order[at]
            at += 1
            node = where[slot]
            if node < ask.lo or node >= ask.hi or gpus[node] < 0:
                continue
            # `fitting` counts nodes, so only the release that makes a node fit changes it
            before = _holds(future.shared, gpus[node], cores[node], memory[node], masks, ask, node)
            gpus[node] += returned(resources.shared, future.shared, releases.owner[slot], freed_gpus[slot])
            cores[node] += freed_cores[slot]
            memory[node] += freed_memory[slot]
            if before or not _holds(future.shared, gpus[node], cores[node], memory[node], masks, ask, node):
                continue
            if within:
                fitting = max(fitting, count_fit(scratch.racks, node))
            else:
                fitting += 1
        following = ends[order[at]] if at < used else np.inf
        if calendar is not None:
            # a node is lost as soon as the job would reach into its reservation, and is back when that ends: entries
            # are sorted by begin, `by_end` by end, so both cursors only move forward with time
            while shut < calendar.node.size and calendar.begin[shut] < time + limit:
                if concerns(calendar, shut, request.mask):
                    fitting += _turned(calendar, calendar.node[shut], 1, masks, ask, request.mask, future)
                shut += 1
            if kept == 0 and calendar.kept_times[0] < time + limit:
                kept = 1
                for part in range(calendar.kept_for[1]):
                    fitting += _turned(calendar, calendar.kept[part], 1, masks, ask, request.mask, future)
            while opened < calendar.node.size and calendar.end[calendar.by_end[opened]] <= time:
                if concerns(calendar, calendar.by_end[opened], request.mask):
                    at_end = calendar.node[calendar.by_end[opened]]
                    fitting += _turned(calendar, at_end, -1, masks, ask, request.mask, future)
                opened += 1
            if kept == 1 and calendar.kept_times[1] <= time:
                kept = 2
                for part in range(calendar.kept_for[1]):
                    fitting += _turned(calendar, calendar.kept[part], -1, masks, ask, request.mask, future)
            if opened < calendar.node.size:
                following = min(following, calendar.end[calendar.by_end[opened]])
            if kept < 2:
                following = min(following, calendar.kept_times[1])
        # the count is cheap and exact except for racks and weights: nodes are chosen only at times that can succeed
        if fitting >= request.parts and choose(future, masks, ask, undrawn(rule), scratch):
            return float(time)
        time = until = max(now, following)
    return np.inf


@jit
def _turned(
    calendar: Calendar, node: int, by: int, masks: Flags, ask: PlacementRequest, row: int, future: Resources
) -> int:  # fmt: skip
    """Apply the begin (1) or the end (-1) of a reservation to a node; return how many more nodes fit."""
    if node < ask.lo or node >= ask.hi:
        return 0
    before = _holds(future.shared, future.gpus[node], future.cores[node], future.memory[node], masks, ask, node)
    calendar.closed[node] += by
    masks[ask.mask, node] = masks[calendar.base[row], node] if calendar.closed[node] == 0 else 0
    after = _holds(future.shared, future.gpus[node], future.cores[node], future.memory[node], masks, ask, node)
    return int(after) - int(before)


@jit
def _holds(
    shared: SharedGpus | None, gpus: int, cores: int, memory: int, masks: Flags, request: PlacementRequest, node: int
) -> bool:
    """Return `place.node_fits` for these resources of the node."""
    if not gives_gpus(shared, gpus, request, node) or cores < request.cores or memory < request.memory:
        return False
    return bool(request.mask < 0 or masks[request.mask, node] != 0)


@jit
def protect(resources: Resources, request: PlacementRequest, reserved: bool, scratch: Scratch) -> None:
    """Set ``scratch.spare`` and ``scratch.late`` from the reservation just made by `reserve`.

    Where jobs share GPUs in parts the head leaves nothing over on its nodes.
    """
    spare = scratch.spare
    for node in range(request.lo, request.hi):
        spare.gpus[node] = spare.cores[node] = spare.memory[node] = UNLIMITED
    if reserved:
        for part in range(request.parts):
            node = scratch.chosen[part]
            spare.gpus[node] = scratch.future.gpus[node] - request.gpus
            if has_parts(resources.shared):
                spare.gpus[node] = -1
            spare.cores[node] = scratch.future.cores[node] - request.cores
            spare.memory[node] = scratch.future.memory[node] - request.memory
    for node in range(request.lo, request.hi):
        refresh_late(resources, scratch, node)


@jit
def keep_request(
    resources: Resources, releases: Releases, masks: Flags, request: PlacementRequest, rule: int, begin: float,
    limit: float, scratch: Scratch,
) -> float:  # fmt: skip
    """Keep for the head the nodes where it fits first (`reserve`, then `protect`); return when that is."""
    shadow = reserve(resources, releases, masks, request, rule, begin, limit, scratch)
    protect(resources, request, shadow < np.inf, scratch)
    return float(shadow)


@jit
def keep_for(state: ClusterState, job: int, rule: int, begin: float) -> float:
    """Do the same for a job, by the first of its request and its looser ones that fits (`reserve_any`)."""
    jobs, requests, scratch = state.jobs, state.requests, state.scratch
    shadow, given = reserve_any(
        state.resources, state.releases, jobs.masks, requests, jobs.shape[job], rule, begin, jobs.limit[job], scratch,
    )  # fmt: skip
    protect(state.resources, request_of(requests, given), shadow < np.inf, scratch)
    return shadow


@jit
def refresh_late(resources: Resources, scratch: Scratch, node: int) -> None:
    """Set ``scratch.late`` of one node."""
    scratch.late.gpus[node] = min(resources.gpus[node], scratch.spare.gpus[node])
    scratch.late.cores[node] = min(resources.cores[node], scratch.spare.cores[node])
    scratch.late.memory[node] = min(resources.memory[node], scratch.spare.memory[node])
