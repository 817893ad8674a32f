"""The present queue run forward to see when jobs start: the engine of replays, in which the live walk decides.

Nothing is submitted meanwhile. Running jobs and those that start on the way end when a draw of run times says so;
backfill believes in limits, as the controller does. Of jobs alike the walk asks only the first, and a pass begins only
where somebody could start, so that a queue of thousands is run forward in some hundredths of a second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any
from gpusched.sched.bounds import room_along, within_bounds
from gpusched.sched.fairtree import FairShareTree, account, places
from gpusched.sched.fit import entry, request_of
from gpusched.sched.keeping import keeps_nodes
from gpusched.sched.kernel.by_rule import PlacementRule, keep_for, pass_by_plan
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
from gpusched.sim.engine.queue import begin_started, state_of
from gpusched.sim.engine.share import count_once, pair_up
from gpusched.sim.engine.state import (
    CHANGED,
    DECIDE,
    ENDED,
    JOB_SETTLES,
    MOVED,
    READY,
    WAITING,
    EventLog,
    Pace,
    Paired,
    Passes,
    Sim,
)

_I8, _F8 = np.int64, np.float64

# Waiting jobs, then what runs; beside `sim.engine.state.JOB`. partition: index into QUEUE. rank: place in its order.
# level: class of its priority, 0 the highest. user: index into USER. gpus: of the whole job. settles: what it asks for
# (index into `Requests`) once it has waited for better nodes long enough. kind, settled: index into KIND, of what it
# asks for now, and then. next: the next of its kind that waits, or -1.
QUEUED = np.dtype(
    [(n, _I8) for n in ("partition", "rank", "level", "user", "gpus", "settles", "kind", "settled", "next")]
)
# kind, kind_stop: rows of KIND. fair: ordered by users' usage. priced: placed by what places cost.
QUEUE = np.dtype([(n, _I8) for n in ("rule", "backfill", "fair", "priced", "kind", "kind_stop", "waiting")])
# Jobs between which only their ranks decide: of one partition, account, request and limit (where nodes are drawn, of
# one partition), and where usage decides the order, of one user and priority. first, last: of those that wait; -1:
# nobody. account, gpus: of each of them; -1 where nodes are drawn. past: the first kind behind those of its account.
# at: its next one in a pass.
KIND = np.dtype([(n, _I8) for n in ("first", "last", "account", "gpus", "past", "at")])
# used: GPU seconds, decayed, at ``since``. held: GPUs. place: by usage.
USER = np.dtype([("used", _F8), ("since", _F8), ("held", _I8), ("place", _I8)])

REACHED, EXHAUSTED = 3, 4  # how a run ends, beside OVER: see `decide_ahead`
TICK, UNTIL, SHADOW, CLOCKS = range(4)
WORK, ALLOWED, TARGET, SEEN, OPEN, ASKED, COUNTERS = range(7)
_PASS_WORK = 200  # what a pass costs beside its queue, in entries of a queue


class LateRoom(NamedTuple):
    """What was left to jobs that outlast the head's wait, and ``fit``, ``fits`` of it, as in `QueueArrays`."""

    room: Resources
    fit: Flags
    fits: Ints


class PlacementCosts(NamedTuple):
    """What places cost, where anything is known of it and a partition's policy asks.

    Attributes:
        costs: Of the waiting jobs.
        slot: ``int64[jobs]``: where a job's links are noted in ``costs.load``; -1: it is no job's first.
        settled: ``int64[jobs]``: whose class and links are a job's once it has settled (`QUEUED`).
    """

    costs: Costs
    slot: Ints
    settled: Ints


class QueueArrays(NamedTuple):
    """The queue, and where a run of it stands beside the engine; changed in place.

    Attributes:
        jobs: ``QUEUED[jobs]``. queues: ``QUEUE[partitions]``. users: ``USER[users]``.
        kinds: ``KIND[kinds]``: the waiting jobs; by partition, account and GPUs.
        open, place: ``int64[kinds]``, ``float64[kinds]``: in a pass, the kinds whose next job may be of account in it,
            and its place in the order.
        late: Where jobs fit that outlast the head's wait, as known of the last pass.
        fit: ``uint8[shapes, nodes]``: whether a part of the request fits there now.
        fits: ``int64[shapes]``: on how many nodes.
        clock: ``float64[CLOCKS]``: pause between decisions; after when nothing matters; when the head can start;
            seconds.
        counter: ``int64[COUNTERS]``: queue entries looked at, and how many are allowed; the job that is asked for (-1:
            all); how many of the engine's changes have been seen; in a pass, how many kinds are open, and which was
            asked last.
        tree: Of users.
        least: ``int64[links of waiting jobs, 3]``: see `bounds.room_along`; set anew for each pass.
        barren: ``int64[kinds, 3]``: as that was when of an account, by its last kind, nobody could start whatever is
            free; -1: not known.
        turns: ``float64[masks]``: `Calendar.turns`, as ``fit`` and ``late`` go by it.
        outcome: Where a pass writes.
        placing: What places cost; None: nothing that anybody asks for.
        plan: Room for conservative backfill, the passes' own; None: nobody backfills so, and nothing of it is compiled.
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
    """Of one partition's pass: the engine's clock; how the partition places, orders and backfills, see QUEUE."""

    line: QueueArrays
    clock: Floats
    rng: Words
    place: int
    fair: int
    backfill: int


@jit
def decide_ahead(sim: Sim, log: EventLog, passes: Passes, line: QueueArrays) -> int:
    """Every partition's pass in which something happened, and again where a start lets somebody in.

    Returns:
        DECIDE to go on; REACHED: the job that is asked for has started, or nothing later matters; EXHAUSTED: the
        allowed work is used up.
    """
    if sim.clock[0] > line.clock[UNTIL]:
        return REACHED
    for i in range(sim.counter[ENDED]):
        _note_end(sim, passes, line, sim.ended[i])
    if line.turns.size > 0 or sim.counter[MOVED] > 0:
        _turn(passes.scratch.calendar, sim, passes, line)
    entered = 0 if sim.counter[READY] == 0 else _enter_ready(sim, line, 0)
    if line.counter[SEEN] < sim.counter[CHANGED]:
        _settle(sim, passes.jobs, line)
    partition = 0
    while partition < line.queues.size:
        asked = sim.dirty[partition] != 0 and line.queues[partition]["waiting"] > 0
        sim.dirty[partition] = 0
        if asked:
            _decide(sim, log, passes, line, partition)
            if entered < sim.counter[READY]:
                entered = _enter_ready(sim, line, entered)
        partition = 0 if asked else partition + 1  # a start may let in a job of an earlier one
    target = line.counter[TARGET]
    if target >= 0 and not np.isnan(sim.state[target]["first"]):
        return REACHED
    return EXHAUSTED if line.counter[WORK] > line.counter[ALLOWED] else DECIDE


run_forward = looped(decide_ahead)


@jit
def _note_end(sim: Sim, passes: Passes, line: QueueArrays, job: int) -> None:
    """What a job has left is free for others, and its user has so much less."""
    of = sim.jobs[job]
    for part in range(sim.shapes[of["shape"]]["parts"]):
        node = sim.held[of["offset"] + part]
        fit_anew(line.fit, line.fits, sim.resources, passes.requests, passes.jobs.masks, node)
    _hold(sim, line, job, -1)
    _leave_links(line.placing, job)
    _stir(sim, line, line.jobs[job]["partition"])


@jit
def _turn(calendar: Calendar | None, sim: Sim, passes: Passes, line: QueueArrays) -> None:
    """Brings up to now where jobs fit, as reservations begin to count and end."""
    if calendar is None:
        return
    jobs, requests = passes.jobs, passes.requests
    turned = sim.counter[MOVED] > 0
    for row in range(line.turns.size):
        if line.turns[row] == calendar.turns[row]:
            continue
        turned, line.turns[row] = True, calendar.turns[row]
        line.counter[WORK] += _PASS_WORK
        for shape in range(line.fits.size):
            if requests.mask[shape] == row:
                _fit_shape(line.fit, line.fits, sim.resources, requests, jobs.masks, shape)
                _fit_shape(line.late.fit, line.late.fits, line.late.room, requests, jobs.masks, shape)
    if turned:
        line.barren[:] = -1
        sim.dirty[:] = 1


@jit
def _enter_ready(sim: Sim, line: QueueArrays, first: int) -> int:
    """Who came to wait at this instant, from that one on; how many came in all."""
    for i in range(first, sim.counter[READY]):
        _enter(sim, line, sim.ready[i])
    return int(sim.counter[READY])


@jit
def _settle(sim: Sim, jobs: QueueJobs, line: QueueArrays) -> None:
    """Who has waited for better nodes long enough takes from now on what there is."""
    while line.counter[SEEN] < sim.counter[CHANGED]:
        change = sim.changes[line.counter[SEEN]]
        line.counter[SEEN] += 1
        if change["kind"] != JOB_SETTLES:
            continue
        job = change["subject"]
        of, waits = line.jobs[job], sim.state[job]["status"] == WAITING
        if waits:
            _leave(line, job)
        jobs.shape[job], of["kind"] = of["settles"], of["settled"]
        _settle_links(line.placing, job)
        if waits:
            _enter(sim, line, job)


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
def _fit_shape(fit: Flags, fits: Ints, resources: Resources, requests: Requests, masks: Flags, shape: int) -> None:
    """The same when what the jobs of a shape may use has changed."""
    request, fits[shape] = request_of(requests, shape), 0
    for node in range(request.lo, request.hi):
        fit[shape, node] = node_fits(resources, masks, request, node)
        fits[shape] += fit[shape, node]


@jit
def _enter(sim: Sim, line: QueueArrays, job: int) -> None:
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
    _stir(sim, line, jobs[job]["partition"])


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
def _stir(sim: Sim, line: QueueArrays, partition: int) -> None:
    """Something happened in the partition; where users' usage decides the order, everywhere."""
    sim.dirty[partition] = 1
    for other in range(line.queues.size):
        sim.dirty[other] |= line.queues[other]["fair"]


@jit
def _hold(sim: Sim, line: QueueArrays, job: int, sign: int) -> None:
    user = line.jobs[job]["user"]
    account(line.users, user, sim.clock[0], sim.clock[2])
    line.users[user]["held"] += sign * line.jobs[job]["gpus"]


@jit
def _decide(sim: Sim, log: EventLog, passes: Passes, line: QueueArrays, partition: int) -> None:
    """One partition's pass, and what follows from its starts."""
    of, outcome = line.queues[partition], line.outcome
    line.counter[WORK] += _PASS_WORK
    if of["fair"] != 0:
        _place_users(sim, line)
    count_once(sim.pace, sim, passes.releases)
    if _anybody(line, passes.jobs, passes.requests, partition):
        state = state_of(sim, passes, outcome)
        outcome.total[:] = 0
        line.counter[ASKED], line.clock[SHADOW] = -1, np.inf
        if of["priced"] != 0:
            _pass_by_cost(line.placing, sim, state, line, partition)
        elif of["backfill"] == CONSERVATIVE:
            _plan_all(line.plan, state, line, partition, passes.rng)
        else:
            more = ForecastPass(line, sim.clock, passes.rng, of["rule"], of["fair"], of["backfill"])
            pass_ahead(state, line.open, of["backfill"], more)
        _mark_closed(passes.scratch.calendar, line)
        _leave_started(sim, line)
        begin_started(sim, log, outcome, None)
    _pair_up(sim.pace, sim, log, passes, line, partition)


@jit
def _mark_closed(calendar: Calendar | None, line: QueueArrays) -> None:
    """Where nodes are kept for somebody, what fits on them is looked at anew when they are open again."""
    if calendar is None:
        return
    for row in range(line.turns.size):
        if calendar.turns[row] == -np.inf:
            line.turns[row] = np.nan


@jit
def _leave_started(sim: Sim, line: QueueArrays) -> None:
    """Takes what has started out of the queue, and counts it for its users."""
    for i in range(line.outcome.total[0]):
        _hold(sim, line, line.outcome.started[i], 1)
        _leave(line, line.outcome.started[i])


@jit
def _pair_up(pace: Pace | None, sim: Sim, log: EventLog, passes: Passes, line: QueueArrays, partition: int) -> None:
    """Starts beside others whom the partition's own pass left waiting."""
    if pace is None:
        return
    outcome = line.outcome
    queue = _who_pair(pace.pairs, sim, passes, line, partition)
    if queue.size == 0:
        return
    outcome.total[:] = 0
    pair_up(pace, sim, log, passes, outcome, queue)
    _leave_started(sim, line)
    _fit_started(line, sim.resources, passes.requests, passes.jobs.masks)


@jit
def _who_pair(pairs: Paired | None, sim: Sim, passes: Passes, line: QueueArrays, partition: int) -> Ints:
    """Who waits and may share, and the first of each kind, of whom one is the head; in order."""
    if pairs is None:
        return np.empty(0, np.int64)
    queue, count = _in_order(line, partition), 0
    for job in queue:
        if pairs.row[job] >= 0 or line.kinds[line.jobs[job]["kind"]]["first"] == job:
            line.outcome.code[job], sim.jobs[job]["shape"] = PRIORITY, passes.jobs.shape[job]
            queue[count] = job
            count += 1
    return queue[:count]


@jit
def _plan_all(plan: BackfillPlan | None, state: ClusterState, line: QueueArrays, partition: int, rng: Words) -> None:
    """The pass in which every job has a place in the plan, so that all are asked."""
    if plan is None:
        return
    queue = _in_order(line, partition)
    line.counter[WORK] += queue.size * state.resources.gpus.size
    pass_by_plan(state, queue, CONSERVATIVE, PlacementRule(line.queues[partition]["rule"], rng))
    _fit_started(line, state.resources, state.requests, state.jobs.masks)


@jit
def _in_order(line: QueueArrays, partition: int) -> Ints:
    """The partition's waiting jobs from first to last, ``int64[waiting]``: all are asked."""
    of, count = line.queues[partition], 0
    queue, place = np.empty(of["waiting"], np.int64), np.empty(of["waiting"])
    for kind in range(of["kind"], of["kind_stop"]):
        job = line.kinds[kind]["first"]
        while job >= 0:
            queue[count], place[count] = job, _place(line.jobs, line.users, of["fair"], job)
            count += 1
            job = line.jobs[job]["next"]
    line.counter[WORK] += count
    by_place: Ints = queue[stable_order(place)]
    return by_place


@jit
def _fit_started(line: QueueArrays, resources: Resources, requests: Requests, masks: Flags) -> None:
    """The nodes of whoever has started have less."""
    for part in range(line.outcome.total[1]):
        fit_anew(line.fit, line.fits, resources, requests, masks, line.outcome.nodes[part])


@jit
def _pass_by_cost(
    placing: PlacementCosts | None, sim: Sim, state: ClusterState, line: QueueArrays, partition: int
) -> None:
    """The pass in which a job goes to the cheapest place, and waits for a better one as long as that pays."""
    if placing is None:
        return
    costs, queue, outcome = placing.costs, _in_order(line, partition), state.outcome
    line.counter[WORK] += costs.last_pass.size * state.resources.gpus.size  # a place is looked for once for each class
    pass_by_cost(state, queue, line.queues[partition]["backfill"], Priced(costs, 0))
    for job in queue:
        if outcome.code[job] == POLICY:
            sim.clock[1] = min(sim.clock[1], until_of(costs, job, costs.wait_cost[job, 0] + costs.wait_cost[job, 1]))
    _fit_started(line, state.resources, state.requests, state.jobs.masks)


@jit
def _leave_links(placing: PlacementCosts | None, job: int) -> None:
    """Who has ended is nobody's neighbour any more."""
    if placing is not None and placing.slot[job] >= 0:
        leave(placing.costs.load, placing.slot[job])


@jit
def _settle_links(placing: PlacementCosts | None, job: int) -> None:
    """Other places count for who asks for more."""
    if placing is not None:
        load, other = placing.costs.load, placing.settled[job]
        placing.costs.of[job], load.jobs[job]["best"] = placing.costs.of[other], load.jobs[other]["best"]


@jit
def _anybody(line: QueueArrays, jobs: QueueJobs, requests: Requests, partition: int) -> bool:
    """Whether any job may start now; sets ``line.open`` to the kinds whose next job could be the head, or start.

    Jobs that can never run block nobody, and those for which a limit leaves no room do not either.
    """
    of, kinds, opened, least, barren = line.queues[partition], line.kinds, line.open, line.least, line.barren
    shape_of, account_of, feasibility, fits = jobs.shape, jobs.account, jobs.feasibility, line.fits
    parts, looser, of_jobs, users = requests.parts, requests.looser, line.jobs, line.users
    kind, stop, draws = of["kind"], of["kind_stop"], of["rule"] == NAIVE
    keeps = keeps_nodes(of["backfill"])
    count, hopeful, work = 0, draws, 0
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
                can = feasibility[shape_of[job]]
                if not (can == OK or (keeps and can == RESERVED)) or not within_bounds(least, account_of, job):
                    continue
                hopeful |= can == OK and _fits(fits, parts, looser, shape_of[job])
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
def _next(state: ClusterState, queue: Ints, at: int, head: int, more: ForecastPass) -> int:
    """The first in order of those that could start, or be the head where there is none yet; -1: nobody.

    Or the first that waits for the end of a reservation, for which nodes are kept.

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
    feasibility, nothing_kept = state.jobs.feasibility, _nothing_kept(state.scratch.calendar)
    count, best, first, place, shadow, i = counter[OPEN], -1, -1, np.inf, line.clock[SHADOW], 0
    while i < count:
        job = kinds[opened[i]]["at"]
        could = job >= 0 and (draws or within_bounds(least, account_of, job))
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
    """By the rule; after an unlucky draw the next cycle draws again."""
    code, given = attempt_any(state, state.jobs.shape[job], more.place, late, more.rng)
    if code == POLICY:
        more.clock[1] = min(more.clock[1], state.now + more.line.clock[TICK])
    return code, given


@jit
def _keep(state: ClusterState, job: int, code: int, more: ForecastPass) -> float:
    """For the head; notes what the others fit on that outlast its wait. Without EASY nobody behind it asks."""
    line, late, shape = more.line, state.scratch.late, state.jobs.shape[job]
    if more.backfill != EASY:
        return np.inf
    shadow, known = keep_for(state, job, more.place, state.now), line.late.room
    for node in range(state.requests.lo[shape], state.requests.hi[shape]):
        gpus, cores, memory = late.gpus[node], late.cores[node], late.memory[node]
        if gpus != known.gpus[node] or cores != known.cores[node] or memory != known.memory[node]:
            _note_late(line.late, late, state.requests, state.jobs.masks, node)
    line.clock[SHADOW] = shadow
    return shadow


@jit
def _note_late(of: LateRoom, late: Resources, requests: Requests, masks: Flags, node: int) -> None:
    of.room.gpus[node], of.room.cores[node], of.room.memory[node] = late.gpus[node], late.cores[node], late.memory[node]
    fit_anew(of.fit, of.fits, late, requests, masks, node)


@jit
def _started(state: ClusterState, job: int, request: PlacementRequest, more: ForecastPass) -> None:
    """The nodes that it takes have less."""
    line, masks = more.line, state.jobs.masks
    for part in range(request.parts):
        node = state.scratch.chosen[part]
        fit_anew(line.fit, line.fits, state.resources, state.requests, masks, node)
        if more.backfill == EASY:  # nobody else is asked what is left behind the head
            _note_late(line.late, state.scratch.late, state.requests, masks, node)


@jit
def _nothing_kept(calendar: Calendar | None) -> bool:
    """Whether nodes are kept for nobody yet who waits for the end of a reservation."""
    return False if calendar is None else bool(calendar.kept_times[0] == np.inf)


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
def _place_users(sim: Sim, line: QueueArrays) -> None:
    """By their usage now: GPU hours, and GPUs held."""
    users = line.users
    usage = np.empty(users.size)
    for user in range(users.size):
        account(users, user, sim.clock[0], sim.clock[2])
        usage[user] = users[user]["used"] / 3600.0 + users[user]["held"]
    users["place"][:] = places(line.tree, usage)
