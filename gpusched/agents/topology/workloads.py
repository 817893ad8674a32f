"""The setting: clusters, what their links are like, and jobs drawn for them at a load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.errors import UsageError
from gpusched.model.topology import Switch, Topology
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.slowdown import Model
from gpusched.sched.topology.tree import NIC_GBPS, Tree, tree_of
from gpusched.sim.network import MACHINES, Pairs
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.study.paper import Paper, read_paper
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """A policy here.

    Attributes:
        placement: Of `gpusched.sim.placed`. knows: What it is told of slowdown.
        schedulers: Of agents. trained: Else theirs is the rule that their network has nothing to say to yet.
        free: With links that take no time.
    """

    placement: str
    knows: str = "nothing"
    schedulers: int = 0
    trained: bool = True
    free: bool = False


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal: mean and deviation of the logarithm of seconds, and seconds between which they are."""

    mean: float
    deviation: float
    shortest: float
    longest: float


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes, of each of the ``racks`` where there are any; see `racks`. The others: see `Setting`."""

    nodes: int
    gpus: int
    machine: str
    mix: str
    racks: int = 0
    over: float = 1.0


class Ours(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/topology.yaml``."""

    policies: dict[str, Rival]  # type: ignore[assignment]
    loads: tuple[float, ...]
    clusters: dict[str, Cluster]
    jobs_per_gpu: int
    most_jobs: int
    quick_jobs: int
    sizes: tuple[int, ...]
    mixes: dict[str, tuple[float, ...]]
    run_s: RunTimes


@cache
def ours() -> Ours:
    """The setting that comes along."""
    return read_paper("topology", Ours)


class Setting(NamedTuple):
    """One cluster and the jobs that come.

    Attributes:
        name: As rows say. topology: Switches. nodes: Names. gpus: Of each node; sizes: where they differ, by node.
        nic_gbps: Of each node.
        machine: Key of `MACHINES`. mix: Of sizes, as the scenario calls it. pairs: Jobs are of the kinds of a table, in
            its sizes.
        combine: "formula"; with pairs "product" or "sum".
    """

    name: str
    topology: Topology
    nodes: tuple[str, ...]
    gpus: int
    machine: str = "aws"
    mix: str = "philly-like"
    pairs: Pairs | None = None
    combine: str = "formula"
    sizes: tuple[int, ...] = ()
    nic_gbps: float = NIC_GBPS

    @property
    def pool(self) -> Pool:
        """The nodes."""
        sizes = self.sizes or (self.gpus,) * len(self.nodes)
        return Pool.of([NodeSpec(gpus, name=name) for name, gpus in zip(self.nodes, sizes, strict=True)])

    @property
    def tree(self) -> Tree:
        """The links. By a table only nodes' NICs are any."""
        nvswitch = MACHINES[self.machine].nvswitch
        tree = tree_of(self.topology, self.nodes, nvswitch=nvswitch, nic_gbps=self.nic_gbps)
        if self.pairs is not None:
            tree.weight[:] = 0.0
            tree.weight[len(self.nodes) : 2 * len(self.nodes)] = 1.0
        return tree

    @property
    def model(self) -> Model:
        """How much slower its kinds of jobs are where they run."""
        if self.pairs is None:
            return MACHINES[self.machine].model()
        return self.pairs.model(self.combine == "sum")


def racks(count: int, each: int, over: float) -> tuple[Topology, tuple[str, ...]]:
    """Racks below one switch whose ways up are ``over`` times narrower than the NICs below; their nodes."""
    nodes = tuple(f"n{i:02}" for i in range(count * each))
    rack = [
        Switch(name=f"r{i}", nodes=nodes[i * each : (i + 1) * each], uplink_gbps=each * NIC_GBPS / over, parent="spine")
        for i in range(count)
    ]
    return Topology(switches=(Switch(name="spine"), *rack)), nodes


def flat(count: int) -> tuple[Topology, tuple[str, ...]]:
    """Nodes on no switch."""
    return Topology(), tuple(f"n{i:02}" for i in range(count))


@cache
def settings() -> dict[str, Setting]:
    """The clusters of the scenario."""
    found = {}
    for name, of in ours().clusters.items():
        nodes = racks(of.racks, of.nodes, of.over) if of.racks else flat(of.nodes)
        found[name] = Setting(name, *nodes, of.gpus, of.machine, of.mix)
    return found


def setting_of(
    name: str, topology: Topology, gpus: int = 8, nic_gbps: float = NIC_GBPS, sizes: Mapping[str, int] | None = None
) -> Setting:
    """A cluster of nodes that hang as in ``topology``, with such GPUs and NICs.

    Jobs are of the kinds that were measured on the most alike: AWS where no node has more than 4 GPUs, else RTX.

    Args:
        name: As rows say.
        topology: Switches.
        gpus: Of each node that ``sizes`` does not name.
        nic_gbps: Of each node.
        sizes: Node -> its GPUs, those on no switch with them; nodes without GPUs are left out.

    Raises:
        UsageError: It names no nodes.
    """
    of = dict.fromkeys(topology.racks(), gpus) | dict(sizes or {})
    nodes = {node: count for node, count in of.items() if count > 0}
    if not topology.racks() or not nodes:
        raise UsageError(f"{name}: no switch has nodes", "name some: r1: {nodes: gpu-[01-04], uplink: 100G}")
    most = max(nodes.values())
    machine = "aws" if most <= MACHINES["aws"].gpus else "rtx"
    differ = tuple(nodes.values()) if min(nodes.values()) < most else ()
    return Setting(name, topology, tuple(nodes), most, machine, sizes=differ, nic_gbps=nic_gbps)


def draw(setting: Setting, load: float, seed: int, jobs: int = 0) -> tuple[Trace, Ints]:
    """Jobs of a load, and the kind of each; ``jobs`` 0: as many for each GPU as the scenario says.

    Load is what they offer: GPU-seconds alone where they are fastest, by the GPU-seconds that there are while they
    come.
    """
    total, of = sum(setting.sizes) or len(setting.nodes) * setting.gpus, ours()
    count = jobs or min(of.jobs_per_gpu * total, of.most_jobs)
    rng = np.random.default_rng((seed, round(load * 100), len(setting.nodes)))
    nodes: Ints = np.zeros(count, np.int64)
    if setting.pairs is not None:
        may = np.flatnonzero(setting.pairs.nodes > 1)
        kind = may[rng.integers(0, len(may), count)]
        gpus, nodes = setting.pairs.gpus[kind], setting.pairs.nodes[kind]
        models = setting.pairs.names
    else:
        models = tuple(MACHINES[setting.machine].kinds)
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
