"""Worlds with links between nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpusched.model.topology import Switch, Topology
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from tests.sim.reference_links import Cluster, Kinds
from tests.sim.worlds import trace_of

WAIT, HOLD = 12.0, 9.0


BLIND = ("load-balancing", "tetris", "best-fit", "rack", "rack-wait")


class World:
    """A small cluster with racks, some kinds of jobs, and jobs; drawn with a seed."""

    def __init__(self, seed: int, table: bool = False, count: int = 40) -> None:
        rng = np.random.default_rng(seed)
        nodes = int(rng.integers(3, 9))
        self.gpus = rng.choice([2, 4, 4], nodes).tolist()
        racks = int(rng.integers(0, 4))
        two = racks > 1 and rng.random() < 0.5  # two levels of switches
        rack = [int(rng.integers(-1 if two else 0, racks)) if racks else -1 for _ in range(nodes)]
        uplink = {r: float(rng.choice([50.0, 100.0, 400.0])) for r in range(racks)}
        names = [f"n{i}" for i in range(nodes)]
        above = {r: f"a{r % 2}" if two else "spine" for r in range(racks)}
        switches = [Switch(name="spine")] if racks else []
        switches += [Switch(name=f"a{i}", uplink_gbps=100.0, parent="spine") for i in range(2 if two else 0)]
        switches += [
            Switch(name=f"r{r}", nodes=tuple(n for n, at in zip(names, rack, strict=True) if at == r),
                   uplink_gbps=uplink[r], parent=above[r])
            for r in range(racks)
        ]  # fmt: skip
        number = {switch.name: i for i, switch in enumerate(switches)}
        self.cluster = Cluster(
            self.gpus, [number[f"r{r}"] if r >= 0 else -1 for r in rack],
            {number[s.name]: number[s.parent] if s.parent else -1 for s in switches},
            {number[s.name]: 100.0 / s.uplink_gbps for s in switches if s.uplink_gbps and not table},
            nvswitch=table or rng.random() < 0.3,
        )  # fmt: skip
        of = [(1.0, *(float(x) for x in rng.choice([0.0, 0.1, 0.4, 1.0], 4))) for _ in range(3)]
        ratio = rng.uniform(0.3, 1.0, (3, 3)) if table else np.zeros((0, 0))
        self.kinds = Kinds(of, ratio.tolist() if table else None, bool(rng.random() < 0.5))
        tree = tree_of(Topology(switches=tuple(switches)), names, nvswitch=self.cluster.nvswitch)
        if table:
            tree.weight[2 * nodes :] = 0.0
        kinds = np.array(of).view(KIND).reshape(-1)
        kind = rng.integers(0, 3, count)
        self.network = PlacementNetwork(tree, SlowdownModel(kinds, ratio, self.kinds.by_sum), kind, WAIT, 20.0, HOLD)
        total = sum(self.gpus)
        gpus = np.array([g for g in rng.choice([1, 2, 4, 6, 8, 8], 400) if g <= total // 2])[:count]
        submit = np.sort(rng.uniform(0.0, 60.0, count)).round(1)
        self.trace = trace_of(submit, rng.uniform(1.0, 20.0, count), gpus)
        limit = self.trace.duration * rng.choice([1.0, 1.0, 1.3, 3.0], count)  # slowed jobs outlast the short ones
        self.trace = replace(self.trace, limit=limit)
        self.pool = Pool.of([NodeSpec(g, name=n) for g, n in zip(self.gpus, names, strict=True)])

    def play(self, rule: str, network: PlacementNetwork | None = None, backfill: str = "skip"):
        knows = "limit" if backfill == "easy" else "nothing"
        policy = ReplayPolicy(name=rule, order="fifo", knows=knows, source="", backfill=backfill, placement=rule)
        result = replay(self.trace, self.pool, policy, network=network or self.network, seed=1)
        o, kind = result.part_offsets, self.network.kind
        places = [
            (int(kind[j]), result.part_nodes[o[j] : o[j + 1]].tolist(), int(result.part_gpus[j]))
            for j in range(len(kind))
        ]
        return result, places
