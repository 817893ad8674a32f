"""A run of the setting: the event engine, and what every job gets at each decision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.beliefs import Beliefs, new_beliefs, watch
from gpusched.agents.maifs.joint import GRAPH, JointDecision, fill, new_plan, same_nodes
from gpusched.agents.maifs.network import MaifsWeights, agent_of, judge
from gpusched.agents.maifs.rules import GREEDY, SizingRule, decide
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates, new_run
from gpusched.compiled import jit
from gpusched.sched.state import Floats
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.state import DECIDE, OVER, EventLog, Passes, Sim
from gpusched.sim.rounds import BEFORE, DECISIONS, NOW, RoundsResult, active_jobs, apply_rates, is_due, set_rate


class MaifsRun(NamedTuple):
    """A run, and who decides.

    Attributes:
        known: What a rule is told. beliefs, agent: Of the agents; None: by the rule. most: Decisions.
        mode, attends: See `play_agent`.
    """

    world: MaifsWorld
    course: JobStates
    known: SpeedEstimates
    rule: SizingRule
    beliefs: Beliefs | None = None
    agent: MaifsWeights | None = None
    mode: int = GRAPH
    attends: bool = True
    most: int = 1 << 40


def play(world: MaifsWorld, known: SpeedEstimates, rule: SizingRule) -> RoundsResult:
    """All jobs to their end, by a rule that is told what is ``known``."""
    run, course = new_run(world.jobs)
    run.to_end(_run, MaifsRun(world, course, known, rule))
    return run.result


def play_agent(
    world: MaifsWorld, numbers: Floats, mode: int = GRAPH, attends: bool = True, most: int = 1 << 40
) -> RoundsResult:  # fmt: skip
    """All jobs to their end, by the agents, who know no speed that no job has told.

    Args:
        world: The setting.
        numbers: What they learned, see `network.agent_of`.
        mode: How they choose together, see `joint`.
        attends: Whether they hear each other.
        most: Decisions; JCT is NaN of jobs that have not ended by then.
    """
    (run, course), agent = new_run(world.jobs), agent_of(numbers)
    beliefs = new_beliefs(world.truth, float(agent.bold[0]))
    run.to_end(_run, MaifsRun(world, course, beliefs.known, SizingRule(GREEDY), beliefs, agent, mode, attends, most))
    return run.result


@jit
def decide_round(sim: Sim, log: EventLog, passes: Passes, of: MaifsRun) -> int:
    """What every job gets, when that is to be decided."""
    progress = of.course.progress
    if progress.counts[DECISIONS] == of.most:
        return OVER
    if is_due(sim, progress):
        serve(of.world, of.course)
        apply(of.world, of.course, plan_of(of.beliefs, of.agent, of))
        apply_rates(sim, log, progress)
    return DECIDE


_run = looped(decide_round)


@jit
def plan_of(beliefs: Beliefs | None, agent: MaifsWeights | None, of: MaifsRun) -> JointDecision:
    """What is decided; by the agents by what running jobs tell."""
    world, course, there = of.world, of.course, active_jobs(of.course.progress)
    if beliefs is None or agent is None:
        return decide(world, course, of.known, there, of.rule)
    watch(world, course, beliefs, there, agent.bold[0])
    plan = new_plan(world, course, of.known, there)
    judge(world, course, of.known, plan, agent, of.attends)
    fill(world, course, of.known, plan, of.mode, True)
    return plan


@jit
def serve(world: MaifsWorld, course: JobStates) -> None:
    """Count what jobs have had since the last decision."""
    time = course.progress.time
    for job in active_jobs(course.progress):
        if course.point[job] >= 0:
            course.served[job] += world.gpus[course.point[job]] * (time[NOW] - time[BEFORE])


@jit
def apply(world: MaifsWorld, course: JobStates, plan: JointDecision) -> None:
    """Jobs whose place or size has changed stop and start anew, which takes the time of a restart."""
    for i in range(len(plan.job)):
        job, point = plan.job[i], plan.point[i]
        if course.point[job] == point and same_nodes(course.node[job], plan.node[i, 0], plan.node[i, 1]):
            continue
        kind, begun = world.jobs.kind[job], course.progress.done[job] > 0.0
        course.point[job] = point
        course.node[job] = plan.node[i]
        set_rate(course.progress, job, world.truth[kind, point] if point >= 0 else 0.0, world.restart_s[kind])
        course.since[job] = course.progress.time[NOW] + (world.restart_s[kind] if begun else 0.0)
        course.told[job] = False


def alone(world: MaifsWorld) -> Floats:
    """A bound on every job's JCT, ``float64[jobs]``: at its best size within its bounds, from its arrival on."""
    shape_of = world.gpus[None, :]
    may = (shape_of >= world.jobs.least[:, None]) & (shape_of <= world.jobs.most[:, None])
    best: Floats = np.where(may, world.truth[world.jobs.kind], 0.0).max(1)
    return world.jobs.steps / best
