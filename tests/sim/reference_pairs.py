"""Replays in which jobs agreed to share GPUs, the slow way: decided by the controller's `decide` on snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gpusched.config.weights import TrainedModel
from gpusched.model.jobs import Allocation, JobSpec
from gpusched.model.limits import Bound, LimitRule, Quotas
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName, SharingSettings
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.queue.snapshots import sharing_views
from gpusched.queue.store import RankRecord
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.engine.log import log_event
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.engine.step import NOTHING_TAKEN, start_job
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import PAIRED
from gpusched.sim.stepper import Stepper
from gpusched.study.own import beliefs_for
from gpusched.traces.trace import Trace
from tests.sched.sharing import BELIEFS, KINDS, MIB
from tests.sim.reference_sized import SizedPolicy
from tests.sim.sized_worlds import assert_same
from tests.sim.worlds import trace_of

USERS = "ann", "bob"
TURNS = SharingSettings(mode="time-slicing", slowdown=1.0)
GPUS, CORES = 4, 12


def pool_of(partitions: str) -> Pool:
    """Return nodes of these partitions, one letter each."""
    return Pool.of([NodeSpec(GPUS, CORES, 99, "A", p, name=f"n{i}") for i, p in enumerate(partitions)])


def sharing_jobs(seed: int, pool: Pool, jobs: int = 80, least: float = 0.0) -> Trace:
    """Jobs of two users in all partitions, most of which share; ``least``: how often they do not."""
    rng = np.random.default_rng(seed)
    lasts, sizes = np.round(rng.lognormal(6, 1, jobs), 1), rng.integers(1, GPUS + 1, jobs)
    trace = trace_of(
        np.sort(np.round(rng.uniform(0, 40 * jobs, jobs), -1)), lasts, sizes, limit=np.ceil(lasts * 2),
        cores=rng.integers(1, 4, jobs), memory=np.ones(jobs), user=rng.integers(0, 2, jobs),
    )  # fmt: skip
    share_mib = np.where(rng.random(jobs) < 0.2 + least, -1, rng.choice([10, 20, 30], jobs))
    group = rng.integers(0, len(pool.partitions), jobs)
    return replace(
        trace, users=USERS, models=tuple(KINDS), model=rng.integers(0, len(KINDS), jobs), share_mib=share_mib,
        group=group, groups=pool.partitions,
    )  # fmt: skip


def sharing_nodes(nodes: Iterable[NodeView]) -> tuple[NodeView, ...]:
    return tuple(
        msgspec.structs.replace(node, sharing=TURNS, shareable=dict.fromkeys(node.gpus, MIB)) for node in nodes
    )


def with_sharers(running: Iterable[RunningView], nodes: Iterable[NodeView]) -> tuple[RunningView, ...]:
    """Return running jobs, with all the GPUs of each, as the controller sees them."""
    known = tuple(
        Node(name=n.name, partition=n.partition, address=n.name, gpus=len(n.gpus), cores=n.cores,
             memory_mib=n.memory_mib, runtime=RuntimeName.PODMAN, sharing=TURNS) for n in nodes
    )  # fmt: skip
    inventory = Inventory(path="", partitions=(Partition(name="p", nodes=known, flavors=()),))
    running = list(running)
    ranks = [
        RankRecord(job_id=job.id, attempt=job.attempt, rank=0, node=job.allocation.parts[0].node, runtime="podman",
                   sharing="time-slicing") for job in running
    ]  # fmt: skip
    return sharing_views(running, inventory, ranks)


class SharingPolicy(SizedPolicy):
    """A function for `replay`: decides as the controller does where jobs share; ``beside``: how often one came to."""

    def __init__(
        self, spec: PolicySpec, trace: Trace, pool: Pool, options: ReplayOptions, model: TrainedModel | None = None
    ) -> None:
        super().__init__(spec, trace, pool, options, model)
        self._nodes = sharing_nodes(self._nodes)
        self.beside = 0

    def _snapshot(self, stepper: Stepper) -> Snapshot:
        found, bounds = super()._snapshot(stepper), _bounds(stepper)
        return msgspec.structs.replace(
            found, running=with_sharers(found.running, self._nodes), beliefs=BELIEFS, bounds=bounds
        )

    def _spec(self, stepper: Stepper, job: int) -> JobSpec:
        known, trace = job in self._specs, self._trace
        spec = super()._spec(stepper, job)
        if known:
            return spec
        mib = int(trace.share_mib[job])
        share: dict[str, Any] = {"share": "pairs", "gpu_memory_mib": mib} if mib >= 0 and spec.elastic is None else {}
        spec = msgspec.structs.replace(spec, name=trace.models[trace.model[job]], preemptible=True, **share)
        self._specs[job] = spec
        return spec

    def _running(self, stepper: Stepper, job: int) -> RunningView:
        view = msgspec.structs.replace(super()._running(stepper, job), user=self._user(job))
        return msgspec.structs.replace(view, bounds=_bounds_of(stepper, job))

    def _pending(self, stepper: Stepper, job: int) -> PendingView:
        view = msgspec.structs.replace(super()._pending(stepper, job), user=self._user(job))
        return msgspec.structs.replace(view, bounds=_bounds_of(stepper, job))

    def _user(self, job: int) -> str:
        return self._trace.users[self._trace.user[job]]

    def _start(self, stepper: Stepper, job: int, allocation: Allocation) -> None:
        """A job on GPUs of another is started on that one's."""
        (*others, part), sim = allocation.parts, stepper._world.sim
        held = {(other, p.node, gpu) for other in stepper.running() for p in self._held[other].parts for gpu in p.gpus}
        mates = {other for other, node, gpu in held if node == part.node and gpu in part.gpus}
        if not mates:
            super()._start(stepper, job, allocation)
            return
        (mate,) = mates
        assert not others
        assert {(mate, part.node, gpu) for gpu in part.gpus} <= held
        log_event(sim, stepper._log, PAIRED, mate)
        sim.pace.runs[job]["mate"], sim.pace.runs[mate]["mate"] = mate, job
        sim.chosen[0] = self._index[part.node]
        start_job(sim, stepper._log, job, sim.chosen, 0, NOTHING_TAKEN, stepper.restart_s(job))
        del stepper._waiting[job]
        self._held[job], self._begun[job] = allocation, stepper.now
        self.beside += 1


def _bounds(stepper: Stepper) -> tuple[Bound, ...]:
    """Return what is left of the limits of GPUs, as limits of which nothing is used."""
    ledger = stepper._world.sim.ledger
    rooms = [] if ledger is None else np.maximum(ledger.room, 0).tolist()
    return tuple(Bound(LimitRule(("", "", ""), "limit", "gpus", room, "AssocGrpGRES")) for room in rooms)


def _bounds_of(stepper: Stepper, job: int) -> tuple[int, ...]:
    ledger, found = stepper._world.sim.ledger, []
    at = -1 if ledger is None else int(ledger.account[job, 0])
    while at >= 0:
        assert ledger.links[at]["unit"] == 1, "only of GPUs"
        found.append(int(ledger.links[at]["bound"]))
        at = int(ledger.links[at]["next"])
    return tuple(found)


def replay_both(
    spec: PolicySpec, trace: Trace, pool: Pool, model: TrainedModel | None = None, quotas: Quotas | None = None,
    **options: Any
) -> tuple[Any, SharingPolicy]:  # fmt: skip
    """The fast replay, held to the one by live decisions, and the policy of that."""
    nodes = SharingPolicy(spec, trace, pool, ReplayOptions())._nodes
    options |= {"believed": beliefs_for(trace, nodes, BELIEFS), "quotas": quotas and QuotaSet(quotas)}
    slow = SharingPolicy(spec, trace, pool, ReplayOptions(**options), model)
    expected = replay(trace, pool, slow, **options)
    policy = policy_of_spec(msgspec.structs.replace(spec, agent=None))
    fast = replay(trace, pool, replace(policy, model=model, spec=spec), **options)
    assert_same(fast, expected)
    return fast, slow
