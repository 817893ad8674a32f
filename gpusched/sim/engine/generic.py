"""Replays that walk the queue at every decision, with the live controller's own pass, `sched.kernel`.

For orders whose keys change while jobs wait, for the naive draw, for conservative backfill, and to check the fast runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.limits import Groups
from gpusched.sched.fairtree import USER, FairShareTree, tree_of
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import (
    BACKFILLS,
    BEST_FIT,
    CONSERVATIVE,
    NAIVE,
    NONE,
    OK,
    Floats,
    Ints,
    PassOutcome,
    Records,
    new_outcome,
)
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.estimates import (
    Estimates,
    new_estimates,
    note_ages,
    note_ended,
    note_started,
    note_submitted,
    renew,
)
from gpusched.sim.engine.keys import ORDER_CODES, PLAIN, count_held_gpus, order_keys, usage_leaves
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.queue import enter, remove_running, start_granted, state_of, waiting_in
from gpusched.sim.engine.share import pair_up, release_pairs_once, share_gpus
from gpusched.sim.engine.state import DECIDE, ENDED, READY, RUNNING, RUNS, EventLog, Passes, Sim
from gpusched.sim.policies import PLACEMENTS


class SimQueue(NamedTuple):
    """The waiting jobs and their users.

    Attributes:
        waiting: ``int64[jobs]``: waiting jobs by rank; ``size[0]`` of them.
        users: ``USER[users]``: what each user holds and has used; with groups each user in each of its groups.
        leaf: ``int64[jobs]``: the row of ``users`` for which a job's usage counts.
        tree: By which ``fairshare`` ranks them; empty without groups.
        outcome: Where the pass writes.
        run_times: What run times are estimated by, where they are (``estimates``).
        order: See `keys`. rule, backfill: See ``gpusched.sched.state``.
        last_first: Whether of jobs with equal keys the one submitted last goes first.
        every_s: Seconds between two times at which there is backfill; 0: at every decision.
        next_s: ``float64[1]``: when it is due; infinite: when something has happened.
        by_all: Whether all partitions decide at once, by users' usage before this instant's starts, as live: where MIG
            slices have queues of their own, users' jobs are in several.
        usage: ``USER[users]``: what the order goes by; ``users`` themselves, but with ``by_all``.
    """

    waiting: Ints
    size: Ints
    users: Records
    leaf: Ints
    tree: FairShareTree
    outcome: PassOutcome
    run_times: Estimates
    estimates: bool
    order: int
    rule: int
    backfill: int
    last_first: bool
    every_s: float
    next_s: Floats
    by_all: bool
    usage: Records


def new_queue(world: SimWorld) -> SimQueue:
    """Return an empty queue."""
    jobs, policy = len(world.sim.jobs), world.policy
    groups = world.options.groups if policy.by_usage else Groups()
    leaves, leaf = usage_leaves(world.trace, groups)
    users, by_all = np.zeros(len(leaves), USER), world.unsplit is not None and policy.kind == "changing"
    return SimQueue(
        waiting=np.zeros(jobs + 1, np.int64),
        size=np.zeros(1, np.int64),
        users=users,
        leaf=leaf,
        tree=tree_of(groups, leaves if groups else ()),
        outcome=new_outcome(jobs, len(world.sim.held)),
        run_times=new_estimates(world),
        estimates=policy.uses_run_time_estimates,
        order=ORDER_CODES.get(policy.order, PLAIN),
        rule=PLACEMENTS.get(world.rule, BEST_FIT),
        backfill=BACKFILLS[policy.backfill],
        last_first=policy.ties == "last",
        every_s=world.options.backfill_every_s,
        next_s=np.full(1, np.inf),
        by_all=by_all,
        usage=users.copy() if by_all else users,
    )


@jit
def decide_generic(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue) -> int:
    """Run the pass of every partition in which something happened."""
    update_queue(sim, passes, queue)
    due = queue.every_s == 0.0 or sim.clock[0] >= queue.next_s[0]
    backfill = queue.backfill if due else NONE
    if queue.by_all:
        sim.dirty[:] = 1
        queue.usage[:] = queue.users
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            _decide(sim, log, passes, queue, partition, backfill)
            sim.dirty[partition] = 0
    while queue.rule == NAIVE and sim.counter[RUNS] == 0 and _any_feasible(sim, passes, queue):
        for partition in range(sim.dirty.size):
            _decide(sim, log, passes, queue, partition, backfill)
    if due:
        queue.next_s[0] = np.inf
    elif queue.size[0] > 0:
        queue.next_s[0] = (np.floor(sim.clock[0] / queue.every_s) + 1.0) * queue.every_s
        sim.clock[1] = min(sim.clock[1], queue.next_s[0])
    return DECIDE


run_generic = looped(decide_generic)


@jit
def update_queue(sim: Sim, passes: Passes, queue: SimQueue) -> None:
    """Record the jobs that ended and that became ready at this instant."""
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        count_held_gpus(sim, queue.users, queue.leaf[job], job, -1)
    if queue.estimates:
        note_ages(queue.run_times.renewed, sim)
        note_ended(queue.run_times.renewed, queue.run_times.past, sim)
    for i in range(sim.counter[READY]):
        job = sim.ready[i]
        if queue.estimates:
            note_submitted(queue.run_times.renewed, queue.run_times.past, sim, passes, job)
        enter(sim, queue.waiting, queue.size, job)
    if queue.estimates:
        renew(queue.run_times.renewed, sim, passes, queue.waiting[: queue.size[0]])


@jit
def _any_feasible(sim: Sim, passes: Passes, queue: SimQueue) -> bool:
    """Return whether any waiting job can run; if nothing runs, a failed naive draw must then be repeated."""
    for i in range(queue.size[0]):
        if passes.jobs.feasibility[sim.jobs[queue.waiting[i]]["shape"]] == OK:
            return True
    return False


@jit
def _decide(sim: Sim, log: EventLog, passes: Passes, queue: SimQueue, partition: int, backfill: int) -> None:
    """Run one partition's pass."""
    waiting = ordered(sim, queue, partition)
    queue.outcome.total[:] = 0
    release_pairs_once(sim.pace, sim, passes.releases)
    if backfill == CONSERVATIVE or not share_gpus(
        sim.pace, sim, log, passes, queue.outcome, waiting, queue.rule, backfill, queue.backfill
    ):
        pass_by_rule(state_of(sim, passes, queue.outcome), waiting, backfill, PlacementRule(queue.rule, passes.rng))
        start_granted(sim, log, queue.outcome, None)
    pair_up(sim.pace, sim, log, passes, queue.outcome, waiting)
    dequeue_started(sim, queue, waiting)


@jit
def ordered(sim: Sim, queue: SimQueue, partition: int) -> Ints:
    """Return the partition's waiting jobs by (key, rank), ``int64[waiting]``."""
    jobs = waiting_in(sim, queue.waiting, queue.size, partition)
    if queue.order == PLAIN or jobs.size < 2:
        return jobs
    if queue.last_first:
        jobs = jobs[stable_order(-sim.jobs["submit"][jobs])]
    keys: Floats = order_keys(sim, queue.usage, queue.leaf, queue.tree, jobs, queue.order)
    by_key: Ints = jobs[stable_order(keys)]
    return by_key


@jit
def dequeue_started(sim: Sim, queue: SimQueue, ordered: Ints) -> None:
    """Remove started jobs from the queue, and count their GPUs for their users."""
    started = 0
    for job in ordered:
        if sim.state[job]["status"] == RUNNING:
            count_held_gpus(sim, queue.users, queue.leaf[job], job, 1)
            if queue.estimates:
                note_started(queue.run_times.renewed, job)
            started += 1
    if started > 0:
        remove_running(sim, queue.waiting, queue.size)
