"""The present queue run forward to see when jobs start: the live pass `sched.kernel`, instant by instant.

At one instant ends come first, then jobs that become eligible, then decisions, as in a replay. Nothing is submitted
meanwhile. Running jobs and those that start on the way end when a draw of run times says so; backfill believes in
limits, as the controller does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.limits import WEEK_S
from gpusched.sched.backfill import attempt_any
from gpusched.sched.bounds import room_along, within_bounds
from gpusched.sched.fairtree import Tree, places, used_now
from gpusched.sched.fit import entry, request_of
from gpusched.sched.heaps import Heap, pop, push
from gpusched.sched.kernel.by_rule import Rule, keep_for, pass_by_plan
from gpusched.sched.kernel.queue_pass import queue_pass
from gpusched.sched.place import choose, node_fits
from gpusched.sched.releases import drop
from gpusched.sched.reservations.calendar import turn
from gpusched.sched.state import (
    CONSERVATIVE,
    EASY,
    FIRST_FIT,
    NAIVE,
    NONE,
    OK,
    POLICY,
    RESERVED,
    STARTED,
    Calendar,
    ClusterState,
    Flags,
    Floats,
    Ints,
    Jobs,
    Records,
    Request,
    Requests,
    Resources,
    Words,
)

_I8, _F8 = np.int64, np.float64

# Waiting jobs, then running ones. partition: index into QUEUE. rank: place in its order. level: class of its priority,
# 0 the highest. account: index into `Jobs.links`, or -1. user: index into USER. gpus: of the whole job. gpu_s:
# GPU seconds that it may use at the most. needs: jobs
# it still waits for; negative: takes no part. part, part_stop: what a running job holds, rows of PART. child,
# child_begun, child_stop: those that wait for its end, and for its start, in ``QueueArrays.child``. settles: what it
# asks for (index into `Requests`) once it has waited for better nodes long enough, from ``gives_up`` on; infinite: it
# waits for none. kind, settled: index into KIND, of what it asks for now, and then. next: the next of its kind that
# waits, or -1. eligible: not before it. lasts: how long it runs. start: NaN until then. limit: when it would
# end by its limit, once it runs.
JOB = np.dtype(
    [(n, _I8) for n in ("partition", "rank", "level", "account", "user", "gpus", "gpu_s", "needs", "part", "part_stop")]
    + [(n, _I8) for n in ("child", "child_begun", "child_stop", "settles", "kind", "settled", "next")]
    + [(n, _F8) for n in ("gives_up", "eligible", "lasts", "start", "limit")]
)
PART = np.dtype([(n, _I8) for n in ("node", "gpus", "cores", "memory")])
# kind, kind_stop: rows of KIND. fair: ordered by users' usage. dirty: something has happened.
QUEUE = np.dtype([(n, _I8) for n in ("rule", "backfill", "fair", "kind", "kind_stop", "waiting", "dirty")])
# Jobs between which only their ranks decide: of one partition, account, request and limit (where nodes are drawn, of
# one partition), and where usage decides the order, of one user and priority. first, last: of those that wait; -1:
# nobody. account, gpus: of each of them; -1 where nodes are drawn. past: the first kind behind those of its account.
# at: its next one in a pass.
KIND = np.dtype([(n, _I8) for n in ("first", "last", "account", "gpus", "past", "at")])
# From when on so many GPU seconds more may be used of a bound; time: seconds.
FREE = np.dtype([("bound", _I8), ("amount", _I8), ("time", _F8)])
# used: GPU seconds, decayed, at ``since``. usage: GPU hours and GPUs held. held: GPUs. place: by usage.
USER = np.dtype([(n, _F8) for n in ("used", "since", "usage")] + [(n, _I8) for n in ("held", "place")])

# What will happen, at one time in this order, and to whom: to a job, but FREED: to a row of ``frees``, DRAWN_AGAIN and
# UNRESERVED: to nobody. FORGOTTEN: what it used leaves the seven days for which a limit of GPU hours counts; FREED: so
# does what was used before the run began. DRAWN_AGAIN: after an unlucky draw. UNRESERVED: a reservation is over.
ENDS, ELIGIBLE, DRAWN_AGAIN, GIVES_UP, FORGOTTEN, FREED, UNRESERVED = range(7)
_WHOM_BITS = 32

NOW, HALF_LIFE, TICK, SHADOW, CLOCKS = range(5)
JOBS, WORK, ALLOWED, AWAKE, OPEN, ASKED, COUNTERS = range(7)
_PASS_WORK = 200  # what a pass costs beside its queue, in entries of a queue


class LateRoom(NamedTuple):
    """What was left to jobs that outlast the head's wait, and ``fit``, ``fits`` of it, as in `QueueArrays`."""

    room: Resources
    fit: Flags
    fits: Ints


class QueueArrays(NamedTuple):
    """The queue and where a run of it stands; changed in place.

    Attributes:
        jobs: ``JOB[J+R]``. parts: ``PART[...]``. child: ``int64[...]``.
        queues: ``QUEUE[partitions]``. users: ``USER[users]``.
        kinds: ``KIND[kinds]``: the waiting jobs; by partition, account and GPUs.
        entering: ``int64[J]``: all by place in the order.
        open, place: ``int64[kinds]``, ``float64[kinds]``: in a pass, the kinds whose next job may be of account in it,
            and its place in the order.
        late: Where jobs fit that outlast the head's wait, as known of the last pass.
        fit: ``uint8[shapes, nodes]``: whether a part of the request fits there now.
        fits: ``int64[shapes]``: on how many nodes.
        clock: ``float64[CLOCKS]``: now; half-life of usage; pause between decisions; when the head can start; seconds.
        counter: ``int64[COUNTERS]``: J; queue entries looked at, and how many are allowed; whether
            an unlucky draw is to be drawn again; in a pass, how many kinds are open, and which was asked last.
        heap: What will happen: see `schedule`.
        hourly: ``int64[bounds]``: 1 where a bound is of GPU seconds. frees: ``FREE[...]``: used before the run began.
        tree: Of users.
        least: ``int64[links of waiting jobs, 3]``: see `bounds.room_along`; set anew for each pass.
        barren: ``int64[kinds, 3]``: as that was when of an account, by its last kind, nobody could start whatever is
            free; -1: not known.
        turns: ``float64[masks]``: when each row of the masks changes next, as nodes are reserved; of size 0: never.
        strict: ``uint8[shapes]``: where all wait for the first that does not start, but for one that could not whatever
            were free, as nodes are reserved. usable: The nodes, empty of jobs.
        rng: What draws of nodes go on from.
    """

    jobs: Records
    parts: Records
    child: Ints
    queues: Records
    users: Records
    kinds: Records
    entering: Ints
    open: Ints
    place: Floats
    late: LateRoom
    fit: Flags
    fits: Ints
    clock: Floats
    counter: Ints
    heap: Heap
    hourly: Ints
    frees: Records
    tree: Tree
    least: Ints
    barren: Ints
    turns: Floats
    strict: Flags
    usable: Resources
    rng: Words


class Ahead(NamedTuple):
    """Of one partition's pass: how it places, orders and backfills; see QUEUE."""

    line: QueueArrays
    place: int
    fair: int
    backfill: int


@jit
def run_forward(line: QueueArrays, state: ClusterState, target: int, until: float) -> bool:
    """Runs until ``target`` (-1: nobody) has started, time ``until`` is reached, or nothing is left to happen.

    Both ``line``, with the running jobs' ends in the heap, and ``state`` are as at the snapshot's time.

    Returns:
        Whether it came that far; False where the allowed work was used up.
    """
    jobs, queues, clock, counter, heap = line.jobs, line.queues, line.clock, line.counter, line.heap
    for job in line.entering:  # by place in the order: each enters at the end of its kind
        if jobs[job]["needs"] == 0:
            _enter_when_due(line, job)
        if jobs[job]["needs"] >= 0 and jobs[job]["gives_up"] < np.inf:
            schedule(heap, jobs[job]["gives_up"], GIVES_UP, job)
    for at in range(line.frees.size):
        schedule(heap, line.frees[at]["time"], FREED, at)
    _schedule_reservations(state.scratch.calendar, heap)
    _stir_all(line)
    while True:
        while heap.size[0] > 0 and heap.key[0] <= clock[NOW]:
            _happen(line, state, pop(heap))
        _turn(state.scratch.calendar, line, state)
        partition = 0
        while partition < queues.size:
            asked = queues[partition]["dirty"] != 0 and queues[partition]["waiting"] > 0
            queues[partition]["dirty"] = 0
            if asked:
                _decide(line, state, partition)
            partition = 0 if asked else partition + 1  # a start may let in a job of an earlier one
        if (target >= 0 and not np.isnan(jobs[target]["start"])) or heap.size[0] == 0 or heap.key[0] > until:
            return True
        if counter[WORK] > counter[ALLOWED]:
            return False
        clock[NOW] = heap.key[0]


@jit
def schedule(heap: Heap, time: float, kind: int, whom: int) -> None:
    """Notes what will happen when, and to whom."""
    push(heap, time, (kind << _WHOM_BITS) + whom)


@jit
def _schedule_reservations(calendar: Calendar | None, heap: Heap) -> None:
    if calendar is not None:
        for end in calendar.end:
            schedule(heap, end, UNRESERVED, 0)


@jit
def _happen(line: QueueArrays, state: ClusterState, event: int) -> None:
    """What was scheduled."""
    kind, whom = event >> _WHOM_BITS, event & ((1 << _WHOM_BITS) - 1)
    if kind == ENDS:
        _end(line, state, whom)
    elif kind == ELIGIBLE:
        _enter(line, whom)
    elif kind == GIVES_UP:
        _give_up(line, state.jobs, whom)
    else:
        if kind == DRAWN_AGAIN:
            line.counter[AWAKE] = 0
        elif kind == FORGOTTEN:
            _forget(line, state.jobs, whom)
        elif kind == FREED:
            state.jobs.room[line.frees[whom]["bound"]] += line.frees[whom]["amount"]
        _stir_all(line)


@jit
def _end(line: QueueArrays, state: ClusterState, item: int) -> None:
    """A job gives back what it held, and others may go on that waited for it."""
    job = line.jobs[item]
    if item < line.counter[JOBS]:
        _give_back(line, state, item)
        drop(state.releases, item)
    else:
        for at in range(job["part"], job["part_stop"]):
            part = line.parts[at]
            _return(line, state, part["node"], part["gpus"], part["cores"], part["memory"])
        drop(state.releases, line.counter[JOBS] - 1 - item)
    if job["account"] >= 0:
        _return_bounds(line, state.jobs, item)
    _hold(line, item, -1)
    _stir(line, job["partition"])
    _tell(line, job["child"], job["child_begun"])


@jit
def _return_bounds(line: QueueArrays, jobs: Jobs, item: int) -> None:
    """What an ended job took of its limits: of GPU seconds only those that it has not used."""
    job, links, room = line.jobs[item], jobs.links, jobs.room
    at, hourly = job["account"], False
    while at >= 0:
        bound = links[at]["bound"]
        if line.hourly[bound] != 0:
            room[bound] += _unused(job, line.clock[NOW])
            hourly = True
        else:
            room[bound] += 1 if links[at]["unit"] == 0 else job["gpus"]
        at = links[at]["next"]
    if hourly:
        schedule(line.heap, line.clock[NOW] + WEEK_S, FORGOTTEN, item)
    _stir_all(line)  # whom a limit holds may be of any partition


@jit
def _unused(job: Any, end: float) -> int:
    """Of a job's GPU seconds."""
    return int(min(job["gpu_s"], job["gpus"] * max(0.0, job["limit"] - end)))


@jit
def _forget(line: QueueArrays, jobs: Jobs, item: int) -> None:
    """What it used a week ago counts no more."""
    job, links = line.jobs[item], jobs.links
    at, ended = job["account"], line.clock[NOW] - WEEK_S
    while at >= 0:
        bound = links[at]["bound"]
        if line.hourly[bound] != 0:
            jobs.room[bound] += job["gpu_s"] - _unused(job, ended)
        at = links[at]["next"]


@jit
def _stir_all(line: QueueArrays) -> None:
    for partition in range(line.queues.size):
        line.queues[partition]["dirty"] = 1


@jit
def _turn(calendar: Calendar | None, line: QueueArrays, state: ClusterState) -> None:
    """Brings what jobs may use up to now, as reservations begin to count and end."""
    if calendar is None:
        return
    now, jobs, requests, feasibility = line.clock[NOW], state.jobs, state.requests, state.jobs.feasibility
    turned = False
    for row in range(line.turns.size):
        if line.turns[row] > now:
            continue
        turned, line.turns[row] = True, turn(calendar, jobs.masks, row, now)
        line.counter[WORK] += _PASS_WORK
        for shape in range(line.fits.size):
            if requests.mask[shape] != row:
                continue
            request, line.fits[shape] = request_of(requests, shape), 0
            for node in range(request.lo, request.hi):
                line.fit[shape, node] = node_fits(state.resources, jobs.masks, request, node)
                line.fits[shape] += line.fit[shape, node]
                line.late.fits[shape] -= line.late.fit[shape, node]
                line.late.fit[shape, node] = node_fits(line.late.room, jobs.masks, request, node)
                line.late.fits[shape] += line.late.fit[shape, node]
            if line.strict[shape] != 0:
                could = choose(line.usable, jobs.masks, request, FIRST_FIT, state.scratch)
                feasibility[shape] = OK if could else RESERVED
    if turned:
        line.barren[:] = -1
        _stir_all(line)


@jit
def _give_up(line: QueueArrays, jobs: Jobs, job: int) -> None:
    """From now on it takes what there is."""
    of = line.jobs[job]
    waits = np.isnan(of["start"]) and of["needs"] == 0 and of["eligible"] <= line.clock[NOW]
    if waits:
        _leave(line, job)
    jobs.shape[job], of["kind"] = of["settles"], of["settled"]
    if waits:
        _enter(line, job)


@jit
def _give_back(line: QueueArrays, state: ClusterState, job: int) -> None:
    """What a job that started on the way held."""
    shape, offset, requests = state.outcome.shape[job], state.outcome.offset[job], state.requests
    for part in range(requests.parts[shape]):
        node = state.outcome.nodes[offset + part]
        _return(line, state, node, requests.gpus[shape], requests.cores[shape], requests.memory[shape])


@jit
def _return(line: QueueArrays, state: ClusterState, node: int, gpus: int, cores: int, memory: int) -> None:
    """What comes back on a node that takes no jobs stays there."""
    resources = state.resources
    if resources.gpus[node] >= 0:
        resources.gpus[node] += gpus
    resources.cores[node] += cores
    resources.memory[node] += memory
    fit_anew(line.fit, line.fits, resources, state.requests, state.jobs.masks, node)


@jit
def fit_anew(fit: Flags, fits: Ints, resources: Resources, requests: Requests, masks: Flags, node: int) -> None:
    """Keeps ``fit`` and ``fits`` true when a node has changed: `place.node_fits`, written out for speed."""
    lo, hi, gpus, cores = requests.lo, requests.hi, requests.gpus, requests.cores
    memory, mask = requests.memory, requests.mask
    has_gpus, has_cores, has_memory = resources.gpus[node], resources.cores[node], resources.memory[node]
    for shape in range(fits.size):
        if node < lo[shape] or node >= hi[shape]:
            continue
        fitting = has_gpus >= gpus[shape] and has_cores >= cores[shape] and has_memory >= memory[shape]
        if fitting and mask[shape] >= 0:
            fitting = masks[mask[shape], node] != 0
        fits[shape] += int(fitting) - int(fit[shape, node])
        fit[shape, node] = fitting


@jit
def _enter_when_due(line: QueueArrays, job: int) -> None:
    eligible = line.jobs[job]["eligible"]
    if eligible <= line.clock[NOW]:
        _enter(line, job)
    elif eligible < np.inf:
        schedule(line.heap, eligible, ELIGIBLE, job)


@jit
def _enter(line: QueueArrays, job: int) -> None:
    jobs, kind = line.jobs, line.kinds[line.jobs[job]["kind"]]
    before, after = kind["last"], -1
    line.barren[kind["past"] - 1] = -1
    if before >= 0 and jobs[before]["rank"] > jobs[job]["rank"]:
        before, after = -1, kind["first"]
        while jobs[after]["rank"] < jobs[job]["rank"]:
            before, after = after, jobs[after]["next"]
    jobs[job]["next"] = after
    if before < 0:
        kind["first"] = job
    else:
        jobs[before]["next"] = job
    if after < 0:
        kind["last"] = job
    line.queues[jobs[job]["partition"]]["waiting"] += 1
    _stir(line, jobs[job]["partition"])


@jit
def _leave(line: QueueArrays, job: int) -> None:
    jobs, kind = line.jobs, line.kinds[line.jobs[job]["kind"]]
    before, at = -1, kind["first"]
    while at != job:
        before, at = at, jobs[at]["next"]
    if before < 0:
        kind["first"] = jobs[job]["next"]
    else:
        jobs[before]["next"] = jobs[job]["next"]
    if kind["last"] == job:
        kind["last"] = before
    line.queues[jobs[job]["partition"]]["waiting"] -= 1


@jit
def _stir(line: QueueArrays, partition: int) -> None:
    """Something happened in the partition; where users' usage decides the order, everywhere."""
    line.queues[partition]["dirty"] = 1
    for other in range(line.queues.size):
        line.queues[other]["dirty"] |= line.queues[other]["fair"]


@jit
def _tell(line: QueueArrays, begin: int, stop: int) -> None:
    """These dependents have one job less to wait for."""
    for at in range(begin, stop):
        job = line.child[at]
        line.jobs[job]["needs"] -= 1
        if line.jobs[job]["needs"] == 0:
            _enter_when_due(line, job)


@jit
def _hold(line: QueueArrays, item: int, sign: int) -> None:
    _account(line, line.jobs[item]["user"])
    line.users[line.jobs[item]["user"]]["held"] += sign * line.jobs[item]["gpus"]


@jit
def _account(line: QueueArrays, user: int) -> None:
    """Brings a user's usage up to now."""
    of, now = line.users[user], line.clock[NOW]
    of["used"] = used_now(of["used"], of["held"], now - of["since"], line.clock[HALF_LIFE])
    of["since"] = now
    of["usage"] = of["used"] / 3600.0 + of["held"]


@jit
def _decide(line: QueueArrays, start: ClusterState, partition: int) -> None:
    """One partition's pass, and what follows from its starts."""
    of = line.queues[partition]
    line.counter[WORK] += _PASS_WORK
    if not _anybody(line, start.jobs, start.requests, partition):
        return
    resources, releases, requests, jobs, scratch, outcome, _ = start
    before, now, line.counter[ASKED] = outcome.total[0], line.clock[NOW], -1
    state = ClusterState(resources, releases, requests, jobs, scratch, outcome, now)
    if of["backfill"] == CONSERVATIVE:
        _plan_all(state, line, partition)
    else:
        pass_ahead(state, line.entering, of["backfill"], Ahead(line, of["rule"], of["fair"], of["backfill"]))
    for i in range(before, outcome.total[0]):
        job = outcome.started[i]
        line.jobs[job]["start"] = now
        line.jobs[job]["limit"] = now + jobs.limit[job]
        schedule(line.heap, now + line.jobs[job]["lasts"], ENDS, job)
        _hold(line, job, 1)
        _leave(line, job)
    for i in range(before, outcome.total[0]):
        job = outcome.started[i]
        _tell(line, line.jobs[job]["child_begun"], line.jobs[job]["child_stop"])


@jit
def _plan_all(state: ClusterState, line: QueueArrays, partition: int) -> None:
    """The pass in which every job has a place in the plan, so that all are asked, in their order."""
    of, outcome, count = line.queues[partition], state.outcome, 0
    queue, place = np.empty(of["waiting"], np.int64), np.empty(of["waiting"])
    for kind in range(of["kind"], of["kind_stop"]):
        job = line.kinds[kind]["first"]
        while job >= 0:
            queue[count], place[count] = job, _place(line.jobs, line.users, of["fair"], job)
            count += 1
            job = line.jobs[job]["next"]
    line.counter[WORK] += count * line.usable.gpus.size
    before = outcome.total[1]
    pass_by_plan(state, queue[np.argsort(place)], CONSERVATIVE, Rule(of["rule"], line.rng))
    for part in range(before, outcome.total[1]):
        fit_anew(line.fit, line.fits, state.resources, state.requests, state.jobs.masks, outcome.nodes[part])


@jit
def _anybody(line: QueueArrays, jobs: Jobs, requests: Requests, partition: int) -> bool:
    """Whether any job may start now; sets ``line.open`` to the kinds whose next job could be the head, or start.

    Jobs that can never run block nobody, and those for which a limit leaves no room do not either.
    """
    of, kinds, opened, least, barren = line.queues[partition], line.kinds, line.open, line.least, line.barren
    shape_of, account_of, feasibility, fits = jobs.shape, jobs.account, jobs.feasibility, line.fits
    parts, looser, of_jobs, users = requests.parts, requests.looser, line.jobs, line.users
    kind, stop, draws = of["kind"], of["kind_stop"], of["rule"] == NAIVE
    count, hopeful, work = 0, draws, 0
    if of["fair"] != 0:
        _place_users(line)
    room_along(jobs.links, jobs.room, least)  # chains are few, jobs many: once here is cheaper than with each job
    while kind < stop:
        account, past, before = kinds[kind]["account"], kinds[kind]["past"], count
        work += 1
        if account >= 0 and _no_more(least[account], barren[past - 1]):
            kind = past
        while kind < past:
            work += 1
            job = kinds[kind]["first"]
            if account >= 0 and least[account, 1] < kinds[kind]["gpus"]:
                break  # nor is there room for any behind it
            kind += 1
            if job < 0:
                continue
            if not draws:
                if feasibility[shape_of[job]] != OK or not within_bounds(least, account_of, job):
                    continue
                hopeful |= _fits(fits, parts, looser, shape_of[job])
            opened[count], kinds[kind - 1]["at"] = kind - 1, job
            line.place[count] = _place(of_jobs, users, of["fair"], job)
            count += 1
        if account >= 0 and count == before:
            for unit in range(3):
                barren[past - 1, unit] = least[account, unit]
        kind = past
    line.counter[OPEN] = count
    line.counter[WORK] += work
    return bool(hopeful)


@jit
def _no_more(least: Ints, barren: Ints) -> bool:
    """Whether an account has no more room than when last nobody of it could start."""
    more = False
    for unit in range(3):
        more |= least[unit] > barren[unit]
    return not more


@jit
def _next(state: ClusterState, queue: Ints, at: int, head: int, more: Ahead) -> int:
    """The first in order of those that could start, or be the head where there is none yet; -1: nobody.

    Where one of a kind does not start, none behind it does in this pass, for room only shrinks; but for draws.
    """
    line, draws, fair = more.line, more.place == NAIVE, more.fair
    kinds, counter, opened, place_of, jobs = line.kinds, line.counter, line.open, line.place, line.jobs
    if counter[ASKED] >= 0:
        kind = opened[counter[ASKED]]
        asked = kinds[kind]["at"]
        started = state.outcome.code[asked] == STARTED
        after = jobs[asked]["next"] if draws or started else -1
        kinds[kind]["at"] = after
        if after >= 0:
            place_of[counter[ASKED]] = _place(jobs, line.users, fair, after)
        if started and kinds[kind]["account"] >= 0:
            room_along(state.jobs.links, state.jobs.room, line.least)
    if head >= 0 and more.backfill == NONE:
        return -1
    # the loop's own arrays, as in the walk
    least, fits, late_fits, parts, looser = (
        line.least,
        line.fits,
        line.late.fits,
        state.requests.parts,
        state.requests.looser,
    )
    shape_of, limit_of, account_of, now = state.jobs.shape, state.jobs.limit, state.jobs.account, state.now
    count, best, first, place, shadow, i = counter[OPEN], -1, -1, np.inf, line.clock[SHADOW], 0
    while i < count:
        job = kinds[opened[i]]["at"]
        could = job >= 0 and (draws or within_bounds(least, account_of, job))
        if could and head >= 0 and not draws:
            shape = shape_of[job]
            could = _fits(fits, parts, looser, shape)
            if could and now + limit_of[job] > shadow:
                could = _fits(late_fits, parts, looser, shape)
        if not could:
            count -= 1
            opened[i], place_of[i] = opened[count], place_of[count]
            continue
        if place_of[i] < place:
            best, first, place = i, job, place_of[i]
        i += 1
    counter[OPEN], counter[ASKED] = count, best
    return int(first)


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, more: Ahead) -> tuple[int, int]:
    """By the rule; after an unlucky draw the next cycle draws again."""
    line, jobs = more.line, state.jobs
    code, given = attempt_any(
        state.resources, jobs.masks, state.requests, jobs.shape[job], more.place, late, line.rng, state.scratch
    )
    if code == POLICY and line.counter[AWAKE] == 0:
        line.counter[AWAKE] = 1
        schedule(line.heap, state.now + line.clock[TICK], DRAWN_AGAIN, 0)
    return code, given


@jit
def _keep(state: ClusterState, job: int, code: int, more: Ahead) -> float:
    """For the head; notes what the others fit on that outlast its wait."""
    line, late, shape = more.line, state.scratch.late, state.jobs.shape[job]
    shadow, known = keep_for(state, job, more.place), line.late.room
    for node in range(state.requests.lo[shape], state.requests.hi[shape]):
        gpus, cores, memory = late.gpus[node], late.cores[node], late.memory[node]
        if gpus != known.gpus[node] or cores != known.cores[node] or memory != known.memory[node]:
            _note_late(line.late, late, state.requests, state.jobs.masks, node)
    line.clock[SHADOW] = shadow if more.backfill == EASY else np.inf
    return shadow


@jit
def _note_late(of: LateRoom, late: Resources, requests: Requests, masks: Flags, node: int) -> None:
    of.room.gpus[node], of.room.cores[node], of.room.memory[node] = late.gpus[node], late.cores[node], late.memory[node]
    fit_anew(of.fit, of.fits, late, requests, masks, node)


@jit
def _started(state: ClusterState, job: int, request: Request, more: Ahead) -> None:
    """The nodes that it takes have less."""
    line, masks = more.line, state.jobs.masks
    for part in range(request.parts):
        node = state.scratch.chosen[part]
        fit_anew(line.fit, line.fits, state.resources, state.requests, masks, node)
        _note_late(line.late, state.scratch.late, state.requests, masks, node)


pass_ahead = queue_pass(_attempt, _keep, _started, following=_next)


@jit
def _fits(fits: Ints, parts: Ints, looser: Ints | None, shape: int) -> bool:
    """Whether a request, or a looser one, has nodes enough on which it fits."""
    while fits[shape] < parts[shape]:
        shape = entry(looser, shape, -1)
        if shape < 0:
            return False
    return True


@jit
def _place(jobs: Records, users: Records, fair: int, job: int) -> float:
    """A job's place in its partition's order: by (priority, users' place by usage now, rank); see `order`."""
    if fair == 0:
        return float(jobs[job]["rank"])
    level = jobs[job]["level"] * users.size + users[jobs[job]["user"]]["place"]
    return float(level * jobs.size + jobs[job]["rank"])


@jit
def _place_users(line: QueueArrays) -> None:
    """By their usage now."""
    users = line.users
    usage = np.empty(users.size)
    for user in range(users.size):
        _account(line, user)
        usage[user] = users[user]["usage"]
    users["place"][:] = places(line.tree, usage)
