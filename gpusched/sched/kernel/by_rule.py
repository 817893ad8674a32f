"""The pass of policies that place by a rule: first fit, best fit, spread, by rack, random, naive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import attempt_any, protect, reserve_any
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.queue_pass import queue_pass
from gpusched.sched.state import ClusterState, Words


class Rule(NamedTuple):
    """How jobs are placed: one of `state.PLACES`, and what it draws from."""

    place: int
    rng: Words


@jit
def _attempt(state: ClusterState, job: int, late: bool, first: bool, rule: Rule) -> tuple[int, int]:
    """The naive placement's unlucky draw counts as not starting."""
    jobs = state.jobs
    return attempt_any(
        state.resources, jobs.masks, state.requests, jobs.shape[job], rule.place, late, rule.rng, state.scratch
    )


@jit
def _reserve(state: ClusterState, job: int, code: int, rule: Rule) -> float:
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


pass_by_rule = queue_pass(_attempt, _reserve)
