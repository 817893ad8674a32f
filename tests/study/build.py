"""Traces and results made by hand, so that figures are tested without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.result import CutRuns, Events, ReplayResult
from gpusched.traces.trace import Trace


class Job(NamedTuple):
    """A job and what became of it; ``nodes`` empty: it can never run. ``gpus``: on each node."""

    submit: float
    start: float
    end: float
    nodes: tuple[int, ...] = (0,)
    gpus: int = 1
    user: str = "ann"
    cut: tuple[tuple[float, float, int], ...] = ()
    cores: int = -1


def trace_of(jobs: Sequence[Job], epoch: float | None = 0.0) -> Trace:
    n = len(jobs)
    users = tuple(sorted({j.user for j in jobs}))
    none = np.full(n, -1, np.int64)
    return Trace(
        name="made", epoch=epoch, ids=tuple(f"j{i}" for i in range(n)),
        submit=np.array([j.submit for j in jobs]), duration=np.array([max(j.end - j.start, 1.0) for j in jobs]),
        limit=np.full(n, np.nan), gpus=np.array([j.gpus * max(len(j.nodes), 1) for j in jobs], np.int64),
        gpu_milli=np.full(n, 1000, np.int64), nodes=np.zeros(n, np.int64),
        cores=np.array([j.cores for j in jobs], np.int64), memory_mib=none,
        user=np.array([users.index(j.user) for j in jobs], np.int64), group=none, model=none, gpu_type=none,
        depends_on=none, status=none, wait=np.full(n, np.nan), users=users,
    )  # fmt: skip


def result_of(
    jobs: Sequence[Job], pool: Pool | None = None, *, epoch: float | None = 0.0, policy: str = "p"
) -> ReplayResult:
    trace = trace_of(jobs, epoch)
    ran = [bool(j.nodes) for j in jobs]
    cuts = [(i, c) for i, j in enumerate(jobs) for c in j.cut]
    return ReplayResult(
        policy=policy, knows="nothing", source="made", placement="best-fit", seed=0, trace=trace,
        pool=pool or Pool.uniform(2, 8),
        start=np.array([min([c[0] for c in j.cut] + [j.start]) if j.nodes else np.nan for j in jobs]),
        last_start=np.array([j.start if j.nodes else np.nan for j in jobs]),
        end=np.array([j.end if j.nodes else np.nan for j in jobs]),
        part_offsets=np.cumsum([0, *(len(j.nodes) for j in jobs)]).astype(np.int64),
        part_nodes=np.array([n for j in jobs for n in j.nodes], np.int64),
        part_gpus=np.array([j.gpus if j.nodes else 0 for j in jobs], np.int64),
        killed=np.zeros(len(jobs), np.bool_), restarts=np.array([len(j.cut) for j in jobs], np.int64),
        infeasible=np.flatnonzero(~np.array(ran, np.bool_)), infeasible_why=tuple("no" for r in ran if not r),
        cut=CutRuns(
            job=np.array([i for i, _ in cuts], np.int64), start=np.array([c[0] for _, c in cuts], np.float64),
            end=np.array([c[1] for _, c in cuts], np.float64),
            part_offsets=np.arange(len(cuts) + 1, dtype=np.int64),
            part_nodes=np.array([c[2] for _, c in cuts], np.int64),
        ),
        events=Events(time=np.zeros(0), kind=np.zeros(0, np.uint8), subject=np.zeros(0, np.int64)),
        decisions=0, sim_seconds=0.0, jobs_per_s=0.0,
    )  # fmt: skip


def gist_pool() -> Pool:
    """The paper's partition of two DGX A100."""
    return Pool.of([NodeSpec(8, 256, 1 << 20, "A100", "A100", f"dgx{i}") for i in (1, 2)])
