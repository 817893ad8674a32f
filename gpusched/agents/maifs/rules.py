"""Allocation by published rules, for comparison. They know the speeds of all points; the agent must learn them."""

from __future__ import annotations

import numpy as np

from gpusched.agents.maifs.joint import ALONE, JointDecision, JointProblem, fill, find, may_stay, new_plan, put
from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, PROPORTIONAL
from gpusched.agents.maifs.network import restart_factor
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates, problem_of
from gpusched.compiled import jit
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import Ints

PROPORTIONAL_RULE, LAS, OPTIMUS, SYNERGY, GREEDY = 0, 1, 2, 3, 4
RULES = {"proportional": PROPORTIONAL_RULE, "las": LAS, "optimus": OPTIMUS, "synergy": SYNERGY, "greedy": GREEDY}
_PER = len(CORES) * len(MEMORY_GB)  # points per shape
_QUEUE_S = 3600.0  # attained GPU seconds up to which LAS gives the highest priority
_TINY = 1e-9


@jit
def decide(world: MaifsWorld, states: JobStates, known: SpeedEstimates, job: Ints, rule: int) -> JointDecision:
    """Return the allocation of all active jobs; ``job: int64[n]``, by arrival. ``rule``: one of `RULES`."""
    problem = problem_of(world, states, known, job)
    plan = new_plan(problem, job)
    if rule == GREEDY or rule == OPTIMUS:
        for i in range(len(job)):
            # A restart must pay off within the job's time left, at most within the horizon.
            left = max(problem.work[i], _TINY) / max(plan.best[i], _TINY)
            plan.keep[i] = restart_factor(left, 0.0, problem.cost_s[i])
            plan.weight[i] = 1.0 / left
        if rule == OPTIMUS:
            _place_minimum(problem, plan)
        fill(problem, plan, ALONE)
        return plan
    for i in _order(states, problem, job, rule):
        if may_stay(problem, plan, i):
            put(problem, plan, i, problem.point[i], problem.at[i])
        elif not _place_requested(problem, plan, i, world.jobs.requested[job[i]], rule == SYNERGY):
            if rule != LAS:
                break  # first come, first served
    return plan


@jit
def _order(states: JobStates, problem: JointProblem, job: Ints, rule: int) -> Ints:
    """Order running jobs first, then by arrival; LAS: by three classes of attained GPU time first (Tiresias)."""
    key = np.zeros(len(job))
    for i in range(len(job)):
        running = problem.point[i] >= 0
        if rule == LAS:
            served = states.served[job[i]]
            key[i] = (0.0 if served < _QUEUE_S else 4.0 if served < 10 * _QUEUE_S else 8.0) + (0.0 if running else 1.0)
        else:
            key[i] = 0.0 if running else 1.0
    return stable_order(key)


@jit
def _place_requested(problem: JointProblem, plan: JointDecision, i: int, shape: int, tuned: bool) -> bool:
    """Place a job at its requested shape with proportional cores and memory; return whether it fits.

    ``tuned``: with the cores and memory at which it is fastest (Synergy).
    """
    kind, best, at = problem.kind[i], 0.0, -1
    if tuned:
        for c in range(problem.options[kind]):
            point, speed = problem.option[kind, c], problem.speed[kind, c]
            if point // _PER == shape and speed > best and _pick_nodes(problem, plan, i, point):
                best, at = speed, point
    elif _pick_nodes(problem, plan, i, shape * _PER + PROPORTIONAL):
        at = shape * _PER + PROPORTIONAL
    if at < 0:
        return False
    _pick_nodes(problem, plan, i, at)  # again: the last point tried may have left other nodes
    put(problem, plan, i, at, plan.pick)
    return True


@jit
def _pick_nodes(problem: JointProblem, plan: JointDecision, i: int, point: int) -> bool:
    """Choose nodes of one group, best fit (fewest GPUs left free), into ``plan.pick``; return whether any fit."""
    low = np.inf
    for group in range(len(problem.group) - 1):
        if find(problem, plan, i, group, point):
            left = 0.0
            for s in range(problem.spread[point]):
                left += plan.free[plan.spot[s], 0]
            if left < low:
                low = left
                plan.pick[:] = plan.spot
    return bool(low < np.inf)


@jit
def _place_minimum(problem: JointProblem, plan: JointDecision) -> None:
    """Allocate to every job its minimum of GPUs, by arrival, before any gets more (Optimus)."""
    for i in range(len(plan.job)):
        kind, low, at = problem.kind[i], 1 << 30, -1
        if may_stay(problem, plan, i):
            put(problem, plan, i, problem.point[i], problem.at[i])
            plan.worth[i] = problem.pace[i] / plan.best[i]
            continue
        for c in range(problem.options[kind]):
            gpus = problem.gpus[problem.option[kind, c]]
            if problem.low[i] <= gpus < low and _pick_nodes(problem, plan, i, problem.option[kind, c]):
                low, at = gpus, c
        if at >= 0:
            _pick_nodes(problem, plan, i, problem.option[kind, at])
            put(problem, plan, i, problem.option[kind, at], plan.pick)
            plan.worth[i] = problem.speed[kind, at] / plan.best[i]
