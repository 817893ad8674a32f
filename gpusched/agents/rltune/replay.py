"""The RLTune agent in replays: the live passes, run at every instant with an event in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.queue_replay import InvalidOutput, prepare_replay, queue_runner
from gpusched.agents.rltune.decide import (
    PreparedScorer,
    ScoringState,
    in_order,
    new_scoring_state,
    none_fits,
    observation_of,
)
from gpusched.agents.rltune.history import new_job_history, note_start, note_stop
from gpusched.agents.rltune.known import facts_of_world
from gpusched.agents.rltune.preempt import PreemptionModel, Ranking, changes_after_s, history_of, ranks_of
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.estimation import REMEMBERED
from gpusched.estimation.odds import History, forget, note_passed
from gpusched.model.jobs import HOUR_S
from gpusched.model.policy import PreemptionSettings as Rules
from gpusched.sched.bounds import charge
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.kernel.preempting import GIVEN, plan_starts
from gpusched.sched.kernel.queue_pass import KEPT
from gpusched.sched.reclaim import Holders, hold, new_holders
from gpusched.sched.sorting import by_priority, stable_order
from gpusched.sched.state import STARTED, ClusterState, Flags, Floats, Ints, Records, Resources, copied
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.mapped import StagedRun
from gpusched.sim.engine.pace import elapsed_run_s, mate_of, total_run_s
from gpusched.sim.engine.placing_walk import Walk
from gpusched.sim.engine.preempt import (
    PreemptionPlan,
    apply_plan,
    copy_resources,
    keep_running,
    new_plan,
    pair_waiting,
    planned,
    refresh_active,
    reset,
)
from gpusched.sim.engine.queue import waiting_in
from gpusched.sim.engine.state import DECIDE, DONE, ENDED, RUNNING, RUNS, EventLog, Passes, Sim, shape_request
from gpusched.sim.knowledge import explicit_priorities
from gpusched.sim.placed import is_staged, staged
from gpusched.sim.policies import PLACEMENTS


def maps(model: TrainedModel) -> bool:
    """Return whether the agent leaves node selection to a mapping: one that preempts chooses nodes itself."""
    return not model.preempts


def runner(world: SimWorld, prepared: PreparedScorer | PreemptionModel) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """Return a replay's runner: it runs to the end, or until the event log is full."""
    if isinstance(prepared, PreemptionModel):
        return world, ranked_runner(world, prepared)
    known, rule = new_job_history(facts_of_world(world, prepared.knows)), PLACEMENTS[world.rule]
    by = new_scoring_state(prepared, known, rule, world.passes.jobs.limit, explicit_priorities(world.trace))
    if not is_staged(world):
        return prepare_replay(world, run_scored, by)
    world, walk = staged(world)
    return world, ScoredRun(world, by, walk)


@jit
def _decide(
    state: ClusterState, passes: Passes, queue: Ints, by: ScoringState, need_order: bool
) -> tuple[Ints, bool]:
    obs = observation_of(state, passes.total, queue)
    if not need_order and none_fits(state, obs, queue):
        return queue, True
    order, sound = in_order(state, obs, queue, by)
    if sound:
        pass_by_rule(state, order, by.backfill, PlacementRule(by.rule, passes.rng))
    return order, sound


@jit
def started(sim: Sim, job: int, by: ScoringState) -> None:
    """Record that a job started."""
    note_start(by.known, job, sim.clock[0])


@jit
def ended(sim: Sim, job: int, by: ScoringState) -> None:
    """Record that a job ended or was preempted."""
    note_stop(by.known, job, sim.clock[0])


run_scored = queue_runner(_decide, started, ended)


class ScoredRun(StagedRun):
    """A replay in the order of scores, placed by a mapping or by cost."""

    def __init__(self, world: SimWorld, by: ScoringState, walk: Walk | None) -> None:
        super().__init__(world, walk)
        self._by = by

    def update_queue(self) -> None:
        """Record the jobs that ended or arrived at this instant."""
        super().update_queue()
        sim = self._world.sim
        for job in sim.ended[: sim.counter[ENDED]].tolist():
            ended(sim, job, self._by)

    def order(self, partition: int) -> Ints:
        """Return the partition's waiting jobs in order; none if none can start.

        Raises:
            InvalidOutput: A score is NaN.
        """
        world, queue, state = self._world, self._queue, self._state._replace(now=float(self._world.sim.clock[0]))
        own: Ints = waiting_in(world.sim, queue.waiting, queue.size, partition)
        if not len(own):
            return own
        obs = observation_of(state, world.passes.total, own)
        if world.sim.pairs is None and none_fits(state, obs, own):
            return own[:0]
        order, sound = in_order(state, obs, own, self._by)
        if not sound:
            raise InvalidOutput(world.policy.name)
        return order

    def started(self, jobs: Ints) -> None:
        """Record that jobs started."""
        for job in jobs.tolist():
            started(self._world.sim, job, self._by)


UNBOUND = Rules(min_run_s=0.0, per_hour=0)  # what binds a policy without a file


# With preemption: planned as in `sim.engine.preempt`, ranked by the agent. Unlike there, the running jobs with the last
# ranks are preempted first, on any node, and no more than needed. As in the controller, jobs protected by the policy
# file are not preempted: those not preemptible, those started recently, and those preempted often lately. They keep
# their nodes before any job is ranked.


class Guard(NamedTuple):
    """The protection of jobs from preemption.

    Attributes:
        min_run_s: ``float64[1]``: minimum seconds of a run before a preemption.
        stops: ``float64[jobs, n]``: the last n preemptions of each job (-inf: none); at most n within an hour.
        times: ``int64[jobs]``: preemptions of each job.
        steady: ``uint8[1]``: whether running jobs precede waiting ones of the same rank.
        may: ``uint8[jobs]``: whether the job is preemptible.
    """

    min_run_s: Floats
    stops: Floats
    times: Ints
    steady: Flags
    may: Flags


def guard_of(world: SimWorld) -> Guard:
    """Return the protection of the policy file for the trace's jobs, before any preemption."""
    rules = world.policy.spec.preempt if world.policy.spec is not None else UNBOUND
    jobs, may = len(world.trace), world.trace.preemptible
    return Guard(
        np.array([rules.min_run_s]), np.full((jobs, rules.per_hour), -np.inf), np.zeros(jobs, np.int64),
        np.array([world.policy.spec is not None], np.uint8),
        np.ones(jobs, np.uint8) if may is None else np.ascontiguousarray(may, np.uint8),
    )  # fmt: skip


@jit
def protected_until(sim: Sim, guard: Guard, job: int) -> float:
    """Return until when a running job is protected; -inf: not protected; inf: for ever."""
    if not guard.may[job] or mate_of(sim.pace, job) >= 0:
        return np.inf
    until = sim.state[job]["start"] + guard.min_run_s[0]
    if guard.stops.shape[1] > 0:
        until = max(until, guard.stops[job, guard.times[job] % guard.stops.shape[1]] + HOUR_S)
    return float(until if until > sim.clock[0] else -np.inf)


def ranked_runner(world: SimWorld, prepared: PreemptionModel) -> Callable[[EventLog], int]:
    """Return a replay's runner: it runs to the end, or until the event log is full."""
    sim, passes = world.sim, world.passes
    facts = facts_of_world(world, prepared.knows)
    holders = new_holders(len(sim.ends.item), sim.held, len(sim.node))
    if sim.resources.shared is not None:
        holders = holders._replace(room=copied(sim.resources))
    ranked = RankingState(
        plan=new_plan(world, holders), free=copied(sim.resources), holders=holders, guard=guard_of(world),
        history=history_of(facts), facts=facts, ranking=prepared.ranking, restart_s=world.restart_s,
        ended=np.full(REMEMBERED, -1, np.int64), oldest=np.zeros(1, np.int64),
    )  # fmt: skip
    return lambda log: run_ranked(sim, log, passes, ranked)


class RankingState(NamedTuple):
    """The state of a decision: the plan, protected jobs, history and ranking.

    Attributes:
        free: What no job uses, as jobs start.
        restart_s: ``float64[jobs]``: cost of a restart.
        ended: ``int64[REMEMBERED]``: the last jobs that ended, which alone are counted, as live; -1: none yet.
            ``oldest: int64[1]``: the place of the first of them.
    """

    plan: PreemptionPlan
    free: Resources
    holders: Holders
    guard: Guard
    history: History
    facts: Records
    ranking: Ranking
    restart_s: Floats
    ended: Ints
    oldest: Ints


@jit
def decide_ranked(sim: Sim, log: EventLog, passes: Passes, of: RankingState) -> int:
    """Rank all jobs and allocate nodes in that order; what stopped jobs leave is decided about next, at once."""
    plan, guard, history, facts, ranking = of.plan, of.guard, of.history, of.facts, of.ranking
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        if sim.state[job]["status"] == DONE:
            note_passed(history, job, total_run_s(sim.pace, sim, job), True)
            if of.ended[of.oldest[0]] >= 0:
                forget(history, of.ended[of.oldest[0]])
            of.ended[of.oldest[0]] = job
            of.oldest[0] = (of.oldest[0] + 1) % of.ended.size
    refresh_active(sim, plan)
    if plan.size[0] == sim.counter[RUNS]:  # none waits: it does not matter who is before whom
        sim.clock[1] = np.inf
        return DECIDE
    jobs = plan.active[: plan.size[0]]
    ranks = _ranks(sim, history, facts, ranking, jobs, of.restart_s)
    reset(sim, passes, plan)
    copy_resources(sim.resources, of.free)
    order = by_priority(jobs[stable_order(_steadied(sim, guard, jobs, ranks))], plan.priority)
    for partition in range(sim.dirty.size):
        own = order if sim.dirty.size == 1 else waiting_in(sim, order, plan.size, partition)
        queue, begun = _queue_of(sim, passes, plan, guard, of.holders, own), plan.shares.used[0]
        state = planned(sim, passes, plan)
        plan_starts(state, queue, of.free, plan.shares)
        for job in plan.shares.order[begun : plan.shares.used[0]]:  # live, other partitions know of starts only
            if plan.outcome.code[job] == GIVEN and plan.shares.runs[job] == 0:
                charge(state.jobs.links, state.jobs.room, state.jobs.account, job, -1)
        passes.releases.used[:] = 0  # of this plan
    apply_plan(sim, log, plan, of.restart_s, STARTED)
    stopped = _note_stopped(sim, plan, guard, jobs)
    pair_waiting(sim.pairs, sim, log, passes, plan, order, of.restart_s)
    now = sim.clock[0]
    sim.clock[1] = now if stopped else _next_change(sim, guard, facts, ranking, jobs, of.restart_s)
    return DECIDE


run_ranked = looped(decide_ranked)


@jit
def _steadied(sim: Sim, guard: Guard, jobs: Ints, ranks: Floats) -> Floats:
    """Return the integer ranks doubled, plus one for waiting jobs: no job is preempted for one of equal rank."""
    if guard.steady[0] == 0:
        return ranks
    keys = 2.0 * ranks
    for i in range(jobs.size):
        keys[i] += sim.state[jobs[i]]["status"] != RUNNING
    return keys


@jit
def _queue_of(sim: Sim, passes: Passes, plan: PreemptionPlan, guard: Guard, holders: Holders, order: Ints) -> Ints:
    """Return the order without protected jobs, which keep their nodes; other running jobs become holders."""
    running, size = 0, 0
    queue = np.empty(order.size, np.int64)
    for job in order:
        if plan.shares.runs[job]:
            if protected_until(sim, guard, job) > sim.clock[0]:
                keep_running(sim, passes, plan, job)
                continue
            hold(holders, running, plan.shares.first[job], shape_request(sim.shapes, sim.jobs[job]["shape"]), job)
            running += 1
        queue[size] = job
        size += 1
    plan.shares.through[0], plan.shares.through[1] = 0, running
    return queue[:size]


@jit
def _note_stopped(sim: Sim, plan: PreemptionPlan, guard: Guard, jobs: Ints) -> bool:
    """Record the preemptions; return whether there were any. These jobs wait from the next decision on."""
    stopped = False
    for job in jobs:
        if plan.shares.runs[job] and plan.outcome.code[job] != KEPT:
            if guard.stops.shape[1] > 0:
                guard.stops[job, guard.times[job] % guard.stops.shape[1]] = sim.clock[0]
            guard.times[job] += 1
            plan.outcome.code[job], stopped = KEPT, True
    return stopped


@jit
def _ranks(sim: Sim, history: History, facts: Records, ranking: Ranking, jobs: Ints, restart_s: Floats) -> Floats:
    """Return every job's rank, ``float64[jobs]``, after recording the time of running jobs."""
    had, runs = np.empty(jobs.size), np.empty(jobs.size, np.uint8)
    for i in range(jobs.size):
        had[i] = elapsed_run_s(sim.pace, sim, jobs[i], restart_s[jobs[i]])
        runs[i] = sim.state[jobs[i]]["status"] == RUNNING
    return ranks_of(history, ranking, facts, jobs, had, runs)


@jit
def _next_change(sim: Sim, guard: Guard, facts: Records, ranking: Ranking, jobs: Ints, restart_s: Floats) -> float:
    """Return when a running job next loses its protection or its rank changes."""
    soonest = np.inf
    for job in jobs:
        state = sim.state[job]
        if state["status"] == RUNNING:
            until = protected_until(sim, guard, job)
            if until > sim.clock[0]:
                soonest = min(soonest, until)
                continue  # until then its rank has no effect
            overhead = restart_s[job] if state["restarts"] > 0 else 0.0
            resumes = max(sim.clock[0], state["start"] + overhead)
            had = elapsed_run_s(sim.pace, sim, job, restart_s[job])
            soonest = min(soonest, resumes + changes_after_s(ranking, facts[job]["gpus"], had))
    return float(soonest)
