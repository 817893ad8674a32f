"""Hooks of the walk over a queue where jobs share GPUs in replays, and whom `kernel.beside` may put beside whom.

A job that asks for part of a GPU goes onto one that others share where it leaves least over (best fit among a node's
GPUs), else onto a free one; the placement rule chooses among nodes. Best fit: least left over on the GPU, then the live
order (GPUs, cores, memory). Rules that draw take any node that fits with equal chance, the naive one too. With EASY the
head's reservation is on whole nodes: jobs that end after its shadow time start on other nodes only.

With pairs, two jobs take the same GPUs where nothing else is free, by the pass of the live controller: as its own jobs
do, or, of equally many GPUs, where both get more done than by taking turns (`sim.sharing.lost_together`).
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
from gpusched.sim.engine.pace import WHOLE, best_slot, claim
from gpusched.sim.engine.queue import state_of
from gpusched.sim.engine.state import EventLog, Pace, Paired, Passes, Sim
from gpusched.sim.engine.step import note, start_job
from gpusched.sim.result import PAIRED


class Shared(NamedTuple):
    """Of a pass in which jobs share GPUs."""

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
    own: int,
) -> bool:  # fmt: skip
    """Starts what may start, ``ordered: int64[waiting]`` one partition's queue; False: no parts of GPUs are shared.

    ``own``: the policy's backfill, which may not be due at this decision.
    """
    if pace is None:
        return False
    if pace.slots.size == 0:
        return False
    pairs = _has_pairs(pace.pairs)
    for job in ordered if pairs else ordered[:0]:
        outcome.code[job] = PRIORITY  # of those who are not asked
    shared = Shared(pace, sim, log, passes, rule, backfill)
    _pass_shared(state_of(sim, passes, outcome), ordered, backfill, shared)
    if own != EASY and not pairs:
        passes.releases.used[0] = passes.releases.used[1] = 0  # nobody asks when anything is given back
    return True


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: Shared) -> tuple[int, int]:
    """On GPUs that are free or have room."""
    scratch, shape = state.scratch, state.jobs.shape[job]
    request, room = request_of(state.requests, shape), scratch.late if late else state.resources
    if place_shared(of.pace, of.sim, of.passes, room, of.pace.slots, request, of.pace.milli[shape], of.rule):
        return STARTED, shape
    if late:
        scratch.failed_late[shape] = scratch.stamp[0]
    else:
        scratch.failed[shape] = scratch.stamp[0]
    return PRIORITY, shape


@jit
def _taken(state: ClusterState, job: int, request: PlacementRequest, of: Shared) -> PlacementRequest:
    return claim(of.pace, of.sim, job, request, state.scratch.chosen[0])


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, of: Shared) -> None:
    """At once, as those behind it may share with it."""
    start_job(of.sim, of.log, job, state.scratch.chosen, 0, request.gpus, 0.0)


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
    """Picks nodes for a job into ``sim.chosen``; whether there are any."""
    masks, scratch = passes.jobs.masks, passes.scratch
    if milli == WHOLE:
        if rule >= NAIVE:
            return draw_fitting(resources, masks, request, passes.rng, scratch)
        return choose(resources, masks, request, rule, scratch)
    found, least, least_key = 0, WHOLE + 1, 0
    for node in range(request.lo, request.hi):
        slot = _fitting_slot(resources, slots, masks, request, milli, node, pace.first[node], sim.node[node]["total"])
        if slot == _NOWHERE:
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


_NOWHERE = -2


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
    """The shared GPU that a job for part of one would take on ``node``; -1: a free GPU; -2: it does not fit."""
    if not node_fits(resources, masks, with_gpus(request, 0), node):
        return _NOWHERE
    slot = best_slot(slots, first, gpus, milli)
    return slot if slot >= 0 or resources.gpus[node] > 0 else _NOWHERE


# Pairs


@inlined
@jit
def pair_up(pace: Pace | None, sim: Sim, log: EventLog, passes: Passes, outcome: PassOutcome, ordered: Ints) -> None:
    """Starts beside others whom a queue's own pass left waiting for room; ``outcome``: that pass's."""
    if pace is None:
        return
    if outcome.total[0] < ordered.size:
        _pair_up(pace.pairs, pace, sim, log, passes, outcome, ordered)


@jit
def _has_pairs(pairs: Paired | None) -> bool:
    return pairs is not None


@jit
def _pair_up(
    pairs: Paired | None, pace: Pace, sim: Sim, log: EventLog, passes: Passes, outcome: PassOutcome, ordered: Ints
) -> None:
    if pairs is None:
        return
    queue, shares = wait_for_room(outcome, ordered), False
    for job in queue:
        shares |= pairs.row[job] >= 0
    if not shares:
        return
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
    pairings = pairings_of(mates[:count], sim.held, pairs.lost, pace.kind, pairs.row)
    before = outcome.total[0]
    pass_beside(state_of(sim, passes, outcome), queue, pairings)
    for at in range(before, outcome.total[0]):
        job, mate = outcome.started[at], mates[pairings.beside[at - before]]["owner"]
        pace.runs[job]["mate"] = mate
        pace.runs[mate]["mate"] = job
        note(sim, log, PAIRED, mate)
        start_job(sim, log, job, outcome.nodes, outcome.offset[job], 0, 0.0)


@inlined
@jit
def count_once(pace: Pace | None, sim: Sim, releases: Releases) -> None:
    """GPUs that two jobs have are given back by the one that is expected to end last, also once a pair has ended."""
    if pace is None:
        return
    _count_once(pace.pairs, pace, sim, releases)


@jit
def _count_once(pairs: Paired | None, pace: Pace, sim: Sim, releases: Releases) -> None:
    if pairs is None:
        return
    if pairs.parted[0] == 0:
        return
    pairs.parted[0] = 0
    for at in range(releases.used[0]):
        slot = releases.order[at]
        job = releases.owner[slot]
        mate = pace.runs[job]["mate"]
        if pace.runs[job]["slot"] < 0:
            gpus = sim.shapes[sim.jobs[job]["shape"]]["gpus"]
            if mate >= 0 and _ends_before(sim, job, mate):
                gpus = max(0, gpus - sim.shapes[sim.jobs[mate]["shape"]]["gpus"])
            releases.gpus[slot] = gpus


@jit
def _ends_before(sim: Sim, job: int, mate: int) -> bool:
    """Whether it is expected to leave the GPUs to its mate."""
    end = sim.state[job]["start"] + sim.jobs[job]["expected"]
    other = sim.state[mate]["start"] + sim.jobs[mate]["expected"]
    return bool(end < other or (end == other and job < mate))


# The head's reservation


@jit
def _hold(state: ClusterState, job: int, code: int, of: Shared) -> float:
    """When the head can start at the latest, by what is expected of running jobs; closes its nodes to late jobs."""
    if of.backfill != EASY:
        return np.inf
    pace, sim, passes, releases, scratch = of.pace, of.sim, of.passes, state.releases, state.scratch
    shape, future, spare = state.jobs.shape[job], scratch.future, scratch.spare
    request, milli = request_of(state.requests, shape), pace.milli[shape]
    future.gpus[:], future.cores[:], future.memory[:] = state.resources
    settle(releases)
    slots, fitting, at, time = _sharers(pace, releases), 0, 0, state.now
    for node in range(request.lo, request.hi):
        spare.gpus[node] = spare.cores[node] = spare.memory[node] = UNLIMITED
        fitting += part_fits(pace, sim, passes, future, slots, request, milli, node)
    while fitting < request.parts and at < releases.used[0]:
        time = max(state.now, releases.end[releases.order[at]])
        while at < releases.used[0] and releases.end[releases.order[at]] <= time:
            fitting += _give_back(pace, sim, passes, future, slots, request, milli, releases.order[at])
            at += 1
    reserved = fitting >= request.parts
    if reserved:
        place_shared(pace, sim, passes, future, slots, request, milli, FIRST_FIT if of.rule >= NAIVE else of.rule)
        for part in range(request.parts):
            spare.gpus[scratch.chosen[part]] = -1
    for node in range(request.lo, request.hi):
        refresh_late(state.resources, scratch, node)
    return float(time) if reserved else np.inf


@jit
def _following(state: ClusterState, queue: Ints, at: int, head: int, of: Shared) -> int:
    """In order; nobody behind a head who blocks all: no replay asks why they wait."""
    return -1 if head >= 0 and of.backfill == NONE else in_order(state, queue, at, head, of)


_pass_shared = inlined(queue_pass(_place, _hold, _started, following=_following, taken=_taken))


@jit
def _sharers(pace: Pace, releases: Releases) -> Records:
    """A copy of the slots in which ``jobs`` counts those on it, less one."""
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
    """1 if one part of a job fits a node, else 0."""
    masks = passes.jobs.masks
    if milli < WHOLE:
        gpus = sim.node[node]["total"]
        return int(_fitting_slot(resources, slots, masks, request, milli, node, pace.first[node], gpus) != _NOWHERE)
    return int(node_fits(resources, masks, request, node))


@jit
def _give_back(
    pace: Pace, sim: Sim, passes: Passes, future: Resources, slots: Records, request: PlacementRequest, milli: int,
    at: int
) -> int:  # fmt: skip
    """A part of a running job leaves ``future``; on how many nodes more the head fits by that."""
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
