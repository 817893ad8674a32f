"""Replays with MIG slices: start by start as the live decision, slices by their share, GPUs cut on demand as live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.agents.gist.networks import heuristic
from gpusched.agents.rltune.preempting import RankingRule
from gpusched.agents.topology.network import SHAPES
from gpusched.agents.topology.replay import agents_spec, placed_by
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.interference import JobClassEstimate, JobShape, SpeedSamples
from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Plan
from gpusched.model.policy import AGENTS, AgentTraits, Backfill, Mapping, Place, PolicySpec
from gpusched.model.slices import Cut, gpu_of, is_slice
from gpusched.model.slicetables import PUBLISHED, gpus_counted, published
from gpusched.model.snapshot import Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.slices.plan import CUT_S
from gpusched.sched.slices.tree import is_valid
from gpusched.sim import snapshots
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.reserving import Booking
from gpusched.sim.result import EVENT_KINDS
from gpusched.sim.snapshots import SnapshotRun
from gpusched.study.bounds import bounds_of
from gpusched.study.metrics import metrics_of
from gpusched.study.timeline import paired_runs
from gpusched.traces.slicing import select, slice_trace
from gpusched.traces.trace import NO_RUNS, Trace
from tests.sched.gist_decisions import GIST
from tests.sched.rltune_decisions import RLTUNE, WILD, arrays_of, model, rule
from tests.sim.slice_worlds import (
    A100,
    LAS,
    NODE,
    RACKS,
    by_controller,
    by_live_decisions,
    drawn,
    preempting,
    shares,
    wild,
)
from tests.sim.worlds import trace_of

POOL = Pool.of([NODE._replace(name=f"n{i}") for i in range(3)])
ON_DEMAND = Pool.of([NodeSpec(3, name=f"n{i}", cuttable=tuple((gpu, A100) for gpu in range(3))) for i in range(2)])
pytestmark = pytest.mark.interpreted


def with_priorities(trace: Trace) -> Trace:
    """The same with explicit priorities, and two arrays of which three and five tasks may run at once."""
    rng = np.random.default_rng(len(trace))
    array = rng.choice([-1, -1, 0, 1], len(trace))
    return replace(
        trace, priority=rng.choice([0, 0, 4, -9], len(trace)), array=array, array_limit=np.array([3, 5, -1])[array]
    )


def one(profile: str, gpus: int = 1, submit: Sequence[float] = (0.0,), duration: float = 3600.0) -> Trace:
    trace = trace_of(list(submit), [duration] * len(submit), [gpus] * len(submit), user=[0] * len(submit))
    return replace(trace, users=("ann",), profile=np.zeros(len(submit), np.int64), profiles=(profile,))




@pytest.mark.parametrize(
    "policy", ["fifo", "easy", pytest.param("sjf-skip", marks=pytest.mark.compiled), "fairshare", "sjf+conservative"]
)
def test_a_replay_starts_each_job_as_live_decisions_do(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        quotas = QuotaSet(Quotas(each=Limits(gpus=2 + seed))) if policy == "easy" else None
        outages = [Outage(1, 2000.0, 4000.0), Outage(2, 5000.0, 6000.0, drain=True)] if seed else []
        books = [Booking("r", (0,), 3000.0, 4500.0, frozenset({"000060"}))] if policy == "sjf-skip" else []
        trace = with_priorities(drawn(seed)) if seed else drawn(seed)
        asked = trace, POOL, policy_by_name(policy)
        options = {"quotas": quotas, "failures": outages, "reservations": books, "placement": "first-fit"}
        fast = replay(*asked, **options)
        live = by_live_decisions(monkeypatch, *asked, **options)
        np.testing.assert_array_equal(fast.start, live.start)
        np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
        assert fast.events.tobytes() == live.events.tobytes()
        assert fast.ran.sum() > 80
        assert [fast.infeasible_why[0]] == ["no node has MIG slices of 7g.80gb"]


RACKED = Pool.of([NODE._replace(name=f"n{i}") for i in range(5)])


def on_several(seed: int) -> Trace:
    """Jobs on one node or two; some do not say on how many."""
    trace = drawn(seed, 160)
    return replace(trace, nodes=np.where(trace.gpus > 1, np.arange(160) % 3, 1))


@pytest.mark.parametrize("order", ["fifo", "sjf", "fairshare"])
@pytest.mark.parametrize("backfill", ["skip", "easy", "conservative"])
def test_jobs_are_placed_by_racks_as_live(order: str, backfill: Backfill, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, place in enumerate(("rack", "rack-wait", "contention")):
        spec = PolicySpec(name="r", order=order, place=place, backfill=backfill, placement_wait_s=700.0)
        asked = on_several(seed), RACKED, policy_of_spec(spec)
        outages = [Outage(seed, 2000.0, 4000.0)]
        fast = replay(*asked, topology=RACKS, failures=outages)
        live = by_live_decisions(monkeypatch, *asked, topology=RACKS, failures=outages)
        np.testing.assert_allclose(fast.start, live.start)
        np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
        assert fast.part_nodes.tolist() != replay(*asked, failures=outages).part_nodes.tolist()


def with_requests(trace: Trace, seed: int) -> Trace:
    """The same jobs with lists of nodes, one rack only, and their own waits for one rack."""
    rng, n = np.random.default_rng(seed), len(trace)
    wide = trace.nodes > 1
    return replace(
        trace, node_lists=("n0|n2|n4", "n1|n3", "n9"), nodelist=rng.choice([-1, -1, 0, 1, 2], n),
        exclude=rng.choice([-1, -1, 1], n), one_rack=wide & (rng.random(n) < 0.3),
        placement_wait=np.where(wide, rng.choice([-1, 0, 900, 5000], n), -1),
    )  # fmt: skip


@pytest.mark.parametrize("place", ["best-fit", "first-fit", "spread", "rack", "rack-wait"])
@pytest.mark.parametrize("backfill", ["skip", "easy", "conservative"])
def test_a_job_s_lists_of_nodes_spread_and_wait_bind_as_live(
    place: str, backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = PolicySpec(name="r", place=place, backfill=backfill, placement_wait_s=700.0)
    for seed, racks in enumerate((RACKS, Topology())):
        trace = on_several(seed)
        asked = with_requests(trace, seed), RACKED, policy_of_spec(spec)
        options = {"topology": racks, "failures": [Outage(seed, 2000.0, 4000.0)]}
        fast, live = replay(*asked, **options), by_live_decisions(monkeypatch, *asked, **options)
        np.testing.assert_allclose(fast.start, live.start)
        assert all(set(fast.nodes_of(j)) == set(live.nodes_of(j)) for j in np.flatnonzero(fast.ran))
        assert fast.ran.sum() > 80
        for name in ("nodelist", "exclude", "one_rack", "placement_wait") if racks and place == "best-fit" else ():
            without = replay(replace(asked[0], **{name: None}), *asked[1:], **options)
            assert without.part_nodes.tolist() != fast.part_nodes.tolist(), name


@pytest.mark.parametrize("backfill", ["skip", "easy"])
def test_limits_over_several_partitions_hold_as_live(backfill: Backfill, monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition is decided after the other, slices last."""
    pool = Pool.of([NODE._replace(name=f"n{i}", partition="BA"[i % 2]) for i in range(4)])
    quotas = QuotaSet(Quotas(each=Limits(gpus=2, jobs=3)))
    for seed, place in enumerate(("best-fit", "rack", "rack", "rack")):
        trace = on_several(seed)
        trace = replace(trace, submit=np.floor(trace.submit / 600) * 600, group=np.arange(160) % 2, groups=("A", "B"))
        spec = PolicySpec(name="q", place=place, backfill=backfill)
        asked = trace, pool, policy_of_spec(spec)
        fast = replay(*asked, topology=RACKS, quotas=quotas)
        live = by_live_decisions(monkeypatch, *asked, topology=RACKS, quotas=quotas)
        np.testing.assert_allclose(fast.start, live.start)
        np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)


def reported(seed: int) -> dict[str, JobClassEstimate]:
    """Of most users' jobs it was reported how fast they are on each of two GPU types."""
    rng, found = np.random.default_rng(seed), dict[str, JobClassEstimate]()
    for kind in (f"{user}/{name}" for user in "abc" for name in ("train-#", "eval")):
        shapes = [
            JobShape(gpu_type=name, unit="steps", gpus=1, max_gpus_per_node=1, nodes=1, racks=1)
            for name in (NODE.gpu_type, "V100")
        ]
        logs = rng.normal(0.0, 1.0, len(shapes)).tolist()
        of = [SpeedSamples(shape=s, logs=((log, 1.0),), count=1, best=log) for s, log in zip(shapes, logs, strict=True)]
        found[kind] = JobClassEstimate(kind=kind, shapes=tuple(of))
    return found


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
def test_jobs_get_types_reported_to_be_faster_as_live(backfill: Backfill, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [NodeSpec(3, 32, 1 << 18, "V100", "A", f"v{i}") for i in range(2)]
    pool = Pool.of([*(NODE._replace(name=f"n{i}", gpus=6) for i in range(2)), *others])
    mapping = Mapping(speeds={"eval": {"V100": 0.9}, "*": {"V100": 0.5, NODE.gpu_type: 1.0}})
    spec = PolicySpec(name="m", place="fastest", backfill=backfill, mapping=mapping)
    for seed in range(2):
        trace = drawn(seed)
        trace = replace(trace, models=("train-7", "train-80", "eval"), model=np.arange(len(trace)) % 3)
        asked = trace, pool, policy_of_spec(spec)
        fast = replay(*asked, learned=reported(seed))
        live = by_live_decisions(monkeypatch, *asked, learned=reported(seed))
        np.testing.assert_array_equal(fast.start, live.start)
        np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
        assert fast.part_nodes.tolist() != replay(*asked).part_nodes.tolist()


def test_gpus_held_in_other_partitions_count_for_live_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(drawn(5, 400), wait=np.zeros(400), group=np.arange(400) % 2, groups=("a", "b"))
    trace = slice_trace(replace(whole, gpus=np.where(whole.group == 0, 4 * whole.gpus, whole.gpus)), vc="b")
    options = {"placement": "first-fit", "half_life_s": 36000.0}
    fast = replay(trace, POOL, policy_by_name("fairshare"), **options)
    live = by_live_decisions(monkeypatch, trace, POOL, policy_by_name("fairshare"), **options)
    np.testing.assert_array_equal(fast.start, live.start)
    alone = replay(replace(trace, others=NO_RUNS), POOL, policy_by_name("fairshare"), **options)
    assert not np.array_equal(alone.start, fast.start, equal_nan=True)




@pytest.mark.parametrize(
    ("spec", "model", "seed"),
    [(RLTUNE, WILD[0], 5), *((GIST, wild(seed), seed) for seed in range(3))],
)
def test_an_agent_that_can_decides_about_queues_of_slices_as_live(
    spec: PolicySpec, model: TrainedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ReplayPolicy(
        name="a", order=model.agent, knows=model.knows, source="", backfill="skip", placement="best-fit", spec=spec,
        model=model,
    )  # fmt: skip
    asked = with_priorities(drawn(seed, 80)) if seed % 2 else drawn(seed, 80), POOL, policy
    fast, live = replay(*asked), by_live_decisions(monkeypatch, *asked)
    np.testing.assert_array_equal(fast.start, live.start)
    np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
    in_racks = on_several(seed), RACKED, replace(policy, placement="rack", spec=changed(spec, place="rack"))
    racked, live = replay(*in_racks, topology=RACKS), by_live_decisions(monkeypatch, *in_racks, topology=RACKS)
    np.testing.assert_array_equal(racked.part_nodes, live.part_nodes)
    assert (racked.part_nodes.tolist() == replay(*in_racks).part_nodes.tolist()) == (spec is GIST), "it has no racks"
    trace = fast.trace
    assert trace.profile is not None
    sliced = fast.ran & (trace.profile >= 0)
    for other in ("fifo-skip", "easy"):
        assert (fast.start != replay(trace, POOL, other).start)[sliced].any(), "by scores"


BY_SHARE = model(arrays_of(rule({"estimate": -1.0, "user_share": -99.0})), "by share")


def ordering(spec: PolicySpec, model: TrainedModel) -> ReplayPolicy:
    return ReplayPolicy(
        name="a", order=model.agent, knows=model.knows, source="", backfill="skip", placement="best-fit", spec=spec,
        model=model,
    )  # fmt: skip


@pytest.mark.parametrize("policy", [ordering(RLTUNE, BY_SHARE), ordering(GIST, wild(1)), preempting(LAS)])
def test_agents_of_several_partitions_share_limits_as_the_controller_asks_them(
    policy: ReplayPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition's agent decides within what those before it leave; no plan exceeds a limit."""
    pool = Pool.of([NODE._replace(name=f"n{i}", partition="BA"[i % 2]) for i in range(4)])
    with by_controller(policy, tmp_path, monkeypatch) as policy:
        for seed, limits in enumerate((Limits(gpus=2, jobs=3), Limits(jobs=6))):
            trace, group = drawn(seed, 100), np.arange(100) % 2
            trace = replace(trace, submit=np.floor(trace.submit / 600) * 600, group=group, groups=("A", "B"))
            asked, options = (trace, pool, policy), {"quotas": QuotaSet(Quotas(each=limits)), "restart_s": 20.0}
            fast, live = replay(*asked, **options), by_live_decisions(monkeypatch, *asked, **options)
            np.testing.assert_array_equal(fast.start, live.start)
            np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)


@pytest.mark.parametrize("rank", [LAS, RankingRule("index", {"index": 1.0})])
def test_an_agent_stops_jobs_in_slices_as_live(rank: RankingRule, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        trace = replace(drawn(seed, 80), preemptible=np.arange(80) % 4 > 0)
        asked = trace, POOL, preempting(rank)
        fast, live = replay(*asked, restart_s=20.0), by_live_decisions(monkeypatch, *asked, restart_s=20.0)
        np.testing.assert_allclose(fast.start, live.start)
        np.testing.assert_allclose(fast.end, live.end)
        np.testing.assert_array_equal(fast.restarts, live.restarts)
        assert fast.restarts.sum() > 3


def test_what_stopped_jobs_leave_is_decided_about_next_as_by_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that need none of it start at once; others, and those stopped, go by ranks once the nodes are free."""
    pool = Pool.of([NODE._replace(name=f"n{i}", gpus=7) for i in range(5)])
    with by_controller(preempting(RankingRule("index", {"index": 1.0, "stay": 1.0})), tmp_path, monkeypatch) as policy:
        for seed in range(5, 8):
            trace, rng = drawn(seed, 80), np.random.default_rng(seed)
            gpus, nodes = rng.integers(1, 4, 80), rng.integers(1, 3, 80)
            trace = replace(trace, gpus=gpus * nodes, nodes=nodes, preemptible=np.arange(80) % 4 > 0)
            fast = replay(trace, pool, policy, restart_s=20.0)
            live = by_live_decisions(monkeypatch, trace, pool, policy, restart_s=20.0)
            np.testing.assert_allclose(fast.start, live.start)
            np.testing.assert_allclose(fast.end, live.end)
            np.testing.assert_array_equal(fast.restarts, live.restarts)
            np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
            assert fast.restarts.sum() > 3


def test_an_agent_stops_jobs_where_gpus_are_cut() -> None:
    trace = replace(drawn(1, 60), preemptible=np.arange(60) % 4 > 0)
    result = replay(trace, ON_DEMAND, preempting(LAS), restart_s=20.0)
    assert result.ran.all()
    assert result.restarts.sum() > 3
    assert (result.restarts[trace.preemptible == 0] == 0).all()
    assert len(result.notes) == 1, "of the cuts"


def test_for_an_agent_that_cannot_the_fallback_decides_about_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole GPUs go by the agent as if no job asked for slices, and slices by its fallback as if it were the policy."""
    monkeypatch.setitem(AGENTS, "gist", AgentTraits(holds_back=True))
    agent = TrainedModel("gist", heuristic(log_limit=-1.0), {}, "", "gist of slices")
    policy = ReplayPolicy(
        name="g", order="gist", knows="limit", source="", placement="best-fit", spec=GIST, model=agent
    )
    trace, pool = drawn(6, 80), Pool.of([NODE._replace(name=f"n{i}", cores=-1, memory_mib=-1) for i in range(3)])
    mixed, easy = replay(trace, pool, policy), replay(trace, pool, policy_of_spec(GIST.effective_fallback))
    assert trace.profile is not None
    sliced = trace.profile >= 0
    np.testing.assert_array_equal(mixed.start[sliced], easy.start[sliced])
    whole = select(replace(trace, profile=None, profiles=()), ~sliced)
    gpus = replay(whole, Pool.of([NodeSpec(1, name=f"n{i}") for i in range(3)]), replace(policy, placement=None))
    np.testing.assert_array_equal(mixed.start[~sliced], gpus.start)


def test_slices_count_by_their_share_of_a_gpu() -> None:
    result = replay(one("1g.10gb", 7), POOL, "fifo")
    metrics = metrics_of(result)
    assert metrics.gpu_hours == pytest.approx(1.0)
    assert metrics.gpu_hours_utilization == pytest.approx(1 / 12)
    assert metrics.utilization == pytest.approx(1 / 12)
    assert metrics.fragmentation is None
    assert (result.pool, result.trace.groups) == (POOL, ()), "in terms of what was asked for"
    assert [POOL.names[row] for row in result.nodes_of(0)] == ["n0"]
    assert bounds_of(one("1g.10gb", 7), POOL).mean_jct_s == 3600.0
    whole = metrics_of(replay(trace_of([0], [3600], [1]), POOL, "fifo"))
    assert whole.energy_kwh == pytest.approx(metrics.energy_kwh)


def test_limits_count_slices_by_their_share() -> None:
    asked = one("1g.10gb", 1, [0.0] * 21)
    starts = replay(asked, POOL, "fifo", quotas=QuotaSet(Quotas(each=Limits(gpus=2)))).start
    assert sorted(starts.tolist()) == [0.0] * 14 + [3600.0] * 7
    result = replay(one("3g.40gb", 3), POOL, "fifo", quotas=QuotaSet(Quotas(each=Limits(gpus=1))))
    assert result.infeasible_why == ("limit of user ann: at most 1 GPU at once; this job needs 1.5",)


def test_a_failed_node_is_one_event_and_takes_its_slices_with_it() -> None:
    result = replay(one("3g.40gb", 3), POOL, "fifo", failures=[Outage(0, 60.0, 100.0)])
    kinds = [EVENT_KINDS[kind] for kind in result.events.kind]
    assert kinds == ["START", "NODE_DOWN", "NODE_FAIL", "START", "NODE_UP", "END"]
    assert result.end[0] == 60.0 + 3600.0


def test_no_pool_without_slices_takes_jobs_for_slices_as_jobs_for_gpus() -> None:
    result = replay(one("1g.10gb"), Pool.of([NodeSpec(2, gpu_type="V100")]), "fifo")
    assert result.infeasible_why == ("no node has MIG slices of 1g.10gb",)


@pytest.mark.parametrize(("policy", "seed"), [("fifo", 1), ("easy", 2), ("fairshare", 3)])
def test_gpus_are_cut_as_live_and_never_below_a_job(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Cut] = []
    begin = SnapshotRun._begin

    def checked(run: SnapshotRun, new: tuple[Cut, ...]) -> None:
        numbers = [(part.node, number) for held in run._held.values() for part in held.parts for number in part.gpus]
        assert len(numbers) == len(set(numbers)), "no GPU or slice twice"
        slices = {(name, one.number) for name, node in run._nodes.items() for one in node.slices}
        assert {pair for pair in numbers if is_slice(pair[1])} <= slices
        whole = {pair for pair in numbers if not is_slice(pair[1])}
        assert not whole & {(name, gpu_of(number)) for name, number in slices}
        for change in new:
            held = {(name, gpu_of(number)) for name, number in numbers}
            assert (change.node, change.gpu) not in held, "a job is on it"
            assert is_valid(A100, change.slices)
        cuts.extend(change for change in new if (change.node, change.gpu) not in run._cuts)
        begin(run, new)

    monkeypatch.setattr(SnapshotRun, "_begin", checked)
    result = replay(drawn(seed, 60), ON_DEMAND, policy)
    assert result.ran.all()
    assert len(cuts) > 10
    assert result.notes == (f"{len(cuts)} times a GPU was cut into slices or made whole, in 30 s each",)
    again = replay(drawn(seed, 60), ON_DEMAND, policy)
    assert again.events.tobytes() == result.events.tobytes()


@pytest.mark.parametrize(("policy", "seed"), [("fifo-skip", 5), ("easy", 2)])
def test_no_decision_takes_more_cores_than_are_free_while_gpus_are_cut(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is being cut brings its cores to the slices that it had or to those that it will have, not to both."""
    rejected = list[Any]()

    def decided(snapshot: Snapshot, models: Any) -> Plan:
        plan = decide(snapshot, models)
        rejected.extend(check(plan, snapshot)[1])
        return plan

    monkeypatch.setattr(snapshots, "decide", decided)
    trace = drawn(seed, 80)
    assert trace.profile is not None
    trace = replace(trace, profile=np.where(np.arange(80) % 2, -1, trace.profile), cores=3 * trace.gpus)
    cuttable = tuple((gpu, A100) for gpu in range(4))
    nodes = [NodeSpec(4, 16, 1 << 14, name=f"n{i}", cuttable=cuttable) for i in range(3)]
    assert replay(trace, Pool.of(nodes), policy).ran.all()
    assert rejected == []


def test_a_cut_takes_its_time_and_a_gpu_is_whole_again_for_a_job() -> None:
    trace = trace_of([0, 0, 100], [1000, 1000, 500], [3, 1, 3])
    trace = replace(trace, profile=np.array([-1, 0, -1]), profiles=("1g.10gb",))
    result = replay(trace, Pool.of([NodeSpec(4, cuttable=tuple((gpu, A100) for gpu in range(4)))]), "fifo")
    assert result.start.tolist() == [0.0, CUT_S, 1000.0]
    full = replay(replace(trace, gpus=np.array([3, 1, 4])), replace(ON_DEMAND, gpus=np.array([4, 3])), "fifo")
    assert full.ran.all()


@pytest.mark.parametrize("pool", [POOL, ON_DEMAND])
def test_an_agent_that_goes_by_placement_costs_asks_for_them(pool: Pool) -> None:
    weights = TrainedModel("topology", {name: np.zeros(shape) for name, shape in SHAPES.items()}, {}, "", "zeros")
    policy = replace(placed_by("contention", "t"), order="topology", model=weights, spec=agents_spec(1))
    with pytest.raises(UsageError, match="topology agents decide by what placement costs") as error:
        replay(one("1g.10gb"), pool, policy)
    assert "--topology" in (error.value.hint or "")


def test_only_live_policies_are_replayed_where_gpus_are_cut() -> None:
    with pytest.raises(UsageError, match="srtf: srtf does not exist live") as error:
        replay(one("1g.10gb"), ON_DEMAND, "srtf")
    assert "fairshare" in (error.value.hint or "")


def test_published_tables_are_found_by_type_and_by_what_is_asked_for() -> None:
    assert published("NVIDIA A100-SXM4-40GB") is PUBLISHED["A100-40GB"]
    assert published("A100", ["3g.40gb"]) is PUBLISHED["A100-80GB"]
    assert published("", ["4g.24gb"]) is PUBLISHED["A30-24GB"]
    assert published("V100") == ()
    assert gpus_counted(1, "3g.40gb") == 0.5




@pytest.mark.parametrize("order", ["fifo", "fairshare"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), place=st.sampled_from(["best-fit", "rack"]), limit=st.sampled_from([None, 9]),
       backfill=st.sampled_from(["skip", "easy", "conservative"]))  # fmt: skip
def test_jobs_share_gpus_that_may_be_cut_as_others(
    order: str, seed: int, place: Place, limit: int | None, backfill: Backfill
) -> None:
    """Where no job asks for slices, none is cut, and jobs are put beside others as in compiled replays."""
    trace, pool, believed = shares(seed)
    policy = policy_of_spec(PolicySpec(name="t", order=order, place=place, backfill=backfill))
    options = {"believed": believed, "quotas": limit and QuotaSet(Quotas(each=Limits(gpus=limit)))}
    cut = replay(trace, pool, policy, **options)
    whole = replay(trace, replace(pool, cuttable=()), policy, **options)
    np.testing.assert_allclose(cut.start, whole.start)
    np.testing.assert_allclose(cut.end, whole.end)
    np.testing.assert_allclose(paired_runs(cut), paired_runs(whole))
    assert len(paired_runs(cut)) > 3


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["fifo", "easy", "fairshare"]))
def test_jobs_share_whole_gpus_beside_those_that_are_cut(seed: int, policy: str) -> None:
    """No start is one that the controller rejects; a GPU with a pair is cut by none."""
    trace, pool, believed = shares(seed, ("1g.10gb", "3g.40gb"))
    seen = list[tuple[Any, Any]]()

    def watched(snapshot: Any, models: Any) -> Any:
        seen.append((snapshot, decide(snapshot, models)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "decide", watched)
        result = replay(trace, pool, policy, believed=believed)
    assert not any(check(plan, snapshot)[1] for snapshot, plan in seen)
    assert len(paired_runs(result)) > 3
    assert trace.profile is not None
    assert result.ran[trace.profile >= 0].sum() > 5
    partners = [job for snapshot, _ in seen for job in snapshot.running if job.partner]
    assert partners
    assert all(job.shares and job.spec is not None and not job.spec.profile for job in partners)
