"""A cost-based pass over a partition's queue: which jobs start where, which wait for a better place.

As by a rule (`kernel.by_rule`), but a job goes to the cheapest place, and a place too dear for how long the job has
waited counts as none. A head that waits so has its reservation for the end of its wait, where it fits at any cost:
it starts no later than its policy lets it wait, and jobs that end before that may use the nodes meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpusched.compiled import jit
from gpusched.sched.backfill import keep_for
from gpusched.sched.fit import entry, request_of
from gpusched.sched.kernel.queue_pass import Pass, Place, queue_pass
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BACKFILL,
    FIRST_FIT,
    POLICY,
    PRIORITY,
    RACK,
    STARTED,
    ClusterState,
    Floats,
    Ints,
    PlacementRequest,
    QueueJobs,
    Requests,
    Resources,
    Scratch,
)
from gpusched.sched.topology.contention import JobLayouts, PlacementSearch, cheapest, cost_of
from gpusched.sched.topology.load import Load, enter_links, set_speeds
from gpusched.sched.topology.slowdown import SlowdownModel, learned
from gpusched.sched.topology.tree import NetworkTree

PATIENCE_S = 1_555_200.0
"""A job waits at most cost ** 2 times this; the cost is 1 where it would run twice as long in the place free now."""
HARMLESS = 0.05  # what costs no more is taken at once
WAIT_S, HOLD_S = 86_400.0, 604_800.0
"""In replays: how long jobs wait for one rack; how long the first of all is passed over by those behind it."""


@jit
def waits_until(since: float, cost: float, patience_s: float, wait_s: float) -> float:
    """Return when a job accepts a place of this cost; it waits from ``since`` on, at most ``wait_s``."""
    return float(since + min(cost * cost * patience_s, wait_s))


@jit
def is_waiting(cost: float, until: float, now: float) -> bool:
    """Return whether a job waits rather than takes a place of this cost, acceptable at ``until``."""
    return bool(cost > HARMLESS and now < until)


class Costs(NamedTuple):
    """Placement costs of the pending jobs in partitions whose policy uses them.

    Attributes:
        tree: Of all nodes, by row (`arrays.NodeArrays`).
        model: All that is believed. sure: without what only public tables say.
        load: Slot j is waiting job j, which does not run yet; slot J + i is running job i.
        ways: Of each class of jobs (request and kind), one for every request of the chain (`Requests.looser`) that fits
            on the well nodes. sure_ways: the same, with what is shortest by ``sure``.
        of: ``int64[J]``: class; -1: of another partition.
        since, wait_s: ``float64[J]``: since when a job waits for a good place, and how long it does at most.
        patience_s: See `waits_until`.
        last_pass: ``int64[2, classes]``: the pass in which a class was looked at, in all, and in what the head leaves.
        class_cost: ``float64[2, classes, 2]``: what its place costs it and its neighbours by ``sure``.
        wait_cost: ``float64[J, 2]``: the cost of the place that a waiting job could have, to it and to its neighbours.
        search: Work space.
    """

    tree: NetworkTree
    model: SlowdownModel
    sure: SlowdownModel
    load: Load
    ways: JobLayouts
    sure_ways: JobLayouts
    of: Ints
    since: Floats
    wait_s: Floats
    patience_s: float
    last_pass: Ints
    class_cost: Floats
    wait_cost: Floats
    search: PlacementSearch

    def until(self, job: int, cost: float) -> float:
        """Return when a pending job accepts a place of this cost (Unix seconds)."""
        return waits_until(float(self.since[job]), cost, self.patience_s, float(self.wait_s[job]))


class Priced(NamedTuple):
    """Placement costs, and an agent's further inputs (`_attempt`: nothing, 0)."""

    costs: Costs
    auction: Any


def priced_pass(place: Place[Priced]) -> Pass[Priced]:
    """Build the pass over a queue in which ``place`` chooses the placement.

    A job that waits for a better place has POLICY, and ``costs.wait_cost`` of the place that it could have; the first
    such job is the head, like one that does not fit.
    """
    return queue_pass(place, _keep, _enter)


@jit
def _keep(state: ClusterState, job: int, code: int, priced: Priced) -> float:
    """Keep a waiting job's nodes from the time at which its wait ends."""
    costs, over = priced.costs, state.now
    if code == POLICY:
        over = until_of(costs, job, costs.wait_cost[job, 0] + costs.wait_cost[job, 1])
    return keep_for(state, job, RACK, over)


@jit
def _enter(state: ClusterState, job: int, request: PlacementRequest, priced: Priced) -> None:
    """Add a started job as a neighbour of others."""
    costs = priced.costs
    enter_links(
        costs.tree, costs.model, costs.load, job, state.scratch.chosen, request.parts, request.gpus, costs.search.use,
        costs.search.needs,
    )  # fmt: skip
    if not learned(costs.model.believed):
        set_speeds(costs.model, costs.load, job)


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, priced: Priced) -> tuple[int, int]:
    """Start in the cheapest place, once the job has waited long enough for its cost."""
    resources, requests, jobs, scratch, now = state.resources, state.requests, state.jobs, state.scratch, state.now
    costs = priced.costs
    shape, c, stamp = jobs.shape[job], costs.of[job], scratch.stamp[0]
    if scratch.failed[shape] == stamp:
        return PRIORITY, shape
    if late and scratch.failed_late[shape] == stamp:
        return BACKFILL, shape
    # within a pass free nodes only shrink and neighbours only grow: what was too dear for one of the class stays so
    again = 1 if late else 0
    if costs.last_pass[again, c] == stamp and _waits(costs, job, costs.class_cost[again, c], now):
        costs.wait_cost[job] = costs.class_cost[again, c]
        return POLICY, shape
    price = costs.class_cost[again, c]
    way = _offer(costs, scratch.late if late else resources, requests, jobs, c, price)
    if way < 0:
        return no_room(resources, requests, jobs, shape, late, scratch), shape
    if _waits(costs, job, price, now):
        costs.last_pass[again, c] = stamp
        costs.wait_cost[job] = price
        return POLICY, shape
    given = costs.ways.shape[way]
    for part in range(requests.parts[given]):
        scratch.chosen[part] = costs.search.best[part]
    return STARTED, given


@jit
def _offer(costs: Costs, room: Resources, requests: Requests, jobs: QueueJobs, c: int, price: Floats) -> int:
    """Return the cheapest place of a class, nodes in ``search.best``; only sure costs count before it waits.

    ``price``: what it costs the job and its neighbours, as far as is sure. -1: it has none, else its way.
    """
    way = _price(costs, costs.model, costs.ways, room, requests, jobs, c, price)
    if way >= 0 and price[0] + price[1] > HARMLESS:
        costs.search.tight[0] = 0.0
        way = _price(costs, costs.sure, costs.sure_ways, room, requests, jobs, c, price)
        costs.search.tight[0] = 1.0
    return way


@jit
def _price(
    costs: Costs,
    model: SlowdownModel,
    ways: JobLayouts,
    room: Resources,
    requests: Requests,
    jobs: QueueJobs,
    c: int,
    price: Floats,
) -> int:
    """Call `contention.cheapest`, and set its ``price``."""
    tree, search = costs.tree, costs.search
    _, way = cheapest(tree, model, costs.load, room, jobs.masks, requests, ways, c, search)
    if way >= 0:
        given = ways.shape[way]
        price[0], price[1] = cost_of(
            tree, costs.sure, costs.load, costs.sure_ways, c, search.best, requests.parts[given], requests.gpus[given],
            search,
        )  # fmt: skip
    return way


@jit
def until_of(costs: Costs, job: int, cost: float) -> float:
    """Return when a job accepts a place of this cost."""
    return waits_until(costs.since[job], cost, costs.patience_s, costs.wait_s[job])


@jit
def _waits(costs: Costs, job: int, price: Floats, now: float) -> bool:
    """Return whether a job waits rather than takes a place of this price."""
    cost = price[0] + price[1]
    return is_waiting(cost, until_of(costs, job, cost), now)


@jit
def no_room(resources: Resources, requests: Requests, jobs: QueueJobs, shape: int, late: bool, scratch: Scratch) -> int:
    """Return PRIORITY if no request fits, or BACKFILL if one fits but would delay the head."""
    if late:
        scratch.failed_late[shape] = scratch.stamp[0]
        at = shape
        while at >= 0:
            if choose(resources, jobs.masks, request_of(requests, at), FIRST_FIT, scratch):
                return BACKFILL
            at = entry(requests.looser, at, -1)
    scratch.failed[shape] = scratch.stamp[0]
    return PRIORITY


pass_by_cost = priced_pass(_attempt)
