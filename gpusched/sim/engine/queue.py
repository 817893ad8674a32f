"""The queue of a replay that walks it: the first ``size[0]`` of ``waiting: int64[jobs]`` are pending jobs, by rank."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import ClusterState, Floats, Ints, PassOutcome
from gpusched.sim.engine.pace import enter_gpu
from gpusched.sim.engine.state import RUNNING, EventLog, Passes, Sim
from gpusched.sim.engine.step import start_job


@jit
def state_of(sim: Sim, passes: Passes, outcome: PassOutcome) -> ClusterState:
    """Return the current state for a pass over a queue."""
    return ClusterState(
        sim.resources, passes.releases, passes.requests, passes.jobs, passes.scratch, outcome, sim.clock[0]
    )


@jit
def enter(sim: Sim, waiting: Ints, size: Ints, job: int) -> None:
    """Insert a job into the queue by its rank."""
    # From the end, which is where jobs belong under first come, first served.
    at, rank = size[0], sim.jobs[job]["rank"]
    while at > 0 and sim.jobs[waiting[at - 1]]["rank"] > rank:
        waiting[at] = waiting[at - 1]
        at -= 1
    waiting[at] = job
    size[0] += 1


@jit
def waiting_in(sim: Sim, waiting: Ints, size: Ints, partition: int) -> Ints:
    """Return the partition's jobs in the queue by rank, ``int64[jobs]``."""
    own, count = np.empty(size[0], np.int64), 0
    for i in range(size[0]):
        job = waiting[i]
        if sim.shapes[sim.jobs[job]["shape"]]["queue"] == partition:
            own[count] = job
            count += 1
    return own[:count]


@jit
def start_granted(sim: Sim, log: EventLog, outcome: PassOutcome, restart_s: Floats | None) -> None:
    """Start the jobs that a pass has chosen, each with the request that it granted.

    ``restart_s: float64[jobs]``: seconds lost by each restart; None: 0.
    """
    for i in range(outcome.total[0]):
        job, shape = outcome.started[i], outcome.shape[outcome.started[i]]
        sim.jobs[job]["shape"] = shape
        gpus = enter_gpu(sim.pace, sim.resources.shared, job, sim.shapes[shape]["gpus"])
        start_job(sim, log, job, outcome.nodes, outcome.offset[job], gpus, restart_cost(restart_s, job))


@jit
def restart_cost(restart_s: Floats | None, job: int) -> float:
    """Return the seconds lost by a job's restart."""
    return 0.0 if restart_s is None else float(restart_s[job])


@jit
def remove_running(sim: Sim, waiting: Ints, size: Ints) -> None:
    """Remove running jobs from the queue."""
    kept = 0
    for i in range(size[0]):
        job = waiting[i]
        if sim.state[job]["status"] != RUNNING:
            waiting[kept] = job
            kept += 1
    size[0] = kept
