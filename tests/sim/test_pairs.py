"""Two jobs on a GPU: whole replays, start by start as the controller decides on snapshots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.agents.rltune.preempting import RankingRule, policy_of
from gpusched.model.interference import ContentionEstimate, JobClassEstimate
from gpusched.model.jobs import Allocation, JobSpec
from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Start
from gpusched.model.policy import Mapping, PolicySpec, PreemptionSettings
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sim.pool import demand_of
from gpusched.sim.replay import replay
from gpusched.sim.result import PAIRED, PREEMPTED, START, ReplayResult
from gpusched.sim.slicing import node_views
from gpusched.study.own import beliefs_for
from gpusched.study.timeline import paired_runs, parts_of
from tests.sched import gist_decisions as gist
from tests.sched import sharing
from tests.sched.preempting_decisions import LIMITS, RANKS, Film, by_agent, policy, stopped, weights
from tests.sim.reference_pairs import pool_of, replay_both, sharing_jobs, sharing_nodes, with_sharers
from tests.sim.sized_worlds import SPECS, few_sizes

LIMITED = Quotas(each=Limits(gpus=9))
pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(("backfill", "place"), [
    *product(("none", "skip", "easy", "conservative"), ("best-fit", "rack")), ("none", "fastest"), ("easy", "fastest"),
])  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_limits_over_several_partitions_hold_as_live(backfill: str, place: str, seed: int) -> None:
    """Jobs are put beside others once all partitions' policies have decided; what starts may let others start."""
    pool = pool_of("ppqq")
    spec = PolicySpec(name="t", order="fifo", backfill=backfill, place=place, mapping=Mapping(window=3))
    _, slow = replay_both(spec, sharing_jobs(seed, pool), pool, quotas=LIMITED)
    assert slow.beside > 1


@pytest.mark.parametrize(("name", "backfill", "place"), [
    pytest.param("elastic", "easy", "best-fit", marks=pytest.mark.compiled), ("drf", "skip", "first-fit"),
    ("elastic", "none", "rack"), ("sia", "easy", "fastest"), ("optimus", "conservative", "best-fit"),
])  # fmt: skip
@pytest.mark.parametrize(("partitions", "quotas"), [("pp", None), ("pp", LIMITED), ("ppqq", LIMITED)])
@pytest.mark.parametrize("seed", [1, 2])
def test_jobs_share_where_others_change_size_as_live(
    name: str, backfill: str, place: str, partitions: str, quotas: Quotas | None, seed: int
) -> None:
    """Within limits, which may cover partitions, all sizes are chosen before any job starts, and starts go first."""
    pool = pool_of(partitions)
    trace = sharing_jobs(seed, pool)
    spec = msgspec.structs.replace(SPECS[name], backfill=backfill, place=place)
    fast, slow = replay_both(spec, trace, pool, elastic=few_sizes(trace, seed), restart_s=20.0, quotas=quotas)
    assert slow.beside > 4
    assert (fast.events.kind == PREEMPTED).sum() > 2
    assert not any(check(plan, snapshot)[1] for snapshot, plan in slow.seen)


@pytest.mark.parametrize("policy", ["srtf", "las", "drf-users"])
def test_jobs_that_share_are_not_preempted(policy: str) -> None:
    """A pair ends with one of its jobs, and no GPU has more than two."""
    pool = pool_of("pq")
    trace = sharing_jobs(1, pool)
    believed = beliefs_for(trace, sharing_nodes(node_views(pool)), sharing.BELIEFS)
    result = replay(trace, pool, policy, believed=believed)
    assert np.isfinite(result.end).all()
    assert (result.events.kind == PREEMPTED).sum() > 5
    pairs = paired_runs(result)
    assert len(pairs) > 5
    for job, mate, _, end in pairs:
        assert end in (result.end[job], result.end[mate])
    parts = parts_of(result)
    for time in np.unique(parts.start):
        on = (parts.start <= time) & (time < parts.end)
        assert (np.bincount(parts.node[on], parts.gpus[on], len(pool)) <= pool.gpus + 1e-9).all()


BELIEFS = {
    f"u/{name}": JobClassEstimate(
        kind=f"u/{name}",
        links=(ContentionEstimate(link="gpu", sensitivity=one, pressure=other, cov=(0, 0, 0), count=9),),
    )
    for name, (one, other) in sharing.KINDS.items()
}


class SharedFilm(Film):
    """With jobs that share GPUs: which do is kept."""

    def __init__(self, result: ReplayResult) -> None:
        super().__init__(result)
        events, names = result.events, result.trace.ids
        of = list(zip(events.time.tolist(), events.kind.tolist(), events.subject.tolist(), strict=True))
        self.pairs = [
            (time, names[mate], names[job])
            for (time, kind, mate), (_, then, job) in pairwise(of)
            if kind == PAIRED and then == START
        ]

    def spec(self, job: int) -> JobSpec:
        trace = self.result.trace
        mib = int(trace.share_mib[job])
        share: dict[str, Any] = {"share": "pairs", "gpu_memory_mib": mib} if mib >= 0 else {}
        return msgspec.structs.replace(super().spec(job), name=trace.models[trace.model[job]], **share)

    def at(self, now: float, gone: bool = False, begun: dict[str, Any] | None = None) -> Snapshot:
        snap = super().at(now, gone, begun)
        nodes = sharing_nodes(snap.nodes)
        found, taken = {job.id: job for job in snap.running}, dict[str, int]()
        mates = {
            job: mate for time, mate, job in self.pairs
            if {job, mate} <= found.keys() and found[job].start_time == time >= found[mate].start_time
        }  # fmt: skip
        for job in sorted(snap.running, key=lambda job: job.id in mates):
            parts = []
            for part in job.allocation.parts:
                first, count = taken.get(part.node, 0), len(part.gpus)
                own = tuple(range(first, first + count))
                if job.id in mates:
                    own = found[mates[job.id]].allocation.parts[0].gpus[:count]
                else:
                    taken[part.node] = first + count
                parts.append(msgspec.structs.replace(part, gpus=own))
            found[job.id] = msgspec.structs.replace(job, allocation=Allocation(job.id, tuple(parts)))
        return msgspec.structs.replace(snap, nodes=nodes, running=with_sharers(found.values(), nodes), beliefs=BELIEFS)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gist.workloads(), st.sampled_from(RANKS), st.sampled_from(LIMITS), st.data())
def test_rltune_stops_none_that_share_and_puts_jobs_beside_others_as_live(
    workload: Any, rule: RankingRule, rules: PreemptionSettings, data: st.DataObject
) -> None:
    trace, pool = workload
    count, one_node = len(trace), demand_of(trace, pool).parts == 1
    drawn = [np.array(data.draw(st.lists(st.sampled_from(of), min_size=count, max_size=count)))
             for of in ([-1, 10, 20], [True, True, False], range(len(sharing.KINDS)))]  # fmt: skip
    trace = replace(
        trace, users=("u",), user=np.zeros(count, np.int64), models=tuple(sharing.KINDS), model=drawn[2],
        share_mib=np.where(one_node & (trace.gpus > 0), drawn[0], -1), preemptible=drawn[1],
    )  # fmt: skip
    spec, of = policy(rules), weights(rule)
    believed = beliefs_for(trace, sharing_nodes(node_views(pool)), BELIEFS)
    believed = believed._replace(speed=np.ones_like(believed.speed))  # so that times are whole, and sums of them exact
    result = replay(trace, pool, replace(policy_of(of, "r"), spec=spec, placement="first-fit"),
                    restart_s=rules.restart_s, believed=believed)  # fmt: skip
    film = SharedFilm(result)
    for now in np.unique(result.events.time).tolist():
        snap = film.at(now)
        plan = by_agent(snap, spec, of)
        cut = {trace.ids[r.job] for r in film.runs if r.cut and r.end == now}
        assert stopped(plan).keys() == cut
        assert check(plan, msgspec.structs.replace(snap, policies={"p": spec}))[1] == ()
        began = {trace.ids[r.job]: [pool.names[n] for n in r.nodes] for r in film.runs if r.start == now}
        holders = {
            (part.node, gpu): job.id for job in snap.running for part in job.allocation.parts for gpu in part.gpus
        }
        first, beside = {}, {}
        for action in plan.actions:
            if isinstance(action, Start):
                parts = action.allocation.parts
                first[action.job_id] = [part.node for part in parts]
                has = {holders.get((part.node, gpu)) for part in parts for gpu in part.gpus} - {None}
                beside |= dict.fromkeys([action.job_id], *has) if has else {}
                holders |= {(part.node, gpu): action.job_id for part in parts for gpu in part.gpus}
        alone = {job: where for job, where in first.items() if job not in beside}
        assert alone.items() <= began.items()
        if not cut:
            assert first == began
            assert beside == {job: mate for time, mate, job in film.pairs if time == now}
