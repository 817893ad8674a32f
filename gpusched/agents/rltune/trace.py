"""A trace as the RLTune agent remembers it; see `snapshot`."""

from __future__ import annotations

import numpy as np

from gpusched.agents.rltune.history import DAY_S, FACTS, Known, grouped, known_of
from gpusched.agents.rltune.snapshot import KNOWS_LIMITS, LEARNS
from gpusched.sched.state import filled
from gpusched.sim.engine.build import World


def known_of_world(world: World, knows: str) -> Known:
    """What the agent is told of a replay's jobs; nothing has run yet."""
    trace, demand = world.trace, world.demand
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
    return known_of(facts, knows in LEARNS)
