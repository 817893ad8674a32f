"""The cluster and the workload of which RLTune may stop jobs."""

from __future__ import annotations

from gpusched.sim.pool import Pool
from gpusched.traces.workload import RunTime, SizeClass, Workload

WORKLOAD = Workload(
    jobs=300, start=0.0, load=1.1, load_gpus=16, name="small", users=6, burst_share=0.6, burst_size=8.0,
    sizes=tuple(SizeClass(gpus=g, share=s) for g, s in ((1, 0.6), (2, 0.2), (4, 0.1), (8, 0.1))),
    run_time=RunTime(parts=((0.5, 120.0, 0.8), (0.5, 14400.0, 1.0))),
)  # fmt: skip


POOL = Pool.uniform(2, 8)
