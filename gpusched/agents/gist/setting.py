"""The paper's setting (Section 6): few single-server jobs on few servers, then one that needs all of them.

An episode's utilization U is Eq. 4 at the time when the last job, f, can start: the sum of share x run time of the
others over the time since the first submission ("a partition run time [...] started when the first job is submitted").
The f job needs no decision: it needs every server whole, so it starts when the last of the others ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.config.weights import Arrays
from gpusched.errors import UsageError
from gpusched.model.resources import Partition
from gpusched.sched.state import Floats, Ints
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.study.paper import Paper, read_paper
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace

HOUR_S = 3600.0


class Episodes(NamedTuple):
    """Results per episode, ``float64[episodes]``: U when f starts, and hours until then."""

    utilization: Floats
    hours: Floats


class ServerFlavor(NamedTuple):
    """A flavor that fits one server: totals of the job, run time in seconds."""

    name: str
    gpus: int
    cores: int
    memory_mib: int
    run_s: float


@dataclass(frozen=True)
class EpisodeSetting:
    """The servers and jobs of episodes.

    Attributes:
        name: Of the partition.
        servers: Its nodes.
        kinds: Flavors of jobs, all equally likely, smallest first.
        gap_s: Seconds between submissions.
        jobs: Per episode, without f.
    """

    name: str
    servers: tuple[NodeSpec, ...]
    kinds: tuple[ServerFlavor, ...]
    gap_s: float = 0.0
    jobs: int = 4

    @property
    def pool(self) -> Pool:
        """The servers as a pool of the replay engine."""
        return Pool.of(self.servers)

    @property
    def shares(self) -> Floats:
        """Lambda of Table 2, the dominant share of the partition, ``float64[kinds]``."""
        whole = [sum(max(getattr(s, c), 0) for s in self.servers) for c in ("gpus", "cores", "memory_mib")]
        return np.array([max(k[1 + i] / whole[i] for i in range(3) if whole[i]) for k in self.kinds])

    def sequences(self) -> Ints:
        """Return all sequences of kinds, ``int64[kinds ** jobs, jobs]``."""
        return np.array(list(itertools.product(range(len(self.kinds)), repeat=self.jobs)), np.int64)

    def trace(self, sequence: Ints | list[int]) -> Trace:
        """Return one episode for the replay engine: jobs of these kinds, ``gap_s`` apart."""
        of = [self.kinds[k] for k in sequence]
        count = len(of)
        _, gpus, cores, memory, seconds = (np.array(column) for column in zip(*of, strict=True))
        return assemble(
            name=f"{self.name}: {count} jobs {self.gap_s / HOUR_S:g} h apart", epoch=None,
            ids=tuple(f"{i}{k.name}" for i, k in enumerate(of)), submit=np.arange(count, dtype=np.float64) * self.gap_s,
            duration=seconds, gpus=gpus, names={}, columns={"limit": seconds, "cores": cores, "memory_mib": memory},
        )  # fmt: skip


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The published figures: see the scenario."""

    trained: float
    naive: float
    lowest: float
    episodes: int
    energy_mwh: dict[str, tuple[float, float]]
    energy_h: int
    energy_change: float
    run_time_change: float
    ends_d: tuple[float, float]


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A server of a partition. ``rated_kw``: Section 6.2."""

    cores: int
    memory_gib: int
    rated_kw: float


class FlavorShare(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of job: it uses 1/``part`` of a server for ``hours``."""

    part: int
    hours: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure compared with the paper's. paper, exact, measured: text with ``{...}`` placeholders; "": none."""

    of: str = ""
    what: str
    paper: str = ""
    exact: str = ""
    measured: str = ""

    def filled(self, values: Mapping[str, Any]) -> Figure:
        """Return the figure with its placeholders filled in."""
        return Figure(**{name: text.format(**values) for name, text in msgspec.structs.asdict(self).items()})


class Gist(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/gist.yaml``."""

    published: Published
    servers: int
    gpus: int
    partitions: dict[str, ServerSpec]
    kinds: dict[str, FlavorShare]
    jobs: int
    f_hours: float
    f_printed_days: float
    gaps_h: dict[str, float]
    figures: tuple[Figure, ...]
    apart: tuple[Figure, ...]


@cache
def gist() -> Gist:
    """Return the scenario of the paper's setting."""
    return read_paper("gist", Gist)


def paper(partition: str, gap_h: float = 0.0) -> EpisodeSetting:
    """Return the setting of ``A100`` or ``V100`` of the paper: Table 2 and Section 6.2."""
    of = gist()
    server = of.partitions[partition]
    node = NodeSpec(of.gpus, server.cores, server.memory_gib << 10, partition)
    kinds = tuple(
        ServerFlavor(f"{name}-{partition}", of.gpus // kind.part, node.cores // kind.part, node.memory_mib // kind.part,
             kind.hours * HOUR_S)
        for name, kind in of.kinds.items()
    )  # fmt: skip
    servers = tuple(node._replace(name=f"{i + 1}") for i in range(of.servers))
    return EpisodeSetting(partition, servers, kinds, gap_h * HOUR_S, of.jobs)


def tables_of(setting: EpisodeSetting) -> Arrays:
    """Return what weights say of their setting, GPUs, cores and MiB by row: its ``servers`` and ``flavors``."""
    return {
        "servers": np.array([(s.gpus, s.cores, s.memory_mib) for s in setting.servers], np.int64),
        "flavors": np.array([(k.gpus, k.cores, k.memory_mib) for k in setting.kinds], np.int64),
    }


def of_partition(partition: Partition, gap_h: float, jobs: int) -> EpisodeSetting:
    """Return the setting of a partition of an inventory, with those flavors that fit one server.

    Raises:
        UsageError: No flavor fits.
    """
    nodes = tuple(NodeSpec(n.gpus, n.cores, n.memory_mib, n.gpu_type, "", n.name) for n in partition.nodes)
    kinds = tuple(
        ServerFlavor(f.name, f.gpus, f.cores, f.memory_mib, float(f.time_limit_s))
        for f in sorted(partition.flavors, key=lambda f: (f.gpus, f.cores))
        if f.gpus > 0 and any(n.gpus >= f.gpus and n.cores >= f.cores and n.memory_mib >= f.memory_mib for n in nodes)
    )
    if not kinds:
        raise UsageError(f"{partition.name}: no flavor fits one server", "the paper's setting needs one; see variant")
    return EpisodeSetting(partition.name, nodes, kinds, gap_h * HOUR_S, jobs)
