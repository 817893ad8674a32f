"""The pass of policies that place by rule: first fit, best fit, spread, by rack, random, naive."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any, keep_for, undrawn
from gpusched.sched.kernel.plan import hold_planned, is_begun, planned
from gpusched.sched.kernel.queue_pass import Pass, queue_pass
from gpusched.sched.state import CONSERVATIVE, RESERVED, BackfillPlan, ClusterState, Ints, Words


class PlacementRule(NamedTuple):
    """A placement rule: one of `state.PLACES`, and its random state."""

    place: int
    rng: Words


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, rule: PlacementRule) -> tuple[int, int]:
    """Try to place a job; an unlucky draw of the naive placement counts as not starting."""
    return attempt_any(state, state.jobs.shape[job], rule.place, late, rule.rng)


@jit
def _reserve(state: ClusterState, job: int, code: int, rule: PlacementRule) -> float:
    return keep_for(state, job, rule.place, state.now)


@jit
def _attempt_in_plan(state: ClusterState, job: int, late: bool, first: bool, rule: PlacementRule) -> tuple[int, int]:
    """Place a job by the plan, made anew in every pass; naive and random placement use first fit."""
    scratch, shape = state.scratch, state.jobs.shape[job]
    if state.jobs.feasibility[shape] == RESERVED:
        hold_planned(scratch.plan, state, job, undrawn(rule.place))
        return RESERVED, shape
    if is_begun(scratch.plan, state):
        return planned(scratch.plan, state, job, first, undrawn(rule.place))
    return attempt_any(state, shape, undrawn(rule.place), late, rule.rng)


@jit
def _reserve_in_plan(state: ClusterState, job: int, code: int, rule: PlacementRule) -> float:
    return hold_planned(state.scratch.plan, state, job, undrawn(rule.place))


@jit
def _waits_for_room(code: int) -> bool:
    """Return whether the job is a head; one that waits for a reservation to end has a planned place instead."""
    return code != RESERVED


_by_rule = queue_pass(_attempt, _reserve)
pass_by_plan = queue_pass(_attempt_in_plan, _reserve_in_plan, may_head=_waits_for_room)


def pass_for(backfill: int) -> Pass[PlacementRule]:
    """Return `pass_by_rule` for this backfill: calls from Python compile the plan only where it is used."""
    return pass_by_plan if backfill == CONSERVATIVE else _by_rule


@jit
def pass_by_rule(state: ClusterState, queue: Ints, backfill: int, rule: PlacementRule) -> tuple[int, float]:
    """Run a `queue_pass.Pass`; conservative backfill needs ``scratch.plan``."""
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
