"""The setting of Narantuya et al. (CMC 2022), Section 6, by replay: four jobs of s, m or l, then one of f.

Every one of the 81 sequences runs in a partition of its own (two servers of 8 GPUs) of one large pool, so that one
replay covers them all. Run times are the flavors' limits (Table 2). U is Eq. 4 at the moment the f job starts: it needs
both servers whole, so that is when the last of the four ends; it is not itself in the trace, where an order by size
would put it first.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from gpusched.sched.state import Floats
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import Result
from gpusched.traces.trace import Trace

# GPUs, cores, MiB, hours (Table 2, A100)
FLAVORS = {"s": (2, 64, 256 << 10, 72), "m": (4, 128, 512 << 10, 168), "l": (8, 256, 1024 << 10, 336)}
SEQUENCES = tuple(itertools.product("sml", repeat=4))
_HOUR = 3600.0


class Episodes(NamedTuple):
    """One figure per episode, ``float64[81 * replicas]``: U when f starts, and hours until then."""

    utilization: Floats
    hours: Floats


def gist_trace(gap_h: float, replicas: int = 1) -> Trace:
    """All sequences, jobs ``gap_h`` hours apart; group = partition = episode, ``replicas`` times each."""
    episodes = len(SEQUENCES) * replicas
    letters = [x for i in range(4) for _ in range(replicas) for sequence in SEQUENCES for x in sequence[i]]
    group = np.tile(np.arange(episodes), 4)
    gpus, cores, memory, hours = (np.array([FLAVORS[x][k] for x in letters], np.int64) for k in range(4))
    none = np.full(len(letters), -1, np.int64)
    return Trace(
        name=f"GIST, jobs {gap_h:g} h apart",
        epoch=None,
        ids=tuple(f"e{g}j{i // episodes}" for i, g in enumerate(group.tolist())),
        submit=np.repeat(np.arange(4) * gap_h * _HOUR, episodes),
        duration=np.multiply(hours, _HOUR, dtype=np.float64),
        limit=np.multiply(hours, _HOUR, dtype=np.float64),
        gpus=gpus,
        gpu_milli=np.full(len(letters), 1000),
        nodes=np.zeros(len(letters), np.int64),
        cores=cores,
        memory_mib=memory,
        user=none,
        group=group,
        model=none,
        gpu_type=none,
        depends_on=none,
        status=none,
        wait=np.full(len(letters), np.nan),
        groups=tuple(f"e{i}" for i in range(episodes)),
    )


def gist_pool(replicas: int = 1) -> Pool:
    """Two DGX A100 for every episode."""
    node = NodeSpec(8, 256, 1024 << 10, "A100")
    return Pool.of([node._replace(partition=f"e{i}") for i in range(len(SEQUENCES) * replicas) for _ in range(2)])


def gist_episodes(result: Result) -> Episodes:
    """Eq. 4 of each episode at the start of f: GPU shares times run times, over the time since the first start."""
    episode, count = result.trace.group, len(result.pool.partitions)
    share = result.trace.gpus / 16.0
    work = np.bincount(episode, share * (result.end - result.start), count)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, episode, result.start)
    np.maximum.at(last, episode, result.end)
    return Episodes(work / (last - first), (last - first) / _HOUR)


def gist(policy: str, placement: str, gap_h: float, *, replicas: int = 1, seed: int = 0) -> Episodes:
    """One cell of the table; placements that draw need replicas."""
    return gist_episodes(
        replay(gist_trace(gap_h, replicas), gist_pool(replicas), policy, placement=placement, seed=seed)
    )
