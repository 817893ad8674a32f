"""Replays of every policy on three traces, as digests of their event logs.

``python -m tests.sim.recorded`` writes them.
`recorded.json` was written before passes were brought together; what changes a digest changes what users' replays say.
Since then two were written anew: `contention` with costs of places waits, looks again and reserves as it does live;
`stopper`, an agent that stops jobs, decides about what these leave in the decision after, as it does live.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.agents.rltune.candidates import arrays_of
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import save_model
from gpusched.model.topology import Switch, Topology
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.build import ResizableJobs
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.orders import known_policies
from gpusched.sim.policies import ReplayPolicy, policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.traces.trace import Trace
from tests.promotion import stopping, weights
from tests.sim.worlds import trace_of

FILE = Path(__file__).with_name("recorded.json")
TRACES = ("mixed", "crowded", "racks")
NODES = 12
WITH_WEIGHTS = ("gist", "rltune", "stopper")
PLACED = (
    "best-fit",
    "random",
    "naive",
    "worst-fit",
    "rack",
    "rack-wait",
    "contention",
    "load-balancing",
    "tetris",
    "fastest",
)


def names() -> list[str]:
    """Every policy that a replay takes by name and that brings its weights along, or has those of `agent_files`."""
    untrained_here = {"rltune-limit", "rltune-milp", "rltune-nothing", "rltune-preempt", "dl2", "maifs", "topology"}
    not_recorded = {"drf-users"}  # compared with a reference in test_engine.py
    left_out = untrained_here | not_recorded | {*WITH_WEIGHTS}
    return [*(name for name in known_policies() if name not in left_out), *WITH_WEIGHTS]


def agent_files(folder: Path) -> None:
    """Policies with small weights in ``folder``."""
    (folder / "gist.yaml").write_text(weights.YAML)
    weights.write(folder / "gist/default.safetensors")
    (folder / "stopper.yaml").write_text(stopping.YAML)
    stopping.write(folder / "stopper/default.safetensors")
    (folder / "rltune.yaml").write_text("agent: rltune\nfallback: easy\nbudget: 60s\n")
    begun = untrained(RltuneSettings())
    assert begun is not None
    (folder / "rltune").mkdir()
    about = {"knows": "estimate", "backfill": "easy"}
    save_model(folder / "rltune/default.safetensors", "rltune", arrays_of(begun), about)


@cache
def workload(name: str) -> tuple[Trace, Pool]:
    """A trace and its nodes."""
    seed = TRACES.index(name)
    rng = np.random.default_rng(seed)
    jobs = 240
    duration = np.ceil(rng.lognormal(3.0, 1.2, jobs)).clip(1.0, 900.0)
    submit = np.sort(rng.integers(0, 1100 if name == "mixed" else 700, jobs).astype(np.float64))
    gpus = rng.choice([1, 1, 1, 2, 2, 4, 8, 16], jobs)
    cores = rng.integers(1, 12, jobs) if name == "mixed" else None
    depends = np.where(rng.random(jobs) < 0.06, (np.arange(jobs) * rng.random(jobs)).astype(np.int64), -1)
    trace = trace_of(
        submit, duration, gpus, limit=duration * rng.choice([1.0, 1.5, 3.0, 10.0], jobs), cores=cores,
        memory=None if cores is None else cores * 4, user=rng.integers(0, 7, jobs),
        depends_on=depends if name == "mixed" else None,
    )  # fmt: skip
    shapes = [NodeSpec(8, 40, 200), NodeSpec(4, 20, 100)] if name == "mixed" else [NodeSpec(8), NodeSpec(4)]
    return trace, Pool.of([shapes[i % 3 == 0]._replace(name=f"n{i}") for i in range(NODES)])


def network() -> PlacementNetwork:
    """Four racks and three kinds of jobs."""
    racks = [
        Switch(name=f"r{r}", nodes=tuple(f"n{i}" for i in range(r, NODES, 4)), uplink_gbps=(100.0, 400.0)[r % 2],
               parent="spine")
        for r in range(4)
    ]  # fmt: skip
    rng = np.random.default_rng(3)
    kinds = np.array([(1.0, *rng.choice([0.0, 0.1, 0.4, 1.0], 4)) for _ in range(3)]).view(KIND).reshape(-1)
    tree = tree_of(Topology(switches=(Switch(name="spine"), *racks)), [f"n{i}" for i in range(NODES)])
    return PlacementNetwork(
        tree, SlowdownModel(kinds, np.zeros((0, 0)), False), rng.integers(0, 3, 240), 60.0, 20.0, 45.0
    )


def digest(result: Any) -> str:
    """Of starts, ends, nodes and events."""
    columns = (result.events, result.part_nodes, result.start, result.end)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()[:16]


def run(name: str, which: str, folder: Path) -> str:
    """The digest of a policy's replay."""
    trace, pool = workload(which)
    policy = policy_by_name(str(folder / f"{name}.yaml") if name in WITH_WEIGHTS else name)
    options: dict[str, Any] = {"restart_s": 2.5, "seed": 7}
    if policy.chooses_sizes:
        least, most = np.ones(len(trace), np.int64), np.maximum(trace.gpus, 8)
        options["elastic"] = ResizableJobs(least=least, most=most, linear=True)
    if which == "racks":
        options["failures"] = [Outage(1, 200.0, 420.0), Outage(5, 300.0, 500.0, True)]
    if which == "crowded":
        options["limits"] = True
    return digest(replay(trace, pool, policy, **options))


def run_placed(rule: str, backfill: str, costs: bool) -> str:
    """The digest of first come, first served with this placement, where places cost something or not."""
    trace, pool = workload("racks")
    knows = "limit" if backfill in ("easy", "conservative") else "nothing"
    policy = ReplayPolicy(name=rule, order="fifo", knows=knows, source="", backfill=backfill, placement=rule)
    return digest(replay(trace, pool, policy, seed=7, **({"network": network()} if costs else {})))


def cases() -> Iterator[tuple[str, ...]]:
    """All that are recorded."""
    yield from ((name, which) for name in names() for which in TRACES)
    for rule in PLACED:
        for backfill in ("none", "skip", "easy"):
            yield rule, backfill, "free"
            if backfill != "none" and rule not in ("naive", "fastest", "worst-fit"):
                yield rule, backfill, "costly"


def record(folder: Path) -> dict[str, str]:
    """All digests."""
    agent_files(folder)
    found = {}
    for case in cases():
        found[" ".join(case)] = digest_of(case, folder)
    return found


def digest_of(case: tuple[str, ...], folder: Path) -> str:
    """One digest; ``folder`` has the `agent_files`."""
    return run(case[0], case[1], folder) if len(case) == 2 else run_placed(case[0], case[1], case[2] == "costly")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        FILE.write_text(json.dumps(record(Path(name)), indent=0) + "\n")
