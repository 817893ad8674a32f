"""The RLTune agent in replays: the live passes, called at every instant at which something happened in a partition."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.agents.common.queued import queued, run_of
from gpusched.agents.rltune.decide import (
    PreparedScorer,
    Scored,
    arrange,
    in_order,
    keep_of,
    nobody_fits,
    observation_of,
    scored_by,
)
from gpusched.agents.rltune.history import note_start, note_stop
from gpusched.agents.rltune.known import known_of_world
from gpusched.agents.rltune.preempt import PreemptionModel
from gpusched.agents.rltune.replay_preempt import ranked_runner
from gpusched.compiled import jit
from gpusched.config.weights import TrainedModel
from gpusched.errors import GpuschedError
from gpusched.sched.agent import NO_NUMBER
from gpusched.sched.mapping.queue import NodeHold
from gpusched.sched.state import ClusterState, Ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.queue import waiting_in
from gpusched.sim.engine.state import DONE, ENDED, EventLog, Passes, Sim
from gpusched.sim.policies import PLACEMENTS


def maps(model: TrainedModel) -> bool:
    """Who stops running jobs chooses nodes itself."""
    return not model.preempts


def runner(world: SimWorld, prepared: PreparedScorer | PreemptionModel) -> tuple[SimWorld, Callable[[EventLog], int]]:
    """The run of one replay: to its end, or to where the log needs more room."""
    if isinstance(prepared, PreemptionModel):
        return world, ranked_runner(world, prepared)
    by = scored_by(prepared, known_of_world(world, prepared.knows), PLACEMENTS[world.rule])
    return (world, ScoredRun(world, by)) if is_mapped(world) else run_of(world, run_scored, by)


@jit
def _decide(state: ClusterState, passes: Passes, queue: Ints, by: Scored) -> bool:
    obs = observation_of(state, passes.total, queue)
    if nobody_fits(state, obs, queue):
        return True
    order, sound = in_order(state, obs, queue, by)
    if sound:
        arrange(state, order, by)
    return sound


@jit
def started(sim: Sim, job: int, by: Scored) -> None:
    """It runs from now on."""
    note_start(by.known, job, sim.clock[0])


@jit
def ended(sim: Sim, job: int, by: Scored) -> None:
    """It runs no longer."""
    note_stop(by.known, job, sim.clock[0], sim.state[job]["status"] == DONE)


run_scored = queued(_decide, started, ended)


class ScoredRun(MappedRun):
    """One replay in the order of scores, placed by mapping."""

    def __init__(self, world: SimWorld, by: Scored) -> None:
        super().__init__(world)
        self._by = by

    def remember(self) -> None:
        """What ended at this instant, and what came to wait."""
        super().remember()
        sim = self._world.sim
        for job in sim.ended[: sim.counter[ENDED]].tolist():
            ended(sim, job, self._by)

    def order(self, partition: int) -> tuple[Ints, NodeHold | None]:
        """The partition's waiting jobs from first to last, and for whom nodes are held.

        Raises:
            GpuschedError: A score is no number.
        """
        world, queue, state = self._world, self._queue, self._state._replace(now=float(self._world.sim.clock[0]))
        own: Ints = waiting_in(world.sim, queue.waiting, queue.size, partition)
        if not len(own):
            return own, None
        obs = observation_of(state, world.passes.total, own)
        if nobody_fits(state, obs, own):
            return own[:0], None
        order, sound = in_order(state, obs, own, self._by)
        if not sound:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return order, keep_of(state, order, self._by)

    def started(self, jobs: Ints) -> None:
        """These run from now on."""
        for job in jobs.tolist():
            started(self._world.sim, job, self._by)
