"""Hooks of the walk over a queue where jobs share GPUs in replays; live see `sched.sharing`.

A job that asks for part of a GPU goes onto one that others share where it leaves least over (best fit among a node's
GPUs), else onto a free one; the placement rule chooses among nodes. Best fit: least left over on the GPU, then the live
order (GPUs, cores, memory). Rules that draw take any node that fits with equal chance, the naive one too.

With pairs, two jobs take the same GPUs where nothing else is free: what Gavel calls space sharing (Narayanan et al.,
OSDI 2020). The newcomer takes the running job with which both together get most done, if that is more than taking
turns: the sum of the two speeds, each by the job's own speed alone, is above 1. That must have been measured.

With EASY the head's reservation is on whole nodes: jobs that end after its shadow time start on other nodes only, and
jobs behind it do not pair with running ones, which would slow these down.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.sched.backfill import refresh_late
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.queue_pass import in_order, queue_pass
from gpusched.sched.place import choose, draw_fitting, next_random, node_fits, sort_key
from gpusched.sched.releases import settle
from gpusched.sched.state import (
    BEST_FIT,
    EASY,
    FIRST_FIT,
    NAIVE,
    NONE,
    PLENTY,
    PRIORITY,
    STARTED,
    ClusterState,
    Flags,
    Ints,
    Outcome,
    Records,
    Releases,
    Request,
    Resources,
)
from gpusched.sim.engine.pace import WHOLE, best_slot, claim, with_gpus
from gpusched.sim.engine.queue import state_of
from gpusched.sim.engine.state import Log, Pace, Passes, Sim
from gpusched.sim.engine.step import begin, note
from gpusched.sim.result import PAIRED


class Shared(NamedTuple):
    """Of a pass in which jobs share GPUs."""

    pace: Pace
    sim: Sim
    log: Log
    passes: Passes
    rule: int
    backfill: int


@jit
def share_gpus(
    pace: Pace | None, sim: Sim, log: Log, passes: Passes, outcome: Outcome, ordered: Ints, rule: int, backfill: int,
    own: int,
) -> bool:  # fmt: skip
    """Starts what may start, ``ordered: int64[waiting]`` one partition's queue; False: GPUs are not shared here.

    ``own``: the policy's backfill, which may not be due at this decision.
    """
    if pace is None:
        return False
    if pace.slots.size == 0:
        return False
    shared = Shared(pace, sim, log, passes, rule, backfill)
    _pass_shared(state_of(sim, passes, outcome), ordered, backfill, shared)
    if own != EASY:
        passes.releases.used[0] = passes.releases.used[1] = 0  # nobody asks when anything is given back
    return True


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: Shared) -> tuple[int, int]:
    """On GPUs that are free or have room; with pairs also on those of one other job, but not behind a reservation."""
    scratch, shape, pace, sim = state.scratch, state.jobs.shape[job], of.pace, of.sim
    stamp, request, milli = scratch.stamp[0], request_of(state.requests, shape), pace.milli[shape]
    pairs = pace.pairs and milli == WHOLE and (first or of.backfill != EASY)
    if abs(scratch.failed[shape]) != stamp:
        room = scratch.late if late else state.resources
        if place_shared(pace, sim, of.passes, room, pace.slots, request, milli, of.rule):
            return STARTED, shape
        if late:
            scratch.failed_late[shape] = stamp
        else:  # with pairs it hangs on the job, too, so that the next one is asked
            scratch.failed[shape] = -stamp if pairs else stamp
    mate = _mate(pace, sim, of.passes, job, request) if pairs else -1
    if mate < 0:
        return PRIORITY, shape
    for part in range(request.parts):
        scratch.chosen[part] = sim.held[sim.jobs[mate]["offset"] + part]
    pace.runs[job]["mate"], pace.runs[mate]["mate"] = mate, job
    note(sim, of.log, PAIRED, mate)
    return STARTED, shape


@jit
def _taken(state: ClusterState, job: int, request: Request, of: Shared) -> Request:
    return claim(of.pace, of.sim, job, request)


@jit
def _started(state: ClusterState, job: int, request: Request, of: Shared) -> None:
    """At once, as those behind it may share with it."""
    for part in range(request.parts):
        of.sim.held[of.sim.jobs[job]["offset"] + part] = state.scratch.chosen[part]
    begin(of.sim, of.log, job, request, 0.0)


@jit
def place_shared(
    pace: Pace, sim: Sim, passes: Passes, resources: Resources, slots: Records, request: Request, milli: int, rule: int
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
    resources: Resources, slots: Records, masks: Flags, request: Request, milli: int, node: int, first: int, gpus: int
) -> int:
    """The shared GPU that a job for part of one would take on ``node``; -1: a free GPU; -2: it does not fit."""
    if not node_fits(resources, masks, with_gpus(request, 0), node):
        return _NOWHERE
    slot = best_slot(slots, first, gpus, milli)
    return slot if slot >= 0 or resources.gpus[node] > 0 else _NOWHERE


# Pairs


@jit
def _mate(pace: Pace, sim: Sim, passes: Passes, job: int, request: Request) -> int:
    """The running job that a newcomer does best to share all GPUs with; -1: none is worth it, or measured."""
    row, best, most = pace.runs[job]["row"], -1, 1.0
    if row < 0 or request.gpus == 0:
        return -1
    for i in range(sim.ends.size[0]):
        other = sim.ends.item[i]
        run, shape = pace.runs[other], sim.shapes[sim.jobs[other]["shape"]]
        if run["mate"] >= 0 or run["slot"] >= 0 or run["row"] < 0:
            continue
        if shape["parts"] != request.parts or shape["gpus"] != request.gpus:
            continue
        both = _both(pace, sim, passes, row, other, request)
        if both > most or (both == most and 0 <= other < best):
            best, most = other, both
    return int(best)


@jit
def _both(pace: Pace, sim: Sim, passes: Passes, row: int, other: int, request: Request) -> float:
    """What two jobs get done together by what each does alone, where ``other`` runs; NaN: not measured, 0: no room."""
    both, beside, resources = np.inf, pace.runs[other]["row"], sim.resources
    for part in range(request.parts):
        node = sim.held[sim.jobs[other]["offset"] + part]
        inside = request.lo <= node < request.hi
        if not inside or not node_fits(resources, passes.jobs.masks, with_gpus(request, 0), node):
            return 0.0
        speed = pace.speed[pace.kind[node]]
        here = speed[row, 1 + beside] / speed[row, 0] + speed[beside, 1 + row] / speed[beside, 0]
        if np.isnan(here):
            return float(here)
        both = min(both, here)
    return float(both)


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
        spare.gpus[node] = spare.cores[node] = spare.memory[node] = PLENTY
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
    pace: Pace, sim: Sim, passes: Passes, resources: Resources, slots: Records, request: Request, milli: int, node: int
) -> int:
    """1 if one part of a job fits a node, else 0."""
    masks = passes.jobs.masks
    if milli < WHOLE:
        gpus = sim.node[node]["total"]
        return int(_fitting_slot(resources, slots, masks, request, milli, node, pace.first[node], gpus) != _NOWHERE)
    return int(node_fits(resources, masks, request, node))


@jit
def _give_back(
    pace: Pace, sim: Sim, passes: Passes, future: Resources, slots: Records, request: Request, milli: int, at: int
) -> int:  # fmt: skip
    """A part of a running job leaves ``future``; on how many nodes more the head fits by that."""
    job, node = passes.releases.owner[at], passes.releases.node[at]
    run, shape = pace.runs[job], sim.shapes[sim.jobs[job]["shape"]]
    gpus = 0 if run["mate"] >= 0 and _ends_before(sim, job, run["mate"]) else shape["gpus"]
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


@jit
def _ends_before(sim: Sim, job: int, mate: int) -> bool:
    """Whether it is expected to leave the GPUs to its mate."""
    end = sim.state[job]["start"] + sim.jobs[job]["expected"]
    other = sim.state[mate]["start"] + sim.jobs[mate]["expected"]
    return bool(end < other or (end == other and job < mate))
