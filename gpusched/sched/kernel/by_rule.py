"""The pass of policies that place by a rule: first fit, best fit, spread, by rack, random, naive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any, protect, reserve_any, undrawn
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.plan import hold_planned, is_begun, planned
from gpusched.sched.kernel.queue_pass import queue_pass
from gpusched.sched.state import ClusterState, Words


class Rule(NamedTuple):
    """How jobs are placed: one of `state.PLACES`, what it draws from, and whether all who wait have a reservation.

    In such a plan, which is made anew at every decision, nothing is drawn: naive and random are first fit.
    """

    place: int
    rng: Words
    plans: bool


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, rule: Rule) -> tuple[int, int]:
    """The naive placement's unlucky draw counts as not starting."""
    jobs, requests, scratch = state.jobs, state.requests, state.scratch
    place = undrawn(rule.place) if rule.plans else rule.place
    if rule.plans and is_begun(scratch.plan, state):
        return planned(scratch.plan, state, job, first, place)
    return attempt_any(state.resources, jobs.masks, requests, jobs.shape[job], place, late, rule.rng, scratch)


@jit
def _reserve(state: ClusterState, job: int, code: int, rule: Rule) -> float:
    """For the head, on the nodes where it fits first."""
    if rule.plans:
        return hold_planned(state.scratch.plan, state, job, undrawn(rule.place))
    jobs, requests, scratch = state.jobs, state.requests, state.scratch
    shadow, given = reserve_any(
        state.resources, state.releases, jobs.masks, requests, jobs.shape[job], rule.place, state.now,
        jobs.limit[job], scratch,
    )  # fmt: skip
    protect(state.resources, request_of(requests, given), shadow < np.inf, scratch)
    return shadow


pass_by_rule = queue_pass(_attempt, _reserve)
