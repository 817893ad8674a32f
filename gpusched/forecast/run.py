"""The current queue simulated forward to predict starts: the engine of replays with the live queue pass.

Nothing is submitted meanwhile. Running jobs and those that start in the simulation end by a draw of run times;
backfill uses time limits, as the controller does. Of equal jobs the walk tries only the first, and a pass begins only
where some job could start, so that a queue of thousands is simulated in some hundredths of a second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any, keep_for
from gpusched.sched.bounds import room_along, within_bounds
from gpusched.sched.fairtree import FairShareTree, account, rank_users
from gpusched.sched.fit import entry, request_of
from gpusched.sched.keeping import keeps_nodes
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_plan
from gpusched.sched.kernel.queue_pass import queue_pass
from gpusched.sched.place import node_fits
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import (
    CONSERVATIVE,
    EASY,
    NAIVE,
    NONE,
    OK,
    POLICY,
    PRIORITY,
    RESERVED,
    STARTED,
    BackfillPlan,
    Calendar,
    ClusterState,
    Flags,
    Floats,
    Ints,
    PassOutcome,
    PlacementRequest,
    QueueJobs,
    Records,
    Requests,
    Resources,
    Words,
)
from gpusched.sched.topology.load import leave
from gpusched.sched.topology.queue import Costs, Priced, pass_by_cost, until_of
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import start_granted, state_of
from gpusched.sim.engine.share import pair_up, release_pairs_once, split_with
from gpusched.sim.engine.state import (
    CHANGED,
    DECIDE,
    ENDED,
    JOB_SETTLES,
    MOVED,
    READY,
    WAITING,
    EventLog,
    Paired,
    Passes,
    Sim,
)

_I8, _F8 = np.int64, np.float64

# Waiting jobs, then running, besides `sim.engine.state.JOB`. partition: index into QUEUE. rank: place in its order.
# level: class of its priority, 0 the highest. user: index into USER. gpus: of the whole job, in the parts of a GPU in
# which usage and holdings of users are counted where there are MIG slices or shared GPUs. relaxed: its request
# (index into `Requests`) once it has waited for better nodes long enough. kind, settled: index into KIND, of its
# request now, and then. next: the next of its kind that waits, or -1.
QUEUED = np.dtype(
    [(n, _I8) for n in ("partition", "rank", "level", "user", "gpus", "relaxed", "kind", "settled", "next")]
)
# kind, kind_stop: rows of KIND. fair: ordered by users' usage. priced: placed by placement cost.
QUEUE = np.dtype([(n, _I8) for n in ("rule", "backfill", "fair", "priced", "kind", "kind_stop", "waiting")])
# Jobs between which only their ranks decide: of one partition, account, request and limit (where nodes are drawn, of
# one partition), and where usage decides the order, of one user and priority. first, last: of the waiting ones; -1:
# none. account, gpus: of each of them; -1 where nodes are drawn. past: the first kind behind those of its account.
# at: its next one in a pass.
KIND = np.dtype([(n, _I8) for n in ("first", "last", "account", "gpus", "past", "at")])

PASSED = 2  # in `Sim.dirty`: only the pass that puts jobs beside others is still to come
REACHED, EXHAUSTED = 3, 4  # how a run ends, beside OVER: see `decide_forecast`
TICK, UNTIL, SHADOW, CLOCKS = range(4)
WORK, ALLOWED, TARGET, SEEN, OPEN, ASKED, COUNTERS = range(7)
_PASS_WORK = 200  # what a pass costs beside its queue, in entries of a queue


class LateRoom(NamedTuple):
    """What was left for jobs that outlast the head's wait, and ``fit`` and ``fits`` of it, as in `QueueArrays`."""

    room: Resources
    fit: Flags
    fits: Ints


class PlacementCosts(NamedTuple):
    """Placement costs, if any are known and a partition's policy uses them.

    Attributes:
        costs: Of the waiting jobs.
        slot: ``int64[jobs]``: where a job's links are noted in ``costs.load``; -1: it is no job's first.
        settled: ``int64[jobs]``: the number of which a job has the class and links once it has settled (`QUEUED`).
    """

    costs: Costs
    slot: Ints
    settled: Ints


class QueueArrays(NamedTuple):
    """The queue, and a run's state besides the engine's; changed in place.

    Attributes:
        jobs: ``QUEUED[jobs]``. queues: ``QUEUE[partitions]``. users: ``USER[users]``.
        kinds: ``KIND[kinds]``: the waiting jobs; by partition, account and GPUs.
        open, place: ``int64[kinds]``, ``float64[kinds]``: in a pass, the kinds whose next job may start or
            be the head, and its place in the order.
        late: Where jobs fit that outlast the head's wait, as known of the last pass.
        fit: ``uint8[shapes, nodes]``: whether a part of the request fits there now.
        fits: ``int64[shapes]``: on how many nodes.
        clock: ``float64[CLOCKS]``: pause between decisions; after when nothing matters; when the head can start;
            seconds.
        counter: ``int64[COUNTERS]``: queue entries examined, and how many are allowed; the target (-1: all jobs); how
            many of the engine's changes have been seen; in a pass, how many kinds are open, and the one asked last.
        tree: Of users.
        least: ``int64[links of waiting jobs, 3]``: see `bounds.room_along`; computed for each pass.
        barren: ``int64[kinds, 3]``: ``least`` of an account, at its last kind, when none of its jobs could start on
            any nodes; -1: unknown.
        turns: ``float64[masks]``: `Calendar.turns` on which ``fit`` and ``late`` are based.
        outcome: Where a pass writes.
        placing: Placement costs; None: no policy uses any.
        plan: The passes' work space for conservative backfill; None: unused, and not compiled.
    """

    jobs: Records
    queues: Records
    users: Records
    kinds: Records
    open: Ints
    place: Floats
    late: LateRoom
    fit: Flags
    fits: Ints
    clock: Floats
    counter: Ints
    tree: FairShareTree
    least: Ints
    barren: Ints
    turns: Floats
    outcome: PassOutcome
    placing: PlacementCosts | None
    plan: BackfillPlan | None


class ForecastPass(NamedTuple):
    """Context of one partition's pass: the engine's clock; placement, order and backfill codes, see QUEUE."""

    arrays: QueueArrays
    clock: Floats
    rng: Words
    place: int
    fair: int
    backfill: int


@jit
def decide_forecast(sim: Sim, log: EventLog, passes: Passes, arrays: QueueArrays) -> int:
    """Run the pass of every partition in which something happened, and again if a start makes more jobs ready.

    Returns:
        DECIDE to go on; REACHED: the target has started, or nothing later matters; EXHAUSTED: the
        allowed work is used up.
    """
    if sim.clock[0] > arrays.clock[UNTIL]:
        return REACHED
    for i in range(sim.counter[ENDED]):
        _note_end(sim, passes, arrays, sim.ended[i])
    if arrays.turns.size > 0 or sim.counter[MOVED] > 0:
        _update_reservations(passes.scratch.calendar, sim, passes, arrays)
    entered = 0 if sim.counter[READY] == 0 else _enter_ready(sim, arrays, 0)
    if arrays.counter[SEEN] < sim.counter[CHANGED]:
        _relax_requests(sim, passes.jobs, arrays)
    partition = 0
    while partition < arrays.queues.size:
        asked = (sim.dirty[partition] & 1) != 0 and arrays.queues[partition]["waiting"] > 0
        if asked:
            sim.dirty[partition] = PASSED
            decide_partition(sim, log, passes, arrays, partition)
        partition = 0 if asked else partition + 1  # a start may let in a job of an earlier one
        if partition == arrays.queues.size:
            _pair_up_all(sim.pairs, sim, log, passes, arrays)
        if entered < sim.counter[READY]:
            partition, entered = 0, _enter_ready(sim, arrays, entered)
    sim.dirty[:] = 0
    target = arrays.counter[TARGET]
    if target >= 0 and not np.isnan(sim.state[target]["first"]):
        return REACHED
    return EXHAUSTED if arrays.counter[WORK] > arrays.counter[ALLOWED] else DECIDE


run_forward = looped(decide_forecast)


@jit
def _note_end(sim: Sim, passes: Passes, arrays: QueueArrays, job: int) -> None:
    """Free what an ended job held, for other jobs and for its user."""
    of = sim.jobs[job]
    for part in range(sim.shapes[of["shape"]]["parts"]):
        node = sim.held[of["offset"] + part]
        update_fit(arrays.fit, arrays.fits, sim.resources, passes.requests, passes.jobs.masks, node)
    _count_held_gpus(sim, arrays, job, -1)
    _leave_links(arrays.placing, job)
    _mark_dirty(sim, arrays, arrays.jobs[job]["partition"])


@jit
def _update_reservations(calendar: Calendar | None, sim: Sim, passes: Passes, arrays: QueueArrays) -> None:
    """Update where jobs fit, as reservations begin to bind and end."""
    if calendar is None:
        return
    jobs, requests = passes.jobs, passes.requests
    turned = sim.counter[MOVED] > 0
    for row in range(arrays.turns.size):
        if arrays.turns[row] == calendar.turns[row]:
            continue
        turned, arrays.turns[row] = True, calendar.turns[row]
        arrays.counter[WORK] += _PASS_WORK
        for shape in range(arrays.fits.size):
            if requests.mask[shape] == row:
                _update_shape(arrays.fit, arrays.fits, sim.resources, requests, jobs.masks, shape)
                _update_shape(arrays.late.fit, arrays.late.fits, arrays.late.room, requests, jobs.masks, shape)
    if turned:
        arrays.barren[:] = -1
        sim.dirty[:] = 1


@jit
def _enter_ready(sim: Sim, arrays: QueueArrays, first: int) -> int:
    """Add the jobs that became ready at this instant, from ``first`` on; return how many there are in all."""
    for i in range(first, sim.counter[READY]):
        _enter(sim, arrays, sim.ready[i])
    return int(sim.counter[READY])


@jit
def _relax_requests(sim: Sim, jobs: QueueJobs, arrays: QueueArrays) -> None:
    """Relax the requests of jobs that have waited long enough for better nodes."""
    while arrays.counter[SEEN] < sim.counter[CHANGED]:
        change = sim.changes[arrays.counter[SEEN]]
        arrays.counter[SEEN] += 1
        if change["kind"] != JOB_SETTLES:
            continue
        job = change["subject"]
        of, waits = arrays.jobs[job], sim.state[job]["status"] == WAITING
        if waits:
            _leave(arrays, job)
        jobs.shape[job], of["kind"] = of["relaxed"], of["settled"]
        _relax_links(arrays.placing, job)
        if waits:
            _enter(sim, arrays, job)


@jit
def update_fit(fit: Flags, fits: Ints, resources: Resources, requests: Requests, masks: Flags, node: int) -> None:
    """Update ``fit`` and ``fits`` after a change of a node: `place.node_fits`, inlined for speed."""
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
def _update_shape(fit: Flags, fits: Ints, resources: Resources, requests: Requests, masks: Flags, shape: int) -> None:
    """Update ``fit`` and ``fits`` after a change of the nodes that a shape's jobs may use."""
    request, fits[shape] = request_of(requests, shape), 0
    for node in range(request.lo, request.hi):
        fit[shape, node] = node_fits(resources, masks, request, node)
        fits[shape] += fit[shape, node]


@jit
def _enter(sim: Sim, arrays: QueueArrays, job: int) -> None:
    jobs, kind = arrays.jobs, arrays.kinds[arrays.jobs[job]["kind"]]
    before, after = kind["last"], -1
    arrays.barren[kind["past"] - 1] = -1
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
    arrays.queues[jobs[job]["partition"]]["waiting"] += 1
    _mark_dirty(sim, arrays, jobs[job]["partition"])


@jit
def _leave(arrays: QueueArrays, job: int) -> None:
    jobs, kind = arrays.jobs, arrays.kinds[arrays.jobs[job]["kind"]]
    before, at = -1, kind["first"]
    while at != job:
        before, at = at, jobs[at]["next"]
    if before < 0:
        kind["first"] = jobs[job]["next"]
    else:
        jobs[before]["next"] = jobs[job]["next"]
    if kind["last"] == job:
        kind["last"] = before
    arrays.queues[jobs[job]["partition"]]["waiting"] -= 1


@jit
def _mark_dirty(sim: Sim, arrays: QueueArrays, partition: int) -> None:
    """Mark the partition for a pass; also all that order by users' usage."""
    sim.dirty[partition] = 1
    for other in range(arrays.queues.size):
        sim.dirty[other] |= arrays.queues[other]["fair"]


@jit
def _count_held_gpus(sim: Sim, arrays: QueueArrays, job: int, sign: int) -> None:
    """Count a job's GPUs for its user, as `engine.generic.count_held_gpus`."""
    of, mate, both = arrays.jobs[job], split_with(sim.pace, job, sign > 0), 0
    if mate >= 0:
        other = arrays.jobs[mate]
        both = min(of["gpus"], other["gpus"]) // 2
        account(arrays.users, other["user"], sim.clock[0], sim.clock[2])
        arrays.users[other["user"]]["held"] -= sign * both
    account(arrays.users, of["user"], sim.clock[0], sim.clock[2])
    arrays.users[of["user"]]["held"] += sign * (of["gpus"] - both)


@jit
def decide_partition(sim: Sim, log: EventLog, passes: Passes, arrays: QueueArrays, partition: int) -> None:
    """Run one partition's pass, and apply its starts."""
    of, outcome = arrays.queues[partition], arrays.outcome
    arrays.counter[WORK] += _PASS_WORK
    if of["fair"] != 0:
        rank_users(arrays.tree, arrays.users, sim.clock[0], sim.clock[2])
    release_pairs_once(sim.pairs, sim, passes.releases)
    if _find_candidates(arrays, passes.jobs, passes.requests, partition):
        state = state_of(sim, passes, outcome)
        outcome.total[:] = 0
        arrays.counter[ASKED], arrays.clock[SHADOW] = -1, np.inf
        if of["priced"] != 0:
            _pass_by_cost(arrays.placing, sim, state, arrays, partition)
        elif of["backfill"] == CONSERVATIVE:
            _plan_all(arrays.plan, state, arrays, partition, passes.rng)
        else:
            more = ForecastPass(arrays, sim.clock, passes.rng, of["rule"], of["fair"], of["backfill"])
            forecast_pass(state, arrays.open, of["backfill"], more)
        _mark_closed(passes.scratch.calendar, arrays)
        _leave_started(sim, arrays)
        start_granted(sim, log, outcome, None)


@jit
def _mark_closed(calendar: Calendar | None, arrays: QueueArrays) -> None:
    """Mark nodes kept for a job, so that what fits on them is computed again when they are free."""
    if calendar is None:
        return
    for row in range(arrays.turns.size):
        if calendar.turns[row] == -np.inf:
            arrays.turns[row] = np.nan


@jit
def _leave_started(sim: Sim, arrays: QueueArrays) -> None:
    """Remove started jobs from the queue, and count their GPUs for their users."""
    for i in range(arrays.outcome.total[0]):
        _count_held_gpus(sim, arrays, arrays.outcome.started[i], 1)
        _leave(arrays, arrays.outcome.started[i])


@jit
def _pair_up_all(pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, arrays: QueueArrays) -> None:
    """Start jobs that the partitions' own passes left waiting beside running ones."""
    if pairs is None:
        return
    outcome = arrays.outcome
    for partition in range(arrays.queues.size):
        if sim.dirty[partition] == PASSED:
            sim.dirty[partition] = 0
            queue = _pairing_candidates(pairs, sim, passes, arrays, partition)
            if queue.size > 0:
                outcome.total[:] = 0
                pair_up(pairs, sim, log, passes, outcome, queue, None)
                _leave_started(sim, arrays)
                update_started_fit(arrays, sim.resources, passes.requests, passes.jobs.masks)


@jit
def _pairing_candidates(pairs: Paired, sim: Sim, passes: Passes, arrays: QueueArrays, partition: int) -> Ints:
    """Return waiting jobs that may share, and the first of each kind, which includes the head; in order."""
    queue, count = in_order(arrays, partition), 0
    for job in queue:
        if pairs.row[job] >= 0 or arrays.kinds[arrays.jobs[job]["kind"]]["first"] == job:
            arrays.outcome.code[job], sim.jobs[job]["shape"] = PRIORITY, passes.jobs.shape[job]
            queue[count] = job
            count += 1
    return queue[:count]


@jit
def _plan_all(plan: BackfillPlan | None, state: ClusterState, arrays: QueueArrays, partition: int, rng: Words) -> None:
    """Run conservative backfill, in which every job has a place in the plan."""
    if plan is None:
        return
    queue = in_order(arrays, partition)
    arrays.counter[WORK] += queue.size * state.resources.gpus.size
    pass_by_plan(state, queue, CONSERVATIVE, PlacementRule(arrays.queues[partition]["rule"], rng))
    update_started_fit(arrays, state.resources, state.requests, state.jobs.masks)


@jit
def in_order(arrays: QueueArrays, partition: int) -> Ints:
    """Return all of the partition's waiting jobs in order, ``int64[waiting]``."""
    of, count = arrays.queues[partition], 0
    queue, place = np.empty(of["waiting"], np.int64), np.empty(of["waiting"])
    for kind in range(of["kind"], of["kind_stop"]):
        job = arrays.kinds[kind]["first"]
        while job >= 0:
            queue[count], place[count] = job, _place(arrays.jobs, arrays.users, of["fair"], job)
            count += 1
            job = arrays.jobs[job]["next"]
    arrays.counter[WORK] += count
    by_place: Ints = queue[stable_order(place)]
    return by_place


@jit
def update_started_fit(arrays: QueueArrays, resources: Resources, requests: Requests, masks: Flags) -> None:
    """Update what fits on the nodes of started jobs."""
    for part in range(arrays.outcome.total[1]):
        update_fit(arrays.fit, arrays.fits, resources, requests, masks, arrays.outcome.nodes[part])


@jit
def _pass_by_cost(
    placing: PlacementCosts | None, sim: Sim, state: ClusterState, arrays: QueueArrays, partition: int
) -> None:
    """Run the pass in which jobs take the cheapest nodes, and wait for better ones while that pays."""
    if placing is None:
        return
    costs, queue, outcome = placing.costs, in_order(arrays, partition), state.outcome
    arrays.counter[WORK] += costs.last_pass.size * state.resources.gpus.size  # one search per class
    pass_by_cost(state, queue, arrays.queues[partition]["backfill"], Priced(costs, 0))
    for job in queue:
        if outcome.code[job] == POLICY:
            sim.clock[1] = min(sim.clock[1], until_of(costs, job, costs.wait_cost[job, 0] + costs.wait_cost[job, 1]))
    update_started_fit(arrays, state.resources, state.requests, state.jobs.masks)


@jit
def _leave_links(placing: PlacementCosts | None, job: int) -> None:
    """Remove an ended job from its network links."""
    if placing is not None and placing.slot[job] >= 0:
        leave(placing.costs.load, placing.slot[job])


@jit
def _relax_links(placing: PlacementCosts | None, job: int) -> None:
    """Use the placement costs of the request that a job now makes."""
    if placing is not None:
        placing.costs.of[job] = placing.costs.of[placing.settled[job]]


@jit
def _find_candidates(arrays: QueueArrays, jobs: QueueJobs, requests: Requests, partition: int) -> bool:
    """Return whether any job may start now; set ``arrays.open`` to kinds whose next job could be the head, or start.

    Neither jobs that can never run nor those that a limit holds block others.
    """
    of, kinds, opened, least, barren = arrays.queues[partition], arrays.kinds, arrays.open, arrays.least, arrays.barren
    shape_of, account_of, feasibility, fits = jobs.shape, jobs.account, jobs.feasibility, arrays.fits
    parts, looser, of_jobs, users = requests.parts, requests.looser, arrays.jobs, arrays.users
    kind, stop, draws = of["kind"], of["kind_stop"], of["rule"] == NAIVE
    keeps = keeps_nodes(of["backfill"])
    count, hopeful, work = 0, draws, 0
    room_along(jobs.links, jobs.room, least)  # chains are few, jobs many: once here is cheaper than with each job
    while kind < stop:
        account, past, before = kinds[kind]["account"], kinds[kind]["past"], count
        work += 1
        # No job of this account could start within these limits: skip its kinds until one of them grows.
        if account >= 0 and _no_more_room(least[account], barren[past - 1]):
            kind = past
        while kind < past:
            work += 1
            job = kinds[kind]["first"]
            if account >= 0 and least[account, 1] < kinds[kind]["gpus"]:
                break  # nor do limits allow any behind it
            kind += 1
            if job < 0:
                continue
            # A naive draw may fail on free nodes and succeed later, so jobs are asked whatever fits.
            if not draws:
                can = feasibility[shape_of[job]]
                if not (can == OK or (keeps and can == RESERVED)) or not within_bounds(least, account_of, job):
                    continue
                # Kinds that do not fit may still be the head; the pass begins only if some job fits now.
                hopeful |= can == OK and _fits(fits, parts, looser, shape_of[job])
            opened[count], kinds[kind - 1]["at"] = kind - 1, job
            arrays.place[count] = _place(of_jobs, users, of["fair"], job)
            count += 1
        if account >= 0 and count == before:
            for unit in range(3):
                barren[past - 1, unit] = least[account, unit]
        kind = past
    arrays.counter[OPEN] = count
    arrays.counter[WORK] += work
    return bool(hopeful)


@jit
def _no_more_room(least: Ints, barren: Ints) -> bool:
    """Return whether limits leave an account no more than when none of its jobs could start."""
    more = False
    for unit in range(3):
        more |= least[unit] > barren[unit]
    return not more


@jit
def _next(state: ClusterState, queue: Ints, at: int, head: int, more: ForecastPass) -> int:
    """Return the first job in order that could start, or be the head if there is none yet; -1: none.

    Or the first that waits for the end of a reservation, for which nodes are kept.

    If a job does not start, no later one of its kind does in this pass, as free resources only shrink; draws excepted.
    """
    arrays, draws, fair = more.arrays, more.place == NAIVE, more.fair
    kinds, counter, opened, place_of, jobs = arrays.kinds, arrays.counter, arrays.open, arrays.place, arrays.jobs
    # Advance the kind asked last: after a start or a draw to its next job, else out of this pass.
    if counter[ASKED] >= 0:
        kind = opened[counter[ASKED]]
        asked = kinds[kind]["at"]
        started = state.outcome.code[asked] == STARTED
        after = jobs[asked]["next"] if draws or started else -1
        kinds[kind]["at"] = after
        if after >= 0:
            place_of[counter[ASKED]] = _place(jobs, arrays.users, fair, after)
        if started and kinds[kind]["account"] >= 0:
            room_along(state.jobs.links, state.jobs.room, arrays.least)
    if head >= 0 and more.backfill == NONE:
        return -1
    # the loop's own arrays, as in the walk
    least, fits, late_fits, parts, looser = (
        arrays.least,
        arrays.fits,
        arrays.late.fits,
        state.requests.parts,
        state.requests.looser,
    )
    shape_of, limit_of, account_of, now = state.jobs.shape, state.jobs.limit, state.jobs.account, state.now
    feasibility, nothing_kept = state.jobs.feasibility, _no_nodes_kept(state.scratch.calendar)
    count, best, first, place, shadow, i = counter[OPEN], -1, -1, np.inf, arrays.clock[SHADOW], 0
    # Kinds that can no longer start leave the list: free resources and limits only shrink within a pass.
    while i < count:
        job = kinds[opened[i]]["at"]
        could = job >= 0 and (draws or within_bounds(least, account_of, job))
        # Until there is a head, a job need not fit: it becomes the head.
        if could and head >= 0 and not draws:
            shape = shape_of[job]
            waits = feasibility[shape] == RESERVED and nothing_kept
            could = waits or _fits(fits, parts, looser, shape)
            if could and not waits and now + limit_of[job] > shadow:
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
def _attempt(state: ClusterState, job: int, late: bool, first: bool, more: ForecastPass) -> tuple[int, int]:
    """Try to place a job by the rule; after a failed draw the next cycle draws again."""
    code, given = attempt_any(state, state.jobs.shape[job], more.place, late, more.rng)
    if code == POLICY:
        more.clock[1] = min(more.clock[1], state.now + more.arrays.clock[TICK])
    return code, given


@jit
def _reserve_for_head(state: ClusterState, job: int, code: int, more: ForecastPass) -> float:
    """Keep nodes for the head, and record what fits beside it for longer jobs, which only EASY asks."""
    arrays, late, shape = more.arrays, state.scratch.late, state.jobs.shape[job]
    if more.backfill != EASY:
        return np.inf
    shadow, known = keep_for(state, job, more.place, state.now), arrays.late.room
    for node in range(state.requests.lo[shape], state.requests.hi[shape]):
        gpus, cores, memory = late.gpus[node], late.cores[node], late.memory[node]
        if gpus != known.gpus[node] or cores != known.cores[node] or memory != known.memory[node]:
            _note_late(arrays.late, late, state.requests, state.jobs.masks, node)
    arrays.clock[SHADOW] = shadow
    return shadow


@jit
def _note_late(of: LateRoom, late: Resources, requests: Requests, masks: Flags, node: int) -> None:
    of.room.gpus[node], of.room.cores[node], of.room.memory[node] = late.gpus[node], late.cores[node], late.memory[node]
    update_fit(of.fit, of.fits, late, requests, masks, node)


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, more: ForecastPass) -> None:
    """Update what fits on the nodes that the job takes."""
    arrays, masks = more.arrays, state.jobs.masks
    for part in range(request.parts):
        node = state.scratch.chosen[part]
        update_fit(arrays.fit, arrays.fits, state.resources, state.requests, masks, node)
        if more.backfill == EASY:  # only then is it asked what fits beside the head
            _note_late(arrays.late, state.scratch.late, state.requests, masks, node)


@jit
def _no_nodes_kept(calendar: Calendar | None) -> bool:
    """Return whether no nodes are kept yet for a job that waits for the end of a reservation."""
    return False if calendar is None else bool(calendar.kept_times[0] == np.inf)


forecast_pass = queue_pass(_attempt, _reserve_for_head, _started, following=_next)


@jit
def _fits(fits: Ints, parts: Ints, looser: Ints | None, shape: int) -> bool:
    """Return whether a request, or a looser one, fits on enough nodes."""
    while fits[shape] < parts[shape]:
        shape = entry(looser, shape, -1)
        if shape < 0:
            return False
    return True


@jit
def _place(jobs: Records, users: Records, fair: int, job: int) -> float:
    """Return a job's place in its partition's order: by (priority, users' rank by usage now, rank); see `order`."""
    if fair == 0:
        return float(jobs[job]["rank"])
    level = jobs[job]["level"] * users.size + users[jobs[job]["user"]]["place"]
    return float(level * jobs.size + jobs[job]["rank"])
