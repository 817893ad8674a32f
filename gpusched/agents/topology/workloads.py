"""The setting: clusters, what their links are like, and jobs drawn for them at a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.topology import Switch, Topology
from gpusched.sched.state import Floats, Ints
from gpusched.sched.topology.slowdown import Model
from gpusched.sched.topology.tree import NIC_GBPS, Tree, tree_of
from gpusched.sim.network import MACHINES, Pairs
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace

LOADS = (0.7, 0.9, 1.1)
JOBS_PER_GPU = 50
MOST_JOBS = 50_000
SIZES = (1, 2, 4, 8, 16)
MIXES = {
    "philly-like": (0.55, 0.15, 0.15, 0.10, 0.05),
    "large": (0.10, 0.05, 0.05, 0.40, 0.40),
    "philly": (0.948, 0.019, 0.015, 0.015, 0.003),
}
"""Shares of jobs of 1, 2, 4, 8 and 16 GPUs; the last as in philly_2017.csv, other sizes as the next lower."""
RUN_S = (6.71, 2.02)
"""Mean and deviation of the logarithm of Philly's run times in seconds."""
SHORTEST_S, LONGEST_S = 30.0, 86_400.0


class Setting(NamedTuple):
    """One cluster and the jobs that come.

    Attributes:
        name: As rows say. topology: Switches. nodes: Names. gpus: Of each node; sizes: where they differ, by node.
        nic_gbps: Of each node.
        machine: Key of `MACHINES`. mix: Key of `MIXES`. pairs: Jobs are of the kinds of a table, in its sizes.
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


def _settings() -> dict[str, Setting]:
    flat = tuple(f"n{i:02}" for i in range(16))
    four, two = racks(4, 4, 4.0), racks(2, 4, 2.0)
    found = (
        Setting("16x4", Topology(), flat, 4),
        Setting("16x4-racks", *four, 4),
        Setting("16x4-racks-large", *four, 4, mix="large"),
        Setting("8x8-racks", *two, 8, machine="rtx"),
        Setting("8x8-dgx", Topology(), flat[:8], 8, machine="dgx", mix="philly"),
    )
    return {setting.name: setting for setting in found}


SETTINGS = _settings()
"""16 nodes of 4 GPUs, flat; in four racks with ways up 4:1, also with mostly large jobs; 8 nodes of 8 in two racks 2:1;
and 8 DGX nodes with Philly's own mix of sizes."""


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
    """Jobs of a load, and the kind of each; ``jobs`` 0: `JOBS_PER_GPU` for each GPU, `MOST_JOBS` at the most.

    Load is what they offer: GPU-seconds alone where they are fastest, by the GPU-seconds that there are while they
    come.
    """
    total = sum(setting.sizes) or len(setting.nodes) * setting.gpus
    count = jobs or min(JOBS_PER_GPU * total, MOST_JOBS)
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
        gpus = np.array(SIZES)[rng.choice(len(SIZES), count, p=MIXES[setting.mix])]
    duration: Floats = np.clip(np.exp(rng.normal(*RUN_S, count)), SHORTEST_S, LONGEST_S)
    span = float((gpus * duration).sum()) / (load * total)
    submit = np.sort(rng.uniform(0.0, span, count))
    return assemble(
        name=setting.name, epoch=None, ids=tuple(f"{i}" for i in range(count)), submit=submit, duration=duration,
        gpus=gpus, names={"model": (kind, models)}, columns={"nodes": nodes},
    ), kind  # fmt: skip
