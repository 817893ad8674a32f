"""Allocation by rules, which know the speeds of all points; only the agent does not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.joint import ALONE, JointDecision, fill, find, may_stay, new_plan, put
from gpusched.agents.maifs.kinds import CORES, MEMORY_GB, PROPORTIONAL
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates
from gpusched.compiled import jit
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import Ints

PROPORTIONAL_RULE, LAS, OPTIMUS, SYNERGY, GREEDY = 0, 1, 2, 3, 4
RULES = {"proportional": PROPORTIONAL_RULE, "las": LAS, "optimus": OPTIMUS, "synergy": SYNERGY, "greedy": GREEDY}
_PER = len(CORES) * len(MEMORY_GB)
_QUEUE_S = 3600.0
_TINY = 1e-9


class SizingRule(NamedTuple):
    """A rule and its numbers.

    Attributes:
        rule: `PROPORTIONAL_RULE` to `GREEDY`.
        power: Of the time left, in a job's weight.
        horizon_s: Maximum period over which the cost of a restart is spread.
        dominant: Whether a share is the largest of GPUs, cores and memory, else their sum.
    """

    rule: int
    power: float = 1.0
    horizon_s: float = 120.0
    dominant: bool = True


@jit
def decide(world: MaifsWorld, states: JobStates, known: SpeedEstimates, job: Ints, rule: SizingRule) -> JointDecision:
    """Return the allocation of all active jobs; ``job: int64[n]``, by arrival."""
    plan = new_plan(world, states, known, job)
    if rule.rule == GREEDY or rule.rule == OPTIMUS:
        for i in range(len(job)):
            left = max(world.jobs.steps[job[i]] - states.progress.done[job[i]], _TINY) / max(plan.best[i], _TINY)
            horizon = min(left, rule.horizon_s)
            plan.keep[i] = horizon / (horizon + world.restart_s[world.jobs.kind[job[i]]])
            plan.weight[i] = left**-rule.power
        if rule.rule == OPTIMUS:
            _place_minimum(world, states, known, plan)
        fill(world, states, known, plan, ALONE, rule.dominant)
        return plan
    for i in _order(world, states, job, rule.rule):
        if may_stay(world, states, plan, i):
            now = states.point[job[i]]
            put(world, states, plan, i, now, states.node[job[i], 0], states.node[job[i], 1])
        elif not _place_requested(world, states, known, plan, i, rule.rule == SYNERGY) and rule.rule != LAS:
            break  # first come, first served
    return plan


@jit
def _order(world: MaifsWorld, states: JobStates, job: Ints, rule: int) -> Ints:
    """Order running jobs first, then by arrival; LAS: by attained GPU time in three classes (Tiresias)."""
    key = np.zeros(len(job))
    for i in range(len(job)):
        running = states.point[job[i]] >= 0
        if rule == LAS:
            served = states.served[job[i]]
            key[i] = (0.0 if served < _QUEUE_S else 4.0 if served < 10 * _QUEUE_S else 8.0) + (0.0 if running else 1.0)
        else:
            key[i] = 0.0 if running else 1.0
    return stable_order(key)


@jit
def _place_requested(
    world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision, i: int, tuned: bool
) -> bool:
    """Place a job at its requested shape with proportional cores and memory; ``tuned``: with those it can use."""
    job = plan.job[i]
    kind, shape = world.jobs.kind[job], world.jobs.requested[job]
    proportional = shape * _PER + PROPORTIONAL
    best, at = 0.0, -1
    if tuned:
        for c in range(known.choices[kind]):
            point = known.choice[kind, c]
            if (
                point // _PER == shape
                and known.speed[kind, point] > best
                and _best_nodes(world, states, plan, i, point)[0] >= 0
            ):
                best, at = known.speed[kind, point], point
    elif _best_nodes(world, states, plan, i, proportional)[0] >= 0:
        at = proportional
    if at < 0:
        return False
    first, second = _best_nodes(world, states, plan, i, at)
    put(world, states, plan, i, at, first, second)
    return True


@jit
def _best_nodes(world: MaifsWorld, states: JobStates, plan: JointDecision, i: int, point: int) -> tuple[int, int]:
    """Return nodes of one group that are left with the fewest free GPUs; -1: none fit."""
    low, best = np.inf, (-1, -1)
    for group in range(len(world.jobs.group) - 1):
        first, second = find(world, states, plan, i, group, point)
        if first >= 0:
            left = plan.free[first, 0] + (plan.free[second, 0] if second >= 0 else 0.0)
            if left < low:
                low, best = left, (first, second)
    return best


@jit
def _place_minimum(world: MaifsWorld, states: JobStates, known: SpeedEstimates, plan: JointDecision) -> None:
    """Give every job its minimum of GPUs, by arrival, before any gets more (Optimus)."""
    for i in range(len(plan.job)):
        job = plan.job[i]
        kind, low, at = world.jobs.kind[job], 1 << 30, -1
        if may_stay(world, states, plan, i):
            point = states.point[job]
            put(world, states, plan, i, point, states.node[job, 0], states.node[job, 1])
            plan.worth[i] = known.speed[kind, point] / plan.best[i]
            continue
        for c in range(known.choices[kind]):
            point = known.choice[kind, c]
            if world.jobs.least[job] <= world.gpus[point] < low and _best_nodes(world, states, plan, i, point)[0] >= 0:
                low, at = world.gpus[point], point
        if at >= 0:
            first, second = _best_nodes(world, states, plan, i, at)
            put(world, states, plan, i, at, first, second)
            plan.worth[i] = known.speed[kind, at] / plan.best[i]
