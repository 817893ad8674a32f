"""EASY on GPU types of different speeds: what is first in the order starts where it ends first.

That may be on a faster type that is taken now. It waits for it then, by a reservation there, where it would end sooner
than by starting on a slower type at once (Topcuoglu et al., HEFT, IEEE TPDS 13(3), 2002, for one queue). Every decision
asks anew; what runs ends by its limit and nothing started meanwhile delays the reservation, so the head's end only ever
comes nearer.
"""

from __future__ import annotations

import numpy as np

from gpusched.sched.backfill import reserve, take
from gpusched.sched.fit import request_of
from gpusched.sched.mapping.problem import Nodes, Problem
from gpusched.sched.releases import add
from gpusched.sched.state import BEST_FIT, Flags, Floats, Ints, PassArrays, Releases, Request, Resources, copied


def shadow_on(arrays: PassArrays, resources: Resources, releases: Releases, job: int, kind: int) -> float:
    """When the job fits on nodes of that GPU type (below 0: on any) at the latest; see `backfill.reserve`."""
    request = request_of(arrays.requests, arrays.jobs.shape[job])
    masks: Flags = arrays.jobs.masks
    if kind >= 0:
        may = (arrays.kind == kind).astype(np.uint8)[None, :]
        masks, request = (may, request._replace(mask=0)) if request.mask < 0 else (masks & may, request)
    return float(
        reserve(resources, releases, masks, request, BEST_FIT, arrays.now, arrays.jobs.limit[job], arrays.scratch)
    )


def reserve_head(arrays: PassArrays, job: int, runs_s: Floats) -> float:
    """Reserves for the first job that does not start where it would end first; the shadow time.

    Sets what `backfill.reserve` sets. ``runs_s``: ``float64[kinds]``: how long it would run on each GPU type; not
    finite: it cannot, or nobody knows.
    """
    kinds = np.flatnonzero(np.isfinite(runs_s)).tolist()
    ends = {k: shadow_on(arrays, arrays.resources, arrays.releases, job, k) + float(runs_s[k]) for k in kinds}
    best = min(ends, key=lambda k: (ends[k], runs_s[k]), default=-1)
    if best >= 0 and ends[best] == np.inf:
        best = -1
    return shadow_on(arrays, arrays.resources, arrays.releases, job, best)


class Prefix:
    """Which of the first jobs start at once; asked in their order, as `greedy` places them.

    Of ``arrays`` only `Scratch` changes. ``runs_s``, ``holds_s``: ``float64[jobs, kinds]``: how long each of the
    problem's jobs would run on each GPU type (not finite: not known), and keep its nodes at the most; ``first_node``:
    row of the problem's first node.
    """

    def __init__(
        self, arrays: PassArrays, jobs: Ints, problem: Problem, runs_s: Floats, holds_s: Floats, first_node: int
    ) -> None:
        self._arrays, self._jobs, self._problem, self._lo = arrays, jobs, problem, first_node
        self._runs_s, self._holds_s = runs_s, holds_s
        self._resources = copied(arrays.resources)
        self._releases = Releases._make(column.copy() for column in arrays.releases)

    def __call__(self, place: int, nodes: Nodes) -> bool:
        """Whether the job starts there; it is taken as started then."""
        arrays, job = self._arrays, int(self._jobs[place])
        if not self._problem.mixes(place) and self._ends_sooner_elsewhere(place, nodes):
            return False
        request: Request = request_of(arrays.requests, arrays.jobs.shape[job])
        held = float(self._holds_s[place, self._problem.kind[list(nodes)]].max())
        for node in nodes:
            take(self._resources, request, self._lo + node)
            add(self._releases, arrays.now + held, self._lo + node, request, job)
        return True

    def _ends_sooner_elsewhere(self, place: int, nodes: Nodes) -> bool:
        runs, now = self._runs_s[place], self._arrays.now
        here = float(runs[self._problem.kind[nodes[0]]])
        for kind in np.flatnonzero(runs < here).tolist():
            shadow = shadow_on(self._arrays, self._resources, self._releases, int(self._jobs[place]), kind)
            # where it fits at once it was not taken for other reasons than its speed
            if now < shadow and shadow + float(runs[kind]) < now + here:
                return True
        return False
