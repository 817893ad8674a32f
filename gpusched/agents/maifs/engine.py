"""Time: jobs arrive, run at the speed of what they have, and end; decisions come at most once a minute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.beliefs import Beliefs, new_beliefs, watch
from gpusched.agents.maifs.joint import GRAPH, Plan, fill, new_plan, same_nodes
from gpusched.agents.maifs.network import Agent, agent_of, judge
from gpusched.agents.maifs.rules import Rule, decide
from gpusched.agents.maifs.world import Course, Known, World, new_course
from gpusched.compiled import jit
from gpusched.sched.state import Floats, Ints

APART_S = 60.0
"""Between decisions at least. One follows each arrival and end."""
AT_LEAST_EVERY_S = 300.0
"""While there are jobs."""
_TINY = 1e-9


class Played(NamedTuple):
    """Figures of one run. jct: ``float64[jobs]`` seconds. makespan: Seconds from the first arrival to the last end."""

    jct: Floats
    makespan: float
    restarts: int
    decisions: int


def play(world: World, known: Known, rule: Rule) -> Played:
    """All jobs to their end, by a rule that is told what is ``known``."""
    course = new_course(len(world.jobs.arrival))
    return _played(world, course, run(world, course, known, rule))


def play_agent(
    world: World, numbers: Floats, mode: int = GRAPH, attends: bool = True, most: int = 1 << 40
) -> Played:  # fmt: skip
    """All jobs to their end, by the agents, who know no speed that no job has told.

    Args:
        world: The setting.
        numbers: What they learned, see `network.agent_of`.
        mode: How they choose together, see `joint`.
        attends: Whether they hear each other.
        most: Decisions; JCT is NaN of jobs that have not ended by then.
    """
    course, agent = new_course(len(world.jobs.arrival)), agent_of(numbers)
    beliefs = new_beliefs(world.truth, float(agent.bold[0]))
    return _played(world, course, run_agent(world, course, beliefs, agent, mode, attends, most))


def _played(world: World, course: Course, decisions: int) -> Played:
    return Played(
        course.end - world.jobs.arrival, float(course.end.max() - world.jobs.arrival[0]), int(course.restarts.sum()),
        decisions,
    )  # fmt: skip


class Clock(NamedTuple):
    """Where a run is.

    Attributes:
        there: ``int64[jobs]``: those that have arrived and not ended, by arrival, ``counts[0]`` of them.
        counts: ``int64[2]``: how many are there, and how many have arrived.
        time: ``float64[3]``: now, the last decision, the next one.
    """

    there: Ints
    counts: Ints
    time: Floats


@jit
def run(world: World, course: Course, known: Known, rule: Rule) -> int:
    """Until the last job has ended, by a rule; how many decisions that took."""
    clock, decisions = new_clock(world), 0
    while until_decision(world, course, clock):
        there = clock.there[: clock.counts[0]]
        apply(world, course, decide(world, course, known, there, rule), clock.time[0])
        decisions += 1
    return decisions


@jit
def run_agent(world: World, course: Course, beliefs: Beliefs, agent: Agent, mode: int, attends: bool, most: int) -> int:
    """Until the last job has ended, by the agents; how many decisions that took."""
    clock, decisions = new_clock(world), 0
    while decisions < most and until_decision(world, course, clock):
        there, now = clock.there[: clock.counts[0]], clock.time[0]
        watch(world, course, beliefs, there, now, agent.bold[0])
        plan = new_plan(world, course, beliefs.known, there)
        judge(world, course, beliefs.known, plan, agent, now, attends)
        fill(world, course, beliefs.known, plan, mode, True)
        apply(world, course, plan, now)
        decisions += 1
    return decisions


@jit
def new_clock(world: World) -> Clock:
    """Before the first arrival."""
    time = np.array([0.0, -np.inf, np.inf])
    return Clock(np.zeros(len(world.jobs.arrival), np.int64), np.zeros(2, np.int64), time)


@jit
def until_decision(world: World, course: Course, clock: Clock) -> bool:
    """Lets time go on to the next decision; False: all jobs have ended."""
    arrival, there, time = world.jobs.arrival, clock.there, clock.time
    n, coming = clock.counts[0], clock.counts[1]
    while n > 0 or coming < len(arrival):
        then = time[2]
        if coming < len(arrival):
            then = min(then, arrival[coming])
        for i in range(n):
            then = min(then, _ends(world, course, there[i], time[0]))
        for i in range(n):
            work(world, course, there[i], time[0], then)
        time[0] = then
        changed, kept = False, 0
        for i in range(n):
            job = there[i]
            if course.done[job] >= world.jobs.steps[job] * (1.0 - _TINY):
                course.end[job], course.point[job], changed = then, -1, True
                course.node[job] = -1
            else:
                there[kept] = job
                kept += 1
        n = kept
        while coming < len(arrival) and arrival[coming] <= then:
            there[n] = coming
            n += 1
            coming += 1
            changed = True
        clock.counts[0], clock.counts[1] = n, coming
        if changed:
            time[2] = min(time[2], max(then, time[1] + APART_S))
        if n == 0:
            time[2] = np.inf
        elif time[2] <= then:
            time[1], time[2] = then, then + AT_LEAST_EVERY_S
            return True
    return False


@jit
def _ends(world: World, course: Course, job: int, now: float) -> float:
    point = course.point[job]
    if point < 0:
        return np.inf
    left = world.jobs.steps[job] - course.done[job]
    return float(max(now, course.ready[job]) + left / world.truth[world.jobs.kind[job], point])


@jit
def work(world: World, course: Course, job: int, now: float, then: float) -> None:
    """A job goes on from one moment to another, restarting first."""
    point = course.point[job]
    if point >= 0:
        course.served[job] += world.gpus[point] * (then - now)
        course.done[job] += world.truth[world.jobs.kind[job], point] * max(0.0, then - max(now, course.ready[job]))


@jit
def apply(world: World, course: Course, plan: Plan, now: float) -> None:
    """Jobs whose place or size has changed stop and start anew, which takes the time of a restart."""
    for i in range(len(plan.job)):
        job = plan.job[i]
        same = course.point[job] == plan.point[i]
        if same and same_nodes(course.node[job], plan.node[i, 0], plan.node[i, 1]):
            continue
        course.point[job] = plan.point[i]
        course.node[job] = plan.node[i]
        if plan.point[i] >= 0:
            if course.done[job] > 0.0:
                course.restarts[job] += 1
                course.ready[job] = now + world.restart_s[world.jobs.kind[job]]
            else:
                course.ready[job] = now
            course.since[job] = course.ready[job]
            course.told[job] = False


def alone(world: World) -> Floats:
    """A bound on every job's JCT, ``float64[jobs]``: at its best size within its bounds, from its arrival on."""
    shape_of = world.gpus[None, :]
    may = (shape_of >= world.jobs.least[:, None]) & (shape_of <= world.jobs.most[:, None])
    best: Floats = np.where(may, world.truth[world.jobs.kind], 0.0).max(1)
    return world.jobs.steps / best
