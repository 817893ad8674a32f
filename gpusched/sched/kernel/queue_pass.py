"""The walk over a partition's queue: which jobs start, which is the first that does not, what is kept for it.

The decider's hooks say where a job goes, what is kept for the head, and what follows from a start; feasibility,
limits, backfill, reasons and what a start takes are the walk's own, the same for all policies. Each set of hooks is
compiled into a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from gpusched.compiled import in_python, inlined, jit, specialized
from gpusched.sched.backfill import enter, launch
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import entry, request_of
from gpusched.sched.keeping import keep_nodes, keeps_nodes, reset_kept_nodes
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
    PlacementRequest,
)

UNSOUND = -1
"""In place of a code: the decider's answer was not a number, and nothing of the pass counts."""
KEPT = 100
"""In place of a code: the job runs, and keeps its nodes."""

More = TypeVar("More")
Place = Callable[[ClusterState, int, bool, bool, More], tuple[int, int]]
"""(state, job, late, first, more) -> code, request.

STARTED with ``scratch.chosen`` set, and which request was given; or why not: PRIORITY (does not fit), BACKFILL, POLICY
(it waits though it fits), UNSOUND. ``late``: the job would outlast the head's reservation; ``first``: no job before it
waits. A hook that marks a shape as failed (``scratch.failed``) is not called for it again in this pass, nor to hold.
"""
Hold = Callable[[ClusterState, int, int, More], float]
"""(state, job, code, more) -> shadow: keeps nodes for the head, which does not start for the reason ``code``; when it
can start at the latest, seconds."""
Taken = Callable[[ClusterState, int, PlacementRequest, More], PlacementRequest]
"""(state, job, request, more): what a start takes on each of ``scratch.chosen``, where it is beside another job."""
Started = Callable[[ClusterState, int, PlacementRequest, More], None]
"""(state, job, request, more): what follows for the decider from a start that took this on ``scratch.chosen``."""
MayHead = Callable[[int], bool]
"""Whether a job that does not start for this reason may be the head."""
Following = Callable[[ClusterState, Ints, int, int, More], int]
"""(state, queue, at, head, more): job number ``at`` of the pass; -1: no more."""
Keeps = Callable[[ClusterState, int, More], bool]
"""(state, job, more): whether the job runs and keeps its nodes, whatever else is said of it."""
Pass = Callable[[ClusterState, Ints, int, More], tuple[int, float]]


@jit
def any_reason_blocks(code: int) -> bool:
    """Return True: any waiting job can be the head."""
    return True


@jit
def no_running_jobs(state: ClusterState, job: int, more: Any) -> bool:
    """Return False: the queue holds no running jobs."""
    return False


@jit
def hold_nothing(state: ClusterState, job: int, code: int, more: Any) -> float:
    """Reserve nothing, and return infinity."""
    return np.inf


@jit
def whole_request(state: ClusterState, job: int, request: PlacementRequest, more: Any) -> PlacementRequest:
    """Return the request unchanged: the job is beside none."""
    return request


@jit
def ignore_start(state: ClusterState, job: int, request: PlacementRequest, more: Any) -> None:
    """Do nothing after a start."""


@jit
def in_order(state: ClusterState, queue: Ints, at: int, head: int, more: Any) -> int:
    """Keep the queue's order."""
    return int(queue[at]) if at < queue.size else -1


def queue_pass(
    place: Place[More], hold: Hold[More], started: Started[More] = ignore_start, may_head: MayHead = any_reason_blocks,
    keeps: Keeps[More] = no_running_jobs, following: Following[More] = in_order, taken: Taken[More] = whole_request,
    renews: bool = True, compiled: bool = True,
) -> Pass[More]:  # fmt: skip
    """Build the pass in which these hooks decide; ``more`` holds what they need beside the state.

    It takes the state, ``queue: int64[waiting]`` in order of precedence, and the backfill. Jobs that can never run
    (``jobs.feasibility``) or that a limit excludes block no other job. With NONE the first job that does not start
    blocks all behind it; with SKIP none blocks; with EASY the first has a reservation, with CONSERVATIVE each (by
    its hooks, see `plan`), also a job that waits for the end of a reservation of nodes. Started jobs are taken off
    ``resources`` and noted in ``releases`` (end: now + limit), both in place. ``keeps``: where running jobs are in the
    queue, too. Of those that wait for the end of a reservation of nodes the first has its place kept from those behind
    it (`keeping`), but with SKIP, unless running jobs are in the queue. ``renews``: False in a second pass over a
    queue, which uses what the first one kept.
    ``compiled``: False where hooks ask what cannot be compiled, such as a solver: Python runs the walk then.

    Returns:
        What gives the first job that could not start (-1: none) and when it can at the latest, by the running jobs'
        limits (seconds; infinite where there is no such job, or backfill is SKIP; NaN: the pass ended by UNSOUND).
    """
    hooks = dict[str, Callable[..., object]](
        _place=place, _hold=hold, _started=started, _may_head=may_head, _keeps=keeps, _following=following,
        _taken=taken,
    )  # fmt: skip
    flags = {"_keeps_clear": keeps is not no_running_jobs, "_shares": taken is not whole_request, "_renews": renews}
    if not compiled:
        # calling code takes longer
        small = dict[str, object](enter=enter, entry=entry, exceeds=exceeds, request_of=request_of)
        return in_python(_walk, **flags, **small, **hooks)
    parts = {name: inlined(hook) for name, hook in hooks.items()}
    return specialized(_walk, place, **flags, **parts)


_place: Place[Any] = cast(Any, None)  # these ten are filled in
_hold: Hold[Any] = cast(Any, None)
_started: Started[Any] = ignore_start
_may_head: MayHead = any_reason_blocks
_keeps: Keeps[Any] = no_running_jobs
_following: Following[Any] = in_order
_taken: Taken[Any] = whole_request
_keeps_clear = _shares = _renews = False


def _walk(state: ClusterState, queue: Ints, backfill: int, more: Any) -> tuple[int, float]:
    """Build the function that `queue_pass` returns."""
    _, _, requests, jobs, scratch, outcome, now = state
    head, shadow, keeps_clear = -1, np.inf, _keeps_clear or keeps_nodes(backfill)
    if _renews:
        reset_kept_nodes(scratch.calendar)
    scratch.stamp[0] += 1
    stamp, waits = scratch.stamp[0], RESOURCES if backfill == SKIP else PRIORITY
    # the loop's own arrays, and its answers before any call: most jobs of a long queue get no further
    code_of, shape_of, limit_of, account_of = outcome.code, jobs.shape, jobs.limit, jobs.account
    feasibility, links, room = jobs.feasibility, jobs.links, jobs.room
    failed, failed_late, looser = scratch.failed, scratch.failed_late, requests.looser
    at, job = 0, _following(state, queue, 0, head, more)
    while job >= 0:
        shape = shape_of[job]
        late = backfill == EASY and now + limit_of[job] > shadow
        if _keeps(state, job, more):
            code_of[job] = KEPT
        elif feasibility[shape] != OK and not (
            backfill == CONSERVATIVE and feasibility[shape] == RESERVED and not exceeds(links, room, account_of, job)
        ):
            code_of[job] = feasibility[shape]
            if _renews and keeps_clear and feasibility[shape] == RESERVED and not exceeds(links, room, account_of, job):
                keep_nodes(scratch.calendar, state, job)
        elif exceeds(links, room, account_of, job):
            code_of[job] = LIMIT
        elif head >= 0 and backfill == NONE:
            code_of[job] = PRIORITY
        # within a pass resources only shrink, so an equal request that failed before fails again; one with looser
        # requests has to be tried, as another of its chain may still fit
        elif failed[shape] == stamp and entry(looser, shape, -1) < 0:
            code_of[job] = waits
        elif late and failed_late[shape] == stamp and entry(looser, shape, -1) < 0:
            code_of[job] = BACKFILL
        else:
            code, given = _place(state, job, late, head < 0, more)
            if code == UNSOUND:
                return head, np.nan
            if code == STARTED:
                guarded = head >= 0 and backfill == EASY
                request = request_of(requests, given)
                if _shares:
                    request = _taken(state, job, request, more)
                else:
                    request = enter(state.resources.shared, request, job, scratch.chosen[0])
                launch(state, request, job, late, guarded)
                outcome.shape[job] = given
                _started(state, job, request, more)
            else:
                heads = head < 0 and _may_head(code)
                head = job if heads else head
                if code == PRIORITY:
                    code = RESOURCES if heads else waits
                # from here on the shadow time is set, and `late` applies to every job behind
                if heads and backfill != SKIP:
                    shadow = _hold(state, job, code, more)
            code_of[job] = code
        at += 1
        job = _following(state, queue, at, head, more)
    return head, shadow
