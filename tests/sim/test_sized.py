"""Replays of a policy that chooses sizes: the live decision at every step, work kept, nothing given twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

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
from gpusched.model.plan import Resize, Start
from gpusched.model.policy import AGENTS, AgentTraits, Mapping, PolicySpec, Resizing
from gpusched.sched.check import check
from gpusched.sched.sizing.question import Claims, Question
from gpusched.sim.engine.build import Outage, ReplayOptions, ResizableJobs
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import replay
from gpusched.sim.resizing import elastic_of
from gpusched.sim.result import PREEMPTED, RESIZED
from gpusched.study.timeline import parts_of
from gpusched.traces.trace import ProgressRecords, Trace
from tests.plugin.building import registered
from tests.sim.reference_sized import SizedPolicy
from tests.sim.sized_worlds import (
    AWAY,
    FAILING,
    POOL,
    SMALL_NODES,
    SPECS,
    Moody,
    Thrifty,
    assert_same,
    mixed,
    some_sizes,
    with_progress,
    with_ranges,
    with_ranks,
)
from tests.sim.worlds import trace_of


def any_size(trace: Trace, most: int = 8) -> ResizableJobs:
    return ResizableJobs(least=np.ones(len(trace), np.int64), most=np.maximum(trace.gpus, most), linear=True)


def elastic(trace: Trace, pool: Pool, **options: Any) -> Any:
    return replay(trace, pool, "elastic", elastic=any_size(trace), **options)


def test_a_single_job_has_its_maximum_from_the_start() -> None:
    result = elastic(trace_of([0], [80], [1], limit=[1000]), Pool.uniform(2, 8))
    assert result.end.tolist() == [10.0]


def test_it_grows_when_another_ends_and_pays_for_the_stop() -> None:
    trace = trace_of([0, 0], [4000, 800], [4, 4], limit=[9000, 9000])
    result = elastic(trace, Pool.uniform(1, 8), restart_s=30.0)
    assert result.end[1] == 800.0
    # The first one has made 800 of 4000 s on four GPUs; it goes on on eight, after the 30 s.
    assert result.end[0] == 800.0 + 30.0 + 3200 / 2
    assert result.restarts.tolist() == [1, 0]
    assert (result.events.kind == PREEMPTED).sum() == 1


def test_it_shrinks_for_one_that_cannot() -> None:
    trace = trace_of([0, 100], [8000, 500], [1, 4], limit=[9000, 900])
    sizes = ResizableJobs(least=np.array([1, 4]), most=np.array([8, 4]), linear=True)
    result = replay(trace, Pool.uniform(1, 8), "elastic", elastic=sizes)
    assert (result.start[1], result.end[1]) == (100.0, 600.0)
    assert result.end[0] == 600.0 + (8000 - 8 * 100 - 4 * 500) / 8


def test_without_elastic_jobs_it_is_easy() -> None:
    rng = np.random.default_rng(3)
    sizes, lasts = rng.choice([1, 2, 4, 8], 200), rng.lognormal(5, 1, 200)
    trace = trace_of(np.sort(rng.uniform(0, 5000, 200)), lasts, sizes, limit=lasts * 2)
    plain, same = replay(trace, Pool.uniform(3, 8), "easy"), replay(trace, Pool.uniform(3, 8), "elastic")
    assert plain.start.tolist() == same.start.tolist()
    assert plain.end.tolist() == same.end.tolist()


def both(
    spec: PolicySpec, trace: Trace, seed: int, model: TrainedModel | None = None, pool: Pool = POOL
) -> tuple[Any, Any, Any]:
    """The fast replay, the one by snapshots, and the policy of that with all that it saw."""
    options: dict[str, Any] = {"elastic": some_sizes(trace, seed), "restart_s": 20.0, "failures": AWAY}
    slow = SizedPolicy(spec, trace, pool, ReplayOptions(**options), model)
    policy = replace(policy_of_spec(msgspec.structs.replace(spec, agent=None)), model=model, spec=spec)
    return replay(trace, pool, policy, **options), replay(trace, pool, slow, placement=spec.place, **options), slow


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_the_fast_replay_decides_as_the_controller_does_on_snapshots(name: str, seed: int) -> None:
    spec = SPECS[name]
    if seed == 3:
        spec = msgspec.structs.replace(
            spec, backfill="none", place="spread", resize=Resizing(min_run_s=5.0, per_hour=2)
        )
    trace = mixed(seed)
    fast, slow, policy = both(spec, trace, seed)
    assert_same(fast, slow)
    assert sum(isinstance(a, Resize) for _, plan in policy.seen for a in plan.actions) > 10
    for snapshot, plan in policy.seen:
        assert check(plan, snapshot)[1] == ()


TYPES = Pool.of([NodeSpec(8, 64, 1 << 16, kind, "p") for kind in "BABA"])


@pytest.mark.parametrize(("seed", "backfill"), [(1, "skip"), (2, "easy"), (3, "none")])
def test_resizable_jobs_are_mapped_to_gpu_types_in_replays_as_live(seed: int, backfill: str) -> None:
    """By the speeds in the policy's file."""
    mapping = Mapping(fragment_cost=0.5, speeds={"*": {"A": 1.0, "B": 0.9}})
    spec = msgspec.structs.replace(SPECS["elastic"], place="fastest", backfill=backfill, mapping=mapping)
    fast, slow, policy = both(spec, mixed(seed), seed, pool=TYPES)
    assert_same(fast, slow)
    assert sum(isinstance(a, Resize) for _, plan in policy.seen for a in plan.actions) > 10


@pytest.mark.parametrize("name", SPECS)
def test_a_rule_that_is_a_component_sizes_as_the_compiled_one_live_and_in_replays(name: str, tmp_path: Path) -> None:
    """Each of the package's own as another package would have it, asked in Python."""
    spec, trace = SPECS[name], mixed(4)
    points = {"acme-rule": f"gpusched.sched.sizing.rules:{spec.sizes.replace('-', '_')}"}
    compiled, _, _ = both(spec, trace, 4)
    with registered(tmp_path, {"sizings": points}):
        fast, slow, policy = both(msgspec.structs.replace(spec, sizes="acme-rule"), trace, 4)
    assert_same(fast, compiled)
    assert_same(slow, compiled)
    assert sum(isinstance(a, Resize) for _, plan in policy.seen for a in plan.actions) > 10


@pytest.mark.parametrize("seed", [1, 2])
def test_an_agent_chooses_in_replays_as_it_does_live(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGENTS, "moody", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "moody", AgentParts(sizes=lambda: Moody))
    model = TrainedModel("moody", {"mood": np.array([seed])}, {}, "", f"moody {seed}")
    spec = msgspec.structs.replace(SPECS["drf"], agent="moody")
    fast, slow, policy = both(spec, mixed(seed), seed, model)
    assert_same(fast, slow)
    troubles = [trouble for _, plan in policy.seen for trouble in plan.troubles.values()]
    assert len(set(troubles)) == 2
    assert len(troubles) < len(policy.seen) // 2
    expected = {f"{troubles.count(why)} times drf chose sizes: {why}" for why in troubles}
    assert expected <= set(fast.notes)


@pytest.mark.parametrize("seed", [1, 2])
def test_dl2_chooses_in_replays_as_it_does_live(seed: int) -> None:
    rng = np.random.default_rng(seed)
    actor = Actor(*(rng.normal(0, 0.3, part.shape).astype(np.float32) for part in zero_actor(8)))
    actor.linear[STEP_FEATURES.index("done")] = -5.0  # GPUs are used
    model = TrainedModel("dl2", arrays_of({"trained": actor}), {"slot_s": "120"}, "", f"drawn {seed}")
    fast, slow, policy = both(msgspec.structs.replace(SPECS["drf"], agent="dl2"), mixed(seed), seed, model)
    assert_same(fast, slow)
    by_rule, _, _ = both(SPECS["drf"], mixed(seed), seed)
    assert fast.end.tolist() != by_rule.end.tolist()
    assert sum(isinstance(a, Resize) for _, plan in policy.seen for a in plan.actions) > 10
    assert not [trouble for _, plan in policy.seen for trouble in plan.troubles.values()]


@pytest.mark.parametrize("reports", [False, True])
def test_maifs_agents_choose_in_replays_as_they_do_live(reports: bool) -> None:
    """The joint step itself, with all parts of its network in use."""
    numbers = untrained(1) + np.random.default_rng(1).normal(0, 0.3, vector_size(MAIFS_WEIGHTS))
    model = TrainedModel("maifs", to_arrays(numbers, MAIFS_WEIGHTS), {}, "", f"maifs {reports}")
    spec, trace = msgspec.structs.replace(SPECS["drf"], agent="maifs"), mixed(2)
    fast, slow, policy = both(spec, with_progress(trace, 2) if reports else trace, 2, model)
    assert_same(fast, slow)
    assert not any(plan.troubles for _, plan in policy.seen)
    assert sum(isinstance(a, Resize) for _, plan in policy.seen for a in plan.actions) > 10


class Listening(Moody):
    """An agent that records its input and leaves the sizes as they are."""

    heard: ClassVar[list[tuple[float, Claims]]] = []

    @classmethod
    def choose_sizes(cls, prepared: Any, question: Question) -> Any:
        claims = question.claims
        cls.heard.append((question.now, claims._replace(reported=claims.reported.copy(), pace=claims.pace.copy())))
        return np.where(claims.jobs["held"] > 0, claims.jobs["held"], claims.sizes[:, 1])


def test_a_policy_knows_a_job_s_pace_only_at_the_sizes_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGENTS, "listening", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "listening", AgentParts(sizes=lambda: Listening))
    trace = replace(
        trace_of([0, 100], [9000, 50], [1, 1], limit=[9999, 99]), model=np.zeros(2, np.int64), models=("m",)
    )
    per_s = {(1, 1): 5.0, (2, 1): 6.0, (4, 1): 50.0, (8, 1): 51.0}
    rates = Rates(profiles=Profiles(series={("m", ""): Series(per_s, "any")}))
    policy = replace(policy_of_spec(SPECS["drf"]), spec=msgspec.structs.replace(SPECS["drf"], agent="listening"))
    policy = replace(policy, model=TrainedModel("listening", {"mood": np.zeros(1)}, {}, "", "listening"))
    Listening.heard.clear()
    result = replay(trace, Pool.uniform(1, 8), policy, elastic=any_size(trace), rates=rates)
    first = [(at, claims.reported[0].tolist(), claims.pace[0]) for at, claims in Listening.heard]
    assert [(at, reported) for at, reported, _ in first[:2]] == [(0.0, [0, 0, 0, 0]), (100.0, [0, 1, 0, 0])]
    assert first[0][2] == pytest.approx([1.0, 2**0.8, 4**0.8, 8**0.8])
    assert first[1][2] == pytest.approx([1.2 / 2**0.8, 1.2, 1.2 * 2**0.8, 1.2 * 4**0.8]), "the profile has 0.2, 1.2, 10"
    assert result.knows == "oracle"
    assert result.end[0] == pytest.approx(9000 / 1.2)


def test_partitions_are_sized_each_for_itself() -> None:
    pool = Pool.of([NodeSpec(8, 64, 1 << 16, "A", name) for name in ("p", "q")])
    trace = mixed(4)
    trace = replace(trace, gpus=np.minimum(trace.gpus, 8), group=np.arange(len(trace)) % 2, groups=("p", "q"))
    spec = SPECS["drf"]
    fast, slow, _ = both(spec, trace, 4, pool=pool)
    for name in ("start", "end", "restarts"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), name)
    assert np.isfinite(fast.end).sum() > 40


@pytest.mark.parametrize("name", SPECS)
def test_no_work_is_lost_and_none_is_made(name: str) -> None:
    rng = np.random.default_rng(1)
    sizes, lasts = rng.choice([1, 2, 4, 6, 16], 120), rng.lognormal(6, 1, 120)
    trace = trace_of(np.sort(rng.uniform(0, 9000, 120)), lasts, sizes, limit=lasts * 3)
    result = replay(trace, POOL, name, elastic=any_size(trace), restart_s=20.0)
    assert not np.isnan(result.end).any()
    # At the most speed that it may ever have, and without any wait, a job takes this long; nothing ends sooner.
    fastest = trace.duration * trace.gpus / np.maximum(trace.gpus, 8)
    assert (result.end - trace.submit >= fastest - 1e-6).all()
    parts = parts_of(result)
    held = float(((parts.end - parts.start) * parts.gpus).sum())
    again = float((parts.gpus[parts.start > result.start[parts.job]]).sum())
    assert result.restarts.sum() > 20
    assert held == pytest.approx((trace.duration * trace.gpus).sum() + 20.0 * again, rel=1e-9)




@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["elastic", "drf", "sia"])
def test_ranks_join_and_leave_in_replays_as_they_do_live(name: str, seed: int) -> None:
    trace, options = with_ranks(mixed(seed, 80), seed), {"restart_s": 20.0, "failures": AWAY}
    assert trace.progress is not None
    slow = SizedPolicy(SPECS[name], trace, SMALL_NODES, ReplayOptions(elastic=elastic_of(trace), **options))
    fast = replay(trace, SMALL_NODES, name, **options)
    assert_same(fast, replay(trace, SMALL_NODES, slow, elastic=elastic_of(trace), **options))
    assert (fast.events.kind == RESIZED).sum() > 5
    assert (fast.events.kind == PREEMPTED).sum() > 5, "others are stopped"
    actions = [action for _, plan in slow.seen for action in plan.actions if isinstance(action, Resize)]
    assert any(action.joins for action in actions)
    for snapshot, plan in slow.seen:
        assert check(plan, snapshot)[1] == ()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["elastic", "drf", "sia"])
def test_hot_jobs_go_on_without_ranks_on_failed_nodes_as_they_do_live(name: str, seed: int) -> None:
    """Also at sizes that no policy would give them, until they are resized."""
    trace = with_ranks(mixed(seed, 30), seed, (1, 2, 4))
    options: dict[str, Any] = {"restart_s": 20.0, "failures": FAILING}
    slow = SizedPolicy(SPECS[name], trace, SMALL_NODES, ReplayOptions(elastic=elastic_of(trace), **options))
    fast = replay(trace, SMALL_NODES, name, **options)
    assert_same(fast, replay(trace, SMALL_NODES, slow, elastic=elastic_of(trace), **options))
    assert slow.lost > 0
    for snapshot, plan in slow.seen:
        assert check(plan, snapshot)[1] == ()


def test_a_hot_job_without_listed_sizes_comes_to_any_number_of_ranks() -> None:
    """To three of four ranks of two GPUs, though only powers of two would be given to it."""
    pool, trace = Pool.of([NodeSpec(2, 8, 1 << 13, "A", "p")] * 4), trace_of([0], [4000], [8], limit=[9000])
    hot = ResizableJobs(least=np.array([1]), most=np.array([8]), rank_gpus=np.array([2]))
    found = replay(trace, pool, "elastic", elastic=hot, failures=(Outage(1, 50.0, 60.0),), restart_s=20.0)
    assert found.start.tolist() == [0.0]
    assert 4000.0 < found.end[0] < 4200.0
    assert PREEMPTED not in found.events.kind


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("agent", ["thrifty", "maifs", ""])
def test_cores_and_memory_within_ranges_are_granted_as_live(
    agent: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is free when a job starts, and by the answer."""
    few = Pool.of([NodeSpec(8, cores, 1 << 15, "A", "p") for cores in (40, 24, 20)])
    trace, model, spec = mixed(seed), None, SPECS["drf"]
    if agent == "thrifty":
        monkeypatch.setitem(AGENTS, "thrifty", AgentTraits(sizes=True))
        monkeypatch.setitem(REGISTRY, "thrifty", AgentParts(sizes=lambda: Thrifty))
        model = TrainedModel("thrifty", {"mood": np.array([seed])}, {}, "", f"thrifty {seed}")
    elif agent:
        numbers = untrained(1) + np.random.default_rng(seed).normal(0, 0.3, vector_size(MAIFS_WEIGHTS))
        model = TrainedModel("maifs", to_arrays(numbers, MAIFS_WEIGHTS), {}, "", f"maifs ranges {seed}")
    options: dict[str, Any] = {"elastic": with_ranges(trace, seed), "restart_s": 20.0, "failures": AWAY}
    slow = SizedPolicy(msgspec.structs.replace(spec, agent=agent or None), trace, few, ReplayOptions(**options), model)
    policy = replace(policy_of_spec(spec), model=model, spec=msgspec.structs.replace(spec, agent=agent or None))
    fast = replay(trace, few, policy, **options)
    assert_same(fast, replay(trace, few, slow, placement=spec.place, **options))
    starts = [action.allocation for _, plan in slow.seen for action in plan.actions if isinstance(action, Start)]
    own = trace.cores / trace.gpus
    less = [a for a in starts if a.parts[0].cores * len(a.parts) < own[int(a.job_id)] * a.gpus]
    assert len(less) > 5, "they go on with fewer cores than go with their GPUs"


def two_hot(cost_s: float) -> Trace:
    """A hot job of ranks of 4 GPUs, 4000 s with one of them, and one of 8 GPUs that comes after 100 s for 500 s."""
    trace = trace_of([0, 100], [4000, 500], [4, 8], limit=[9000, 900])
    none = np.zeros(0, np.int64)
    progress = ProgressRecords(
        steps=np.array([100.0, np.nan]), cost_s=np.array([cost_s, np.nan]), cooldown_s=np.zeros(2),
        size_job=np.array([0, 0, 0, 1]), size_gpus=np.array([4, 8, 12, 8]),
        steps_per_s=np.array([1.0, 2.0, 3.0, np.nan]), rank_gpus=np.array([4, 0]),
        run_job=none, run_gpus=none, run_after_s=np.zeros(0), run_s=np.zeros(0),
    )  # fmt: skip
    return replace(trace, progress=progress, nodes=np.array([1, 2]))


@pytest.mark.parametrize(("cost_s", "pause_s"), [(np.nan, 0.0), (0.0, 0.0), (25.0, 25.0)])
def test_a_hot_job_pays_for_its_group_and_no_restart(cost_s: float, pause_s: float) -> None:
    """Three ranks from the beginning; two leave for the other job, and join again when that has ended."""
    result = replay(two_hot(cost_s), Pool.uniform(3, 4), "elastic", restart_s=300.0)
    assert result.start.tolist() == [0.0, 100.0]
    assert result.end[1] == 600.0
    done = 3 * 100.0 + (500.0 - pause_s)
    assert result.end[0] == pytest.approx(600.0 + pause_s + (4000.0 - done) / 3)
    kinds = result.events.kind.tolist()
    assert (kinds.count(RESIZED), kinds.count(PREEMPTED), result.restarts.tolist()) == (2, 0, [0, 0])
    parts = parts_of(result)
    held = float(((parts.end - parts.start) * parts.gpus)[parts.job == 0].sum())
    assert held == pytest.approx(12 * 100 + 4 * 500 + 12 * (result.end[0] - 600.0))


def test_a_hot_job_whose_ranks_find_no_nodes_keeps_to_what_it_can_have() -> None:
    result = replay(two_hot(0.0), Pool.uniform(2, 8), "elastic")
    assert result.end[0] == 2000.0, "two nodes have two ranks, not one and a half each"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_so_it_does_with_reported_sizes_and_speeds(seed: int) -> None:
    trace, options = with_progress(mixed(seed), seed), {"restart_s": 20.0, "failures": AWAY}
    slow = SizedPolicy(SPECS["elastic"], trace, POOL, ReplayOptions(elastic=elastic_of(trace), **options))
    fast = replay(trace, POOL, "elastic", **options)
    assert_same(fast, replay(trace, POOL, slow, elastic=elastic_of(trace), **options))
    assert sum(isinstance(a, Resize) for _, plan in slow.seen for a in plan.actions) > 5
