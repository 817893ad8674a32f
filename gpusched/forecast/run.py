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
from gpusched.sched.bounds import room_along, within_bounds
from gpusched.sched.fairtree import Tree, places
from gpusched.sched.fit import entry, request_of
from gpusched.sched.heaps import Heap, pop, push
from gpusched.sched.kernel.by_rule import Rule, pass_by_rule
from gpusched.sched.place import choose, node_fits
from gpusched.sched.releases import drop
from gpusched.sched.reservations.calendar import turn
from gpusched.sched.state import (
    CONSERVATIVE,
    FIRST_FIT,
    NAIVE,
    NONE,
    OK,
    POLICY,
    RESERVED,
    Calendar,
    ClusterState,
    Flags,
    Floats,
    Ints,
    Jobs,
    Outcome,
    Records,
    Releases,
    Requests,
    Resources,
    Scratch,
    Words,
)

_I8, _F8 = np.int64, np.float64

# Waiting jobs, then running ones. partition: index into QUEUE. rank: place in its order. level: class of its priority,
# 0 the highest. account: index into `Jobs.links`, or -1. user: index into USER. gpus: of the whole job. gpu_s:
# GPU seconds that it may use at the most. needs: jobs
# it still waits for; negative: takes no part. part, part_stop: what a running job holds, rows of PART. child,
# child_begun, child_stop: those that wait for its end, and for its start, in ``QueueArrays.child``. settles: what it
# asks for (index into `Requests`) once it has waited for better nodes long enough, from ``gives_up`` on; infinite: it
# waits for none. eligible: not before it. lasts: how long it runs. start: NaN until then. limit: when it would
# end by its limit, once it runs.
JOB = np.dtype(
    [(n, _I8) for n in ("partition", "rank", "level", "account", "user", "gpus", "gpu_s", "needs", "part", "part_stop")]
    + [(n, _I8) for n in ("child", "child_begun", "child_stop", "settles")]
    + [(n, _F8) for n in ("gives_up", "eligible", "lasts", "start", "limit")]
)
PART = np.dtype([(n, _I8) for n in ("node", "gpus", "cores", "memory")])
# low: where its part of the line begins. fair: ordered by users' usage. dirty: something has happened.
QUEUE = np.dtype([(n, _I8) for n in ("rule", "backfill", "fair", "low", "waiting", "dirty")])
# From when on so many GPU seconds more may be used of a bound; time: seconds.
FREE = np.dtype([("bound", _I8), ("amount", _I8), ("time", _F8)])
# used: GPU seconds, decayed, at ``since``. usage: GPU hours and GPUs held. held: GPUs. place: by usage.
USER = np.dtype([(n, _F8) for n in ("used", "since", "usage")] + [(n, _I8) for n in ("held", "place")])

NOW, HALF_LIFE, TICK, CLOCKS = range(4)
JOBS, LEVELS, WORK, ALLOWED, AWAKE, COUNTERS = range(6)
_PASS_WORK = 200  # what a pass costs beside its queue, in entries of a queue


class QueueArrays(NamedTuple):
    """The queue and where a run of it stands; changed in place.

    Attributes:
        jobs: ``JOB[J+R]``. parts: ``PART[...]``. child: ``int64[...]``.
        queues: ``QUEUE[partitions]``. users: ``USER[users]``.
        line: ``int64[J]``: the waiting jobs, partition by partition, in order.
        sorted: ``int64[J]``: all by place in the order, at the beginning; then to work in, as ``likely``: ``int64[J]``.
        fit: ``uint8[shapes, nodes]``: whether a part of the request fits there now.
        fits: ``int64[shapes]``: on how many nodes.
        clock: ``float64[CLOCKS]``: now; half-life of usage; pause between decisions; seconds.
        counter: ``int64[COUNTERS]``: J; classes of priority; queue entries looked at, and how many are allowed; whether
            an unlucky draw is to be drawn again.
        heap: What will happen: k an end, J+R+j job j becomes eligible, J+R+J an unlucky draw is drawn again, the
            next J: job j gives up waiting for better nodes, the next J+R: what job k used leaves the seven days for
            which a limit of GPU hours counts, then: row of ``frees``;
            then: a reservation is over.
        hourly: ``int64[bounds]``: 1 where a bound is of GPU seconds. frees: ``FREE[...]``: used before the run began.
        tree: Of users.
        least: ``int64[links, 3]``: see `bounds.room_along`; set anew for each pass.
        turns: ``float64[masks]``: when each row of the masks changes next, as nodes are reserved; of size 0: never.
        strict: ``uint8[shapes]``: where all wait for the first that does not start, but for one that could not whatever
            were free, as nodes are reserved. usable: The nodes, empty of jobs.
    """

    jobs: Records
    parts: Records
    child: Ints
    queues: Records
    users: Records
    line: Ints
    sorted: Ints
    likely: Ints
    fit: Flags
    fits: Ints
    clock: Floats
    counter: Ints
    heap: Heap
    hourly: Ints
    frees: Records
    tree: Tree
    least: Ints
    turns: Floats
    strict: Flags
    usable: Resources


class Passes(NamedTuple):
    """What a pass works on, of this run alone where it changes."""

    resources: Resources
    releases: Releases
    requests: Requests
    jobs: Jobs
    rng: Words
    scratch: Scratch
    outcome: Outcome


@jit
def run_forward(line: QueueArrays, passes: Passes, target: int, until: float) -> bool:
    """Runs until ``target`` (-1: nobody) has started, time ``until`` is reached, or nothing is left to happen.

    Both ``line``, with the running jobs' ends in the heap, and ``passes`` are as at the snapshot's time.

    Returns:
        Whether it came that far; False where the allowed work was used up.
    """
    jobs, queues, clock, counter, heap = line.jobs, line.queues, line.clock, line.counter, line.heap
    for job in line.sorted[: counter[JOBS]]:  # by place in the order: each enters at the end of its line
        if jobs[job]["needs"] == 0:
            _enter_when_due(line, job)
        if jobs[job]["needs"] >= 0 and jobs[job]["gives_up"] < np.inf:
            push(heap, jobs[job]["gives_up"], jobs.size + counter[JOBS] + 1 + job)
    for at in range(line.frees.size):
        push(heap, line.frees[at]["time"], 2 * (jobs.size + counter[JOBS]) + 1 + at)
    _stir_all(line)
    while True:
        while heap.size[0] > 0 and heap.key[0] <= clock[NOW]:
            _happen(line, passes, pop(heap))
        _turn(passes.scratch.calendar, line, passes)
        partition = 0
        while partition < queues.size:
            if queues[partition]["dirty"] == 0:
                partition += 1
                continue
            queues[partition]["dirty"] = 0
            _decide(line, passes, partition)
            partition = 0  # a start may let in a job of an earlier one
        if (target >= 0 and not np.isnan(jobs[target]["start"])) or heap.size[0] == 0 or heap.key[0] > until:
            return True
        if counter[WORK] > counter[ALLOWED]:
            return False
        clock[NOW] = heap.key[0]


@jit
def _happen(line: QueueArrays, passes: Passes, item: int) -> None:
    """An end, a job that becomes eligible or gives up waiting, or another draw."""
    first = line.jobs.size
    if item >= first:
        if item < first + line.counter[JOBS]:
            _enter(line, item - first)
            return
        item -= first + line.counter[JOBS] + 1
        if 0 <= item < line.counter[JOBS]:
            _give_up(line, passes.jobs, item)
            return
        item -= line.counter[JOBS]
        if 0 <= item < first + line.frees.size:
            _forget(line, passes.jobs, item)
        elif item < 0:
            line.counter[AWAKE] = 0
        _stir_all(line)
        return
    job = line.jobs[item]
    if item < line.counter[JOBS]:
        _give_back(line, passes, item)
        drop(passes.releases, item)
    else:
        for at in range(job["part"], job["part_stop"]):
            part = line.parts[at]
            _return(line, passes, part["node"], part["gpus"], part["cores"], part["memory"])
        drop(passes.releases, line.counter[JOBS] - 1 - item)
    if job["account"] >= 0:
        _return_bounds(line, passes.jobs, item)
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
        push(line.heap, line.clock[NOW] + WEEK_S, line.jobs.size + 2 * line.counter[JOBS] + 1 + item)
    _stir_all(line)  # whom a limit holds may be of any partition


@jit
def _unused(job: Any, end: float) -> int:
    """Of a job's GPU seconds."""
    return int(min(job["gpu_s"], job["gpus"] * max(0.0, job["limit"] - end)))


@jit
def _forget(line: QueueArrays, jobs: Jobs, item: int) -> None:
    """What was used a week ago counts no more."""
    if item >= line.jobs.size:
        free = line.frees[item - line.jobs.size]
        jobs.room[free["bound"]] += free["amount"]
        return
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
def _turn(calendar: Calendar | None, line: QueueArrays, passes: Passes) -> None:
    """Brings what jobs may use up to now, as reservations begin to count and end."""
    if calendar is None:
        return
    now, jobs, requests, feasibility = line.clock[NOW], passes.jobs, passes.requests, passes.jobs.feasibility
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
                line.fit[shape, node] = node_fits(passes.resources, jobs.masks, request, node)
                line.fits[shape] += line.fit[shape, node]
            if line.strict[shape] != 0:
                could = choose(line.usable, jobs.masks, request, FIRST_FIT, passes.scratch)
                feasibility[shape] = OK if could else RESERVED
    for partition in range(line.queues.size if turned else 0):
        line.queues[partition]["dirty"] = 1


@jit
def _give_up(line: QueueArrays, jobs: Jobs, job: int) -> None:
    """From now on it takes what there is."""
    of = line.jobs[job]
    jobs.shape[job] = of["settles"]
    if np.isnan(of["start"]) and of["needs"] == 0 and of["eligible"] <= line.clock[NOW]:
        _stir(line, of["partition"])


@jit
def _give_back(line: QueueArrays, passes: Passes, job: int) -> None:
    """What a job that started on the way held."""
    shape, offset, requests = passes.outcome.shape[job], passes.outcome.offset[job], passes.requests
    for part in range(requests.parts[shape]):
        node = passes.outcome.nodes[offset + part]
        _return(line, passes, node, requests.gpus[shape], requests.cores[shape], requests.memory[shape])


@jit
def _return(line: QueueArrays, passes: Passes, node: int, gpus: int, cores: int, memory: int) -> None:
    """What comes back on a node that takes no jobs stays there."""
    resources = passes.resources
    if resources.gpus[node] >= 0:
        resources.gpus[node] += gpus
    resources.cores[node] += cores
    resources.memory[node] += memory
    fit_anew(line.fit, line.fits, resources, passes.requests, passes.jobs.masks, node)


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
        push(line.heap, eligible, line.jobs.size + job)


@jit
def _enter(line: QueueArrays, job: int) -> None:
    jobs, order = line.jobs, line.line
    queue = line.queues[jobs[job]["partition"]]
    at = queue["low"] + queue["waiting"]
    while at > queue["low"] and jobs[order[at - 1]]["rank"] > jobs[job]["rank"]:
        order[at] = order[at - 1]
        at -= 1
    order[at] = job
    queue["waiting"] += 1
    _stir(line, jobs[job]["partition"])


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
    """Brings a user's usage up to now: what was used decays by half every half-life, continuously."""
    of, now, rate = line.users[user], line.clock[NOW], np.log(2.0) / line.clock[HALF_LIFE]
    kept = np.exp(-rate * (now - of["since"]))
    of["used"] = of["used"] * kept + of["held"] * (1.0 - kept) / rate
    of["since"] = now
    of["usage"] = of["used"] / 3600.0 + of["held"]


@jit
def _decide(line: QueueArrays, passes: Passes, partition: int) -> None:
    """One partition's pass, and what follows from its starts."""
    now = line.clock[NOW]
    resources, releases, requests, jobs, rng, scratch, outcome = passes
    rule, backfill = line.queues[partition]["rule"], line.queues[partition]["backfill"]
    queue = _queue(line, requests.parts, requests.looser, jobs, partition)
    line.counter[WORK] += queue.size * (line.usable.gpus.size if backfill == CONSERVATIVE else 1) + _PASS_WORK
    if queue.size == 0:
        return
    before = outcome.total[0]
    state = ClusterState(resources, releases, requests, jobs, scratch, outcome, now)
    pass_by_rule(state, queue, backfill, Rule(rule, rng, backfill == CONSERVATIVE))
    for i in range(before, outcome.total[0]):
        job = outcome.started[i]
        line.jobs[job]["start"] = now
        line.jobs[job]["limit"] = now + jobs.limit[job]
        push(line.heap, now + line.jobs[job]["lasts"], job)
        _hold(line, job, 1)
        for part in range(requests.parts[outcome.shape[job]]):
            node = outcome.nodes[outcome.offset[job] + part]
            fit_anew(line.fit, line.fits, resources, requests, jobs.masks, node)
    _close_up(line, outcome.started[before : outcome.total[0]], outcome.code, partition, rule == NAIVE)
    for i in range(before, outcome.total[0]):
        job = outcome.started[i]
        _tell(line, line.jobs[job]["child_begun"], line.jobs[job]["child_stop"])


@jit
def _queue(line: QueueArrays, parts: Ints, looser: Ints | None, jobs: Jobs, partition: int) -> Ints:
    """The jobs that the pass can start now, and those that may be the head; nobody where none can start.

    What fits nowhere does not start, and counts only as the head: the first job that does not start; of a plan, each
    such job before one that can. Jobs that can never run block nobody, and those for which a limit leaves no room do
    not either. The naive placement draws for all.
    """
    of = line.queues[partition]
    queue = line.line[of["low"] : of["low"] + of["waiting"]]
    line.counter[WORK] += queue.size // 8
    if of["fair"] != 0:
        queue = _by_usage(line, queue)
    if of["rule"] == NAIVE:
        return queue
    count = last = takers = 0  # takers: those of the hopeful that may leave others less of a limit
    headed = False
    shape_of, account_of, feasibility, fits, likely = jobs.shape, jobs.account, jobs.feasibility, line.fits, line.likely
    least = line.least
    room_along(jobs.links, jobs.room, least)  # chains are few, jobs many: once here is cheaper than with each job
    for job in queue:
        shape, bounded = shape_of[job], account_of[job, 0] >= 0
        if feasibility[shape] != OK or not within_bounds(least, account_of, job):
            continue
        while fits[shape] < parts[shape] and entry(looser, shape, -1) >= 0:
            shape = entry(looser, shape, -1)
        if fits[shape] >= parts[shape]:
            last = count + 1
            takers += bounded
        elif headed and of["backfill"] != CONSERVATIVE:
            continue
        else:
            headed = headed or not bounded or takers == 0
        likely[count] = job
        count += 1
        if headed and of["backfill"] == NONE:
            break
    return likely[:last]


@jit
def _close_up(line: QueueArrays, started: Ints, codes: Ints, partition: int, draws: bool) -> None:
    """Takes what has started out of the queue; after an unlucky draw the next cycle draws again."""
    of, order, jobs = line.queues[partition], line.line, line.jobs
    if started.size == 0 and not draws:
        return
    kept = of["low"]
    if started.size == 1 and not draws:  # as most passes do: nothing has to be looked up of the others
        while order[kept] != started[0]:
            kept += 1
        of["waiting"] -= 1
        for at in range(kept, of["low"] + of["waiting"]):
            order[at] = order[at + 1]
        return
    for at in range(kept, kept + of["waiting"]):
        job = order[at]
        if np.isnan(jobs[job]["start"]):
            order[kept] = job
            kept += 1
            if draws and codes[job] == POLICY and line.counter[AWAKE] == 0:
                line.counter[AWAKE] = 1
                push(line.heap, line.clock[NOW] + line.clock[TICK], jobs.size + line.counter[JOBS])
    of["waiting"] = kept - of["low"]


@jit
def _by_usage(line: QueueArrays, queue: Ints) -> Ints:
    """The queue by (priority, users' place by usage now, rank): buckets, as there are few users. See `order`."""
    users, jobs, ordered = line.users, line.jobs, line.sorted
    usage = np.empty(users.size)
    for user in range(users.size):
        _account(line, user)
        usage[user] = users[user]["usage"]
    found = places(line.tree, usage)
    for user in range(users.size):
        users[user]["place"] = found[user]
    begins = np.zeros(line.counter[LEVELS] * users.size + 1, np.int64)
    for job in queue:
        begins[jobs[job]["level"] * users.size + users[jobs[job]["user"]]["place"] + 1] += 1
    for bucket in range(1, begins.size):
        begins[bucket] += begins[bucket - 1]
    for job in queue:
        bucket = jobs[job]["level"] * users.size + users[jobs[job]["user"]]["place"]
        ordered[begins[bucket]] = job
        begins[bucket] += 1
    return ordered[: queue.size]
