"""A pass over the queue where jobs may share GPUs; the live scheduler knows whole GPUs only.

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

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.place import choose, draw_fitting, next_random, node_fits, sort_key
from gpusched.sched.state import BEST_FIT, EASY, FIRST_FIT, NAIVE, NONE, OK, Flags, Ints, Records, Request, Resources
from gpusched.sim.engine.ledger import exceeds_limit
from gpusched.sim.engine.pace import WHOLE, best_slot, with_gpus
from gpusched.sim.engine.state import Log, Pace, Passes, Sim, shape_request
from gpusched.sim.engine.step import note, occupy
from gpusched.sim.result import PAIRED


@jit
def share_gpus(pace: Pace | None, sim: Sim, log: Log, passes: Passes, ordered: Ints, rule: int, backfill: int) -> bool:
    """Starts what may start, ``ordered: int64[waiting]`` one partition's queue; False: GPUs are not shared here."""
    if pace is None:
        return False
    if pace.slots.size == 0:
        return False
    scratch, now, head, shadow = passes.scratch, sim.clock[0], -1, np.inf
    scratch.stamp[0] += 1
    stamp = scratch.stamp[0]
    for job in ordered:
        shape = sim.jobs[job]["shape"]
        if passes.jobs.feasibility[shape] != OK or exceeds_limit(sim.ledger, job):
            continue
        if head >= 0 and backfill == NONE:
            break
        late = backfill == EASY and head >= 0 and now + sim.jobs[job]["expected"] > shadow
        request, milli = shape_request(sim.shapes, shape), pace.milli[shape]
        if scratch.failed[shape] != stamp and not (late and scratch.failed_late[shape] == stamp):
            if place_shared(
                pace, sim, passes, scratch.late if late else sim.resources, pace.slots, request, milli, rule
            ):
                occupy(sim, log, job, request, 0.0)
                _refresh(sim, passes, request)
                continue
            if late:
                scratch.failed_late[shape] = stamp
            else:
                scratch.failed[shape] = stamp
        if pace.pairs and milli == WHOLE and not (backfill == EASY and head >= 0):
            mate = _mate(pace, sim, passes, job, request)
            if mate >= 0:
                _join(pace, sim, log, job, mate, request)
                continue
        if head < 0:
            head = job
            if backfill == EASY:
                shadow = _reserve(pace, sim, passes, request, milli, rule)
    return True


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


@jit
def _refresh(sim: Sim, passes: Passes, request: Request) -> None:
    """What late jobs may take, where a job has just started; nodes that the head has reserved stay closed."""
    late = passes.scratch.late
    for part in range(request.parts):
        node = sim.chosen[part]
        if late.gpus[node] >= 0:
            late.gpus[node], late.cores[node] = sim.resources.gpus[node], sim.resources.cores[node]
            late.memory[node] = sim.resources.memory[node]


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


@jit
def _join(pace: Pace, sim: Sim, log: Log, job: int, mate: int, request: Request) -> None:
    """Starts a job on all the GPUs of another."""
    for part in range(request.parts):
        sim.chosen[part] = sim.held[sim.jobs[mate]["offset"] + part]
    pace.runs[job]["mate"] = mate
    pace.runs[mate]["mate"] = job
    note(sim, log, PAIRED, mate)
    occupy(sim, log, job, with_gpus(request, 0), 0.0)


# The head's reservation


@jit
def _reserve(pace: Pace, sim: Sim, passes: Passes, request: Request, milli: int, rule: int) -> float:
    """When the head can start at the latest, by what is expected of running jobs; closes its nodes to late jobs."""
    scratch, now = passes.scratch, sim.clock[0]
    future, late, resources = scratch.future, scratch.late, sim.resources
    future.gpus[:], future.cores[:], future.memory[:] = resources
    late.gpus[:], late.cores[:], late.memory[:] = resources
    running = sim.ends.item[: sim.ends.size[0]].copy()
    slots, gone = _sharers(pace, running), np.zeros(sim.jobs.size, np.uint8)
    end = np.empty(running.size)
    for i in range(running.size):
        end[i] = max(now, sim.state[running[i]]["start"] + sim.jobs[running[i]]["expected"])
    order = np.argsort(end, kind="mergesort")
    fitting = 0
    for node in range(request.lo, request.hi):
        fitting += part_fits(pace, sim, passes, future, slots, request, milli, node)
    at, time = 0, now
    while fitting < request.parts and at < order.size:
        time = end[order[at]]
        while at < order.size and end[order[at]] <= time:
            fitting += _give_back(pace, sim, passes, future, slots, gone, request, milli, running[order[at]])
            at += 1
    if fitting < request.parts:
        return np.inf
    first = FIRST_FIT if rule >= NAIVE else rule
    place_shared(pace, sim, passes, future, slots, request, milli, first)
    for part in range(request.parts):
        late.gpus[sim.chosen[part]] = -1
    return float(time)


@jit
def _sharers(pace: Pace, running: Ints) -> Records:
    """A copy of the slots in which ``jobs`` counts those on it, less one."""
    slots = pace.slots.copy()
    for slot in range(slots.size):
        slots[slot]["jobs"] = -1
    for job in running:
        if pace.runs[job]["slot"] >= 0:
            slots[pace.runs[job]["slot"]]["jobs"] += 1
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
    pace: Pace,
    sim: Sim,
    passes: Passes,
    future: Resources,
    slots: Records,
    gone: Flags,
    request: Request,
    milli: int,
    job: int,
) -> int:
    """A running job leaves ``future``; on how many nodes more the head fits by that."""
    run, shape, more = pace.runs[job], sim.jobs[job]["shape"], 0
    gone[job] = 1
    gpus = sim.shapes[shape]["gpus"]
    if run["mate"] >= 0 and not gone[run["mate"]]:
        gpus = 0
    for part in range(sim.shapes[shape]["parts"]):
        node = sim.held[sim.jobs[job]["offset"] + part]
        if future.gpus[node] < 0:
            continue
        inside = request.lo <= node < request.hi
        before = inside and part_fits(pace, sim, passes, future, slots, request, milli, node) != 0
        if run["slot"] >= 0:
            slots[run["slot"]]["room"] += pace.milli[shape]
            slots[run["slot"]]["jobs"] -= 1
            gpus = 1 if slots[run["slot"]]["jobs"] < 0 else 0
        future.gpus[node] += gpus
        future.cores[node] += sim.shapes[shape]["cores"]
        future.memory[node] += sim.shapes[shape]["memory"]
        more += inside and not before and part_fits(pace, sim, passes, future, slots, request, milli, node) != 0
    return more
