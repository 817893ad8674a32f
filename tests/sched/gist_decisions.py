"""GIST's decisions, live and replayed."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sim.pool import NodeSpec, Pool, demand_of
from gpusched.sim.result import ReplayResult
from tests.sim.worlds import trace_of
from tests.strategies import among

EASY = PolicySpec(name="easy", place="best-fit", backfill="easy")


GIST = PolicySpec(name="gist", agent="gist", fallback=EASY, place="best-fit", backfill="easy", version="1")


@st.composite
def workloads(draw: st.DrawFn, alike: bool = False):
    """A trace and a pool whose figures are whole numbers, as the live controller has them.

    ``alike``: all nodes have as many cores.
    """
    binding = draw(st.booleans())
    cores = st.just(8) if alike else st.sampled_from([8, 16])
    nodes = [
        NodeSpec(draw(among(2, 4, 8)), *((draw(cores), 64) if binding else ()))
        for _ in range(draw(st.integers(1, 5)))
    ]
    jobs, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        at += draw(among(0.0, 0.0, 1.0, 60.0, 3000.0))
        run = draw(among(30.0, 600.0, 1800.0, 7200.0))
        limit = run * draw(among(1, 2, 8))
        jobs.append((at, run, limit, draw(among(1, 1, 2, 3, 4, 8, 16)), draw(st.integers(0, 20)),
                     draw(st.integers(0, 80))))  # fmt: skip
    submit, duration, limits, gpus, cores, memory = map(list, zip(*jobs, strict=True))
    more = {"cores": cores, "memory": memory} if binding else {}
    return trace_of(submit, duration, gpus, limit=limits, **more), Pool.of(nodes)


def live_at(result: ReplayResult, now: float) -> Snapshot:
    """Return what the controller would have seen at an instant of the replay, just before it decided."""
    trace, pool = result.trace, result.pool
    demand = demand_of(trace, pool)
    asked = demand.requests
    nodes = tuple(
        NodeView(name=name, partition="p", gpus=tuple(range(gpus)), cores=int(demand.resources.cores[i]),
                 memory_mib=int(demand.resources.memory[i]))
        for i, (name, gpus) in enumerate(zip(pool.names, pool.gpus.tolist(), strict=True))
    )  # fmt: skip
    held = {name: 0 for name in pool.names}
    busy, waiting = [], []
    for job in np.flatnonzero(demand.shape >= 0).tolist():
        shape, name = int(demand.shape[job]), trace.ids[job]
        gpus, cores, memory = (int(c[shape]) for c in (asked.gpus, asked.cores, asked.memory))
        if result.start[job] < now < result.end[job]:
            parts = []
            for rank, row in enumerate(result.nodes_of(job).tolist()):
                node_name = pool.names[row]
                at = held[node_name]
                held[node_name] += gpus
                parts.append(NodeAllocation(rank=rank, node=node_name, gpus=tuple(range(at, at + gpus)), cores=cores,
                                            memory_mib=memory))  # fmt: skip
            start = float(result.start[job])
            busy.append(RunningView(id=name, user="u", allocation=Allocation(name, tuple(parts)), start_time=start,
                                    expected_end=start + float(trace.limit[job])))  # fmt: skip
        elif trace.submit[job] <= now <= result.start[job]:
            spec = JobSpec(name="j", partition="p", nodes=int(asked.parts[shape]), gpus_per_node=gpus,
                           cores_per_node=cores, memory_mib_per_node=memory,
                           time_limit_s=int(trace.limit[job]))  # fmt: skip
            waiting.append(PendingView(id=name, user="u", spec=spec, submit_time=float(trace.submit[job])))
    return Snapshot(now=now, nodes=nodes, running=tuple(busy), pending=tuple(waiting), policies={"p": GIST})
