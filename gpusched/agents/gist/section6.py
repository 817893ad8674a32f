"""The setting of Narantuya et al. (CMC 2022), Section 6, by replay: four jobs of s, m or l, then one of f.

Every one of the 81 sequences runs in a partition of its own (two servers of 8 GPUs) of one large pool, so that one
replay covers them all. Run times are the flavors' limits (Table 2). U is Eq. 4 at the moment the f job starts: it needs
both servers whole, so that is when the last of the four ends; it is not itself in the trace, where an order by size
would put it first.
"""

from __future__ import annotations

import numpy as np

from gpusched.agents.gist.setting import HOUR_S, Episodes, paper
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.traces.readers.draft import assemble


def replayed(policy: str, placement: str, gap_h: float, *, replicas: int = 1) -> Episodes:
    """One cell of the table, jobs ``gap_h`` hours apart; placements that draw need replicas of every sequence."""
    setting = paper("A100", gap_h)
    sequences = np.tile(setting.sequences(), (replicas, 1))
    count, jobs = sequences.shape
    kinds, episode = sequences.T.ravel(), np.tile(np.arange(count), jobs)
    _, gpus, cores, memory, run_s = (np.array(column)[kinds] for column in zip(*setting.kinds, strict=True))
    partitions = tuple(f"e{i}" for i in range(count))
    trace = assemble(
        name=f"GIST, jobs {gap_h:g} h apart", epoch=None,
        ids=tuple(f"e{e}j{i // count}" for i, e in enumerate(episode.tolist())),
        submit=np.repeat(np.arange(jobs) * setting.gap_s, count), duration=run_s, gpus=gpus,
        names={"group": (episode, partitions)}, columns={"limit": run_s, "cores": cores, "memory_mib": memory},
    )  # fmt: skip
    pool = Pool.of([server._replace(partition=name, name="") for name in partitions for server in setting.servers])
    result = replay(trace, pool, policy, placement=placement)
    work = np.bincount(episode, gpus / 16.0 * (result.end - result.start), count)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, episode, result.start)
    np.maximum.at(last, episode, result.end)
    return Episodes(work / (last - first), (last - first) / HOUR_S)
