"""Replays that walk the queue at every decision, with the live controller's own pass `sched.backfill.schedule`.

For orders whose keys change while jobs wait, for the naive draw, for conservative backfill, and to check the fast runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.sched.backfill import schedule
from gpusched.sched.state import EASY, NAIVE, OK, Floats, Ints, Outcome, new_outcome
from gpusched.sim.conservative import conserve
from gpusched.sim.engine_fast import settle_instant
from gpusched.sim.engine_state import (
    CHANGED,
    DECIDE,
    DECISIONS,
    ENDED,
    READY,
    RUNNING,
    RUNS,
    Log,
    Passes,
    Records,
    Sim,
    shape_request,
)
from gpusched.sim.engine_step import advance, begin
from gpusched.sim.keys import USER, ended_of_user, estimate, held_by_user, order_keys

CONSERVATIVE = 3


class Queue(NamedTuple):
    """The waiting jobs and their users.

    Attributes:
        waiting: ``int64[jobs]``: waiting jobs by rank; ``size[0]`` of them.
        users: ``USER[users]``: what each user holds and has used.
        outcome: Where `schedule` writes.
        capped: ``uint8[jobs]``: the job has a limit (``believed`` at submission), which caps its estimate.
    """

    waiting: Ints
    size: Ints
    users: Records
    outcome: Outcome
    capped: npt.NDArray[np.uint8]


def new_queue(jobs: int, parts: int, users: int, capped: npt.NDArray[np.uint8]) -> Queue:
    """An empty queue."""
    records: npt.NDArray[Any] = np.zeros(users + 1, USER)
    return Queue(np.zeros(jobs + 1, np.int64), np.zeros(1, np.int64), records, new_outcome(jobs, parts), capped)


@jit
def run_generic(
    sim: Sim, log: Log, passes: Passes, queue: Queue, order: int, estimates: bool, rule: int, backfill: int
) -> int:
    """Replays to the end; OVER, or GROW (call again)."""
    while True:
        changed = sim.counter[CHANGED]
        code = advance(sim, log)
        if code != DECIDE:
            return code
        sim.counter[DECISIONS] += 1
        settle_instant(sim, passes, changed, EASY)
        for i in range(sim.counter[ENDED]):
            ended_of_user(sim, queue.users, sim.ended[i])
        for i in range(sim.counter[READY]):
            job = sim.ready[i]
            if estimates:
                sim.jobs[job]["believed"] = estimate(sim, queue.users, job, queue.capped[job] != 0)
                passes.jobs.limit[job] = sim.jobs[job]["believed"]
            _enter(sim, queue, job)
        for partition in range(sim.dirty.size):
            if sim.dirty[partition]:
                _decide(sim, log, passes, queue, partition, order, rule, backfill)
                sim.dirty[partition] = 0
        while rule == NAIVE and sim.counter[RUNS] == 0 and _any_can(sim, passes, queue):
            for partition in range(sim.dirty.size):
                _decide(sim, log, passes, queue, partition, order, rule, backfill)


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
    ordered = _ordered(sim, queue, partition, order)
    if backfill == CONSERVATIVE:
        conserve(sim, log, passes, ordered, rule)
    else:
        _schedule(sim, log, passes, queue, ordered, rule, backfill)
    _forget_started(sim, queue, ordered)


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
    for i in range(outcome.total[0]):
        job = outcome.started[i]
        request = shape_request(sim.shapes, sim.jobs[job]["shape"])
        for part in range(request.parts):
            sim.held[sim.jobs[job]["offset"] + part] = outcome.nodes[outcome.offset[job] + part]
        begin(sim, log, job, request, 0.0)


@jit
def _enter(sim: Sim, queue: Queue, job: int) -> None:
    at, rank = queue.size[0], sim.jobs[job]["rank"]
    while at > 0 and sim.jobs[queue.waiting[at - 1]]["rank"] > rank:
        queue.waiting[at] = queue.waiting[at - 1]
        at -= 1
    queue.waiting[at] = job
    queue.size[0] += 1


@jit
def _ordered(sim: Sim, queue: Queue, partition: int, order: int) -> Ints:
    """The partition's waiting jobs by (key, rank), ``int64[waiting]``."""
    jobs = np.empty(queue.size[0], np.int64)
    count = 0
    for i in range(queue.size[0]):
        job = queue.waiting[i]
        if sim.shapes[sim.jobs[job]["shape"]]["queue"] == partition:
            jobs[count] = job
            count += 1
    jobs = jobs[:count]
    if order == 0 or count < 2:
        return jobs
    keys: Floats = order_keys(sim, queue.users, jobs, order)
    return jobs[np.argsort(keys, kind="mergesort")]


@jit
def _forget_started(sim: Sim, queue: Queue, ordered: Ints) -> None:
    """Takes what has started out of the queue, and counts it for its user."""
    started = 0
    for job in ordered:
        if sim.state[job]["status"] == RUNNING:
            held_by_user(sim, queue.users, job, 1)
            started += 1
    if started == 0:
        return
    kept = 0
    for i in range(queue.size[0]):
        job = queue.waiting[i]
        if sim.state[job]["status"] != RUNNING:
            queue.waiting[kept] = job
            kept += 1
    queue.size[0] = kept
