"""The setting: clusters, their links, and jobs drawn for them at a load."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.model.topology import Switch, Topology
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.slowdown import SlowdownModel
from gpusched.sched.topology.tree import NIC_GBPS, NetworkTree, tree_of
from gpusched.sim.network import ColocationTable, machines
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.study.paper import Paper, read_paper
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace


class TopologyRival(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in this comparison.

    Attributes:
        placement: Of `gpusched.sim.placed`. knows: Its information on slowdown.
        schedulers: Of agents. trained: Else theirs are the weights where training starts.
        free: With links that take no time.
    """

    placement: str
    knows: str = "nothing"
    schedulers: int = 0
    trained: bool = True
    free: bool = False


class RunTimeDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal: mean and deviation of the logarithm of seconds, and the range in seconds."""

    mean: float
    deviation: float
    shortest: float
    longest: float


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a cluster; see `racked_topology` and `TopologySetting`."""

    nodes: int
    gpus: int
    machine: str
    mix: str
    racks: int = 0
    over: float = 1.0


class TopologyScenario(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/topology.yaml``."""

    policies: dict[str, TopologyRival]
    loads: tuple[float, ...]
    clusters: dict[str, ClusterLayout]
    jobs_per_gpu: int
    most_jobs: int
    quick_jobs: int
    sizes: tuple[int, ...]
    mixes: dict[str, tuple[float, ...]]
    run_s: RunTimeDistribution


@cache
def load_scenario() -> TopologyScenario:
    """Return the bundled scenario."""
    return read_paper("topology", TopologyScenario)


class TopologySetting(NamedTuple):
    """One cluster and its workload.

    Attributes:
        name: As rows say. topology: Switches. pool: Nodes. nic_gbps: Of each node.
        machine: Of `machines`. mix: Of sizes, as the scenario calls it. pairs: Jobs are of the kinds of a table, in its
            sizes.
        combine: "formula"; with pairs "product" or "sum".
    """

    name: str
    topology: Topology
    pool: Pool
    machine: str = "aws"
    mix: str = "philly-like"
    pairs: ColocationTable | None = None
    combine: str = "formula"
    nic_gbps: float = NIC_GBPS

    @property
    def tree(self) -> NetworkTree:
        """Return the links. With a table, only the nodes' NICs count."""
        nvswitch = machines()[self.machine].nvswitch
        tree = tree_of(self.topology, self.pool.names, nvswitch=nvswitch, nic_gbps=self.nic_gbps)
        if self.pairs is not None:
            tree.weight[:] = 0.0
            tree.weight[len(self.pool) : 2 * len(self.pool)] = 1.0
        return tree

    @property
    def model(self) -> SlowdownModel:
        """Return how placement slows down its kinds of jobs."""
        if self.pairs is None:
            return machines()[self.machine].model()
        return self.pairs.model(self.combine == "sum")


def racked_topology(nodes: int, gpus: int, racks: int = 0, over: float = 1.0) -> tuple[Topology, Pool]:
    """Return racks of so many nodes below one switch, uplinks ``over`` times narrower than the NICs below.

    Without racks: so many nodes on no switch.
    """
    names = tuple(f"n{i:02}" for i in range(nodes * max(racks, 1)))
    uplink_gbps = nodes * NIC_GBPS / over
    rack = [
        Switch(name=f"r{i}", nodes=names[i * nodes : (i + 1) * nodes], uplink_gbps=uplink_gbps, parent="spine")
        for i in range(racks)
    ]
    topology = Topology(switches=(Switch(name="spine"), *rack)) if racks else Topology()
    return topology, Pool.of([NodeSpec(gpus, name=name) for name in names])


@cache
def settings() -> dict[str, TopologySetting]:
    """Return the clusters of the scenario."""
    return {
        name: TopologySetting(name, *racked_topology(of.nodes, of.gpus, of.racks, of.over), of.machine, of.mix)
        for name, of in load_scenario().clusters.items()
    }


def draw(setting: TopologySetting, load: float, seed: int, jobs: int = 0) -> tuple[Trace, Ints]:
    """Draw jobs of a load, and the kind of each; ``jobs`` 0: per GPU as in the scenario.

    Load is what they offer: GPU-seconds alone where they are fastest, by the GPU-seconds that there are while they
    come.
    """
    total, of = setting.pool.total_gpus, load_scenario()
    count = jobs or min(of.jobs_per_gpu * total, of.most_jobs)
    rng = np.random.default_rng((seed, round(load * 100), len(setting.pool)))
    nodes: Ints = np.zeros(count, np.int64)
    if setting.pairs is not None:
        may = np.flatnonzero(setting.pairs.nodes > 1)
        kind = may[rng.integers(0, len(may), count)]
        gpus, nodes = setting.pairs.gpus[kind], setting.pairs.nodes[kind]
        models = setting.pairs.names
    else:
        models = tuple(machines()[setting.machine].kinds)
        kind = rng.integers(0, len(models), count)
        gpus = np.array(of.sizes)[rng.choice(len(of.sizes), count, p=of.mixes[setting.mix])]
    run_s = np.exp(rng.normal(of.run_s.mean, of.run_s.deviation, count))
    duration: Floats = np.clip(run_s, of.run_s.shortest, of.run_s.longest)
    span = float((gpus * duration).sum()) / (load * total)
    submit = np.sort(rng.uniform(0.0, span, count))
    return assemble(
        name=setting.name, epoch=None, ids=tuple(f"{i}" for i in range(count)), submit=submit, duration=duration,
        gpus=gpus, names={"model": (kind, models)}, columns={"nodes": nodes},
    ), kind  # fmt: skip
