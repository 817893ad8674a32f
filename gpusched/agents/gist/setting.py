"""The paper's setting (Section 6): few jobs of single-server flavors on few servers, then one that needs them all.

An episode's utilization U is Eq. 4 at the moment the last job, f, can start: the sum of share x run time of the others
over the time since the first was submitted ("a partition run time [...] started when the first job is submitted"). The
f job itself is no decision: it needs every server whole, so it starts when the last of the others ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.resources import Partition
from gpusched.sched.state import Floats, Ints
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace

HOUR_S = 3600.0


class Episodes(NamedTuple):
    """One figure per episode, ``float64[episodes]``: U when f starts, and hours until then."""

    utilization: Floats
    hours: Floats


class Kind(NamedTuple):
    """A flavor that fits one server; totals of the job, seconds."""

    name: str
    gpus: int
    cores: int
    memory_mib: int
    run_s: float


@dataclass(frozen=True)
class Setting:
    """What episodes are made of.

    Attributes:
        name: The partition's.
        servers: Its nodes.
        kinds: Flavors that jobs are drawn from, all equally likely, smallest first.
        gap_s: Seconds from one job's submission to the next.
        jobs: Of an episode, f not counted.
    """

    name: str
    servers: tuple[NodeSpec, ...]
    kinds: tuple[Kind, ...]
    gap_s: float = 0.0
    jobs: int = 4

    @property
    def pool(self) -> Pool:
        """The servers as the replay engine takes them."""
        return Pool.of(self.servers)

    @property
    def shares(self) -> Floats:
        """``float64[kinds]``: lambda of Table 2, the dominant share of the partition."""
        whole = [sum(max(getattr(s, c), 0) for s in self.servers) for c in ("gpus", "cores", "memory_mib")]
        return np.array([max(k[1 + i] / whole[i] for i in range(3) if whole[i]) for k in self.kinds])

    def sequences(self) -> Ints:
        """All sequences of kinds, ``int64[kinds ** jobs, jobs]``."""
        return np.array(list(itertools.product(range(len(self.kinds)), repeat=self.jobs)), np.int64)

    def trace(self, sequence: Ints | list[int]) -> Trace:
        """One episode for the replay engine: jobs of these kinds, ``gap_s`` apart."""
        of = [self.kinds[k] for k in sequence]
        count = len(of)
        _, gpus, cores, memory, seconds = (np.array(column) for column in zip(*of, strict=True))
        return assemble(
            name=f"{self.name}: {count} jobs {self.gap_s / HOUR_S:g} h apart", epoch=None,
            ids=tuple(f"{i}{k.name}" for i, k in enumerate(of)), submit=np.arange(count, dtype=np.float64) * self.gap_s,
            duration=seconds, gpus=gpus, names={}, columns={"limit": seconds, "cores": cores, "memory_mib": memory},
        )  # fmt: skip


_HOURS = {"s": 72, "m": 168, "l": 336}
F_RUN_H = 504
RATED_KW = {"A100": 6.5, "V100": 3.5}
"""Of one server (Section 6.2)."""


def paper(partition: str, gap_h: float = 0.0) -> Setting:
    """``A100`` or ``V100`` of the paper: Table 2 and Section 6.2."""
    cores, gib = {"A100": (256, 1024), "V100": (80, 512)}[partition]
    server = NodeSpec(8, cores, gib << 10, partition)
    parts = {"s": 4, "m": 2, "l": 1}
    kinds = tuple(
        Kind(f"{name}-{partition}", 8 // part, cores // part, (gib << 10) // part, _HOURS[name] * HOUR_S)
        for name, part in parts.items()
    )
    return Setting(partition, (server._replace(name="1"), server._replace(name="2")), kinds, gap_h * HOUR_S)


def of_partition(partition: Partition, gap_h: float, jobs: int) -> Setting:
    """A partition of an inventory with those of its flavors that fit one server.

    Raises:
        UsageError: It has none.
    """
    nodes = tuple(NodeSpec(n.gpus, n.cores, n.memory_mib, n.gpu_type, "", n.name) for n in partition.nodes)
    kinds = tuple(
        Kind(f.name, f.gpus, f.cores, f.memory_mib, float(f.time_limit_s))
        for f in sorted(partition.flavors, key=lambda f: (f.gpus, f.cores))
        if f.gpus > 0 and any(n.gpus >= f.gpus and n.cores >= f.cores and n.memory_mib >= f.memory_mib for n in nodes)
    )
    if not kinds:
        raise UsageError(f"{partition.name}: no flavor fits one server", "the paper's setting needs one; see variant")
    return Setting(partition.name, nodes, kinds, gap_h * HOUR_S, jobs)
