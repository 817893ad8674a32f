"""Replays of policies that stop running jobs: SRTF, discretized LAS (Tiresias) and DRF.

At every decision all jobs in the system, running or waiting, are taken in the policy's order, and each is given nodes
out of the whole pool: a running job keeps its own where those before it left them; another gets nodes that nobody
runs on, else nodes of jobs that come after it. Running jobs that got none are stopped. What was done is kept
(checkpoint); every restart holds its nodes for the job's ``restart_s`` before its work goes on. A limit that leaves too
little for a job keeps it waiting; what a stopped job took of limits others may take from the next decision on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.reclaim import finds, keeps, retain
from gpusched.sched.state import FIRST_FIT, NAIVE, Floats, Ints, Resources, new_resources
from gpusched.sim.engine.build import World
from gpusched.sim.engine.ledger import Ledger, bind_waiting, charge_limits, exceeds_limit, plan_anew, planned
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.pace import time_had, work_left
from gpusched.sim.engine.queue import enter
from gpusched.sim.engine.state import DECIDE, DECISIONS, READY, RUNNING, WAITING, Log, Passes, Sim, shape_request
from gpusched.sim.engine.step import cut, occupy
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.result import PREEMPTED

SRTF, LAS, DRF = range(3)
PREEMPTIVE_CODES = {"srtf": SRTF, "las": LAS, "drf": DRF}
_SLACK_GPU_S = 1e-3


class Plan(NamedTuple):
    """Who gets what at this decision.

    Attributes:
        active: ``int64[jobs]``: jobs in the system by rank; ``size[0]`` of them.
        kept: ``int64[jobs]``: number of the decision in which a running job kept its nodes.
        order: ``int64[jobs]``: jobs to be started; ``size[1]`` of them. nodes: their nodes; ``size[2]`` of them.
        whole, idle: Resources: what is left of the pool; what is left of what nobody runs on.
        shares: ``float64[users + 1]``: dominant shares.
        ledger: What is left of limits.
    """

    active: Ints
    kept: Ints
    size: Ints
    order: Ints
    nodes: Ints
    whole: Resources
    idle: Resources
    shares: Floats
    ledger: Ledger | None


def new_plan(world: World) -> Plan:
    """An empty plan."""
    jobs, nodes = len(world.sim.jobs), len(world.sim.node)
    return Plan(
        active=np.zeros(jobs + 1, np.int64),
        kept=np.zeros(jobs, np.int64),
        size=np.zeros(3, np.int64),
        order=np.zeros(jobs + 1, np.int64),
        nodes=np.zeros(len(world.passes.releases.order) + 1, np.int64),
        whole=new_resources(nodes),
        idle=new_resources(nodes),
        shares=np.zeros(world.users + 1),
        ledger=planned(world.sim.ledger),
    )


def rule_of(world: World) -> int:
    """How jobs are placed: who plans for all of them draws no nodes."""
    rule = PLACEMENTS[world.rule]
    return FIRST_FIT if rule >= NAIVE else rule


class Preemptive(NamedTuple):
    """A policy that stops running jobs: SRTF, LAS or DRF; how it places, and what a restart costs.

    Attributes:
        restart_s: ``float64[jobs]``.
        thresholds: GPU seconds that part LAS's queues, ascending.
    """

    plan: Plan
    policy: int
    rule: int
    restart_s: Floats
    thresholds: Floats


@jit
def decide_preemptive(sim: Sim, log: Log, passes: Passes, of: Preemptive) -> int:
    """Plans for all jobs anew, and carries the plan out."""
    plan = of.plan
    refresh_active(sim, plan)
    jobs = plan.active[: plan.size[0]]
    if of.policy == DRF:
        _fill_by_share(sim, passes, plan, of.rule)
    else:
        keys = _keys(sim, jobs, of.policy, of.restart_s, of.thresholds)
        reset(sim, passes, plan)
        for job in jobs[np.argsort(keys, kind="mergesort")]:
            give_nodes(sim, passes, plan, job, of.rule)
    apply_plan(sim, log, plan, of.restart_s)
    if of.policy == LAS:
        sim.clock[1] = _next_demotion(sim, jobs, of.restart_s, of.thresholds)
    return DECIDE


run_preemptive = looped(decide_preemptive)


@jit
def refresh_active(sim: Sim, plan: Plan) -> None:
    """Drops what has ended, enters what has arrived (by rank)."""
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
    """GPU seconds that a job has run, restarts left out."""
    shape = sim.shapes[sim.jobs[job]["shape"]]
    return float(shape["parts"] * shape["gpus"] * time_had(sim.pace, sim, job, restart_s))


@jit
def _keys(sim: Sim, jobs: Ints, policy: int, restart_s: Floats, thresholds: Floats) -> Floats:
    """SRTF: work left; LAS: the queue it is in by attained service (in it by rank). Smaller first."""
    keys = np.empty(jobs.size)
    for i in range(jobs.size):
        if policy == SRTF:
            keys[i] = work_left(sim.pace, sim, jobs[i], restart_s[jobs[i]])
        else:
            attained = _attained(sim, jobs[i], restart_s[jobs[i]])
            keys[i] = np.sum(thresholds <= attained + _SLACK_GPU_S)
    return keys


@jit
def _next_demotion(sim: Sim, jobs: Ints, restart_s: Floats, thresholds: Floats) -> float:
    """When the next running job will have had so much that it falls to the next queue."""
    soonest = np.inf
    for job in jobs:
        state = sim.state[job]
        if state["status"] != RUNNING:
            continue
        attained = _attained(sim, job, restart_s[job])
        shape = sim.shapes[sim.jobs[job]["shape"]]
        gpus = shape["parts"] * shape["gpus"]
        overhead = restart_s[job] if state["restarts"] > 0 else 0.0
        resumes = max(sim.clock[0], state["start"] + overhead)
        for threshold in thresholds:
            if gpus > 0 and threshold > attained + _SLACK_GPU_S:
                soonest = min(soonest, resumes + (threshold - attained) / gpus)
                break
    return soonest


@jit
def reset(sim: Sim, passes: Passes, plan: Plan) -> None:
    """An empty plan on nodes as they are."""
    plan.size[1] = plan.size[2] = 0
    whole, idle = plan.whole, plan.idle
    whole.gpus[:], whole.cores[:], whole.memory[:] = passes.usable
    idle.gpus[:], idle.cores[:], idle.memory[:] = sim.resources
    plan_anew(plan.ledger, sim.ledger)
    for i in range(plan.size[0]):
        job = plan.active[i]
        bind_waiting(plan.ledger, sim.ledger, job, sim.state[job]["status"] == WAITING)


@jit
def give_nodes(sim: Sim, passes: Passes, plan: Plan, job: int, rule: int) -> bool:
    """Gives a job its nodes, others, or none."""
    request, offset = shape_request(sim.shapes, sim.jobs[job]["shape"]), sim.jobs[job]["offset"]
    if sim.state[job]["status"] == RUNNING and keeps(plan.whole, passes.usable, request, sim.held, offset):
        plan.kept[job] = sim.counter[DECISIONS]
        return True
    if exceeds_limit(plan.ledger, job):
        return False
    if not finds(plan.whole, plan.idle, passes.jobs.masks, request, rule, passes.scratch):
        return False
    charge_limits(plan.ledger, job)
    for part in range(request.parts):
        plan.nodes[plan.size[2]] = sim.chosen[part]
        plan.size[2] += 1
    plan.order[plan.size[1]] = job
    plan.size[1] += 1
    return True


@jit
def spare(sim: Sim, plan: Plan, job: int) -> None:
    """A running job keeps its nodes, whoever comes before it."""
    retain(plan.whole, shape_request(sim.shapes, sim.jobs[job]["shape"]), sim.held, sim.jobs[job]["offset"])
    plan.kept[job] = sim.counter[DECISIONS]


@jit
def _fill_by_share(sim: Sim, passes: Passes, plan: Plan, rule: int) -> None:
    """Progressive filling: the user with the least dominant share so far goes next, its jobs by rank.

    A job that does not fit is passed over. Ties between users go to the job of lower rank.
    """
    reset(sim, passes, plan)
    plan.shares[:] = 0.0
    total = np.array([_positive(passes.total.gpus), _positive(passes.total.cores), _positive(passes.total.memory)])
    jobs = plan.active[: plan.size[0]].copy()
    left = jobs.size
    while left > 0:
        best = -1
        for i in range(left):
            if best < 0 or plan.shares[sim.jobs[jobs[i]]["user"]] < plan.shares[sim.jobs[jobs[best]]["user"]]:
                best = i
        job = jobs[best]
        for i in range(best, left - 1):
            jobs[i] = jobs[i + 1]
        left -= 1
        if give_nodes(sim, passes, plan, job, rule):
            shape = sim.shapes[sim.jobs[job]["shape"]]
            asked = max(shape["gpus"] / total[0], max(shape["cores"] / total[1], shape["memory"] / total[2]))
            plan.shares[sim.jobs[job]["user"]] += shape["parts"] * asked


@jit
def _positive(column: Ints) -> float:
    return max(1.0, float(np.sum(column)))


@jit
def apply_plan(sim: Sim, log: Log, plan: Plan, restart_s: Floats) -> None:
    """Stops running jobs that got no nodes or others, then starts."""
    for i in range(plan.size[0]):
        job = plan.active[i]
        if sim.state[job]["status"] == RUNNING and plan.kept[job] != sim.counter[DECISIONS]:
            cut(sim, log, job, PREEMPTED, work_left(sim.pace, sim, job, restart_s[job]))
    at = 0
    for i in range(plan.size[1]):
        job = plan.order[i]
        request = shape_request(sim.shapes, sim.jobs[job]["shape"])
        for part in range(request.parts):
            sim.chosen[part] = plan.nodes[at]
            at += 1
        occupy(sim, log, job, request, restart_s[job] if sim.state[job]["restarts"] > 0 else 0.0)
