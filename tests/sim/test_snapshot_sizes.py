"""Jobs change size on GPUs that may be cut into slices: as in other replays, and as the live decision says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.agents.common.vector import to_arrays, vector_size
from gpusched.agents.dl2.decide import STEP_FEATURES, Actor, zero_actor
from gpusched.agents.dl2.weights import arrays_of
from gpusched.agents.maifs.network import SHAPES as MAIFS_WEIGHTS
from gpusched.agents.maifs.network import untrained
from gpusched.config.weights import TrainedModel
from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.policy import AGENTS, AgentTraits, Mapping
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim import snapshots
from gpusched.sim.engine.build import Outage
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.network import learned_network
from gpusched.sim.policies import ReplayPolicy, policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import PAIRED, PREEMPTED, RESIZED, ReplayResult
from gpusched.sim.slicing import node_views
from gpusched.study.own import beliefs_for
from gpusched.study.timeline import parts_of
from gpusched.traces.trace import Trace
from tests.sched.sharing import BELIEFS
from tests.sim.reference_pairs import pool_of, sharing_jobs, sharing_nodes
from tests.sim.sized_worlds import (
    AWAY,
    FAILING,
    POOL,
    SMALL_NODES,
    SPECS,
    Moody,
    assert_same,
    few_sizes,
    mixed,
    some_sizes,
    with_progress,
    with_ranges,
    with_ranks,
)
from tests.sim.slice_worlds import (
    A100,
    KNOWN,
    NODE,
    RACKS,
    WIDE,
    by_controller,
    by_live_decisions,
    drawn,
    named_jobs,
    shares,
)

pytestmark = pytest.mark.interpreted


def same_where_cuttable(trace: Trace, pool: Pool, policy: ReplayPolicy | str, **options: Any) -> ReplayResult:
    """The replay, equal to that on GPUs that might be cut, event by event."""
    cuttable = replace(pool, cuttable=tuple(dict.fromkeys(range(gpus), A100) for gpus in pool.gpus.tolist()))
    options["restart_s"] = 20.0
    whole, cut = replay(trace, pool, policy, **options), replay(trace, cuttable, policy, **options)
    assert_same(cut, whole)
    assert (cut.knows, set(whole.notes) <= set(cut.notes)) == (whole.knows, True)
    return cut


def of_two_users(trace: Trace) -> Trace:
    return replace(trace, user=np.arange(len(trace)) % 2, users=("ann", "bob"))


@pytest.mark.parametrize("name", SPECS)
def test_jobs_are_resized_on_gpus_that_may_be_cut_as_on_others(name: str) -> None:
    trace = mixed(3)
    result = same_where_cuttable(trace, POOL, name, elastic=some_sizes(trace, 3), failures=AWAY)
    assert result.restarts.sum() > 10


def test_so_they_are_within_limits_and_without_backfill() -> None:
    trace = of_two_users(mixed(1))
    quotas, sizes = QuotaSet(Quotas(each=Limits(gpus=9, jobs=4))), some_sizes(trace, 1)
    spec = msgspec.structs.replace(SPECS["elastic"], backfill="none", place="spread")
    limited = same_where_cuttable(trace, POOL, "elastic", elastic=sizes, quotas=quotas)
    assert limited.restarts.sum() > 10
    assert (limited.start != replay(trace, POOL, "elastic", elastic=sizes, restart_s=20.0).start).any()
    unlimited = replace(trace, limit=np.full(len(trace), np.inf))
    assert same_where_cuttable(unlimited, POOL, policy_of_spec(spec), elastic=sizes).restarts.sum() > 10


def test_ranks_join_leave_and_are_lost_on_gpus_that_may_be_cut() -> None:
    trace = with_ranks(mixed(1, 30), 1, (1, 2, 4))
    result = same_where_cuttable(trace, SMALL_NODES, "drf", failures=FAILING)
    assert (result.events.kind == RESIZED).sum() > 10
    quotas = QuotaSet(Quotas(each=Limits(gpu_hours=6.0)))
    limited = same_where_cuttable(of_two_users(trace), SMALL_NODES, "drf", failures=FAILING, quotas=quotas)
    assert limited.end.tolist() != result.end.tolist()
    assert (limited.events.kind == RESIZED).any()


def test_beside_them_jobs_are_spread_over_more_nodes() -> None:
    trace = mixed(1)
    trace = replace(trace, gpus=np.minimum(trace.gpus, 6))
    sizes = some_sizes(trace, 1)
    wide = (sizes.least == sizes.most) & (trace.gpus > 1)
    nodes = np.where(wide, -(-trace.gpus // 4), 0)
    trace = replace(trace, max_nodes=np.where(wide, 3, -1), nodes=nodes)
    result = same_where_cuttable(
        trace, Pool.uniform(3, 4), "elastic", elastic=sizes, failures=[Outage(1, 500.0, 900.0)]
    )
    assert result.restarts.sum() > 10
    assert (np.diff(result.part_offsets)[wide] > nodes[wide]).any()


def test_usage_counts_ranks_from_when_they_join_until_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Snapshot]()

    def decided(snapshot: Snapshot, models: Any) -> Plan:
        seen.append(snapshot)
        return decide(snapshot, models)

    monkeypatch.setattr(snapshots, "decide", decided)
    trace, spec = with_ranks(mixed(1, 30), 1, (1, 2, 4)), msgspec.structs.replace(SPECS["drf"], order="fairshare")
    pool = replace(SMALL_NODES, cuttable=tuple(dict.fromkeys(range(gpus), A100) for gpus in SMALL_NODES.gpus.tolist()))
    runs = parts_of(replay(trace, pool, policy_of_spec(spec), failures=FAILING, half_life_s=1e10))
    for snapshot in seen[::9]:
        held = (np.clip(snapshot.now - runs.start, 0.0, runs.end - runs.start) * runs.gpus).sum()
        assert 3600.0 * sum(snapshot.usage.values()) == pytest.approx(held, rel=1e-5)


def test_reported_speeds_and_granted_cores_count_on_gpus_that_may_be_cut() -> None:
    assert same_where_cuttable(with_progress(mixed(1), 1), POOL, "elastic", failures=AWAY).restarts.sum() > 10
    few, trace = Pool.of([NodeSpec(8, cores, 1 << 15, "A", "p") for cores in (40, 24, 20)]), mixed(2)
    assert same_where_cuttable(trace, few, "drf", elastic=with_ranges(trace, 2)).restarts.sum() > 10


def chosen_by(agent: str, model: TrainedModel) -> ReplayPolicy:
    spec = msgspec.structs.replace(SPECS["drf"], agent=agent)
    policy = policy_of_spec(msgspec.structs.replace(spec, agent=None))
    return replace(policy, model=model, spec=spec)


def test_agents_choose_sizes_on_gpus_that_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = untrained(1) + np.random.default_rng(1).normal(0, 0.3, vector_size(MAIFS_WEIGHTS))
    maifs = TrainedModel("maifs", to_arrays(numbers, MAIFS_WEIGHTS), {}, "", "maifs where cut")
    trace = mixed(2)
    result = same_where_cuttable(trace, POOL, chosen_by("maifs", maifs), elastic=some_sizes(trace, 2))
    assert result.restarts.sum() > 10
    monkeypatch.setitem(AGENTS, "moody", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "moody", AgentParts(sizes=lambda: Moody))
    moody = chosen_by("moody", TrainedModel("moody", {"mood": np.array([1])}, {}, "", "moody where cut"))
    result = same_where_cuttable(trace, POOL, moody, elastic=some_sizes(trace, 2))
    assert len([note for note in result.notes if "times drf chose sizes" in note]) == 2


def test_resizable_jobs_share_no_gpus_that_may_be_cut() -> None:
    trace, pool, believed = shares(1)
    options: dict[str, Any] = {"elastic": some_sizes(trace, 1), "believed": believed}
    result = same_where_cuttable(trace, replace(pool, cuttable=()), "elastic", **options)
    assert result.restarts.sum() > 10


def test_beside_slices_jobs_are_resized_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slices stay as they are; and where links slow jobs down, at each size."""
    pool, trace = Pool.of([NODE._replace(name=f"n{i}", gpus=7) for i in range(4)]), drawn(1, 100)
    assert trace.profile is not None
    profile = np.where(np.arange(100) % 2, -1, trace.profile)
    trace = replace(trace, profile=profile, gpus=np.where(profile < 0, 1 << np.arange(100) % 3, trace.gpus))
    wide, count = named_jobs(2, 80), np.where(np.arange(80) % 2, -1, named_jobs(2, 80).nodes)
    network, _ = learned_network(RACKS, replace(wide, nodes=count), WIDE, KNOWN)
    linked = {"network": network, "learned": KNOWN, "topology": RACKS}
    spec = msgspec.structs.replace(SPECS["elastic"], place="contention", placement_wait_s=1500.0)
    for seed, (asked, nodes, policy, options) in enumerate((
        (trace, pool, policy_of_spec(SPECS["elastic"]), {"failures": [Outage(1, 2000.0, 4000.0)]}),
        (replace(wide, nodes=count), WIDE, policy_of_spec(spec), linked),
    )):  # fmt: skip
        options |= {"elastic": some_sizes(asked, seed), "restart_s": 20.0}
        fast = replay(asked, nodes, policy, **options)
        live = by_live_decisions(monkeypatch, asked, nodes, policy, **options)
        np.testing.assert_allclose(fast.start, live.start)
        np.testing.assert_allclose(fast.end, live.end)
        np.testing.assert_array_equal(fast.restarts, live.restarts)
        assert fast.restarts.sum() > 2


@pytest.mark.parametrize(("name", "seed"), [("elastic", 1), ("drf", 2)])
def test_jobs_are_resized_while_gpus_are_cut_and_no_work_is_lost(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list[tuple[Snapshot, Plan]]()

    def decided(snapshot: Snapshot, models: Any) -> Plan:
        plans.append((snapshot, decide(snapshot, models)))
        assert check(plans[-1][1], snapshot)[1] == ()
        return plans[-1][1]

    monkeypatch.setattr(snapshots, "decide", decided)
    trace, nodes = drawn(seed, 80), [NodeSpec(4, cuttable=tuple((gpu, A100) for gpu in range(4)))] * 3
    assert trace.profile is not None
    trace = replace(trace, profile=np.where(np.arange(80) % 2, -1, trace.profile))
    result = replay(trace, Pool.of(nodes), name, elastic=some_sizes(trace, seed), restart_s=20.0)
    assert result.ran.all()
    assert int(result.notes[-1].split()[0]) > 20, "GPUs are cut"
    actions = [(snapshot.now, action) for snapshot, plan in plans for action in plan.actions]
    assert sum(isinstance(action, Resize) for _, action in actions) > 5
    runs = parts_of(result)
    run = set(zip(runs.job.tolist(), runs.start.tolist(), strict=True))
    assert {(int(action.job_id), now) for now, action in actions if isinstance(action, Start)} == run
    whole = np.flatnonzero(trace.profile < 0)
    of_whole = np.isin(runs.job, whole)
    held, again = (
        ((runs.end - runs.start) * runs.gpus)[of_whole].sum(),
        of_whole & (runs.start > result.start[runs.job]),
    )
    work = (trace.duration * trace.gpus)[whole].sum() + 20.0 * runs.gpus[again].sum()
    assert held == pytest.approx(work, rel=1e-9)


def shared_by_both(seed: int, jobs: int = 30) -> Trace:
    """Jobs of two users in two partitions."""
    rng, trace = np.random.default_rng(seed), of_two_users(mixed(seed, jobs))
    group = rng.integers(0, 2, jobs)
    return replace(trace, gpus=np.minimum(trace.gpus, 8), user=rng.integers(0, 2, jobs), group=group, groups=("p", "q"))


def by_maifs() -> ReplayPolicy:
    numbers = untrained(1) + np.random.default_rng(1).normal(0, 0.3, vector_size(MAIFS_WEIGHTS))
    return chosen_by("maifs", TrainedModel("maifs", to_arrays(numbers, MAIFS_WEIGHTS), {}, "", "maifs in turn"))


def by_dl2() -> ReplayPolicy:
    rng = np.random.default_rng(1)
    actor = Actor(*(rng.normal(0, 0.3, part.shape).astype(np.float32) for part in zero_actor(8)))
    actor.linear[STEP_FEATURES.index("done")] = -5.0  # GPUs are used
    about = {"slot_s": "120"}
    return chosen_by("dl2", TrainedModel("dl2", arrays_of({"trained": actor}), about, "", "dl2 in turn"))


def changed(policy: ReplayPolicy, **changes: Any) -> ReplayPolicy:
    assert policy.spec is not None
    spec = msgspec.structs.replace(policy.spec, **changes)
    plain = policy_of_spec(msgspec.structs.replace(spec, agent=None))
    return replace(plain, model=policy.model, spec=spec)


def two_partitions(*nodes: NodeSpec) -> Pool:
    return Pool.of([node._replace(partition="qp"[i % 2]) for i, node in enumerate(nodes)])


def hot_world() -> tuple[Trace, Pool, ReplayPolicy, dict[str, Any]]:
    trace = with_ranks(shared_by_both(1), 1, (1, 2, 4))
    return trace, two_partitions(*[NodeSpec(4, 32, 1 << 15)] * 8), by_maifs(), {"failures": FAILING}


def granted_world() -> tuple[Trace, Pool, ReplayPolicy, dict[str, Any]]:
    trace, cores = shared_by_both(0), (40, 24, 20, 30)
    pool = two_partitions(*(NodeSpec(8, some, 1 << 15) for some in cores))
    return trace, pool, by_maifs(), {"elastic": with_ranges(trace, 0)}


def mapped_world() -> tuple[Trace, Pool, ReplayPolicy, dict[str, Any]]:
    trace, mapping = shared_by_both(1), Mapping(fragment_cost=0.5, speeds={"*": {"A": 1.0, "B": 0.9}})
    pool = two_partitions(*(NodeSpec(8, 64, 1 << 16, kind) for kind in "BAAB"))
    return trace, pool, changed(by_dl2(), place="fastest", mapping=mapping), {"elastic": some_sizes(trace, 1)}


def paired_world() -> tuple[Trace, Pool, ReplayPolicy, dict[str, Any]]:
    pool = pool_of("ppqq")
    trace = sharing_jobs(2, pool, 60)
    believed = beliefs_for(trace, sharing_nodes(node_views(pool)), BELIEFS)
    return trace, pool, by_maifs(), {"elastic": few_sizes(trace, 2), "believed": believed}


@pytest.mark.parametrize("limits", [Limits(gpus=9), Limits(jobs=5), Limits(gpu_hours=6.0)])
@pytest.mark.parametrize("world", [hot_world, granted_world, mapped_world, paired_world])
def test_agents_that_choose_sizes_share_limits_of_partitions_as_the_controller_asks_them(
    world: Callable[[], Any], limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition's jobs start, share GPUs and grow within what those before it leave, before the next is asked."""
    trace, pool, policy, options = world()
    options["quotas"] = QuotaSet(Quotas(each=limits))
    result = same_where_cuttable(trace, pool, policy, **options)
    with by_controller(policy, tmp_path, monkeypatch) as policy:
        same_where_cuttable(trace, pool, policy, **options)
    kinds = np.bincount(result.events.kind, minlength=PAIRED + 1)
    assert kinds[PREEMPTED] > 5
    assert kinds[RESIZED if world is hot_world else PAIRED if world is paired_world else PREEMPTED] > 0


@pytest.mark.parametrize(("order", "backfill"), [("fairshare", "easy"), ("sjf", "easy"), ("sjf-estimate", "skip")])
@pytest.mark.parametrize("by_agent", [by_dl2, by_maifs])
def test_under_agents_that_choose_sizes_jobs_start_in_the_policy_s_order_as_live(
    by_agent: Callable[[], ReplayPolicy], order: str, backfill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, pool = shared_by_both(1, 40), two_partitions(*[NodeSpec(8, 64, 1 << 16)] * 4)
    policy, options = changed(by_agent(), order=order, backfill=backfill), {"elastic": some_sizes(trace, 1)}
    result = replay(trace, pool, policy, half_life_s=5000.0, **options)
    with by_controller(policy, tmp_path, monkeypatch) as policy:
        assert_same(result, replay(trace, pool, policy, half_life_s=5000.0, **options))
    by_submission = changed(by_agent(), backfill=backfill)
    assert result.start.tolist() != replay(trace, pool, by_submission, **options).start.tolist()


def test_a_time_limit_of_zero_or_less_is_none() -> None:
    trace, none = mixed(2), np.arange(60) % 3 == 0
    zero, unknown = (replace(trace, limit=np.where(none, limit, trace.limit)) for limit in (0.0, np.nan))
    asked: dict[str, Any] = {"elastic": some_sizes(trace, 2)}
    result = same_where_cuttable(zero, POOL, "elastic", **asked)
    assert_same(result, replay(unknown, POOL, "elastic", restart_s=20.0, **asked))
    assert result.end.tolist() != replay(trace, POOL, "elastic", restart_s=20.0, **asked).end.tolist()


def test_jobs_without_known_cores_and_memory_have_none_at_any_size() -> None:
    trace, none = mixed(1), np.arange(60) % 2 == 0
    memory = np.where(none, 0, trace.memory_mib)
    trace = replace(trace, cores=np.where(none, 0, np.minimum(trace.cores, 2 * trace.gpus)), memory_mib=memory)
    few = Pool.of([NodeSpec(gpus, cores, 1 << 14, "A", "p") for gpus, cores in ((8, 14), (8, 12), (4, 9))])
    assert same_where_cuttable(trace, few, "elastic", elastic=some_sizes(trace, 1)).restarts.sum() > 10
