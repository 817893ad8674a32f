"""Conservative backfill: every waiting job has a reservation on concrete nodes, and nobody delays an earlier one.

Mu'alem and Feitelson, IEEE TPDS 12(6), 2001. The plan is made anew, in order of the queue, at every decision, so that
an early end is used at once; jobs ahead in the queue are never planned later than with the jobs behind them left out.
The plan is a table of what each node has free in each interval between known times: cost grows with the waiting jobs
times the running ones times the nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.place import choose
from gpusched.sched.releases import add, settle
from gpusched.sched.state import FIRST_FIT, NAIVE, OK, Flags, Floats, Ints, Releases, Request, Resources, Scratch
from gpusched.sim.engine.ledger import exceeds_limit
from gpusched.sim.engine.state import Log, Passes, Sim, shape_request
from gpusched.sim.engine.step import occupy


class Profile(NamedTuple):
    """What is free when.

    Attributes:
        time: ``float64[rows]``: where an interval begins. row: ``int64[rows]``: the intervals in order of time.
        free: ``int64[rows, 3, nodes]``: GPUs, cores, MiB. size: ``int64[1]``: intervals.
        least: ``int64[3, nodes]``: the least of a span of intervals.
    """

    time: Floats
    row: Ints
    free: Ints
    size: Ints
    least: Ints


@jit
def conserve(sim: Sim, log: Log, passes: Passes, ordered: Ints, rule: int) -> None:
    """Starts what may start now; ``ordered: int64[waiting]``: one partition's queue.

    Placements that draw count as first fit here.
    """
    settle(passes.releases)
    rule = FIRST_FIT if rule >= NAIVE else rule
    now = sim.clock[0]
    profile = _profile(sim.resources, passes.releases, now, ordered.size)
    not_before, at_least = np.full(sim.shapes.size, now), np.full(sim.shapes.size, np.inf)
    for job in ordered:
        shape = sim.jobs[job]["shape"]
        if passes.jobs.feasibility[shape] != OK or exceeds_limit(sim.ledger, job):
            continue
        request, expected = shape_request(sim.shapes, shape), sim.jobs[job]["expected"]
        first = not_before[shape] if expected >= at_least[shape] else now
        begin = _earliest(profile, passes.jobs.masks, request, expected, first, rule, passes.scratch)
        not_before[shape], at_least[shape] = begin, expected
        if begin == np.inf:
            continue
        _reserve(profile, request, begin, begin + expected, sim.chosen)
        if begin == now:
            occupy(sim, log, job, request, 0.0)
            for part in range(request.parts):
                add(passes.releases, now + expected, sim.chosen[part], request, job)


@jit
def _profile(resources: Resources, releases: Releases, now: float, waiting: int) -> Profile:
    """What is free from now on, by what running jobs are expected to give back (overdue: soon, not now)."""
    rows, nodes = releases.used[0] + waiting + 2, resources.gpus.size
    size = np.ones(1, np.int64)
    least = np.zeros((3, nodes), np.int64)
    least[0], least[1], least[2] = resources
    profile = Profile(np.zeros(rows), np.arange(rows), np.zeros((rows, 3, nodes), np.int64), size, least)
    soon = np.nextafter(now, np.inf)
    profile.time[0] = now
    profile.free[0] = profile.least
    for i in range(releases.used[0]):
        slot = releases.order[i]
        end, last = max(releases.end[slot], soon), size[0] - 1
        if end > profile.time[last]:
            last += 1
            size[0] += 1
            profile.time[last] = end
            profile.free[last] = profile.free[last - 1]
        node = releases.node[slot]
        if profile.free[last, 0, node] >= 0:
            profile.free[last, 0, node] += releases.gpus[slot]
            profile.free[last, 1, node] += releases.cores[slot]
            profile.free[last, 2, node] += releases.memory[slot]
    return profile


@jit
def _earliest(
    profile: Profile, masks: Flags, request: Request, expected: float, first: float, rule: int, scratch: Scratch
) -> float:
    """The earliest time from ``first`` on at which the job fits for all of its run; ``scratch.chosen`` its nodes."""
    least = profile.least
    resources = Resources(least[0], least[1], least[2])
    for at in range(profile.size[0]):
        begin = profile.time[profile.row[at]]
        if begin < first:
            continue
        least[:] = profile.free[profile.row[at]]
        if not choose(resources, masks, request, FIRST_FIT, scratch):
            continue
        for later in range(at + 1, profile.size[0]):
            if profile.time[profile.row[later]] >= begin + expected:
                break
            _lower(least, profile.free[profile.row[later]], request)
        if choose(resources, masks, request, rule, scratch):
            return float(begin)
    return np.inf


@jit
def _lower(least: Ints, other: Ints, request: Request) -> None:
    for kind in range(3):
        for node in range(request.lo, request.hi):
            least[kind, node] = min(least[kind, node], other[kind, node])


@jit
def _reserve(profile: Profile, request: Request, begin: float, end: float, chosen: Ints) -> None:
    """Takes the job's nodes off all intervals from ``begin`` to ``end``; ``begin`` is where one begins."""
    at = 0
    while at < profile.size[0] and profile.time[profile.row[at]] < end:
        at += 1
    if at == profile.size[0] or profile.time[profile.row[at]] > end:
        _split(profile, at, end)
    for i in range(at):
        row = profile.row[i]
        if profile.time[row] >= begin:
            for part in range(request.parts):
                profile.free[row, 0, chosen[part]] -= request.gpus
                profile.free[row, 1, chosen[part]] -= request.cores
                profile.free[row, 2, chosen[part]] -= request.memory


@jit
def _split(profile: Profile, at: int, time: float) -> None:
    """A new interval from ``time`` on before position ``at``, as free as the one it is cut from."""
    row = profile.row[profile.size[0]]
    for i in range(profile.size[0], at, -1):
        profile.row[i] = profile.row[i - 1]
    profile.row[at] = row
    profile.time[row] = time
    profile.free[row] = profile.free[profile.row[at - 1]]
    profile.size[0] += 1
