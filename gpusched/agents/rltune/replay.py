"""The RLTune agent in replays: the live passes, run at every instant with an event in a partition."""

from __future__ import annotations

from collections.abc import Callable

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
from gpusched.agents.rltune.preempt import PreemptionModel
from gpusched.agents.rltune.replay_preempt import ranked_runner
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.state import ClusterState, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.queue import waiting_in
from gpusched.sim.engine.state import ENDED, EventLog, Passes, Sim
from gpusched.sim.knowledge import explicit_priorities
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
    return (world, ScoredRun(world, by)) if is_mapped(world) else prepare_replay(world, run_scored, by)


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


class ScoredRun(MappedRun):
    """A replay in the order of scores, placed by a mapping."""

    def __init__(self, world: SimWorld, by: ScoringState) -> None:
        super().__init__(world)
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
