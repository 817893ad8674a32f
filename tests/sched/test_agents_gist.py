"""The GIST agent's deciding pass: as a heuristic exactly that, as anything sound, and the same live and in replays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.agents.gist.networks import HOLD_INPUTS, heuristic
from gpusched.config.weights import TrainedModel, load_model, save_model
from gpusched.model.plan import Plan, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from tests.sched.gist_decisions import EASY, GIST, live_at, workloads
from tests.sched.reserved import FEW, reserved_snapshots, sound
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, snapshots, started
from tests.sim.worlds import trace_of

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def model(arrays: dict[str, np.ndarray], path: str = "here") -> TrainedModel:
    return TrainedModel("gist", arrays, {}, "", path)


def drawn(seed: int, holds: float = 0.0) -> dict[str, np.ndarray]:
    """Weights of no sense at all. ``holds``: how much it likes to let jobs wait."""
    rng = np.random.default_rng(seed)
    arrays = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in heuristic(6, seed).items()}
    arrays["hold.base"][HOLD_INPUTS.index("one")] += holds
    return arrays


ORDERED = heuristic(log_limit=-1.0)
WILD = [model(drawn(seed, holds), f"wild {seed}") for seed, holds in enumerate((-3.0, 0.0, 0.0, 3.0))]
MODELS = st.sampled_from(WILD)


def by_agent(snap: Snapshot, of: TrainedModel | None) -> Plan:
    policies = dict.fromkeys(snap.policies, GIST)
    models = {} if of is None else dict.fromkeys(snap.policies, of)
    return decide(msgspec.structs.replace(snap, policies=policies), models)


@QUICK
@given(snapshots(), MODELS)
def test_whatever_the_weights_the_plan_is_sound(snap: Snapshot, wild: TrainedModel) -> None:
    """Masks, held GPUs, broken nodes, gangs, array bounds: `check` counts them without the passes."""
    plan = by_agent(snap, wild)
    assert plan.troubles == {}
    checked, rejections = check(plan, snap)
    assert rejections == ()
    assert checked == plan
    assert started(plan).keys() | plan.reasons.keys() == {j.id for j in snap.pending}
    assert all(r.message for r in plan.reasons.values())
    resources = {j.array_id: j.array_room for j in snap.pending if j.array_room is not None}
    tasks = [j.array_id for j in snap.pending if j.id in started(plan) and j.array_id]
    assert all(tasks.count(array) <= room for array, room in resources.items())
    for job in (j for j in snap.pending if j.id in started(plan)):
        where = {name for name, _ in started(plan)[job.id]}
        assert len(where) == job.spec.nodes
        assert not where & {*job.spec.exclude, *job.excluded_nodes}
        assert not job.spec.nodelist or where <= set(job.spec.nodelist)


@QUICK
@given(snapshots(simple=True))
def test_as_a_heuristic_it_is_that_heuristic(snap: Snapshot) -> None:
    """Shortest limit first with EASY and best fit, among nodes with as many cores and as much memory.

    Limits are far apart, so that no scores are equal by rounding.
    """
    jobs = tuple(
        msgspec.structs.replace(j, spec=msgspec.structs.replace(j.spec, time_limit_s=60 * (i + 1) ** 2))
        for i, j in enumerate(snap.pending)
    )
    alike = tuple(msgspec.structs.replace(n, cores=32, memory_mib=16384) for n in snap.nodes)
    snap = msgspec.structs.replace(snap, pending=jobs, nodes=alike)
    staged = PolicySpec(name="s", order="sjf", place="best-fit", backfill="easy")
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, staged)))
    mine = by_agent(snap, model(ORDERED))
    assert mine.actions == plain.actions
    assert {j: (r.code, r.message) for j, r in mine.reasons.items()} == {
        j: (r.code, r.message) for j, r in plain.reasons.items()
    }


@QUICK
@given(snapshots(), MODELS)
def test_without_weights_the_fallback_decides_and_nothing_else_changes(snap: Snapshot, wild: TrainedModel) -> None:
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, EASY)))
    huge = {n: np.full_like(a, 3e38) for n, a in wild.arrays.items()}
    narrow = {**wild.arrays, "server.base": wild.arrays["server.base"][:-1]}
    lacking = {n: a for n, a in wild.arrays.items() if n != "hold.base"}
    queues = {j.spec.partition for j in snap.pending if not j.held_by and not j.dependency and j.eligible_time is None}
    for bad in (None, model(narrow, "narrow"), model(lacking, "lacking"), model(huge, "huge")):
        plan = by_agent(snap, bad)
        assert plan.actions == plain.actions
        assert plan.reasons == plain.reasons
        assert set(plan.troubles) == queues
        assert all(plan.troubles.values())


def test_priorities_go_before_scores() -> None:
    jobs = [pending("long", 8, limit=90_000, priority=5), pending("short", 8, limit=600)]
    snap = snapshot([node("a")], jobs)
    assert list(started(by_agent(snap, model(ORDERED)))) == ["long"]
    plain = [msgspec.structs.replace(j, priority=0) for j in jobs]
    assert list(started(by_agent(msgspec.structs.replace(snap, pending=tuple(plain)), model(ORDERED)))) == ["short"]


def test_it_may_keep_a_job_waiting_though_it_fits_but_never_with_nothing_running() -> None:
    arrays = heuristic(hold={"one": 1.0})
    busy = [running("r", {"a": (0,)}, NOW + 60)]
    plan = by_agent(snapshot([node("a")], [pending("j", 1)], busy), model(arrays))
    assert plan.actions == ()
    assert plan.reasons["j"].code == ReasonCode.POLICY
    assert "the agent keeps the servers free" in plan.reasons["j"].message
    policies = dict.fromkeys(("p",), GIST)
    held = msgspec.structs.replace(snapshot([node("a")], [pending("j", 1)], busy), policies=policies)
    assert explain(held, "j").reason == plan.reasons["j"]
    assert list(started(by_agent(snapshot([node("a")], [pending("j", 1)]), model(arrays)))) == ["j"]
    old = snapshot([node("a")], [pending("j", 1, submit=NOW - 8 * 86400)], busy)
    assert list(started(by_agent(old, model(arrays)))) == ["j"], "its patience is at an end"


def test_servers_are_chosen_by_score() -> None:
    """The same question with the sign turned: best fit becomes worst fit, for gangs as well."""
    arrays = heuristic()
    turned = {**arrays, "server.base": -arrays["server.base"]}
    nodes = [node("a"), node("b"), node("c")]
    busy = [running("r", {"a": (0, 1)}, NOW + 60), running("s", {"b": (0,)}, NOW + 60)]
    one, two = snapshot(nodes, [pending("j", 2)], busy), snapshot(nodes, [pending("j", 4, nodes=2)], busy)
    assert [n for n, _ in started(by_agent(one, model(arrays)))["j"]] == ["a"]
    assert [n for n, _ in started(by_agent(one, model(turned, "turned")))["j"]] == ["c"]
    assert [n for n, _ in started(by_agent(two, model(arrays)))["j"]] == ["a", "b"]
    assert [n for n, _ in started(by_agent(two, model(turned, "turned")))["j"]] == ["c", "b"]


@pytest.mark.parametrize("size", [2, 8, 140])
def test_one_set_of_weights_serves_partitions_of_any_size(size: int) -> None:
    rng = np.random.default_rng(size)
    nodes = [node(f"n{i:03}") for i in range(size)]
    busy = [running(f"r{i}", {f"n{i:03}": tuple(range(int(rng.integers(1, 9))))}, NOW + 600.0 * i)
            for i in range(0, size, 2)]  # fmt: skip
    jobs = [pending(f"j{i}", int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 1, 2])), int(rng.integers(1, 50)) * 600)
            for i in range(4 * size)]  # fmt: skip
    snap = snapshot(nodes, jobs, busy)
    for weights in (*WILD, model(ORDERED)):
        plan = by_agent(snap, weights)
        assert plan.troubles == {}
        assert check(plan, snap)[1] == ()
    assert len(plan.actions) >= size // 2


def test_the_weights_survive_their_file(tmp_path) -> None:
    save_model(tmp_path / "p.safetensors", "gist", WILD[1].arrays, {"knows": "limit", "patience_s": "60"})
    read = load_model(tmp_path, "p", "gist")
    assert {n: a.tobytes() for n, a in read.arrays.items()} == {n: a.tobytes() for n, a in WILD[1].arrays.items()}
    assert read.about["patience_s"] == "60"


# Live and in the simulator


def replayed(trace, pool, of: TrainedModel) -> ReplayResult:
    policy = ReplayPolicy(name="g", order="gist", knows="limit", source="", backfill="easy", model=of)
    return replay(trace, pool, policy)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), MODELS)
def test_live_and_replay_choose_the_same(workload, wild: TrainedModel) -> None:
    """At every instant of a replay: the same jobs in the same order on the same servers."""
    result = replayed(*workload, wild)
    assert len(result.infeasible) == int((~result.ran).sum()), "no job waits for ever"
    for now in np.unique(result.events.time).tolist():
        plan = by_agent(live_at(result, now), wild)
        assert plan.troubles == {}
        new = np.flatnonzero(result.start == now).tolist()
        expected = {result.trace.ids[j]: [result.pool.names[n] for n in result.nodes_of(j).tolist()] for j in new}
        assert {job: [name for name, _ in parts] for job, parts in started(plan).items()} == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(alike=True))
def test_a_replay_as_a_heuristic_is_that_heuristics(workload) -> None:
    trace, pool = workload
    mine, plain = replayed(trace, pool, model(ORDERED)), replay(trace, pool, "sjf-limit+easy", placement="best-fit")
    assert mine.start.tobytes() == plain.start.tobytes()
    assert mine.part_nodes.tobytes() == plain.part_nodes.tobytes()


def test_the_same_replay_twice_is_the_same() -> None:
    rng = np.random.default_rng(3)
    trace = trace_of(np.cumsum(rng.exponential(60, 300)), rng.exponential(3000, 300), rng.choice([1, 2, 4, 8, 16], 300),
                     limit=rng.exponential(9000, 300))  # fmt: skip
    pool = Pool.uniform(4, 8)
    assert replayed(trace, pool, WILD[1]).events.tobytes() == replayed(trace, pool, WILD[1]).events.tobytes()


def test_a_waiting_job_of_a_whole_cluster_is_started_in_the_end() -> None:
    snap = snapshot([node("a"), node("b")], [pending("f", 8, nodes=2), pending("s", 1)])
    assert after(snap, by_agent(snap, WILD[3])).running


@FEW
@given(reserved_snapshots(), MODELS)
def test_reserved_nodes_are_left_to_whom_they_are_reserved_for(snap: Snapshot, wild: TrainedModel) -> None:
    sound(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, GIST)), by_agent(snap, wild))
