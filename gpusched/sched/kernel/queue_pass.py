"""The walk over a partition's queue: who starts, who is first of those that do not, what is kept for that one.

Whoever decides says by hooks where a job goes, what is kept for the head, and what follows from a start; feasibility,
limits, backfill, reasons and what a start takes are the walk's own, the same for everybody. Each set of hooks is
compiled into a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from gpusched.compiled import filled_in, jit
from gpusched.sched.backfill import launch
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import entry, request_of
from gpusched.sched.state import (
    BACKFILL,
    CONSERVATIVE,
    EASY,
    LIMIT,
    NONE,
    OK,
    PRIORITY,
    RESERVED,
    RESOURCES,
    SKIP,
    STARTED,
    ClusterState,
    Ints,
    Request,
)

UNSOUND = -1
"""In place of a code: whoever decides answered what is no number, and nothing of the pass counts."""


More = TypeVar("More")
Place = Callable[[ClusterState, int, bool, bool, More], tuple[int, int]]
"""(state, job, late, first, more) -> code, request.

STARTED with ``scratch.chosen`` set, and which request was given; or why not: PRIORITY (does not fit), BACKFILL, POLICY
(it waits though it fits), UNSOUND. ``late``: the job would outlast the head's reservation; ``first``: nobody before it
waits. Who marks a shape as failed (``scratch.failed``) is not asked about it again in this pass.
"""
Hold = Callable[[ClusterState, int, int, More], float]
"""(state, job, code, more) -> shadow: keeps nodes for the head, which does not start for the reason ``code``; when it
can start at the latest, seconds. With CONSERVATIVE likewise for each job with the code RESERVED."""
Started = Callable[[ClusterState, int, Request, More], None]
"""(state, job, request, more): what follows for whoever decides from a start on ``scratch.chosen``."""
MayHead = Callable[[int], bool]
"""Whether who does not start for this reason may be the head."""
Pass = Callable[[ClusterState, Ints, int, More], tuple[int, float]]


@jit
def whoever_waits(code: int) -> bool:
    """Any reason makes a head."""
    return True


@jit
def nothing_follows(state: ClusterState, job: int, request: Request, more: Any) -> None:
    """Of a start."""


def queue_pass(
    place: Place[More], hold: Hold[More], started: Started[More] = nothing_follows, may_head: MayHead = whoever_waits
) -> Pass[More]:
    """The pass in which these hooks decide; ``more`` is what they need beside the state.

    It takes the state, ``queue: int64[waiting]`` in order of precedence, and the backfill. Jobs that can never run
    (``jobs.feasibility``) or for which a bound leaves no room block nobody. With NONE the first job that does not start
    blocks all behind it; with SKIP nobody blocks; with EASY the first has a reservation, with CONSERVATIVE each (by
    its hooks, see `plan`), also who waits for the end of a reservation of nodes. Started jobs are taken off
    ``resources`` and noted in ``releases`` (end: now + limit), both in place.

    Returns:
        What gives the first job that could not start (-1: none) and when it can at the latest, by the running jobs'
        limits (seconds; infinite where there is no such job, or backfill is SKIP; NaN: the pass ended by UNSOUND).
    """
    return filled_in(_walk, place, _place=place, _hold=hold, _started=started, _may_head=may_head)


_place: Place[Any] = cast(Any, None)  # these four are filled in
_hold: Hold[Any] = cast(Any, None)
_started: Started[Any] = nothing_follows
_may_head: MayHead = whoever_waits


def _walk(state: ClusterState, queue: Ints, backfill: int, more: Any) -> tuple[int, float]:
    """What `queue_pass` makes."""
    resources, releases, requests, jobs, scratch, outcome, now = state
    head, shadow = -1, np.inf
    scratch.stamp[0] += 1
    stamp, waits = scratch.stamp[0], RESOURCES if backfill == SKIP else PRIORITY
    # the loop's own arrays, and its answers before any call: most jobs of a long queue get no further
    code_of, shape_of, limit_of, account_of = outcome.code, jobs.shape, jobs.limit, jobs.account
    feasibility, links, room = jobs.feasibility, jobs.links, jobs.room
    failed, failed_late, looser = scratch.failed, scratch.failed_late, requests.looser
    for job in queue:
        shape = shape_of[job]
        late = backfill == EASY and now + limit_of[job] > shadow
        if feasibility[shape] != OK:
            code_of[job] = feasibility[shape]
            reserved = backfill == CONSERVATIVE and feasibility[shape] == RESERVED
            if reserved and not exceeds(links, room, account_of, job):
                _hold(state, job, RESERVED, more)
        elif exceeds(links, room, account_of, job):
            code_of[job] = LIMIT
        elif head >= 0 and backfill == NONE:
            code_of[job] = PRIORITY
        elif failed[shape] == stamp and entry(looser, shape, -1) < 0:
            code_of[job] = waits
        elif late and failed_late[shape] == stamp and entry(looser, shape, -1) < 0:
            code_of[job] = BACKFILL
        else:
            code, given = _place(state, job, late, head < 0, more)
            if code == UNSOUND:
                return head, np.nan
            if code == STARTED:
                request, guarded = request_of(requests, given), head >= 0 and backfill == EASY
                launch(resources, releases, jobs, request, job, now, late, guarded, scratch, outcome)
                outcome.shape[job] = given
                _started(state, job, request, more)
            elif head < 0 and _may_head(code):
                head = job
                code = RESOURCES if code == PRIORITY else code
                if backfill != SKIP:
                    shadow = _hold(state, job, code, more)
            elif code == PRIORITY:
                code = waits
            code_of[job] = code
    return head, shadow
