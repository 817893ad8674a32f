"""The offers of several schedulers to the jobs of a queue, each on its own nodes, and how jobs choose among them.

`offer` is one scheduler alone: it looks at the jobs that are its, in their order, and takes what it would start for
gone; then at those that others have no good place for. Live several run side by side, in replays one after the other
(`offer_in_turn`). `settle` then goes through the queue once. Of a job's offers the one that ranks highest counts: if
its place is gone meanwhile, that scheduler makes another on what is there now.
"""

from __future__ import annotations

import numpy as np

from gpusched.agents.topology.auction import DAY_S, NOT_ASKED, Auction, Offers, Workspace, workspace_of
from gpusched.agents.topology.network import Graph, start_in
from gpusched.agents.topology.places import (
    GOOD,
    MAX_DAYS_WAITED,
    PlaceChoice,
    best_place,
    worth_of_handing,
    worth_of_waiting,
)
from gpusched.agents.topology.tape import noise_of, record
from gpusched.compiled import jit
from gpusched.sched.backfill import take
from gpusched.sched.bounds import charge, exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.place import node_fits
from gpusched.sched.state import (
    BACKFILL,
    OK,
    POLICY,
    PRIORITY,
    STARTED,
    Calendar,
    ClusterState,
    Flags,
    Ints,
    QueueJobs,
    Resources,
)
from gpusched.sched.topology.contention import JobLayouts, cost_of
from gpusched.sched.topology.load import enter_links, leave, neighbours, set_speeds, speed_of
from gpusched.sched.topology.queue import HARMLESS, PATIENCE_S, Costs, Priced, no_room, priced_pass
from gpusched.sched.topology.slowdown import SlowdownModel, learned

_OWN_BONUS = 1e-6  # of two places that are worth the same, its own scheduler's
# A job that waits for a better place is decided about again after so long, or so much of its wait, if nothing happens.
_RETRY_S, _LATER = 600.0, 0.1


@jit
def offer_in_turn(
    auction: Auction, costs: Costs, jobs: QueueJobs, resources: Resources, queue: Ints, now: float
) -> None:
    """Collect all schedulers' offers in turn; as in parallel, since none sees the starts of another."""
    workspaces = [workspace_of(auction, costs, jobs, resources) for _ in range(auction.offers.rank.shape[0])]
    for number in range(len(workspaces)):
        offer(auction, number, False, jobs, queue, now, workspaces[number])
    for number in range(len(workspaces)):
        offer(auction, number, True, jobs, queue, now, workspaces[number])


@jit
def offer(
    auction: Auction, number: int, others: bool, jobs: QueueJobs, queue: Ints, now: float, workspace: Workspace
) -> None:  # fmt: skip
    """Make one scheduler's offers on its own nodes: to its jobs, or to those of ``others`` that ask."""
    offers, graph, costs, resources = auction.offers, workspace.graph, workspace.costs, workspace.resources
    room, full = workspace.room, workspace.full
    for i in range(workspace.used[0]):
        _enter_trial(auction, number, costs, auction.begun[number, i])
    for job in queue:
        shape, own = jobs.shape[job], auction.home[job] == number
        if own == others or (others and auction.asks[job] == 0):
            continue
        if jobs.feasibility[shape] != OK or full[shape] != 0 or exceeds(jobs.links, room, jobs.account, job):
            continue
        if auction.whole[job] != 0 and number != 0:
            continue
        _store_offer(auction, number, graph, costs, resources, job, now)
        way = offers.way[number, job]
        if way < 0:
            full[shape] = 1
            continue
        if not own:
            continue
        takes = _accepts(costs, offers, number, number, job, now)
        if takes and offers.rank[number, job] >= -GOOD:
            auction.asks[job] = 0
        if takes:
            request = request_of(auction.requests, auction.ways.shape[way])
            _enter_trial(auction, number, costs, job)
            for part in range(request.parts):
                take(resources, request, costs.search.trial[part])
            auction.begun[number, workspace.used[0]] = job
            workspace.used[0] += 1
            start_in(graph, number, costs.search.trial, request.parts, request.gpus)
            charge(jobs.links, room, jobs.account, job)
    for i in range(workspace.used[0] - 1, -1, -1):
        _leave_trial(auction, number, costs, auction.begun[number, i])


@jit
def _enter_trial(auction: Auction, number: int, costs: Costs, job: int) -> None:
    """Enter a job as if the scheduler's offer were taken: its nodes are in ``search.trial``, it is on their links."""
    offers, search = auction.offers, costs.search
    request = request_of(auction.requests, auction.ways.shape[offers.way[number, job]])
    for part in range(request.parts):
        search.trial[part] = offers.nodes[number, offers.offset[job] + part]
    enter_links(
        costs.tree, costs.model, costs.load, job, search.trial, request.parts, request.gpus, search.use, search.needs
    )  # fmt: skip
    if not learned(costs.model.believed):
        set_speeds(costs.model, costs.load, job)


@jit
def _leave_trial(auction: Auction, number: int, costs: Costs, job: int) -> None:
    """Remove a job again, last in first out: links and neighbours' speeds are restored."""
    load, found = costs.load, auction.found[number]
    count = neighbours(load, job, found)
    leave(load, job)
    if not learned(costs.model.believed):
        for name in found[:count]:
            load.jobs[name]["speed"] = speed_of(costs.model, load, name)


@jit
def _store_offer(
    auction: Auction, number: int, graph: Graph, costs: Costs, room: Resources, job: int, now: float
) -> None:
    """Store a scheduler's best place for a job as its offer; only sure costs count before the job waits."""
    offers, waited = auction.offers, now - costs.since[job]
    _make_offer(auction, number, graph, costs, costs.model, auction.ways, room, job, waited)
    if offers.way[number, job] >= 0 and not _accepts(costs, offers, number, number, job, now):
        costs.search.tight[0] = 0.0
        _make_offer(auction, number, graph, costs, costs.sure, auction.sure_ways, room, job, waited)
        costs.search.tight[0] = 1.0
    if offers.own[number, job] + offers.harm[number, job] > HARMLESS and waited < costs.wait_s[job]:
        _record(auction, number, graph, job, waited)


@jit
def _record(auction: Auction, number: int, graph: Graph, job: int, waited: float) -> None:
    """Record an offer that the job may refuse."""
    offers, way = auction.offers, auction.offers.way[number, job]
    if way < 0:
        return
    request, first = request_of(auction.requests, auction.ways.shape[way]), offers.offset[job]
    record(auction.tape, auction.agent, graph, job, waited, offers.nodes[number, first:], request.parts)


@jit
def _make_offer(
    auction: Auction, number: int, graph: Graph, costs: Costs, model: SlowdownModel, ways: JobLayouts, room: Resources,
    job: int, waited: float,
) -> None:  # fmt: skip
    offers, agent, c, search = auction.offers, auction.agent, costs.of[job], costs.search
    aged, scheduler = min(waited / DAY_S, MAX_DAYS_WAITED), offers.rank.shape[0] if auction.whole[job] != 0 else number
    best = best_place(
        agent, graph, number, costs.tree, model, costs.load, room, auction.masks, auction.requests, ways,
        scheduler * auction.classes + c, aged, search,
    )  # fmt: skip
    gpus = costs.load.jobs[job]["gpus"]
    if best.way >= 0:
        request, first = request_of(auction.requests, ways.shape[best.way]), offers.offset[job]
        for part in range(request.parts):
            offers.nodes[number, first + part] = search.best[part]
        own, harm = cost_of(
            costs.tree, costs.sure, costs.load, costs.sure_ways, c, search.best, request.parts, request.gpus, search
        )
        best = PlaceChoice(best.rank, best.value + best.own + best.harm - own - harm, best.way, own, harm)
        if not (np.isfinite(best.rank) and np.isfinite(best.value)):
            offers.sound[number] = 0
    waits = worth_of_waiting(agent, graph, number, gpus, aged, waited / PATIENCE_S, best)
    if best.own + best.harm > HARMLESS:
        waits += noise_of(auction.tape, job)
    if not np.isfinite(waits):
        offers.sound[number] = 0
    offers.rank[number, job], offers.value[number, job], offers.waits[number, job] = best.rank, best.value, waits
    offers.own[number, job], offers.harm[number, job], offers.way[number, job] = best.own, best.harm, best.way


@jit
def _accepts(costs: Costs, offers: Offers, number: int, judge: int, job: int, now: float) -> bool:
    """Return whether a job takes an offer rather than waits, in scheduler ``judge``'s view; finally any."""
    over = now >= costs.since[job] + costs.wait_s[job]
    return bool(over or offers.value[number, job] >= offers.waits[judge, job])


@jit
def retries_at(costs: Costs, job: int, now: float) -> float:
    """Return when a job that waits for a better place is decided about again at the latest, as values change."""
    later = now + max(_RETRY_S, _LATER * (now - costs.since[job]))
    return float(min(later, max(costs.since[job] + costs.wait_s[job], np.nextafter(now, np.inf))))


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, priced: Priced) -> tuple[int, int]:
    """Start a job on the highest-ranked offer."""
    resources, requests, jobs, scratch, now = state.resources, state.requests, state.jobs, state.scratch, state.now
    costs, trial = priced.costs, priced.auction
    shape, stamp, offers = jobs.shape[job], scratch.stamp[0], trial.offers
    if scratch.failed[shape] == stamp:
        return PRIORITY, shape
    if late and scratch.failed_late[shape] == stamp:
        return BACKFILL, shape
    room, home = scratch.late if late else resources, trial.home[job]
    _close_kept(scratch.calendar, trial, jobs.masks, requests.mask[shape])
    if offers.way[home, job] == NOT_ASKED:
        _offer_again(trial, costs, room, home, job, now)
    number = _highest(trial, costs, room, job, now, False)
    if number < 0:
        # Its own had a good place, so no other was asked, and that is taken; or its own gave its nodes to a job that
        # took another's offer. Once a size.
        for other in range(offers.rank.shape[0]):
            if other == home or trial.whole[job] == 0:
                _offer_again(trial, costs, room, other, job, now)
        number = _highest(trial, costs, room, job, now, False)
    waits = number >= 0 and number != home and not _accepts(costs, offers, number, home, job, now)
    if waits:
        own = _highest(trial, costs, room, job, now, True)
        number, waits = own if own >= 0 else number, own < 0
    if number < 0 and first and trial.whole[job] == 0 and offers.rank.shape[0] > 1:
        trial.whole[job], number = 1, 0  # on all nodes: a head that fits in no part must not be blocked forever
        _offer_again(trial, costs, room, 0, job, now)
        number = 0 if offers.way[0, job] >= 0 else -1
    if number < 0:
        return no_room(resources, requests, jobs, shape, late, scratch), shape
    if waits or not _accepts(costs, offers, number, number, job, now):
        costs.wait_cost[job, 0], costs.wait_cost[job, 1] = offers.own[number, job], offers.harm[number, job]
        return POLICY, shape
    given = trial.ways.shape[offers.way[number, job]] % trial.shapes
    for part in range(requests.parts[given]):
        scratch.chosen[part] = offers.nodes[number, offers.offset[job] + part]
    start_in(trial.graph, home, scratch.chosen, requests.parts[given], requests.gpus[given])
    return STARTED, given


settle = priced_pass(_attempt)


@jit
def _close_kept(calendar: Calendar | None, auction: Auction, masks: Flags, row: int) -> None:
    """Close what the walk keeps for an earlier job (`keeping`), and invalidate offers on it."""
    if calendar is None or calendar.kept_times[0] == np.inf:
        return
    rows = masks.shape[0] + 1  # of one scheduler; the last: any node
    for part in range(calendar.kept_for[1]):
        node = calendar.kept[part]
        for at in range(row, auction.masks.shape[0] if masks[row, node] == 0 else 0, rows):
            auction.masks[at, node] = 0


@jit
def _highest(auction: Auction, costs: Costs, room: Resources, job: int, now: float, home_only: bool) -> int:
    """Return the scheduler with the highest-ranked valid offer to a job. -1: none has an offer that fits.

    One that holds no more is made again; where the job's own scheduler has one that holds, others' are left out, as
    making them again one after the other is what several schedulers lose most time with.
    """
    offers, home = auction.offers, auction.home[job]
    aged, gpus = min((now - costs.since[job]) / DAY_S, MAX_DAYS_WAITED), costs.load.jobs[job]["gpus"]
    while True:
        best, most = -1, -np.inf
        for number in range(offers.rank.shape[0]):
            if offers.way[number, job] < 0 or (home_only and number != home):
                continue
            rank = offers.rank[number, job]
            if number != home:
                rank += worth_of_handing(auction.agent, auction.graph, home, number, gpus, aged) - _OWN_BONUS
            if not np.isfinite(rank):
                offers.sound[number] = 0
            if rank > most:
                best, most = number, rank
        if best < 0 or _holds(auction, room, best, job):
            return best
        if best != home and offers.way[home, job] >= 0 and _holds(auction, room, home, job):
            offers.way[best, job] = -1
        else:
            _offer_again(auction, costs, room, best, job, now)


@jit
def _holds(auction: Auction, room: Resources, number: int, job: int) -> bool:
    """Return whether the job still fits in the offered place."""
    offers = auction.offers
    request, first = request_of(auction.requests, auction.ways.shape[offers.way[number, job]]), offers.offset[job]
    for part in range(request.parts):
        if not node_fits(room, auction.masks, request, offers.nodes[number, first + part]):
            return False
    return True


@jit
def _offer_again(auction: Auction, costs: Costs, room: Resources, number: int, job: int, now: float) -> None:
    auction.again[0] += 1
    _store_offer(auction, number, auction.graph, costs, room, job, now)
