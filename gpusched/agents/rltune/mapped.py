"""RLTune's order placed by mapping (``place: milp`` or ``fastest``): the optimiser chooses nodes for its first jobs."""

from __future__ import annotations

import msgspec
import numpy as np

from gpusched.agents.rltune.decide import await_room, due_slots
from gpusched.agents.rltune.history import Known
from gpusched.compiled import jit
from gpusched.sched.agent import Context
from gpusched.sched.bounds import exceeds
from gpusched.sched.fit import request_of
from gpusched.sched.mapping.queue import Keep
from gpusched.sched.place import choose
from gpusched.sched.reasons import Block
from gpusched.sched.stages import place_queue
from gpusched.sched.state import FIRST_FIT, NONE, OK, ClusterState, Flags, Ints

# Of the agent's budget: what the optimiser may have. The rest is for scoring, and for a machine that is busy: an agent
# that is late loses its turn altogether.
SHARE = 0.6


def map_order(context: Context, known: Known, order: Ints, hold: Flags, backfill: int) -> Block:
    """Starts what may start of ``order: int64[waiting]``, the agent's, by the policy's mapping, within its budget."""
    policy = context.policy
    keep = keep_of(known, context.state, order, hold, backfill)
    budget_s = min(policy.mapping.budget_s, SHARE * policy.budget_s)
    mapping = msgspec.structs.replace(policy.mapping, budget_s=budget_s)
    told = msgspec.structs.replace(policy, mapping=mapping, backfill="none" if backfill == NONE else "skip")
    return place_queue(context._replace(policy=told), order, keep)


def keep_of(known: Known, state: ClusterState, order: Ints, hold: Flags, backfill: int) -> Keep | None:
    """For whom nodes are held: the first of the order that is to have some and does not fit as things stand.

    One that does not fit only because of those ahead of it has to wait for the next decision.
    """
    job = int(_first_held(state, order, hold)) if backfill != NONE else -1
    return None if job < 0 else Keep(job, lambda: _nodes_for(known, state, job))


@jit
def _first_held(state: ClusterState, order: Ints, hold: Flags) -> int:
    jobs = state.jobs
    for job in order:
        shape = jobs.shape[job]
        if hold[job] and jobs.feasibility[shape] == OK and not exceeds(jobs.links, jobs.room, jobs.account, job):
            request = request_of(state.requests, shape)
            if not choose(state.resources, jobs.masks, request, FIRST_FIT, state.scratch):
                return int(job)
    return -1


@jit
def _nodes_for(known: Known, state: ClusterState, job: int) -> Ints:
    """On which nodes the job is expected to fit first, ``int64[parts]``; none where that is not in sight."""
    request = request_of(state.requests, state.jobs.shape[job])
    slots, due = due_slots(known, state)
    if await_room(state, state.resources, slots, due, request) == np.inf:
        return np.zeros(0, np.int64)
    return state.scratch.chosen[: request.parts].copy()
