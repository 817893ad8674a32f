"""Hooks of the queue pass for replays in which jobs share GPUs, including pairs (`kernel.beside`).

A job that asks for part of a GPU goes onto one that others share where it leaves least over (best fit among a node's
GPUs), else onto a free one; the placement rule chooses among nodes. Best fit: least left over on the GPU, then the live
order (GPUs, cores, memory). Rules that draw take any node that fits with equal chance, the naive one too. With EASY the
head's reservation is on whole nodes: jobs that end after its shadow time start on other nodes only.

With pairs, two jobs take the same GPUs where nothing else is free, by the pass of the live controller: as its own jobs
do, or, of equally many GPUs, where both get more done than by taking turns (`sim.sharing.pairing_costs`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.sched.backfill import refresh_late
from gpusched.sched.fit import request_of, with_gpus
from gpusched.sched.kernel.beside import MATE, pairings_of, pass_beside, wait_for_room
from gpusched.sched.kernel.queue_pass import in_order, queue_pass
from gpusched.sched.place import choose, draw_fitting, next_random, node_fits, sort_key
from gpusched.sched.releases import settle
from gpusched.sched.sorting import ascending
from gpusched.sched.state import (
    BEST_FIT,
    EASY,
    FIRST_FIT,
    NAIVE,
    NONE,
    PRIORITY,
    STARTED,
    UNLIMITED,
    ClusterState,
    Flags,
    Ints,
    PassOutcome,
    PlacementRequest,
    Records,
    Releases,
    Resources,
)
from gpusched.sim.engine.log import log_event
from gpusched.sim.engine.pace import WHOLE, best_slot, claim
from gpusched.sim.engine.queue import state_of
from gpusched.sim.engine.state import EventLog, Pace, Paired, Passes, Sim
from gpusched.sim.engine.step import start_job
from gpusched.sim.result import PAIRED


class Shared(NamedTuple):
    """Context of a pass in which jobs share GPUs."""

    pace: Pace
    sim: Sim
    log: EventLog
    passes: Passes
    rule: int
    backfill: int


@jit
def share_gpus(
    pace: Pace | None, sim: Sim, log: EventLog, passes: Passes, outcome: PassOutcome, ordered: Ints, rule: int,
    backfill: int,
    policy_backfill: int,
) -> bool:  # fmt: skip
    """Start jobs of ``ordered: int64[waiting]``, one partition's queue; False: no fractions of GPUs are shared.

    ``policy_backfill``: the policy's backfill, which may not be due at this decision.
    """
    if pace is None:
        return False
    if pace.slots.size == 0:
        return False
    note_unreached(sim.pairs, outcome, ordered, PRIORITY)
    pairs = _has_pairs(sim.pairs)
    shared = Shared(pace, sim, log, passes, rule, backfill)
    _pass_shared(state_of(sim, passes, outcome), ordered, backfill, shared)
    if policy_backfill != EASY and not pairs:
        passes.releases.used[0] = passes.releases.used[1] = 0  # nothing asks when GPUs are released
    return True


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, context: Shared) -> tuple[int, int]:
    """Place a job on GPUs that are free or have room."""
    scratch, shape = state.scratch, state.jobs.shape[job]
    request, room = request_of(state.requests, shape), scratch.late if late else state.resources
    if place_shared(
        context.pace,
        context.sim,
        context.passes,
        room,
        context.pace.slots,
        request,
        context.pace.milli[shape],
        context.rule,
    ):
        return STARTED, shape
    if late:
        scratch.failed_late[shape] = scratch.stamp[0]
    else:
        scratch.failed[shape] = scratch.stamp[0]
    return PRIORITY, shape


@jit
def _taken(state: ClusterState, job: int, request: PlacementRequest, context: Shared) -> PlacementRequest:
    return claim(context.pace, context.sim, job, request, state.scratch.chosen[0])


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, context: Shared) -> None:
    """Start the job at once, as those behind it may share its GPUs."""
    start_job(context.sim, context.log, job, state.scratch.chosen, 0, request.gpus, 0.0)


@jit
def place_shared(
    pace: Pace,
    sim: Sim,
    passes: Passes,
    resources: Resources,
    slots: Records,
    request: PlacementRequest,
    milli: int,
    rule: int,
) -> bool:
    """Select nodes for a job into ``sim.chosen``; return whether it fits."""
    masks, scratch = passes.jobs.masks, passes.scratch
    if milli == WHOLE:
        if rule >= NAIVE:
            return draw_fitting(resources, masks, request, passes.rng, scratch)
        return choose(resources, masks, request, rule, scratch)
    found, least, least_key = 0, WHOLE + 1, 0
    for node in range(request.lo, request.hi):
        slot = _fitting_slot(resources, slots, masks, request, milli, node, pace.first[node], sim.node[node]["total"])
        if slot == _NO_FIT:
            continue
        if rule == FIRST_FIT or rule >= NAIVE:
            scratch.keys[found] = node
            found += 1
            if rule == FIRST_FIT:
                break
            continue
        left = (WHOLE if slot < 0 else slots[slot]["room"]) - milli if rule == BEST_FIT else 0
        key = sort_key(rule, resources.gpus[node], resources.cores[node], resources.memory[node], request)
        if left < least or (left == least and key < least_key):
            scratch.keys[0] = node
            found, least, least_key = 1, left, key
    if found == 0:
        return False
    if rule >= NAIVE:
        sim.chosen[0] = scratch.keys[next_random(passes.rng, found)]
    else:
        sim.chosen[0] = scratch.keys[0]
    return True


_NO_FIT = -2


@jit
def _fitting_slot(
    resources: Resources,
    slots: Records,
    masks: Flags,
    request: PlacementRequest,
    milli: int,
    node: int,
    first: int,
    gpus: int,
) -> int:
    """Return the shared GPU for a fractional job on ``node``; -1: a free GPU; -2: it does not fit."""
    if not node_fits(resources, masks, with_gpus(request, 0), node):
        return _NO_FIT
    slot = best_slot(slots, first, gpus, milli)
    return slot if slot >= 0 or resources.gpus[node] > 0 else _NO_FIT


# Pairs


@jit
def _has_pairs(pairs: Paired | None) -> bool:
    return pairs is not None


@jit
def note_unreached(pairs: Paired | None, outcome: PassOutcome, ordered: Ints, code: int) -> None:
    """Set the code of jobs that the pass to come may not reach, by which `pair_up` goes."""
    if pairs is not None:
        for job in ordered:
            outcome.code[job] = code


@inlined
@jit
def pair_up(pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, outcome: PassOutcome, ordered: Ints) -> None:
    """Start jobs left waiting for room by ``outcome``'s pass beside running ones."""
    if pairs is None or outcome.total[0] >= ordered.size:
        return
    pace = sim.pace
    assert pace is not None
    queue, shares = wait_for_room(outcome, ordered), False
    for job in queue:
        shares |= pairs.row[job] >= 0
    if not shares:
        return
    # Mates: running jobs that agreed to share, hold whole GPUs, and share with none yet.
    running = ascending(sim.ends.item[: sim.ends.size[0]])
    mates, count = np.zeros(running.size, MATE), 0
    for other in running:
        run, shape = pace.runs[other], sim.shapes[sim.jobs[other]["shape"]]
        if run["mate"] < 0 and pairs.row[other] >= 0 and shape["gpus"] > 0:
            new = mates[count]
            new["owner"], new["column"], new["first"] = other, pairs.row[other], sim.jobs[other]["offset"]
            new["parts"], new["most"] = shape["parts"], shape["gpus"]
            new["least"] = shape["gpus"] if pairs.equal else 1
            count += 1
    if count == 0:
        return
    if pace.slots.size > 0:
        _release_slots_once(pace, passes.releases)
    pairings = pairings_of(mates[:count], sim.held, pairs.lost, pace.kind, pairs.row)
    before = outcome.total[0]
    pass_beside(state_of(sim, passes, outcome), queue, pairings)
    # The newcomer takes no GPUs (0): it runs on its mate's.
    for at in range(before, outcome.total[0]):
        job, mate = outcome.started[at], mates[pairings.beside[at - before]]["owner"]
        pace.runs[job]["mate"] = mate
        pace.runs[mate]["mate"] = job
        sim.jobs[job]["shape"] = outcome.shape[job]
        log_event(sim, log, PAIRED, mate)
        start_job(sim, log, job, outcome.nodes, outcome.offset[job], 0, 0.0)


@jit
def split_with(pace: Pace | None, job: int, starts: bool) -> int:
    """Return with whom a job that starts, or has stopped, shares its GPUs, which count half for each; -1: nobody.

    Ends are handled after both have parted (`pace.release`), so that it is noted here.
    """
    if pace is None:
        return -1
    runs = pace.runs
    if starts:
        mate = runs[job]["mate"]
        if mate < 0 or runs[job]["split"] == mate:  # of two that start at once it is noted with the first
            return -1
        runs[job]["split"], runs[mate]["split"] = mate, job
        return int(mate)
    mate = runs[job]["split"]
    if mate >= 0:
        runs[job]["split"] = runs[mate]["split"] = -1
    return int(mate)


@jit
def _release_slots_once(pace: Pace, releases: Releases) -> None:
    """Release a GPU that parts share with the job on it that is expected to end last: who opened it may have ended."""
    last = np.full(pace.slots.size, -1)
    for at in range(releases.used[0]):
        index = releases.order[at]
        slot = pace.runs[releases.owner[index]]["slot"]
        if slot >= 0 and (last[slot] < 0 or releases.end[index] >= releases.end[last[slot]]):
            last[slot] = index
    for at in range(releases.used[0]):
        index = releases.order[at]
        slot = pace.runs[releases.owner[index]]["slot"]
        if slot >= 0:
            releases.gpus[index] = 1 if last[slot] == index else 0


@inlined
@jit
def release_pairs_once(pairs: Paired | None, sim: Sim, releases: Releases) -> None:
    """Release the GPUs of a pair when its later job is expected to end, also after a pair has ended."""
    if pairs is None or pairs.parted[0] == 0:
        return
    pace = sim.pace
    assert pace is not None
    pairs.parted[0] = 0
    for at in range(releases.used[0]):
        slot = releases.order[at]
        job = releases.owner[slot]
        mate = pace.runs[job]["mate"]
        # Of a pair, the job that ends first frees only what its mate does not hold, too.
        if pace.runs[job]["slot"] < 0:
            gpus = sim.shapes[sim.jobs[job]["shape"]]["gpus"]
            if mate >= 0 and _ends_before(sim, job, mate):
                gpus = max(0, gpus - sim.shapes[sim.jobs[mate]["shape"]]["gpus"])
            releases.gpus[slot] = gpus


@jit
def _ends_before(sim: Sim, job: int, mate: int) -> bool:
    """Return whether a job is expected to end before its mate."""
    end = sim.state[job]["start"] + sim.jobs[job]["expected"]
    other = sim.state[mate]["start"] + sim.jobs[mate]["expected"]
    return bool(end < other or (end == other and job < mate))


# The head's reservation


@jit
def _reserve_for_head(state: ClusterState, job: int, code: int, context: Shared) -> float:
    """Return the latest start of the head, by expected ends of running jobs; close its nodes to late jobs."""
    if context.backfill != EASY:
        return np.inf
    pace, sim, passes, releases, scratch = context.pace, context.sim, context.passes, state.releases, state.scratch
    shape, future, spare = state.jobs.shape[job], scratch.future, scratch.spare
    request, milli = request_of(state.requests, shape), pace.milli[shape]
    future.gpus[:], future.cores[:], future.memory[:] = state.resources
    settle(releases)
    slots, fitting, at, time = _sharers(pace, releases), 0, 0, state.now
    for node in range(request.lo, request.hi):
        spare.gpus[node] = spare.cores[node] = spare.memory[node] = UNLIMITED
        fitting += part_fits(pace, sim, passes, future, slots, request, milli, node)
    # Free the running jobs by expected end, all of one time together, until the head fits.
    while fitting < request.parts and at < releases.used[0]:
        time = max(state.now, releases.end[releases.order[at]])
        while at < releases.used[0] and releases.end[releases.order[at]] <= time:
            fitting += _give_back(pace, sim, passes, future, slots, request, milli, releases.order[at])
            at += 1
    reserved = fitting >= request.parts
    # A rule that draws would choose other nodes later: the reservation is by first fit.
    if reserved:
        place_shared(
            pace, sim, passes, future, slots, request, milli, FIRST_FIT if context.rule >= NAIVE else context.rule
        )
        for part in range(request.parts):
            spare.gpus[scratch.chosen[part]] = -1
    for node in range(request.lo, request.hi):
        refresh_late(state.resources, scratch, node)
    return float(time) if reserved else np.inf


@jit
def _following(state: ClusterState, queue: Ints, at: int, head: int, context: Shared) -> int:
    """Return the next job in order; none behind a head that blocks all, as replays report no reasons."""
    return -1 if head >= 0 and context.backfill == NONE else in_order(state, queue, at, head, context)


_pass_shared = inlined(queue_pass(_place, _reserve_for_head, _started, following=_following, taken=_taken))


@jit
def _sharers(pace: Pace, releases: Releases) -> Records:
    """Return a copy of the slots in which ``jobs`` is the number of jobs, less one."""
    slots, runs = pace.slots.copy(), pace.runs
    for slot in range(slots.size):
        slots[slot]["jobs"] = -1
    for at in range(releases.used[0]):
        slot = runs[releases.owner[releases.order[at]]]["slot"]
        if slot >= 0:
            slots[slot]["jobs"] += 1
    return slots


@jit
def part_fits(
    pace: Pace,
    sim: Sim,
    passes: Passes,
    resources: Resources,
    slots: Records,
    request: PlacementRequest,
    milli: int,
    node: int,
) -> int:
    """Return 1 if one part of a job fits a node, else 0."""
    masks = passes.jobs.masks
    if milli < WHOLE:
        gpus = sim.node[node]["total"]
        return int(_fitting_slot(resources, slots, masks, request, milli, node, pace.first[node], gpus) != _NO_FIT)
    return int(node_fits(resources, masks, request, node))


@jit
def _give_back(
    pace: Pace, sim: Sim, passes: Passes, future: Resources, slots: Records, request: PlacementRequest, milli: int,
    at: int
) -> int:  # fmt: skip
    """Remove a part of a running job from ``future``; return on how many more nodes the head then fits."""
    job, node = passes.releases.owner[at], passes.releases.node[at]
    run, shape = pace.runs[job], sim.shapes[sim.jobs[job]["shape"]]
    gpus = passes.releases.gpus[at]
    if future.gpus[node] < 0:
        return 0
    inside = request.lo <= node < request.hi
    before = inside and part_fits(pace, sim, passes, future, slots, request, milli, node) != 0
    if run["slot"] >= 0:
        slots[run["slot"]]["room"] += pace.milli[sim.jobs[job]["shape"]]
        slots[run["slot"]]["jobs"] -= 1
        gpus = 1 if slots[run["slot"]]["jobs"] < 0 else 0
    future.gpus[node] += gpus
    future.cores[node] += shape["cores"]
    future.memory[node] += shape["memory"]
    return int(inside and not before and part_fits(pace, sim, passes, future, slots, request, milli, node) != 0)
