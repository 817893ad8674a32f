"""Who gets what by rule. All but the agent are told every speed that they ask for."""

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
        horizon_s: Over which the cost of a restart is spread, at most.
        dominant: Whether a share is the largest of GPUs, cores and memory, else their sum.
    """

    rule: int
    power: float = 1.0
    horizon_s: float = 120.0
    dominant: bool = True


@jit
def decide(world: MaifsWorld, course: JobStates, known: SpeedEstimates, job: Ints, rule: SizingRule) -> JointDecision:
    """What all jobs that are there get; ``job: int64[n]``, by arrival."""
    plan = new_plan(world, course, known, job)
    if rule.rule == GREEDY or rule.rule == OPTIMUS:
        for i in range(len(job)):
            left = max(world.jobs.steps[job[i]] - course.progress.done[job[i]], _TINY) / max(plan.best[i], _TINY)
            horizon = min(left, rule.horizon_s)
            plan.keep[i] = horizon / (horizon + world.restart_s[world.jobs.kind[job[i]]])
            plan.weight[i] = left**-rule.power
        if rule.rule == OPTIMUS:
            _at_least(world, course, known, plan)
        fill(world, course, known, plan, ALONE, rule.dominant)
        return plan
    for i in _order(world, course, job, rule.rule):
        if may_stay(world, course, plan, i):
            now = course.point[job[i]]
            put(world, course, plan, i, now, course.node[job[i], 0], course.node[job[i], 1])
        elif not _at_asked(world, course, known, plan, i, rule.rule == SYNERGY) and rule.rule != LAS:
            break  # first come, first served
    return plan


@jit
def _order(world: MaifsWorld, course: JobStates, job: Ints, rule: int) -> Ints:
    """Running jobs first, and by arrival; LAS: by the GPU time that they have had, in three classes (Tiresias)."""
    key = np.zeros(len(job))
    for i in range(len(job)):
        running = course.point[job[i]] >= 0
        if rule == LAS:
            served = course.served[job[i]]
            key[i] = (0.0 if served < _QUEUE_S else 4.0 if served < 10 * _QUEUE_S else 8.0) + (0.0 if running else 1.0)
        else:
            key[i] = 0.0 if running else 1.0
    return stable_order(key)


@jit
def _at_asked(
    world: MaifsWorld, course: JobStates, known: SpeedEstimates, plan: JointDecision, i: int, tuned: bool
) -> bool:
    """Places a job at the shape it asked for, with its part of cores and memory; ``tuned``: with what it can use."""
    job = plan.job[i]
    kind, shape = world.jobs.kind[job], world.jobs.asked[job]
    usual = shape * _PER + PROPORTIONAL
    best, at = 0.0, -1
    if tuned:
        for c in range(known.choices[kind]):
            point = known.choice[kind, c]
            if (
                point // _PER == shape
                and known.speed[kind, point] > best
                and _anywhere(world, course, plan, i, point) >= 0
            ):
                best, at = known.speed[kind, point], point
    elif _anywhere(world, course, plan, i, usual) >= 0:
        at = usual
    if at < 0:
        return False
    group = _anywhere(world, course, plan, i, at)
    first, second = find(world, course, plan, i, group, at)
    put(world, course, plan, i, at, first, second)
    return True


@jit
def _anywhere(world: MaifsWorld, course: JobStates, plan: JointDecision, i: int, point: int) -> int:
    """The group whose nodes have the fewest GPUs left with it; -1: none."""
    low, best = np.inf, -1
    for group in range(len(world.jobs.group) - 1):
        first, second = find(world, course, plan, i, group, point)
        if first >= 0:
            left = plan.free[first, 0] + (plan.free[second, 0] if second >= 0 else 0.0)
            if left < low:
                low, best = left, group
    return best


@jit
def _at_least(world: MaifsWorld, course: JobStates, known: SpeedEstimates, plan: JointDecision) -> None:
    """Optimus: every job begins with the fewest GPUs, by arrival, before any gets more."""
    for i in range(len(plan.job)):
        job = plan.job[i]
        kind, low, at = world.jobs.kind[job], 1 << 30, -1
        if may_stay(world, course, plan, i):
            point = course.point[job]
            put(world, course, plan, i, point, course.node[job, 0], course.node[job, 1])
            plan.worth[i] = known.speed[kind, point] / plan.best[i]
            continue
        for c in range(known.choices[kind]):
            point = known.choice[kind, c]
            if world.jobs.least[job] <= world.gpus[point] < low and _anywhere(world, course, plan, i, point) >= 0:
                low, at = world.gpus[point], point
        if at >= 0:
            group = _anywhere(world, course, plan, i, at)
            first, second = find(world, course, plan, i, group, at)
            put(world, course, plan, i, at, first, second)
            plan.worth[i] = known.speed[kind, at] / plan.best[i]
