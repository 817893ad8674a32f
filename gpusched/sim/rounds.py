"""The event engine for settings that allocate to all jobs afresh in rounds.

The setting itself allocates nodes: for the engine a job needs nothing, and runs at the rate that the setting gives it
until it gives another, or the job has ended.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from gpusched.compiled import bound, jit
from gpusched.sched.state import Floats, Ints
from gpusched.sim.engine.build import ReplayOptions, ResizableJobs, log_of, world_of
from gpusched.sim.engine.loop import Decide, looped
from gpusched.sim.engine.pace import work_left
from gpusched.sim.engine.state import (
    ARRIVED,
    DECIDE,
    ENDED,
    GROW,
    IN_SYSTEM,
    READY,
    RUNNING,
    WAITING,
    EventLog,
    Passes,
    Sim,
    grown,
)
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job, stop_job
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.result import RESIZED
from gpusched.traces.readers.draft import assemble

_DUE = -1  # why a run stops, beside OVER and GROW
NOW, BEFORE, NEXT = range(3)  # positions in Progress.time
ACTIVE, DECISIONS = range(2)  # positions in Progress.counts


class Rounds(NamedTuple):
    """When decisions are made, in the setting's unit of time; never while no job is present.

    One follows each arrival and end, at least ``apart`` after the last one and at most ``every``; with ``slots`` only
    at multiples of ``apart``.
    """

    apart: float
    every: float
    slots: bool = False


SLOT_BY_SLOT = Rounds(1.0, 1.0, slots=True)
"""Time is counted in slots."""


class RoundProgress(NamedTuple):
    """The jobs' progress at this decision.

    Attributes:
        rounds: See there.
        work, done: ``float64[jobs]``. restarts: ``int64[jobs]``: how often it resumed with another allocation.
        active: ``int64[jobs]``: those that have arrived and not ended, by arrival; ``counts[ACTIVE]`` of them.
        rate, restart: ``float64[jobs]``: the last `set_rate` of each; restart NaN: it has been applied.
        counts: ``int64[2]``: also how many decisions there were.
        time: ``float64[3]``: this decision, the one before, and the next one as things stand.
    """

    rounds: Rounds
    work: Floats
    done: Floats
    restarts: Ints
    active: Ints
    rate: Floats
    restart: Floats
    counts: Ints
    time: Floats


class RoundsResult(NamedTuple):
    """Figures of one run. jct: ``float64[jobs]``. makespan: From the first arrival to the last end."""

    jct: Floats
    makespan: float
    restarts: int
    decisions: int


class EngineRun:
    """One run of the event engine.

    Args:
        arrival: ``float64[jobs]`` or ``int64[jobs]``, ascending. work: ``float64[jobs]``: at rate 1 it takes so long.
        rounds: When decisions are made.

    Attributes:
        progress: As of the last decision.
    """

    def __init__(self, arrival: Floats | Ints, work: Floats, rounds: Rounds) -> None:
        count = len(arrival)
        none, policy = np.zeros(count, np.int64), ReplayPolicy(name="", order="fifo", knows="nothing", source="")
        trace = assemble(
            name="", epoch=None, ids=tuple(map(str, range(count))), submit=arrival.astype(np.float64), duration=work,
            gpus=none, names={}, columns={},
        )  # fmt: skip
        options = ReplayOptions(generic=True, elastic=ResizableJobs(least=none, most=none))
        world = world_of(trace, Pool.of([NodeSpec(1)]), policy, options)
        self.sim, self._passes, self._log = world.sim, world.passes, log_of(world)
        self.progress = RoundProgress(
            rounds, work, np.zeros(count), none.copy(), none.copy(), np.zeros(count), np.full(count, np.nan),
            np.zeros(2, np.int64), np.array([-np.inf, -np.inf, np.inf]),
        )  # fmt: skip
        self._step = bound(_to_decision, self.sim, self._log, self._passes, self.progress)

    def next_round(self) -> bool:
        """Advance to the next decision; False: all jobs have ended."""
        while (code := self._step()) == GROW:
            self._grow()
        return code == _DUE

    def to_end(self, run: Decide[Any], state: Any) -> None:
        """Run to the end with what `engine.loop.looped` returned."""
        while run(self.sim, self._log, self._passes, state) == GROW:
            self._grow()

    def _grow(self) -> None:
        self._log = grown(self._log, self.sim)
        self._step = bound(_to_decision, self.sim, self._log, self._passes, self.progress)

    @property
    def active(self) -> Ints:
        """The jobs as from `active_jobs`, for Python."""
        return self.progress.active[: self.progress.counts[ACTIVE]]

    @property
    def end(self) -> Floats:
        """``float64[jobs]``: when each ended; NaN: it has not."""
        return cast(Floats, self.sim.state["end"])

    @property
    def result(self) -> RoundsResult:
        """The figures of this run."""
        submit, restarts = self.sim.jobs["submit"], int(self.sim.state["restarts"].sum())
        makespan = float(self.end.max() - submit[0])
        return RoundsResult(self.end - submit, makespan, restarts, int(self.progress.counts[DECISIONS]))


@jit
def is_due(sim: Sim, progress: RoundProgress) -> bool:
    """Return whether to decide at this instant; then ``progress`` is current."""
    now, time, rounds = sim.clock[0], progress.time, progress.rounds
    if sim.counter[READY] > 0 or sim.counter[ENDED] > 0:
        soonest = np.ceil(now / rounds.apart) * rounds.apart if rounds.slots else max(now, time[NOW] + rounds.apart)
        time[NEXT] = min(time[NEXT], soonest)
    if sim.counter[IN_SYSTEM] == 0:
        time[NEXT] = np.inf
    due = time[NEXT] <= now
    if due:
        time[NOW], time[BEFORE], time[NEXT] = now, time[NOW], now + rounds.every
        progress.counts[DECISIONS] += 1
        _refresh_progress(sim, progress)
    sim.clock[1] = time[NEXT]
    return bool(due)


@jit
def _stop_if_due(sim: Sim, log: EventLog, passes: Passes, progress: RoundProgress) -> int:
    return _DUE if is_due(sim, progress) else DECIDE


_until_due = looped(_stop_if_due)


@jit
def _to_decision(sim: Sim, log: EventLog, passes: Passes, progress: RoundProgress) -> int:
    apply_rates(sim, log, progress)
    return _until_due(sim, log, passes, progress)


@jit
def _refresh_progress(sim: Sim, progress: RoundProgress) -> None:
    """Update which jobs are present, and their work done."""
    count = 0
    for job in range(sim.counter[ARRIVED]):
        state = sim.state[job]
        if state["status"] == WAITING or state["status"] == RUNNING:
            progress.active[count] = job
            count += 1
            progress.done[job] = progress.work[job] - work_left(sim.pace, sim, job, 0.0)
            progress.restarts[job] = state["restarts"] - (state["status"] == WAITING and state["restarts"] > 0)
    progress.counts[ACTIVE] = count


@jit
def active_jobs(progress: RoundProgress) -> Ints:
    """Return the present jobs, by arrival."""
    return progress.active[: progress.counts[ACTIVE]]


@jit
def set_rate(progress: RoundProgress, job: int, rate: float, restart: float) -> None:
    """Set a job's rate from now on (0: stopped); a restart comes first if it has run before."""
    progress.rate[job], progress.restart[job] = rate, restart


@jit
def apply_rates(sim: Sim, log: EventLog, progress: RoundProgress) -> None:
    """Apply the rates given at this decision in the engine."""
    pace = sim.pace
    assert pace is not None
    for job in active_jobs(progress):
        restart = progress.restart[job]
        if np.isnan(restart):
            continue
        progress.restart[job] = np.nan
        if sim.state[job]["status"] == RUNNING:
            stop_job(sim, log, job, RESIZED, work_left(pace, sim, job, restart))
        pace.runs[job]["own"] = progress.rate[job]
        if progress.rate[job] > 0.0:
            sim.chosen[0] = 0
            start_job(sim, log, job, sim.chosen, 0, NOTHING_TAKEN, restart)
