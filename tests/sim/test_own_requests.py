"""Replays of own jobs by their lists of nodes, spread and own waits: start by start as live decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.plan import Start
from gpusched.model.slicetables import PUBLISHED
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.network import learned_network
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.traces.readers.history import _assembled
from gpusched.traces.trace import Trace
from tests.sched.contention import clusters
from tests.sched.worlds import NOW, snapshots, topology
from tests.sim.plain_ahead import Plain
from tests.strategies import among

PLACES = ("first-fit", "best-fit", "spread", "rack", "rack-wait")


def history_of(jobs: Sequence[PendingView], lasts: Sequence[float]) -> Trace:
    """The jobs as the history has them, once they have run."""
    records = [
        JobRecord(
            id=j.id, user=j.user, uid=1, spec=j.spec, state=JobState.COMPLETED, submit_time=j.submit_time,
            priority=j.priority,
        )
        for j in jobs
    ]  # fmt: skip
    submits = [job.submit_time for job in jobs]
    return _assembled("h", records, submits, list(lasts), {job.id: job.submit_time for job in jobs}, [])


def pool_of(snap: Snapshot) -> Pool:
    return Pool.of([NodeSpec(len(n.gpus), n.cores, n.memory_mib, n.gpu_type, n.partition, n.name) for n in snap.nodes])


def runs(snap: Snapshot, job: PendingView) -> bool:
    """Whether it would start at once anywhere on empty nodes."""
    alone = changed(job, spec=changed(job.spec, max_spread="", placement_wait_s=0.0))
    return bool(decide(changed(snap, pending=(alone,))).actions)


@st.composite
def queues(draw: st.DrawFn) -> Snapshot:
    """Empty nodes, in racks or not, and jobs submitted at once; those that the controller would refuse are left out."""
    snap = draw(snapshots(simple=True, racked=True))
    (policy,) = snap.policies.values()
    policy = changed(
        policy, order=draw(among("fifo", "ljf", "sjf")), place=draw(among(*PLACES)),
        backfill=draw(among("none", "skip", "easy", "conservative")), placement_wait_s=700.0,
    )  # fmt: skip
    names = st.lists(among(*(n.name for n in snap.nodes)), max_size=3, unique=True).map(tuple)
    snap = changed(
        snap, running=(), policies=dict.fromkeys(snap.policies, policy), usage={},
        topology=snap.topology if draw(st.booleans()) else topology(),
    )  # fmt: skip
    jobs = []
    for i, job in enumerate(snap.pending):
        listed = {"nodelist": draw(names), "exclude": draw(names)} if draw(st.integers(0, 3)) == 0 else {}
        if draw(st.integers(0, 3)) == 0:
            of = draw(st.sampled_from(snap.nodes))
            listed |= {"exclusive": True, "nodes": draw(st.integers(1, 2)), "gpus_per_node": len(of.gpus),
                       "cores_per_node": of.cores, "memory_mib_per_node": of.memory_mib, "max_nodes": None}  # fmt: skip
        elif draw(st.booleans()):
            spread = {"nodes": 1, "gpus_per_node": draw(among(2, 4, 6)), "max_nodes": 4, "max_spread": ""}
            listed |= spread | {"cores_per_node": 2, "placement_wait_s": draw(among(None, 0.0, 900.0))}
        job = changed(job, id=f"j{i:02}", submit_time=NOW, estimate_s=None, spec=changed(job.spec, **listed))
        if runs(snap, job):
            jobs.append(job)
    return changed(snap, pending=tuple(jobs))


@settings(max_examples=100, deadline=None)
@given(snap=queues().filter(lambda snap: snap.pending), share=st.sampled_from([0.3, 0.5, 1.0]))
def test_a_history_s_jobs_start_where_and_when_live_decisions_start_them(snap: Snapshot, share: float) -> None:
    """Also where GPUs may be cut on demand, and no job asks for slices."""
    lasts = [share * job.spec.time_limit_s for job in snap.pending]
    live = OneQueue(snap, dict(zip((job.id for job in snap.pending), lasts, strict=True)), {})
    live.run()
    trace, (policy,), pool = history_of(snap.pending, lasts), snap.policies.values(), pool_of(snap)
    cuttable = tuple(dict.fromkeys(range(len(node.gpus)), PUBLISHED["A100-80GB"]) for node in snap.nodes)
    for of in (pool, replace(pool, cuttable=cuttable)):
        found = replay(trace, of, policy_of_spec(policy), topology=snap.topology)
        starts = {trace.ids[j]: NOW + found.start[j] for j in np.flatnonzero(found.ran)}
        assert starts == pytest.approx(live.starts)
        nodes = {trace.ids[j]: {pool.names[n] for n in found.nodes_of(j)} for j in np.flatnonzero(found.ran)}
        assert nodes == {name: set(where) for name, where in live.nodes.items()}


class OneQueue(Plain):
    """Without limits that free anything."""

    def freed(self) -> set[str]:
        return set()

    def frees(self) -> list[float]:
        return []


@settings(max_examples=100, deadline=None)
@given(snap=clusters(), waits=st.lists(among(None, 0.0, 900.0), min_size=5), most=st.lists(among(None, 4), min_size=5))
def test_by_what_places_cost_the_first_decision_is_the_live_one(
    snap: Snapshot, waits: list[float | None], most: list[int | None]
) -> None:
    jobs = []
    for i, job in enumerate(snap.pending):
        few = min(job.spec.nodes, len(snap.nodes))  # the controller refuses more
        spec = changed(job.spec, nodes=few, placement_wait_s=waits[i], max_nodes=most[i] if job.spec.gpus > 1 else None)
        jobs.append(changed(job, id=f"j{i:02}", submit_time=snap.now, spec=spec))
    snap = changed(snap, running=(), pending=tuple(jobs))
    plan = decide(snap)
    live = {a.job_id: {part.node for part in a.allocation.parts} for a in plan.actions if isinstance(a, Start)}
    trace, (policy,), pool = history_of(jobs, [60.0] * len(jobs)), snap.policies.values(), pool_of(snap)
    network, _ = learned_network(snap.topology, trace, pool, snap.beliefs)
    found = replay(trace, pool, policy_of_spec(policy), network=network)
    begun = np.flatnonzero(found.ran & (found.start == 0.0))
    assert {trace.ids[j]: {pool.names[n] for n in found.nodes_of(j)} for j in begun} == live
