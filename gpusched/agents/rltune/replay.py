"""The RLTune agent in replays: the live passes, called at every instant at which something happened in a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpusched.agents.rltune.decide import Field, Scorer, arrange, observation_of, ordered
from gpusched.agents.rltune.history import (
    DAY_S,
    FACTS,
    FEATURES,
    Book,
    Reals,
    book_of,
    grouped,
    note_start,
    note_stop,
)
from gpusched.agents.rltune.live import NO_NUMBER, Prepared
from gpusched.agents.rltune.mapped import keep_of
from gpusched.agents.rltune.snapshot import KNOWS_LIMITS, LEARNS
from gpusched.compiled import jit
from gpusched.errors import GpuschedError
from gpusched.sched.mapping.queue import Keep
from gpusched.sched.state import EASY, Ints, Outcome, filled, new_outcome
from gpusched.sim.engine.build import World
from gpusched.sim.engine.generic import Queue as PlainQueue
from gpusched.sim.engine.mapped import MappedRun, is_mapped
from gpusched.sim.engine.queue import begin_started, enter, leave_started, waiting_in
from gpusched.sim.engine.state import DECIDE, DONE, ENDED, READY, Log, Passes, Sim
from gpusched.sim.engine.static import next_decision
from gpusched.sim.policies import PLACEMENTS
from gpusched.sim.pool import Demand
from gpusched.traces.trace import Trace

MAPS = True
UNSOUND = 3  # beside OVER, DECIDE and GROW


class Queue(NamedTuple):
    """The waiting jobs, and room to work in.

    Attributes:
        waiting: ``int64[jobs]`` in order of submission; ``size[0]`` of them.
        ahead: ``int64[jobs]``. seen: ``float32[window, FEATURES]``: see `decide.ordered`.
        outcome: Where the pass writes.
    """

    waiting: Ints
    size: Ints
    ahead: Ints
    seen: Reals
    outcome: Outcome


def runner(world: World, prepared: Prepared) -> Callable[[Log], int]:
    """The run of one replay: to its end, or to where the log needs more room.

    The function returned raises `GpuschedError` where a network's answer is no number.
    """
    if is_mapped(world):
        return MappedRun(world, ScoredOrder(world, prepared))
    sim, passes, scorer = world.sim, world.passes, prepared.scorer
    book = book_of_trace(world.trace, world.demand, len(world.pool.partitions), prepared.knows)
    queue = new_queue(sim, int(scorer.window[0]))
    rule = PLACEMENTS[world.rule]

    def run(log: Log) -> int:
        code = run_scored(sim, log, passes, queue, book, scorer, rule, prepared.backfill)
        if code == UNSOUND:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return code

    return run


def book_of_trace(trace: Trace, demand: Demand, queues: int, knows: str) -> Book:
    """What the agent is told of a trace's jobs; nothing has run yet."""
    jobs, shape = len(trace), demand.shape
    runs = shape >= 0
    queue, gpus, cores, memory = (np.zeros(jobs, np.int64) for _ in range(4))
    queue[runs] = demand.queue[shape[runs]]
    asked = demand.requests
    for column, of in ((gpus, asked.gpus), (cores, asked.cores), (memory, asked.memory)):
        column[runs] = demand.parts[runs] * of[shape[runs]]
    owner = trace.user if (trace.user >= 0).any() else trace.group
    kind, burst = grouped(trace.submit, queue, owner, gpus, demand.parts, cores)
    limited = np.isfinite(trace.limit) & (trace.limit > 0) & (knows in KNOWS_LIMITS)
    truth = np.log(np.maximum(trace.duration, 1.0)) if knows == "oracle" else np.full(jobs, np.nan)
    facts = filled(
        FACTS, jobs, submit=trace.submit, gpus=gpus, cores=cores, memory=memory,
        limit=np.where(limited, np.log(np.where(limited, trace.limit, 1.0)), np.nan), started=np.nan, truth=truth,
        user=np.maximum(owner, 0), kind=kind, burst=burst, queue=queue,
        clock=np.mod(trace.submit + (trace.epoch or 0.0), DAY_S),
    )  # fmt: skip
    return book_of(facts, queues, knows in LEARNS)


def new_queue(sim: Sim, window: int) -> Queue:
    """An empty queue."""
    jobs = len(sim.jobs)
    outcome = new_outcome(jobs, len(sim.held))
    ahead, seen = np.zeros(jobs + 1, np.int64), np.zeros((window, len(FEATURES)), np.float32)
    return Queue(np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), ahead, seen, outcome)


@jit
def run_scored(
    sim: Sim, log: Log, passes: Passes, queue: Queue, book: Book, scorer: Scorer, rule: int, backfill: int
) -> int:
    """Replays to the end; OVER, GROW (call again), or UNSOUND."""
    while True:
        code = next_decision(sim, log, passes, EASY)
        if code != DECIDE:
            return code
        remember(sim, queue, book)
        for partition in range(sim.dirty.size):
            if sim.dirty[partition]:
                sim.dirty[partition] = 0
                own = waiting_in(sim, queue.waiting, queue.size, partition)
                if own.size and not decide_scored(sim, log, passes, queue, book, scorer, own, rule, backfill):
                    return UNSOUND


@jit
def remember(sim: Sim, queue: Queue, book: Book) -> None:
    """What ended at this instant, and what came to wait."""
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        note_stop(book, job, sim.clock[0], sim.state[job]["status"] == DONE)
    for i in range(sim.counter[READY]):
        enter(sim, queue.waiting, queue.size, sim.ready[i])


@jit
def decide_scored(
    sim: Sim, log: Log, passes: Passes, queue: Queue, book: Book, scorer: Scorer, own: Ints, rule: int, backfill: int
) -> bool:
    """One partition's decision, carried out; False: a score is no number."""
    shape, now = sim.shapes[sim.jobs[own[0]]["shape"]], sim.clock[0]
    obs = observation_of(sim.rooms, passes.total, shape["lo"], shape["hi"], own.size, now)
    if obs.free == 0.0 and shape["gpus"] > 0:
        return True
    field = Field(sim.rooms, passes.usable, passes.requests, passes.jobs, passes.scratch)
    order, hold, sound = ordered(book, scorer, obs, field, passes.releases, own, queue.ahead, queue.seen)
    if sound:
        queue.outcome.total[:] = 0
        arrange(book, scorer.odds, field, passes.releases, order, hold, rule, backfill, now, queue.outcome)
        carry_out(sim, log, queue, book)
    return sound


@jit
def carry_out(sim: Sim, log: Log, queue: Queue, book: Book) -> None:
    """Starts in the engine's terms what the pass has decided, and takes it out of the queue."""
    outcome = queue.outcome
    if outcome.total[0] == 0:
        return
    begin_started(sim, log, outcome)
    for i in range(outcome.total[0]):
        note_start(book, outcome.started[i], sim.clock[0])
    leave_started(sim, queue.waiting, queue.size)


class ScoredOrder:
    """What orders the queue of one replay; see `gpusched.sim.engine.mapped.Ordering`."""

    def __init__(self, world: World, prepared: Prepared) -> None:
        self._world, self._prepared = world, prepared
        self._book = book_of_trace(world.trace, world.demand, len(world.pool.partitions), prepared.knows)
        self._ahead = np.zeros(len(world.sim.jobs) + 1, np.int64)
        self._seen = np.zeros((int(prepared.scorer.window[0]), len(FEATURES)), np.float32)

    def remember(self) -> None:
        """What ended at this instant."""
        sim = self._world.sim
        for job in sim.ended[: sim.counter[ENDED]].tolist():
            note_stop(self._book, job, float(sim.clock[0]), bool(sim.state[job]["status"] == DONE))

    def order(self, queue: PlainQueue, partition: int) -> tuple[Ints, Keep | None]:
        """The partition's waiting jobs from first to last, and for whom nodes are held.

        Raises:
            GpuschedError: A score is no number.
        """
        world, prepared = self._world, self._prepared
        sim, passes, now = world.sim, world.passes, float(world.sim.clock[0])
        own: Ints = waiting_in(sim, queue.waiting, queue.size, partition)
        if not len(own):
            return own, None
        shapes = sim.shapes[sim.jobs["shape"][own]]
        obs = observation_of(sim.rooms, passes.total, int(shapes["lo"][0]), int(shapes["hi"][0]), len(own), now)
        if obs.free == 0.0 and shapes["gpus"].min() > 0:  # nobody can start
            return own[:0], None
        field = Field(sim.rooms, passes.usable, passes.requests, passes.jobs, passes.scratch)
        order, hold, sound = ordered(
            self._book, prepared.scorer, obs, field, passes.releases, own, self._ahead, self._seen
        )  # fmt: skip
        if not sound:
            raise GpuschedError(f"{world.policy.name}: {NO_NUMBER}", "train it again")
        return order, keep_of(self._book, field, passes.releases, order, hold, prepared.backfill, now)

    def started(self, jobs: Ints) -> None:
        """These run from now on."""
        for job in jobs.tolist():
            note_start(self._book, job, float(self._world.sim.clock[0]))
