"""Replays of policies that stop running jobs: SRTF, discretized LAS (Tiresias) and DRF.

At every decision all jobs in the system, running or waiting, are taken by explicit priority, then in the policy's
order, and each is given nodes out of the whole pool: a running job keeps its own where those before it left them;
another gets idle nodes, else nodes of jobs that come after it. Running jobs that got none are stopped, but for two
that share GPUs. What was done is kept (checkpoint); every restart holds its nodes for the job's ``restart_s`` before
its work goes on. A limit that leaves too little for a job keeps it waiting; what a stopped job took of limits others
may take from the next decision on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import inlined, jit
from gpusched.sched.backfill import copy_room
from gpusched.sched.fit import gpus_asked, with_gpus
from gpusched.sched.kernel.preempting import (
    GIVEN,
    PINNED,
    Filling,
    PreemptiveAllocation,
    note_held,
    preempting_pass,
    steady_rule,
)
from gpusched.sched.kernel.queue_pass import KEPT
from gpusched.sched.reclaim import Holders, retain
from gpusched.sched.sorting import ascending, by_priority, stable_order
from gpusched.sched.state import (
    SKIP,
    WHOLE,
    ClusterState,
    Floats,
    Ints,
    PassOutcome,
    Resources,
    SharedGpus,
    copied,
    new_outcome,
    new_resources,
)
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.ledger import SimLedger, bind_waiting, jobs_planned, plan_copy, reset_plan
from gpusched.sim.engine.loop import looped, note_running
from gpusched.sim.engine.pace import elapsed_run_s, mate_of, work_left
from gpusched.sim.engine.queue import enter, waiting_in
from gpusched.sim.engine.share import pair_up, release_pairs_once
from gpusched.sim.engine.state import DECIDE, READY, RUNNING, WAITING, EventLog, Paired, Passes, Sim, shape_request
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job, stop_job
from gpusched.sim.knowledge import explicit_priorities
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.result import PREEMPTED

SRTF, LAS, DRF = range(3)
PREEMPTIVE_CODES = {"srtf": SRTF, "las": LAS, "drf-users": DRF}
_SLACK_GPU_S = 1e-3


class PreemptionPlan(NamedTuple):
    """The allocation planned at this decision.

    Attributes:
        active: ``int64[jobs]``: jobs in the system by rank; ``size[0]`` of them.
        priority: ``int64[jobs]``: explicit priorities, which go before the policy's keys; empty: all 0.
        ledger: What is left of limits.
        whole: What earlier jobs left of all nodes. shares: Other allocations; the jobs to be started, and where.
        outcome: What the pass said of each.
    """

    active: Ints
    size: Ints
    priority: Ints
    ledger: SimLedger | None
    whole: Resources
    shares: PreemptiveAllocation
    outcome: PassOutcome


def new_plan(world: SimWorld, holders: Holders | None = None, filling: Filling | None = None) -> PreemptionPlan:
    """Return an empty plan; ``holders``, ``filling``: see `PreemptiveAllocation`."""
    sim, jobs, nodes, rule = world.sim, len(world.sim.jobs), len(world.sim.node), steady_rule(PLACEMENTS[world.rule])
    order, offset, active = (np.zeros(jobs + 1, np.int64) for _ in range(3))
    runs, cleared = (np.zeros(jobs, np.uint8) for _ in range(2))
    whole, idle, shared = new_resources(nodes), new_resources(nodes), sim.resources.shared
    if shared is not None:  # what jobs are given is noted in a copy: they have what they had until it is applied
        idle = idle._replace(shared=copied(sim.resources).shared)
        whole = whole._replace(shared=shared._replace(room=shared.room.copy(), on=shared.on.copy()))
    shares = PreemptiveAllocation(
        idle, world.passes.usable, runs, np.ascontiguousarray(sim.jobs["offset"]),
        sim.held, np.zeros(jobs), holders, np.zeros(2, np.int64), rule, order,
        np.zeros(len(world.passes.releases.order) + 1, np.int64), offset, np.zeros(2, np.int64), cleared, filling,
    )  # fmt: skip
    size, priority = np.zeros(1, np.int64), explicit_priorities(world.trace)
    outcome = new_outcome(jobs, 0 if sim.pairs is None else len(sim.held))
    return PreemptionPlan(active, size, priority, plan_copy(sim.ledger), whole, shares, outcome)


def new_filling(world: SimWorld) -> Filling:
    """Return DRF's empty allocation; other policies need no users in it."""
    users = world.users + 1 if world.policy.order == "drf-users" else 0
    total = np.array([max(1.0, float(column.sum())) for column in world.passes.total.columns])
    user, priority = np.ascontiguousarray(world.sim.jobs["user"]), explicit_priorities(world.trace)
    return Filling(np.zeros(users), user, priority, total)


class Preemptive(NamedTuple):
    """A policy that stops running jobs (SRTF, LAS or DRF), and the cost of a restart.

    Attributes:
        restart_s: ``float64[jobs]``.
        thresholds: GPU seconds that part LAS's queues, ascending.
    """

    plan: PreemptionPlan
    policy: int
    restart_s: Floats
    thresholds: Floats


@jit
def decide_preemptive(sim: Sim, log: EventLog, passes: Passes, of: Preemptive) -> int:
    """Plan all jobs afresh, and apply the plan."""
    plan = of.plan
    refresh_active(sim, plan)
    jobs = plan.active[: plan.size[0]]
    reset(sim, passes, plan)
    keys = _keys(sim, jobs, of.policy, of.restart_s, of.thresholds)
    order = by_priority(jobs[stable_order(keys)], plan.priority)
    _pin_pairs(sim.pairs, sim, passes, plan)
    preempting_pass(planned(sim, passes, plan), order, SKIP, plan.shares)
    passes.releases.used[:] = 0  # of this plan
    apply_plan(sim, log, plan, of.restart_s, GIVEN)
    pair_waiting(sim.pairs, sim, log, passes, plan, order, of.restart_s)
    if of.policy == LAS:
        sim.clock[1] = _next_demotion(sim, jobs, of.restart_s, of.thresholds)
    return DECIDE


run_preemptive = looped(decide_preemptive)


@jit
def refresh_active(sim: Sim, plan: PreemptionPlan) -> None:
    """Remove ended jobs, and add new ones by rank."""
    kept = 0
    for i in range(plan.size[0]):
        job = plan.active[i]
        if sim.state[job]["status"] == RUNNING or sim.state[job]["status"] == WAITING:
            plan.active[kept] = job
            kept += 1
    plan.size[0] = kept
    for i in range(sim.counter[READY]):
        if sim.state[sim.ready[i]]["restarts"] == 0:
            enter(sim, plan.active, plan.size, sim.ready[i])


@jit
def _attained(sim: Sim, job: int, restart_s: float) -> float:
    """Return the GPU seconds that a job has run, restarts excluded."""
    return gpus_of(sim, job) * elapsed_run_s(sim.pace, sim, job, restart_s)


@jit
def gpus_of(sim: Sim, job: int) -> float:
    """Return how many GPUs a job has, parts of one included."""
    shape = sim.shapes[sim.jobs[job]["shape"]]
    return float(shape["parts"] * gpus_asked(part_of(sim.resources.shared, job), shape["gpus"]))


@jit
def part_of(shared: SharedGpus | None, job: int) -> int | None:
    """Return the thousandths that a job has of its GPU; None: no GPUs are shared."""
    if shared is None:
        return None
    return int(shared.milli[job])


@jit
def _keys(sim: Sim, jobs: Ints, policy: int, restart_s: Floats, thresholds: Floats) -> Floats:
    """Return keys, smallest first. SRTF: work left; LAS: queue by attained service; DRF: see `Filling`."""
    keys = np.zeros(jobs.size)
    for i in range(0 if policy == DRF else jobs.size):
        if policy == SRTF:
            keys[i] = work_left(sim.pace, sim, jobs[i], restart_s[jobs[i]])
        else:
            attained = _attained(sim, jobs[i], restart_s[jobs[i]])
            for threshold in thresholds:
                keys[i] += threshold <= attained + _SLACK_GPU_S
    return keys


@jit
def _next_demotion(sim: Sim, jobs: Ints, restart_s: Floats, thresholds: Floats) -> float:
    """Return when the next running job will move to a lower queue by its attained service."""
    soonest = np.inf
    for job in jobs:
        state = sim.state[job]
        if state["status"] != RUNNING:
            continue
        attained = _attained(sim, job, restart_s[job])
        gpus = gpus_of(sim, job)
        overhead = restart_s[job] if state["restarts"] > 0 else 0.0
        resumes = max(sim.clock[0], state["start"] + overhead)
        for threshold in thresholds:
            if gpus > 0 and threshold > attained + _SLACK_GPU_S:
                soonest = min(soonest, resumes + (threshold - attained) / gpus)
                break
    return soonest


@jit
def reset(sim: Sim, passes: Passes, plan: PreemptionPlan) -> None:
    """Reset the plan to the nodes' current state."""
    whole, idle, runs, ends = plan.whole, plan.shares.idle, plan.shares.runs, plan.shares.ends
    plan.shares.used[:] = 0
    copy_resources(passes.usable, whole)
    copy_resources(sim.resources, idle)
    reset_plan(plan.ledger, sim.ledger)
    for i in range(plan.size[0]):
        job = plan.active[i]
        runs[job], ends[job] = sim.state[job]["status"] == RUNNING, sim.state[job]["until"]
        bind_waiting(plan.ledger, sim.ledger, job, sim.state[job]["status"] == WAITING)


@jit
def copy_resources(resources: Resources, to: Resources) -> None:
    """Copy what is left of nodes, and of which GPUs jobs have parts."""
    to.gpus[:], to.cores[:], to.memory[:] = resources.gpus, resources.cores, resources.memory
    copy_room(to.shared, resources.shared)
    _copy_gpus(resources.shared, to.shared)


@jit
def _copy_gpus(shared: SharedGpus | None, to: SharedGpus | None) -> None:
    if shared is not None and to is not None:
        to.on[:] = shared.on


@inlined
@jit
def planned(sim: Sim, passes: Passes, plan: PreemptionPlan) -> ClusterState:
    """Return the state for a pass of the plan."""
    jobs = jobs_planned(plan.ledger, passes.jobs)
    return ClusterState(plan.whole, passes.releases, passes.requests, jobs, passes.scratch, plan.outcome, sim.clock[0])


@jit
def keep_running(sim: Sim, passes: Passes, plan: PreemptionPlan, job: int) -> None:
    """Keep a running job on its nodes, whatever comes before it."""
    request, first, ends = shape_request(sim.shapes, sim.jobs[job]["shape"]), sim.jobs[job]["offset"], plan.shares.ends
    mate = mate_of(sim.pace, job)
    if 0 <= mate < job:  # what two have is counted with the first
        request = with_gpus(request, max(0, request.gpus - sim.shapes[sim.jobs[mate]["shape"]]["gpus"]))
    retain(plan.whole, request, sim.held, first, job)
    note_held(passes.scratch.calendar, passes.releases, request, sim.held, first, ends[job], job)
    plan.outcome.code[job] = KEPT


@inlined
@jit
def _pin_pairs(pairs: Paired | None, sim: Sim, passes: Passes, plan: PreemptionPlan) -> None:
    """Keep the jobs that share GPUs on their nodes, as live."""
    if pairs is None:
        return
    for i in range(plan.size[0]):
        job = plan.active[i]
        if plan.shares.runs[job] and mate_of(sim.pace, job) >= 0:
            keep_running(sim, passes, plan, job)
            plan.shares.runs[job] = PINNED


@inlined
@jit
def pair_waiting(
    pairs: Paired | None, sim: Sim, log: EventLog, passes: Passes, plan: PreemptionPlan, order: Ints, restart_s: Floats
) -> None:
    """Start jobs that the plan left waiting beside running ones, each partition's in this order."""
    if pairs is None:
        return
    for job in ascending(sim.ends.item[: sim.ends.size[0]]):
        note_running(sim, passes, job)
    pairs.parted[0] = 1
    release_pairs_once(pairs, sim, passes.releases)
    for partition in range(sim.dirty.size):
        plan.outcome.total[:] = 0
        own = waiting_in(sim, order, plan.size, partition)
        pair_up(pairs, sim, log, passes, plan.outcome, own, restart_s)
    passes.releases.used[:] = 0


@jit
def apply_plan(sim: Sim, log: EventLog, plan: PreemptionPlan, restart_s: Floats, starts: int) -> None:
    """Stop running jobs whose nodes changed or were not granted, then start those with this code."""
    for i in range(plan.size[0]):
        job = plan.active[i]
        if plan.shares.runs[job] and plan.outcome.code[job] != KEPT:
            stop_job(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, restart_s[job]))
    shares = plan.shares
    for job in shares.order[: shares.used[0]]:
        if plan.outcome.code[job] == starts:
            _note_gpu(plan.whole.shared, sim.resources.shared, job)
            start_job(sim, log, job, shares.nodes, shares.offset[job], NOTHING_TAKEN, restart_s[job])


@jit
def _note_gpu(given: SharedGpus | None, shared: SharedGpus | None, job: int) -> None:
    """Record of which GPU a job was given a part."""
    if given is not None and shared is not None and given.milli[job] < WHOLE:
        shared.on[job] = given.on[job]
