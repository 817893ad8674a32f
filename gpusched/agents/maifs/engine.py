"""A run of the setting: the event engine, and the allocation at each decision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.agents.maifs.beliefs import Beliefs, new_beliefs, record_speeds
from gpusched.agents.maifs.joint import AUCTION, JointDecision, fill, new_plan, same_nodes
from gpusched.agents.maifs.network import MaifsWeights, agent_of, set_weights
from gpusched.agents.maifs.rules import GREEDY, decide
from gpusched.agents.maifs.world import JobStates, MaifsWorld, SpeedEstimates, new_run, problem_of
from gpusched.compiled import jit
from gpusched.sched.state import Floats
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.state import DECIDE, OVER, EventLog, Passes, Sim
from gpusched.sim.rounds import BEFORE, DECISIONS, NOW, RoundsResult, active_jobs, apply_rates, is_due, set_rate


class MaifsRun(NamedTuple):
    """A run and its policy.

    Attributes:
        known: Speeds known to a rule. beliefs, agent: Of the agents; None: the rule decides. most: Decisions.
        mode, attends: See `simulate_agent`.
    """

    world: MaifsWorld
    states: JobStates
    known: SpeedEstimates
    rule: int
    beliefs: Beliefs | None = None
    agent: MaifsWeights | None = None
    mode: int = AUCTION
    attends: bool = True
    most: int = 1 << 40


def simulate(world: MaifsWorld, known: SpeedEstimates, rule: int) -> RoundsResult:
    """Run all jobs to their end, by a rule that knows the speeds ``known``."""
    run, states = new_run(world.jobs)
    run.to_end(_run, MaifsRun(world, states, known, rule))
    return run.result


def simulate_agent(
    world: MaifsWorld, numbers: Floats, mode: int = AUCTION, attends: bool = True, most: int = 1 << 40
) -> RoundsResult:  # fmt: skip
    """Run all jobs to their end, by the agents, which know only reported speeds.

    Args:
        world: The setting.
        numbers: Their weights, see `network.agent_of`.
        mode: Coordination of agents, see `joint`.
        attends: Whether the agents attend to each other.
        most: Maximum of decisions; JCT is NaN of jobs that have not ended by then.
    """
    (run, states), agent = new_run(world.jobs), agent_of(numbers)
    beliefs = new_beliefs(world.truth, float(agent.bold[0]))
    run.to_end(_run, MaifsRun(world, states, beliefs.known, GREEDY, beliefs, agent, mode, attends, most))
    return run.result


@jit
def decide_round(sim: Sim, log: EventLog, passes: Passes, run_state: MaifsRun) -> int:
    """Decide about all jobs, if a decision is due."""
    progress = run_state.states.progress
    if progress.counts[DECISIONS] == run_state.most:
        return OVER
    if is_due(sim, progress):
        serve(run_state.world, run_state.states)
        apply(run_state.world, run_state.states, plan_of(run_state.beliefs, run_state.agent, run_state))
        apply_rates(sim, log, progress)
    return DECIDE


_run = looped(decide_round)


@jit
def plan_of(beliefs: Beliefs | None, agent: MaifsWeights | None, run_state: MaifsRun) -> JointDecision:
    """Return the decision; the agents first record the speeds of running jobs."""
    world, states, active = run_state.world, run_state.states, active_jobs(run_state.states.progress)
    if beliefs is None or agent is None:
        return decide(world, states, run_state.known, active, run_state.rule)
    record_speeds(world, states, beliefs, active, agent.bold[0])
    problem = problem_of(world, states, run_state.known, active)
    plan = new_plan(problem, active)
    set_weights(problem, plan, agent, run_state.attends)
    fill(problem, plan, run_state.mode)
    return plan


@jit
def serve(world: MaifsWorld, states: JobStates) -> None:
    """Add the GPU time since the last decision."""
    time = states.progress.time
    for job in active_jobs(states.progress):
        if states.point[job] >= 0:
            states.served[job] += world.gpus[states.point[job]] * (time[NOW] - time[BEFORE])


@jit
def apply(world: MaifsWorld, states: JobStates, plan: JointDecision) -> None:
    """Apply the decision: jobs with other nodes or another size restart, at the cost of a restart."""
    for i in range(len(plan.job)):
        job, point = plan.job[i], plan.point[i]
        if states.point[job] == point and same_nodes(states.node[job], plan.node[i]):
            continue
        kind, has_progress = world.jobs.kind[job], states.progress.done[job] > 0.0
        states.point[job] = point
        states.node[job] = plan.node[i]
        set_rate(states.progress, job, world.truth[kind, point] if point >= 0 else 0.0, world.restart_s[kind])
        states.since[job] = states.progress.time[NOW] + (world.restart_s[kind] if has_progress else 0.0)
        states.reported[job] = False


def best_alone_jct(world: MaifsWorld) -> Floats:
    """Return a lower bound on every job's JCT, ``float64[jobs]``: at its best allowed size from its arrival."""
    shape_of = world.gpus[None, :]
    may = (shape_of >= world.jobs.least[:, None]) & (shape_of <= world.jobs.most[:, None])
    best: Floats = np.where(may, world.truth[world.jobs.kind], 0.0).max(1)
    return world.jobs.steps / best
