"""Replays run by Python at every decision: of jobs placed by mapping (`sched.mapping`), or in an agent's order by cost.

The passes are the live controller's own. This is slower than the compiled replays by a factor of a hundred or more.
"""

from __future__ import annotations

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.policy import MAPPING_PLACES, Mapping
from gpusched.sched.mapping.learned import TypeSpeeds
from gpusched.sched.mapping.problem import MappingSolution, Problem
from gpusched.sched.mapping.queue import MappingFacts, MappingReport, Solver, map_queue, unfit_of
from gpusched.sched.state import BACKFILLS, EASY, PRIORITY, ClusterState, Floats, Ints, ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.generic import dequeue_started, new_queue, ordered, update_queue
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.placing_walk import Walk, begin_round, place, request_now, set_wake
from gpusched.sim.engine.queue import start_granted, state_of
from gpusched.sim.engine.share import pair_up, release_pairs_once
from gpusched.sim.engine.state import DECIDE, READY, EventLog, Passes, Sim
from gpusched.sim.knowledge import keys_of
from gpusched.sim.rates import speeds_of

SEARCH_NODES = 100  # of HiGHS's tree: a bound that does not depend on the machine, so that equal replays are equal
AMPLE_S = 30.0


class QueueMapper:
    """Maps the queues of one replay.

    Attributes:
        reports: The mappings so far.

    Raises:
        UsageError: The optimiser is not installed, or the policy cannot be mapped.
    """

    def __init__(self, world: SimWorld, state: ClusterState, sized: bool = False) -> None:
        """Prepare them; ``sized``: the policy chooses sizes."""
        policy, agent = world.policy, world.policy.kind == "agent"
        if policy.kind == "preemptive" or policy.backfill not in ("none", "skip", "easy"):
            raise UsageError(f"{policy.name} cannot be combined with --placement {world.rule}", "use another placement")
        self._world, self._state = world, state
        self._mapping = policy.spec.mapping if policy.spec is not None else Mapping()
        self._backfill = BACKFILLS[policy.backfill]
        self._solver: Solver | None = _solver() if world.rule == "milp" else None
        # where speeds are measured, those of running jobs are known, too; an agent predicts them in its own way
        sim, pool, jobs = world.sim, world.pool, len(world.sim.jobs)
        self._measured = _measured(world)
        by_type = self._measured is not None and not agent and not sized and self._backfill == EASY
        self._rate = self._with_measured(np.ones((jobs, len(pool.gpu_types))), np.arange(jobs))
        self._kill = np.full(jobs, np.inf) if sim.pace is None else sim.pace.runs["limit"]
        self._speeds = TypeSpeeds(self._mapping.speeds, pool.gpu_types, world.options.learned)
        self._facts = MappingFacts(
            usable=world.passes.usable,
            kind=pool.gpu_type,
            speed=lambda jobs: self._with_measured(self._typed(jobs), jobs),
            user=sim.jobs["user"] % (world.users + 1),
            held=np.zeros(0),
            priority=keys_of(world.trace, world.knowledge.expected).priority,
            unfit=np.zeros(0),
            lasts=self._lasts if by_type else None,
        )
        self.reports: list[MappingReport] = []

    def __call__(self, partition: int, waiting: Ints) -> None:
        """Decide which jobs of a queue start where, in the state's outcome."""
        state = self._state._replace(now=float(self._world.sim.clock[0]))
        gpus = state.requests.gpus[state.jobs.shape[waiting]]
        unfit = unfit_of(gpus, int(self._world.pool.gpus.max(initial=0)))
        facts = self._facts._replace(held=self._held(partition), unfit=unfit)
        *_, reports = map_queue(state, waiting, facts, self._mapping, self._backfill, self._solver)
        self.reports += reports

    def _held(self, partition: int) -> Floats:
        """Return the GPUs that each user's jobs hold in a partition, ``float64[users]``."""
        sim = self._world.sim
        running = sim.ends.item[: sim.ends.size[0]]
        of = sim.shapes[sim.jobs["shape"][running]]
        gpus = of["parts"] * of["gpus"] * (of["queue"] == partition)
        return np.bincount(self._facts.user[running], gpus, self._world.users + 1).astype(np.float64)

    def _typed(self, jobs: Ints) -> Floats:
        """Return the speeds, ``float64[jobs, kinds]``, as reported by jobs of their classes, else the policy's."""
        trace, asked = self._world.trace, self._state.requests
        shape = self._state.jobs.shape[jobs]
        gpus = (asked.parts[shape] * asked.gpus[shape]).tolist()
        rows = zip(trace.user[jobs].tolist(), trace.model[jobs].tolist(), gpus, strict=True)
        return self._speeds.of((trace.user_name(user), trace.model_name(model), size) for user, model, size in rows)

    def _with_measured(self, speeds: Floats, jobs: Ints) -> Floats:
        """Set measured speeds, relative to the recorded one, in ``float64[jobs, kinds]``, at the jobs' sizes."""
        if self._measured is not None:
            rows, table = self._measured
            row = rows[jobs]
            speeds[row >= 0] = table[:, row[row >= 0], 0].T
        return speeds

    def _lasts(self, jobs: Ints) -> Floats:
        """Return expected run times, ``float64[jobs, kinds]``, at measured speeds, at most limits that kill."""
        lasts: Floats = self._world.passes.jobs.limit[jobs][:, None] / self._rate[jobs]
        bound: Floats = np.minimum(lasts, self._kill[jobs][:, None])
        return bound

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the result: how often the mapping could be improved, and the remaining gap."""
        if self._solver is None or not self.reports:
            return ()
        better = [r for r in self.reports if r.solver == "milp"]
        gaps = np.array([r.gap for r in self.reports])
        stopped = sum(bool(r.note) for r in self.reports)
        return (
            f"{len(self.reports)} mappings, {len(better)} of them better than the greedy one; at most {gaps.max():.2%} "
            f"below the best, {gaps.mean():.3%} in the mean; {stopped} ended by the search's bound",
        )


class StagedRun:
    """One replay; call it until it says OVER (see `state`). An agent orders the queue in its own way (`order`).

    ``walk``: the passes by cost; None: a mapping places the jobs.

    Raises:
        UsageError: As `QueueMapper`.
    """

    def __init__(self, world: SimWorld, walk: Walk | None = None) -> None:
        self._world, self._walk = world, walk
        self._queue = new_queue(world) if walk is None else walk.queue._replace(outcome=walk.outcome)
        self._limit = world.passes.jobs.limit.copy()
        self._state = state_of(world.sim, world.passes, self._queue.outcome)
        self._map_queue = QueueMapper(world, self._state) if walk is None else None
        self._begun: list[int] = []  # at this decision
        self._in_turn = world.policy.by_agent  # live an agent decides about one partition alone

    def __call__(self, log: EventLog) -> int:
        """Replay to the end; return OVER, or GROW (call again)."""
        return _run(self._world.sim, log, self._world.passes, self)

    def decide(self, log: EventLog) -> int:
        """Decide for every partition in which something happened; by cost for all, as links may join them."""
        sim = self._world.sim
        self.update_queue()
        begin_round(self._walk, sim, self._world.passes)
        sim.dirty[:] |= self._walk is not None
        queues = dict[int, Ints]()
        for partition in np.flatnonzero(sim.dirty).tolist():
            queues[partition] = self._decide(log, partition)
            if self._in_turn:
                self._pair_up(log, queues.pop(partition))
        for waiting in queues.values():
            self._pair_up(log, waiting)
        set_wake(self._walk, sim)
        self.started(ints(self._begun))
        self._begun.clear()
        sim.dirty[:] = 0
        return DECIDE

    def update_queue(self) -> None:
        """Record the jobs that ended and that became ready at this instant."""
        sim, passes = self._world.sim, self._world.passes
        ready = sim.ready[: sim.counter[READY]]
        # after a failure: no longer of where it ran
        sim.jobs["expected"][ready] = passes.jobs.limit[ready] = self._limit[ready]
        update_queue(sim, passes, self._queue)

    def order(self, partition: int) -> Ints:
        """Return the partition's waiting jobs in order."""
        return ordered(self._world.sim, self._queue, partition)

    def started(self, jobs: Ints) -> None:
        """Handle the jobs that have started at a decision, in any partition."""

    def _decide(self, log: EventLog, partition: int) -> Ints:
        """Place one partition's jobs, and start them in the engine; return its queue in order."""
        sim, passes, outcome = self._world.sim, self._world.passes, self._queue.outcome
        waiting = self.order(partition)
        outcome.total[:] = 0
        if not len(waiting):
            return waiting
        outcome.code[waiting] = PRIORITY  # of jobs that are in no mapping
        if sim.pairs is not None:
            release_pairs_once(sim.pairs, sim, passes.releases)
        if self._map_queue is not None:
            self._map_queue(partition, waiting)
            started = outcome.started[: outcome.total[0]]
            # when its end is looked for among the releases, it must be the one noted there
            sim.jobs["expected"][started] = passes.jobs.limit[started]
        elif self._walk is not None:
            for job in waiting:
                passes.jobs.shape[job] = request_now(sim, passes, self._walk, job)
            place(sim, passes, self._walk, waiting, self._walk.placing.backfill)
        start_granted(sim, log, outcome, None)
        self._dequeue(waiting)
        return waiting

    def _pair_up(self, log: EventLog, waiting: Ints) -> None:
        """Start jobs of a partition's queue that were left waiting beside others."""
        sim, outcome = self._world.sim, self._queue.outcome
        if sim.pairs is not None:
            outcome.total[:] = 0
            pair_up(sim.pairs, sim, log, self._world.passes, outcome, waiting, None)
            self._dequeue(waiting)

    def _dequeue(self, waiting: Ints) -> None:
        outcome = self._queue.outcome
        self._begun += outcome.started[: outcome.total[0]].tolist()
        dequeue_started(self._world.sim, self._queue, waiting)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the result."""
        return () if self._map_queue is None else self._map_queue.notes


def _decide_staged(sim: Sim, log: EventLog, passes: Passes, run: StagedRun) -> int:
    return run.decide(log)


_run = looped(_decide_staged, compiled=False)


def _solver() -> Solver:
    """Return the live optimiser, bounded by search effort only."""
    from gpusched.sched.mapping.milp import highs, solve

    highs()

    def solver(problem: Problem, start: MappingSolution, _share: float) -> MappingSolution:
        return solve(problem, start, budget_s=AMPLE_S, max_nodes=SEARCH_NODES)

    return solver


def _measured(world: SimWorld) -> tuple[Ints, Floats] | None:
    """Return each job's row, ``int64[jobs]``, of measured speeds, ``float64[kinds, rows, others]``; None: of none.

    Where sizes change, so do the rows.
    """
    rates, pace = world.options.rates, world.sim.pace
    if rates is None or pace is None:
        return None
    if world.options.elastic is not None:
        return pace.runs["row"], pace.speed
    of = speeds_of(rates, world.trace, world.pool, world.demand)
    return of.row, of.table


def is_mapped(world: SimWorld) -> bool:
    """Return whether the replay's jobs are placed by mapping."""
    return world.rule in MAPPING_PLACES
