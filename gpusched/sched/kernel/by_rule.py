"""The pass of policies that place by a rule: first fit, best fit, spread, by rack, random, naive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any, protect, reserve_any, undrawn
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.plan import hold_planned, is_begun, planned
from gpusched.sched.kernel.queue_pass import Pass, queue_pass
from gpusched.sched.state import CONSERVATIVE, RESERVED, BackfillPlan, ClusterState, Ints, Words


class PlacementRule(NamedTuple):
    """How jobs are placed: one of `state.PLACES`, and what it draws from."""

    place: int
    rng: Words


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, rule: PlacementRule) -> tuple[int, int]:
    """The naive placement's unlucky draw counts as not starting."""
    jobs = state.jobs
    return attempt_any(
        state.resources, jobs.masks, state.requests, jobs.shape[job], rule.place, late, rule.rng, state.scratch
    )


@jit
def _reserve(state: ClusterState, job: int, code: int, rule: PlacementRule) -> float:
    return keep_for(state, job, rule.place)


@jit
def keep_for(state: ClusterState, job: int, place: int) -> float:
    """Keep for the head the nodes where it fits first; when that is, seconds."""
    jobs, requests, scratch = state.jobs, state.requests, state.scratch
    shadow, given = reserve_any(
        state.resources, state.releases, jobs.masks, requests, jobs.shape[job], place, state.now, jobs.limit[job],
        scratch,
    )  # fmt: skip
    protect(state.resources, request_of(requests, given), shadow < np.inf, scratch)
    return shadow


@jit
def _attempt_in_plan(state: ClusterState, job: int, late: bool, first: bool, rule: PlacementRule) -> tuple[int, int]:
    """In a plan, which is made anew in every pass, nothing is drawn: naive and random are first fit."""
    jobs, requests, scratch, shape = state.jobs, state.requests, state.scratch, state.jobs.shape[job]
    if jobs.feasibility[shape] == RESERVED:
        hold_planned(scratch.plan, state, job, undrawn(rule.place))
        return RESERVED, shape
    if is_begun(scratch.plan, state):
        return planned(scratch.plan, state, job, first, undrawn(rule.place))
    return attempt_any(state.resources, jobs.masks, requests, shape, undrawn(rule.place), late, rule.rng, scratch)


@jit
def _reserve_in_plan(state: ClusterState, job: int, code: int, rule: PlacementRule) -> float:
    return hold_planned(state.scratch.plan, state, job, undrawn(rule.place))


@jit
def _waits_for_room(code: int) -> bool:
    """Who waits for the end of a reservation of nodes has a place in the plan, and is no head."""
    return code != RESERVED


_by_rule = queue_pass(_attempt, _reserve)
pass_by_plan = queue_pass(_attempt_in_plan, _reserve_in_plan, may_head=_waits_for_room)


def pass_for(backfill: int) -> Pass[PlacementRule]:
    """Return `pass_by_rule` for this backfill: where Python calls it, no plan is compiled that nobody asks for."""
    return pass_by_plan if backfill == CONSERVATIVE else _by_rule


@jit
def pass_by_rule(state: ClusterState, queue: Ints, backfill: int, rule: PlacementRule) -> tuple[int, float]:
    """`queue_pass.Pass`; conservative backfill needs ``scratch.plan``."""
    return _either(state.scratch.plan, state, queue, backfill, rule)


@jit
def _either(
    plan: BackfillPlan | None, state: ClusterState, queue: Ints, backfill: int, rule: PlacementRule
) -> tuple[int, float]:
    if plan is None:
        return _by_rule(state, queue, backfill, rule)
    if backfill == CONSERVATIVE:
        return pass_by_plan(state, queue, backfill, rule)
    return _by_rule(state, queue, backfill, rule)
