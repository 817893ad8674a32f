"""Replays of the RLTune agent that stops running jobs: planned as in `engine_preempt`, ranked by what it learned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.agents.rltune_book import Records
from gpusched.sched.agents.rltune_preempt import (
    SERVED,
    History,
    Preempting,
    Ranking,
    changes_after_s,
    new_history,
    note_passed,
    rank_of,
    reached,
)
from gpusched.sched.state import FIRST_FIT, NAIVE, NONE, Floats, Ints
from gpusched.sim.agents.rltune import book_of_trace
from gpusched.sim.engine_build import World
from gpusched.sim.engine_fast import next_decision
from gpusched.sim.engine_pace import time_had, time_run
from gpusched.sim.engine_preempt import Plan, apply_plan, give_nodes, new_plan, refresh_active, reset
from gpusched.sim.engine_state import DECIDE, DECISIONS, DONE, ENDED, RUNNING, Log, Passes, Sim
from gpusched.sim.policies import PLACEMENTS


def runner(world: World, prepared: Preempting) -> Callable[[Log], int]:
    """The run of one replay: to its end, or to where the log needs more room."""
    sim, passes, rule, restart_s = world.sim, world.passes, PLACEMENTS[world.rule], world.options.restart_s
    queues = len(world.pool.partitions)
    facts = book_of_trace(world.trace, world.demand, queues, prepared.knows).facts
    history = new_history(facts, queues)
    plan = new_plan(len(sim.jobs), len(sim.node), len(passes.releases.order), world.users)
    return lambda log: run_ranked(sim, log, passes, plan, history, facts, prepared.ranking, rule, restart_s)


@jit
def run_ranked(
    sim: Sim, log: Log, passes: Passes, plan: Plan, history: History, facts: Records, ranking: Ranking, rule: int,
    restart_s: float,
) -> int:  # fmt: skip
    """Replays to the end; OVER, or GROW (call again)."""
    rule = FIRST_FIT if rule >= NAIVE else rule
    full = np.zeros(sim.shapes.size, np.int64)  # shape -> the last decision in which one of it got no nodes
    while True:
        code = next_decision(sim, log, passes, NONE)
        if code != DECIDE:
            return code
        for i in range(sim.counter[ENDED]):
            job = sim.ended[i]
            if sim.state[job]["status"] == DONE:
                note_passed(history, facts, job, time_run(sim.pace, sim, job), True)
        refresh_active(sim, plan)
        jobs = plan.active[: plan.size[0]]
        ranks = _ranks(sim, history, facts, ranking, jobs, restart_s)
        reset(sim, passes, plan)
        for job in jobs[np.argsort(ranks, kind="mergesort")]:
            shape = sim.jobs[job]["shape"]
            if full[shape] == sim.counter[DECISIONS] and sim.state[job]["status"] != RUNNING:
                continue  # within a decision nodes only become fewer
            if not give_nodes(sim, passes, plan, job, rule):
                full[shape] = sim.counter[DECISIONS]
        apply_plan(sim, log, plan, restart_s)
        sim.clock[1] = _next_change(sim, facts, ranking, jobs, restart_s)


@jit
def _ranks(sim: Sim, history: History, facts: Records, ranking: Ranking, jobs: Ints, restart_s: float) -> Floats:
    """Every job's rank, ``float64[jobs]``, after all that run have been counted."""
    had, ranks = np.empty(jobs.size), np.empty(jobs.size)
    for i in range(jobs.size):
        had[i] = time_had(sim.pace, sim, jobs[i], restart_s)
        note_passed(history, facts, jobs[i], had[i], False)
    for i in range(jobs.size):
        if i > 0 and _alike(sim, facts, ranking, jobs[i - 1], had[i - 1], jobs[i], had[i]):
            ranks[i] = ranks[i - 1]
        else:
            ranks[i] = rank_of(history, ranking, facts, jobs[i], had[i], sim.state[jobs[i]]["status"] == RUNNING)
    return ranks


@jit
def _alike(sim: Sim, facts: Records, ranking: Ranking, a: int, had_a: float, b: int, had_b: float) -> bool:
    """Whether two jobs are sure to have the same rank; long queues are mostly bursts."""
    return bool(
        facts[a]["burst"] == facts[b]["burst"]
        and ranking.weights[SERVED] == 0.0
        and sim.state[a]["status"] == sim.state[b]["status"]
        and reached(had_a) == reached(had_b)
    )


@jit
def _next_change(sim: Sim, facts: Records, ranking: Ranking, jobs: Ints, restart_s: float) -> float:
    """When the rank of a running job may next change by itself."""
    soonest = np.inf
    for job in jobs:
        state = sim.state[job]
        if state["status"] == RUNNING:
            overhead = restart_s if state["restarts"] > 0 else 0.0
            resumes = max(sim.clock[0], state["start"] + overhead)
            had = time_had(sim.pace, sim, job, restart_s)
            soonest = min(soonest, resumes + changes_after_s(ranking, facts[job]["gpus"], had))
    return float(soonest)
