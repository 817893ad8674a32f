"""One pass over a partition's queue by what places cost: who starts where, who waits for a better place.

As `backfill.schedule`, but a job goes to the cheapest place, and a place that is too dear for how long the job has
waited counts as none. A head that waits so has its reservation for the end of its wait, where it could start by room
alone: it starts no later than its policy lets it wait, and who ends before that may use the room meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import launch, protect, reserve_any
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import entry, request_of
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BACKFILL,
    EASY,
    FIRST_FIT,
    LIMIT,
    NONE,
    OK,
    POLICY,
    PRIORITY,
    RACK,
    RESOURCES,
    SKIP,
    STARTED,
    Floats,
    Ints,
    Jobs,
    Outcome,
    Releases,
    Requests,
    Resources,
    Scratch,
)
from gpusched.sched.topology.contention import Ways, cheapest, cost_of
from gpusched.sched.topology.live import HARMLESS, PATIENCE_S, Costs, enter_links
from gpusched.sched.topology.slowdown import Model

More = TypeVar("More")
Attempt = Callable[[Resources, Requests, Jobs, int, float, bool, bool, Costs, More, Scratch], tuple[int, int]]
Run = Callable[
    [Resources, Releases, Requests, Jobs, Ints, int, float, Costs, More, Scratch, Outcome], tuple[int, float]
]


def scheduled(attempt: Attempt[More]) -> Run[More]:
    """The pass over a queue in which ``attempt`` says where a job goes, or why it does not.

    ``attempt`` is told whether the job would outlast the head's reservation (``late``), and whether no job before it
    waits (``first``); it answers as `_attempt` does. ``more``: what it needs beside costs. The pass is as
    `backfill.schedule`, also what comes back: who waits for a better place has POLICY, with what the place that it
    could have costs in ``costs.told``; the first such job is the head, as one that has no room.
    """

    def run(
        resources: Resources, releases: Releases, requests: Requests, jobs: Jobs, queue: Ints, backfill: int,
        now: float, costs: Costs, more: More, scratch: Scratch, outcome: Outcome,
    ) -> tuple[int, float]:  # fmt: skip
        head, shadow = -1, np.inf
        scratch.stamp[0] += 1
        waits = RESOURCES if backfill == SKIP else PRIORITY
        for job in queue:
            shape = jobs.shape[job]
            late = backfill == EASY and now + jobs.limit[job] > shadow
            if jobs.feasibility[shape] != OK:
                outcome.code[job] = jobs.feasibility[shape]
            elif exceeds(jobs.links, jobs.room, jobs.account, job):
                outcome.code[job] = LIMIT
            elif head >= 0 and backfill == NONE:
                outcome.code[job] = PRIORITY
            else:
                code, given = attempt(resources, requests, jobs, job, now, late, head < 0, costs, more, scratch)
                if code == STARTED:
                    request, guarded = request_of(requests, given), head >= 0 and backfill == EASY
                    launch(resources, releases, jobs, request, job, now, late, guarded, scratch, outcome)
                    outcome.shape[job] = given
                    enter_links(
                        costs.tree, costs.model, costs.load, job, scratch.chosen, request.parts, request.gpus,
                        costs.search,
                    )  # fmt: skip
                elif head < 0:
                    head = job
                    code = RESOURCES if code == PRIORITY else code
                    if backfill != SKIP:
                        over = _until(costs, job, costs.told[job, 0] + costs.told[job, 1]) if code == POLICY else now
                        shadow, given = reserve_any(
                            resources, releases, jobs.masks, requests, shape, RACK, over, jobs.limit[job], scratch
                        )
                        protect(resources, request_of(requests, given), shadow < np.inf, scratch)
                elif code == PRIORITY:
                    code = waits
                outcome.code[job] = code
        return head, shadow

    # It is kept on disk as a part of the module that says where jobs go: what changes there changes it.
    run.__module__, run.__name__ = attempt.__module__, f"{attempt.__name__}.run"
    run.__qualname__ = run.__name__
    return jit(run)


@jit
def _attempt(
    resources: Resources, requests: Requests, jobs: Jobs, job: int, now: float, late: bool, first: bool, costs: Costs,
    more: int, scratch: Scratch,
) -> tuple[int, int]:  # fmt: skip
    """STARTED with ``scratch.chosen`` set, and the request given; or why not: PRIORITY, BACKFILL, POLICY (it waits)."""
    shape, c, stamp = jobs.shape[job], costs.of[job], scratch.stamp[0]
    if scratch.failed[shape] == stamp:
        return PRIORITY, shape
    if late and scratch.failed_late[shape] == stamp:
        return BACKFILL, shape
    # within a pass there is ever less room, and more neighbours: what was too dear for one of the class stays so
    again = 1 if late else 0
    if costs.looked[again, c] == stamp and _waits(costs, job, costs.seen[again, c, 0] + costs.seen[again, c, 1], now):
        costs.told[job] = costs.seen[again, c]
        return POLICY, shape
    price = costs.seen[again, c]
    way = _offer(costs, scratch.late if late else resources, requests, jobs, c, price)
    if way < 0:
        return no_room(resources, requests, jobs, shape, late, scratch), shape
    costs.looked[again, c] = stamp
    if _waits(costs, job, price[0] + price[1], now):
        costs.told[job] = price
        return POLICY, shape
    given = costs.ways.shape[way]
    for part in range(requests.parts[given]):
        scratch.chosen[part] = costs.search.best[part]
    return STARTED, given


schedule_by_cost = scheduled(_attempt)


def waits_now(costs: Costs, resources: Resources, requests: Requests, jobs: Jobs, now: float) -> dict[int, float]:
    """Waiting job -> until when it waits for a better place than the best that it could have now, were it first."""
    dear = np.zeros((len(costs.ways.first) - 1, 2))
    _look_at_all(costs, resources, requests, jobs, dear)
    found = {}
    for job in np.flatnonzero(costs.of >= 0).tolist():
        cost = float(dear[costs.of[job]].sum())
        if cost > HARMLESS and (until := costs.until(job, cost)) > now:
            found[job] = until
            costs.told[job] = dear[costs.of[job]]
    return found


@jit
def _look_at_all(costs: Costs, resources: Resources, requests: Requests, jobs: Jobs, dear: Floats) -> None:
    """What the place of each class costs now, into ``dear: float64[classes, 2]``."""
    for c in range(dear.shape[0]):
        _offer(costs, resources, requests, jobs, c, dear[c])


@jit
def _offer(costs: Costs, room: Resources, requests: Requests, jobs: Jobs, c: int, price: Floats) -> int:
    """The cheapest place of a class, its nodes in ``search.best``; before it waits nothing counts but what is sure.

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
    costs: Costs, model: Model, ways: Ways, room: Resources, requests: Requests, jobs: Jobs, c: int, price: Floats
) -> int:
    """`contention.cheapest`, and its ``price``."""
    tree, search = costs.tree, costs.search
    _, way = cheapest(tree, model, costs.load, room, jobs.masks, requests, ways, c, np.inf, search)
    if way >= 0:
        given = ways.shape[way]
        price[0], price[1] = cost_of(
            tree, costs.sure, costs.load, costs.sure_ways, c, search.best, requests.parts[given], requests.gpus[given],
            search,
        )  # fmt: skip
    return way


@jit
def _until(costs: Costs, job: int, cost: float) -> float:
    """When a job takes a place that costs so much."""
    return float(costs.since[job] + min(cost * cost * PATIENCE_S, costs.wait_s[job]))


@jit
def _waits(costs: Costs, job: int, cost: float, now: float) -> bool:
    """Whether a job rather waits than taking a place that costs so much."""
    return bool(cost > HARMLESS and now < _until(costs, job, cost))


@jit
def no_room(resources: Resources, requests: Requests, jobs: Jobs, shape: int, late: bool, scratch: Scratch) -> int:
    """PRIORITY where no request fits; BACKFILL where one does, but would be in the head's way."""
    if late:
        scratch.failed_late[shape] = scratch.stamp[0]
        at = shape
        while at >= 0:
            if choose(resources, jobs.masks, request_of(requests, at), FIRST_FIT, scratch):
                return BACKFILL
            at = entry(requests.looser, at, -1)
    scratch.failed[shape] = scratch.stamp[0]
    return PRIORITY
