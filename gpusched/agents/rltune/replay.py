"""The RLTune agent in replays: the live passes, called at every instant at which something happened in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.decide import Scorer, arrange, observation_of, ordered
from gpusched.agents.rltune.history import FEATURES, Known, Reals, note_start, note_stop
from gpusched.agents.rltune.live import NO_NUMBER, Prepared
from gpusched.agents.rltune.mapped import keep_of
from gpusched.agents.rltune.preempt import Preempting
from gpusched.agents.rltune.replay_preempt import ranked_runner
from gpusched.agents.rltune.trace import known_of_world
from gpusched.compiled import jit
from gpusched.config.weights import Model
from gpusched.errors import GpuschedError
from gpusched.sched.mapping.queue import Keep
from gpusched.sched.state import Flags, Ints, Outcome, new_outcome
from gpusched.sim.engine.build import World
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.queue import apply_outcome, enter, state_of, waiting_in
from gpusched.sim.engine.state import DECIDE, DONE, ENDED, READY, Log, Passes, Sim
from gpusched.sim.policies import PLACEMENTS

UNSOUND = 3  # beside OVER, DECIDE and GROW


class Queue(NamedTuple):
    """The waiting jobs, and room to work in.

    Attributes:
        waiting: ``int64[jobs]`` in order of submission; ``size[0]`` of them.
        ahead: ``int64[jobs]``. seen: ``float32[window, FEATURES]``: see `decide.ordered`.
        hold: ``uint8[jobs]``: see there, too. outcome: Where the pass writes.
    """

    waiting: Ints
    size: Ints
    ahead: Ints
    seen: Reals
    hold: Flags
    outcome: Outcome


class Scored(NamedTuple):
    """Who decides: the queue, what the agent knows, its network; how jobs are placed, and how it backfills."""

    queue: Queue
    known: Known
    scorer: Scorer
    rule: int
    backfill: int


def maps(model: Model) -> bool:
    """Who stops running jobs chooses nodes itself."""
    return not model.preempts


def runner(world: World, prepared: Prepared | Preempting) -> tuple[World, Callable[[Log], int]]:
    """The run of one replay: to its end, or to where the log needs more room.

    The function returned raises `GpuschedError` where a network's answer is no number.
    """
    if isinstance(prepared, Preempting):
        return world, ranked_runner(world, prepared)
    if is_mapped(world):
        return world, ScoredRun(world, prepared)
    sim, passes, scorer = world.sim, world.passes, prepared.scorer
    known = known_of_world(world, prepared.knows)
    queue = new_queue(sim, int(scorer.window[0]))
    by = Scored(queue, known, scorer, PLACEMENTS[world.rule], prepared.backfill)

    def run(log: Log) -> int:
        code = run_scored(sim, log, passes, by)
        if code == UNSOUND:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return world, run


def new_queue(sim: Sim, window: int) -> Queue:
    """An empty queue."""
    jobs = len(sim.jobs)
    outcome = new_outcome(jobs, len(sim.held))
    ahead, seen = np.zeros(jobs + 1, np.int64), np.zeros((window, len(FEATURES)), np.float32)
    waiting, size = np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64)
    return Queue(waiting, size, ahead, seen, np.zeros(jobs, np.uint8), outcome)


@jit
def decide_scored(sim: Sim, log: Log, passes: Passes, by: Scored) -> int:
    """Every partition's pass in which something happened; UNSOUND: a score is no number."""
    remember(sim, by.queue, by.known)
    for partition in range(sim.dirty.size):
        if sim.dirty[partition]:
            sim.dirty[partition] = 0
            own = waiting_in(sim, by.queue.waiting, by.queue.size, partition)
            if own.size and not _decide(sim, log, passes, by, own):
                return UNSOUND
    return DECIDE


run_scored = looped(decide_scored)


@jit
def remember(sim: Sim, queue: Queue, known: Known) -> None:
    """What ended at this instant, and what came to wait."""
    _note_stops(sim, known)
    for i in range(sim.counter[READY]):
        enter(sim, queue.waiting, queue.size, sim.ready[i])


@jit
def _note_stops(sim: Sim, known: Known) -> None:
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        note_stop(known, job, sim.clock[0], sim.state[job]["status"] == DONE)


@jit
def _decide(sim: Sim, log: Log, passes: Passes, by: Scored, own: Ints) -> bool:
    """One partition's decision, carried out; False: a score is no number."""
    queue, known, scorer = by.queue, by.known, by.scorer
    shape, now = sim.shapes[sim.jobs[own[0]]["shape"]], sim.clock[0]
    obs = observation_of(sim.resources, passes.total, shape["lo"], shape["hi"], own.size, now)
    if obs.free == 0.0 and all_need_gpus(sim, own):
        return True
    state = state_of(sim, passes, queue.outcome)
    order, sound = ordered(known, scorer, obs, state, own, queue.ahead, queue.seen, queue.hold)
    if sound:
        queue.outcome.total[:] = 0
        arrange(state, known, scorer.odds, order, queue.hold, by.rule, by.backfill)
        carry_out(sim, log, queue, known)
    return sound


@jit
def all_need_gpus(sim: Sim, own: Ints) -> bool:
    """Whether no waiting job asks for CPU cores only: then nobody can start as long as no GPU is free."""
    for job in own:
        if sim.shapes[sim.jobs[job]["shape"]]["gpus"] == 0:
            return False
    return True


@jit
def carry_out(sim: Sim, log: Log, queue: Queue, known: Known) -> None:
    """Starts in the engine's terms what the pass has decided, and takes it out of the queue."""
    outcome = queue.outcome
    apply_outcome(sim, log, queue.waiting, queue.size, outcome)
    for i in range(outcome.total[0]):
        note_start(known, outcome.started[i], sim.clock[0])


class ScoredRun(MappedRun):
    """One replay in the order of scores."""

    def __init__(self, world: World, prepared: Prepared) -> None:
        super().__init__(world)
        self._prepared = prepared
        self._known = known_of_world(world, prepared.knows)
        self._own = new_queue(world.sim, int(prepared.scorer.window[0]))

    def remember(self) -> None:
        """What ended at this instant, and what came to wait."""
        super().remember()
        _note_stops(self._world.sim, self._known)

    def order(self, partition: int) -> tuple[Ints, Keep | None]:
        """The partition's waiting jobs from first to last, and for whom nodes are held.

        Raises:
            GpuschedError: A score is no number.
        """
        world, prepared, queue = self._world, self._prepared, self._queue
        sim, passes, now = world.sim, world.passes, float(world.sim.clock[0])
        own: Ints = waiting_in(sim, queue.waiting, queue.size, partition)
        if not len(own):
            return own, None
        shapes = sim.shapes[sim.jobs["shape"][own]]
        obs = observation_of(sim.resources, passes.total, int(shapes["lo"][0]), int(shapes["hi"][0]), len(own), now)
        if obs.free == 0.0 and all_need_gpus(sim, own):
            return own[:0], None
        state, of = state_of(sim, passes, self._own.outcome), self._own
        order, sound = ordered(self._known, prepared.scorer, obs, state, own, of.ahead, of.seen, of.hold)
        if not sound:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return order, keep_of(self._known, state, order, of.hold, prepared.backfill)

    def started(self, jobs: Ints) -> None:
        """These run from now on."""
        for job in jobs.tolist():
            note_start(self._known, job, float(self._world.sim.clock[0]))
