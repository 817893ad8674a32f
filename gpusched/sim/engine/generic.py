"""Replays that walk the queue at every decision, with the live controller's own pass `sched.backfill.schedule`.

For orders whose keys change while jobs wait, for the naive draw, for conservative backfill, and to check the fast runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.forecast.features import Forecast, expected_run_s, note_end
from gpusched.sched.backfill import schedule
from gpusched.sched.state import EASY, NAIVE, OK, Floats, Ints, Outcome, Records, new_outcome
from gpusched.sim.engine.conservative import conserve
from gpusched.sim.engine.keys import USER, ended_of_user, estimate, held_by_user, order_keys
from gpusched.sim.engine.queue import begin_started, enter, leave_started, waiting_in
from gpusched.sim.engine.share import share_gpus
from gpusched.sim.engine.state import DECIDE, DONE, ENDED, READY, RUNNING, RUNS, Log, Passes, Sim
from gpusched.sim.engine.static import next_decision

CONSERVATIVE = 3


class Queue(NamedTuple):
    """The waiting jobs and their users.

    Attributes:
        waiting: ``int64[jobs]``: waiting jobs by rank; ``size[0]`` of them.
        users: ``USER[users]``: what each user holds and has used.
        outcome: Where `schedule` writes.
        capped: ``uint8[jobs]``: the job has a limit (``expected`` at submission), which caps its estimate.
        forecast: A trained predictor's estimates; None: `keys.estimate`.
    """

    waiting: Ints
    size: Ints
    users: Records
    outcome: Outcome
    capped: npt.NDArray[np.uint8]
    forecast: Forecast | None


def new_queue(
    jobs: int, parts: int, users: int, capped: npt.NDArray[np.uint8], forecast: Forecast | None = None
) -> Queue:
    """An empty queue."""
    records: npt.NDArray[Any] = np.zeros(users + 1, USER)
    return Queue(
        np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), records, new_outcome(jobs, parts), capped, forecast
    )


@jit
def run_generic(
    sim: Sim, log: Log, passes: Passes, queue: Queue, order: int, estimates: bool, rule: int, backfill: int
) -> int:
    """Replays to the end; OVER, or GROW (call again)."""
    while True:
        code = next_decision(sim, log, passes, EASY)
        if code != DECIDE:
            return code
        for i in range(sim.counter[ENDED]):
            ended_of_user(sim, queue.users, sim.ended[i])
            if estimates:
                learn_from(queue.forecast, sim, queue, sim.ended[i])
        for i in range(sim.counter[READY]):
            job = sim.ready[i]
            if estimates:
                sim.jobs[job]["expected"] = estimate_of(queue.forecast, sim, queue, job)
                passes.jobs.limit[job] = sim.jobs[job]["expected"]
            enter(sim, queue.waiting, queue.size, job)
        for partition in range(sim.dirty.size):
            if sim.dirty[partition]:
                _decide(sim, log, passes, queue, partition, order, rule, backfill)
                sim.dirty[partition] = 0
        while rule == NAIVE and sim.counter[RUNS] == 0 and _any_can(sim, passes, queue):
            for partition in range(sim.dirty.size):
                _decide(sim, log, passes, queue, partition, order, rule, backfill)


@jit
def learn_from(forecast: Forecast | None, sim: Sim, queue: Queue, job: int) -> None:
    """What has ended is past from now on; ``forecast`` stands alone so that without one nothing of it is compiled."""
    if forecast is not None and sim.state[job]["status"] == DONE:
        seconds = queue.users[sim.jobs[job]["user"]]["last"]  # of the run that was counted just before
        note_end(forecast.past, forecast.keys[job], seconds, sim.clock[0])


@jit
def estimate_of(forecast: Forecast | None, sim: Sim, queue: Queue, job: int) -> float:
    """The run time that is expected of a job that has just come to wait, seconds."""
    if forecast is None:
        return estimate(sim, queue.users, job, queue.capped[job] != 0)
    return expected_run_s(forecast, job, sim.clock[0], sim.jobs[job]["expected"] if queue.capped[job] else np.inf)


@jit
def _any_can(sim: Sim, passes: Passes, queue: Queue) -> bool:
    """Whether any waiting job can run; with nothing running, an unlucky draw is drawn again, or it might never be."""
    for i in range(queue.size[0]):
        if passes.jobs.standing[sim.jobs[queue.waiting[i]]["shape"]] == OK:
            return True
    return False


@jit
def _decide(
    sim: Sim, log: Log, passes: Passes, queue: Queue, partition: int, order: int, rule: int, backfill: int
) -> None:
    """One partition's pass."""
    waiting = ordered(sim, queue, partition, order)
    if backfill == CONSERVATIVE:
        conserve(sim, log, passes, waiting, rule)
    elif not share_gpus(sim.pace, sim, log, passes, waiting, rule, backfill):
        _schedule(sim, log, passes, queue, waiting, rule, backfill)
    forget_started(sim, queue, waiting)


@jit
def _schedule(sim: Sim, log: Log, passes: Passes, queue: Queue, ordered: Ints, rule: int, backfill: int) -> None:
    """The live pass, and its starts in the engine's terms."""
    outcome, now = queue.outcome, sim.clock[0]
    outcome.total[:] = 0
    schedule(
        sim.rooms,
        passes.releases,
        passes.requests,
        passes.jobs,
        ordered,
        rule,
        backfill,
        now,
        passes.rng,
        passes.scratch,
        outcome,
    )
    begin_started(sim, log, outcome)


@jit
def ordered(sim: Sim, queue: Queue, partition: int, order: int) -> Ints:
    """The partition's waiting jobs by (key, rank), ``int64[waiting]``."""
    jobs = waiting_in(sim, queue.waiting, queue.size, partition)
    if order == 0 or jobs.size < 2:
        return jobs
    keys: Floats = order_keys(sim, queue.users, jobs, order)
    return jobs[np.argsort(keys, kind="mergesort")]


@jit
def forget_started(sim: Sim, queue: Queue, ordered: Ints) -> None:
    """Takes what has started out of the queue, and counts it for its user."""
    started = 0
    for job in ordered:
        if sim.state[job]["status"] == RUNNING:
            held_by_user(sim, queue.users, job, 1)
            started += 1
    if started > 0:
        leave_started(sim, queue.waiting, queue.size)
