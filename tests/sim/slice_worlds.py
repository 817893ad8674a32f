"""Workloads of jobs in MIG slices and on whole GPUs, pools of cut nodes, and the same replay by live decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from gpusched.agents.gist.networks import heuristic
from gpusched.agents.rltune.preempting import NO_ODDS, RankingRule, model_of, policy_of
from gpusched.config.weights import TrainedModel, save_model
from gpusched.controller.deciding import Decider
from gpusched.model.plan import Plan
from gpusched.model.policy import PreemptionSettings
from gpusched.model.slices import slice_index
from gpusched.model.slicetables import PUBLISHED
from gpusched.model.snapshot import SliceView, Snapshot
from gpusched.queue.store import Store
from gpusched.sched.check import check
from gpusched.sched.slices.tree import arranged
from gpusched.sim import snapshots
from gpusched.sim.engine import build
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from gpusched.sim.sharing import SharingBeliefs
from gpusched.sim.slicing import node_views
from gpusched.study.own import beliefs_for
from gpusched.traces.trace import Trace
from tests.sched.contention import NAMES, beliefs
from tests.sched.rltune_decisions import RLTUNE
from tests.sched.sharing import BELIEFS
from tests.sched.worlds import topology
from tests.sim.reference_pairs import GPUS, pool_of, sharing_jobs, sharing_nodes
from tests.sim.worlds import trace_of

A100 = PUBLISHED["A100-80GB"]
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")


def cut(gpu: int, *names: str) -> tuple[SliceView, ...]:
    geometry = arranged(A100, names)
    assert geometry is not None
    return tuple(SliceView(slice_index(gpu, start), name) for name, start in geometry)


SLICES = cut(0, *["1g.10gb"] * 7) + cut(1, "3g.40gb", "3g.40gb") + cut(2, "3g.40gb", "2g.20gb", "1g.10gb")
NODE = NodeSpec(4, 32, 1 << 18, "A100-80GB", "A", slices=SLICES)
LAS = RankingRule("las", {"served": 1.0}, (300.0, 1200.0))
# nodes in racks, and what has been learned of the jobs of `named_jobs`
KNOWN = beliefs(0.4, 0.5, 1.6)
RACKS = topology("a", "a", "b", "b", "c")
WIDE = Pool.of([NODE._replace(name=f"n{i}", gpus=7, gpu_type="V100" if i % 2 else "A100") for i in range(5)])


def drawn(seed: int, jobs: int = 120, profiles: tuple[str, ...] = PROFILES) -> Trace:
    rng = np.random.default_rng(seed)
    duration = np.ceil(rng.exponential(900, jobs))
    submit, limit = np.floor(np.cumsum(rng.exponential(60, jobs))), duration * rng.choice([1, 2, 4], jobs)
    cores, memory = rng.integers(0, 5, jobs), rng.integers(0, 1 << 12, jobs)
    trace = trace_of(
        submit, duration, rng.integers(1, 3, jobs), limit, cores=cores, memory=memory, user=rng.integers(0, 4, jobs)
    )
    return replace(
        trace, users=tuple("abcd"), profile=rng.integers(-1, len(profiles), jobs).astype(np.int64), profiles=profiles
    )


def named_jobs(seed: int, count: int = 120) -> Trace:
    """Jobs of alice's classes on a number of nodes that they name."""
    trace, rng = drawn(seed, count), np.random.default_rng(seed)
    gpus = rng.integers(1, 4, count)
    nodes = np.where(rng.random(count) < 0.5, 2, 1)
    return replace(
        trace, gpus=gpus * nodes, nodes=nodes, users=("alice", "alice2", "bob", "c"),
        user=rng.choice([0, 0, 0, 2], count), models=NAMES, model=rng.integers(0, len(NAMES), count),
    )  # fmt: skip


def shares(seed: int, profiles: tuple[str, ...] = (), jobs: int = 60) -> tuple[Trace, Pool, SharingBeliefs]:
    """Return jobs that may share GPUs, some of them for slices of ``profiles``, and nodes that are cut on demand."""
    pool = pool_of("pppq")
    trace = sharing_jobs(seed, pool, jobs)
    rng = np.random.default_rng(seed)
    profile = rng.choice([-1, -1, *range(len(profiles))], jobs).astype(np.int64) if profiles else np.full(jobs, -1)
    assert trace.share_mib is not None
    trace = replace(trace, profile=profile, profiles=profiles, share_mib=np.where(profile < 0, trace.share_mib, -1))
    believed = beliefs_for(trace, sharing_nodes(node_views(pool)), BELIEFS)
    cuttable = dict.fromkeys(range(GPUS), PUBLISHED["A100-80GB"])
    return trace, replace(pool, cuttable=(cuttable,) * len(pool)), believed


def wild(seed: int) -> TrainedModel:
    """Weights of no sense at all, but that no job which fits waits: else it matters when is decided."""
    rng, found = np.random.default_rng(seed), heuristic(6, seed, hold={"one": -0.5})
    found |= {name: rng.normal(size=of.shape).astype(np.float32) for name, of in found.items() if "hold" not in name}
    return TrainedModel("gist", found, {}, "", f"wild gist {seed}")


def preempting(rank: RankingRule) -> ReplayPolicy:
    rules = PreemptionSettings(min_run_s=60.0, per_hour=2, restart_s=20.0)
    spec = changed(RLTUNE, place="first-fit", preempt=rules)
    return replace(policy_of(model_of(rank, NO_ODDS.prior, "estimate"), "r"), spec=spec, placement="first-fit")


def by_live_decisions(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> ReplayResult:
    """The same replay, decided by `sched.decide` from snapshots."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "needs_snapshots", lambda unsplit, *_: unsplit is not None)
        return replay(*arguments, **options)


@contextmanager
def by_controller(policy: ReplayPolicy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayPolicy]:
    """The policy, whose replays from snapshots the controller decides; none of its plans may exceed a limit."""
    model, decided = policy.model, list[tuple[Snapshot, Plan]]()
    assert model is not None
    assert policy.spec is not None
    (folder / "weights").mkdir()
    about = model.about | {"knows": model.knows}
    save_model(folder / "weights/default.safetensors", model.agent, model.arrays, about)
    with closing(Store.create_or_open(folder)) as store:
        decider = Decider(store)

        def decide(snapshot: Snapshot, models: Any) -> Plan:
            decided.append((snapshot, decider.decide(snapshot, {}).plan))
            return decided[-1][1]

        monkeypatch.setattr(snapshots, "decide", decide)
        yield replace(policy, spec=changed(policy.spec, folder=str(folder / "weights"), budget_s=600.0))
        assert store.fallbacks() == {}
    assert not any(check(plan, snapshot)[1] for snapshot, plan in decided)
