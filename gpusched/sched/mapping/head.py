"""EASY with GPU types of different speeds: the first job in the order starts where it ends first.

That may be on a faster type that is taken now. It waits for it then, by a reservation there, where it would end sooner
than by starting on a slower type at once (Topcuoglu et al., HEFT, IEEE TPDS 13(3), 2002, for one queue). Every decision
asks anew; what runs ends by its limit and nothing started meanwhile delays the reservation, so the head's end only ever
comes nearer.
"""

from __future__ import annotations

import numpy as np

from gpusched.sched.backfill import reserve, take
from gpusched.sched.fit import request_of
from gpusched.sched.mapping.greedy import Takes
from gpusched.sched.mapping.problem import Nodes, Problem
from gpusched.sched.releases import add
from gpusched.sched.state import BEST_FIT, ClusterState, Flags, Floats, Ints, Releases, copied


def shadow_on(state: ClusterState, types: Ints, job: int, kind: int) -> float:
    """Return when the job fits at the latest on that GPU type (below 0: any); see `backfill.reserve`.

    ``types``: ``int64[nodes]``: the nodes' GPU types.
    """
    request = request_of(state.requests, state.jobs.shape[job])
    masks: Flags = state.jobs.masks
    if kind >= 0:
        may = (types == kind).astype(np.uint8)[None, :]
        masks, request = (may, request._replace(mask=0)) if request.mask < 0 else (masks & may, request)
    lasts = state.jobs.limit[job]
    return float(reserve(state.resources, state.releases, masks, request, BEST_FIT, state.now, lasts, state.scratch))


def reserve_head(state: ClusterState, types: Ints, job: int, runs_s: Floats) -> float:
    """Reserve nodes for the first job that does not start, where it ends first; return the shadow time.

    Sets what `backfill.reserve` sets. ``runs_s``: ``float64[kinds]``: how long it would run on each GPU type; not
    finite: it cannot, or that is unknown.
    """
    kinds = np.flatnonzero(np.isfinite(runs_s)).tolist()
    ends = {k: shadow_on(state, types, job, k) + float(runs_s[k]) for k in kinds}
    best = min(ends, key=lambda k: (ends[k], runs_s[k]), default=-1)
    if best >= 0 and ends[best] == np.inf:
        best = -1
    return shadow_on(state, types, job, best)


def starts_now(
    state: ClusterState, types: Ints, jobs: Ints, problem: Problem, runs_s: Floats, holds_s: Floats, first_node: int
) -> Takes:
    """Return which of the first jobs start now: tried in order, placed as by `greedy`.

    Of ``state`` only `Scratch` changes. ``runs_s``, ``holds_s``: ``float64[jobs, kinds]``: how long each of the
    problem's jobs would run on each GPU type (not finite: not known), and keep its nodes at the most; ``first_node``:
    row of the problem's first node. ``types``: See `shadow_on`.
    """
    releases, now = Releases._make(column.copy() for column in state.releases), state.now
    state = state._replace(resources=copied(state.resources), releases=releases)

    def ends_sooner_elsewhere(place: int, nodes: Nodes) -> bool:
        runs = runs_s[place]
        state_now = float(runs[problem.kind[nodes[0]]])
        for kind in np.flatnonzero(runs < state_now).tolist():
            shadow = shadow_on(state, types, int(jobs[place]), kind)
            # where it fits at once it was not taken for other reasons than its speed
            if now < shadow and shadow + float(runs[kind]) < now + state_now:
                return True
        return False

    def takes(place: int, nodes: Nodes) -> bool:
        job = int(jobs[place])
        if not problem.mixes(place) and ends_sooner_elsewhere(place, nodes):
            return False
        request = request_of(state.requests, state.jobs.shape[job])
        held = float(holds_s[place, problem.kind[list(nodes)]].max())
        for node in nodes:
            take(state.resources, request, first_node + node)
            add(releases, now + held, first_node + node, request, job)
        return True

    return takes
