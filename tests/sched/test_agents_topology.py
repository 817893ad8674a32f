"""The topology agents live: one scheduler keeps to the rule, several share a partition, and what they cannot decide."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.agents.common import vector
from gpusched.agents.common.vector import vector_size
from gpusched.agents.topology import live
from gpusched.agents.topology.auction import Auction, Site, Workspace, parts_of
from gpusched.agents.topology.live import NOTHING_LEARNED, prepare, workspaces_of
from gpusched.agents.topology.network import SHAPES, untrained, weights_from
from gpusched.config.weights import TrainedModel
from gpusched.model.interference import JobClassEstimate
from gpusched.model.plan import Plan, ReasonCode
from gpusched.model.snapshot import Snapshot
from gpusched.sched.agent import NAN_OUTPUT, Context
from gpusched.sched.arrays import node_arrays_of
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.topology.queue import HARMLESS, PATIENCE_S, Costs
from gpusched.sched.topology.tree import tree_of
from tests.sched.contention import LATE, Plain, beliefs, clusters, named
from tests.sched.racks import FOUR, HALF, TWO_RACKS
from tests.sched.reserved import FEW, H, reservation, reserved_snapshots, sound, with_reservations
from tests.sched.topology_decisions import by_agents, weights
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, started, topology

QUICK = settings(max_examples=60, deadline=None)
DAY_S = 86_400.0


RULE = weights()


def planned(snap: Snapshot, schedulers: int = 1, model: TrainedModel = RULE) -> Plan:
    asked = by_agents(snap, schedulers)
    return decide(asked, dict.fromkeys(asked.policies, model))


def shares(snap: Snapshot, count: int) -> dict[str, int]:
    """Node -> the scheduler that has it."""
    world = node_arrays_of(snap)
    tree = tree_of(snap.topology, [n.name for n in world.nodes])
    found = parts_of(Site(0, len(world.nodes), world.rack, world.total.gpus), tree, count)
    return {n.name: int(part) for n, part in zip(world.nodes, found, strict=True)}


@QUICK
@given(clusters())
def test_one_scheduler_that_learned_nothing_keeps_to_the_rule(snap: Snapshot) -> None:
    """What starts is worth its wait; of those over one node nobody waits who has a good place, none was ever unsure."""
    plan = planned(snap)
    assert plan.troubles == {}
    assert check(plan, by_agents(snap)) == (replace(plan, remarks={}), ())
    left, plain = after(snap, plan), Plain(snap)
    one_rack = max(Counter(snap.topology.racks().get(n.name, n.name) for n in snap.nodes).values())
    for action, job in ((a, j) for a in plan.actions for j in snap.pending if a.job_id == j.id):
        parts = {p.node: len(p.gpus) for p in action.allocation.parts}
        if len(parts) > 1 and one_rack < 2 and snap.topology:
            continue  # no rack could hold it: the cost counts from the fewest that could
        cost = sum(plain.cost(job.spec.name, parts))  # who started with it only adds to it
        assert cost <= HARMLESS + 1e-6 or LATE - job.submit_time >= min(DAY_S, cost**2 * PATIENCE_S) - 1e-3
    free = {n.name: 8 for n in snap.nodes}
    for run in left.running:
        for part in run.allocation.parts:
            free[part.node] -= len(part.gpus)
    now = Plain(left)
    skips = next(iter(snap.policies.values())).backfill == "skip"
    for job in left.pending if skips else ():
        gpus = job.spec.gpus_per_node
        costs = [sum(now.cost(job.spec.name, {n: gpus})) for n in free if free[n] >= gpus and job.spec.nodes == 1]
        if costs:
            assert plan.reasons[job.id].code is ReasonCode.POLICY
            assert min(costs) > HARMLESS


def test_schedulers_have_room_for_all_neighbours_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code would write beyond it: of those that run there may be more than wait."""
    rooms = []

    def kept(auction: Auction, context: Context, costs: Costs) -> list[Workspace]:
        rooms.append((auction.found.shape, len(costs.load.jobs)))
        return workspaces_of(auction, context, costs)

    monkeypatch.setattr(live, "workspaces_of", kept)
    busy = [named(running(f"r{i}", {"n0": (2 * i, 2 * i + 1)}, LATE + 60.0), "calm") for i in range(3)]
    jobs = [pending("j", 2, user="alice", name="calm")]
    planned(snapshot([node("n0")], jobs, busy, place="contention", beliefs=beliefs(0.02, 0.02, 1.0, None)), 2)
    assert rooms == [((2, 4), 4)]


@QUICK
@given(clusters(), st.sampled_from([2, 4]), st.lists(st.sampled_from(["", "rack"]), min_size=5, max_size=5))
def test_several_schedulers_keep_to_their_own_nodes_and_every_plan_is_sound(
    snap: Snapshot, count: int, spread: list[str]
) -> None:
    """But for jobs too large for a part, those that fit on none, and the first that waits for room."""
    snap = replace(snap, pending=tuple(replace(j, spec=replace(j.spec, max_spread=s))
                                       for j, s in zip(snap.pending, spread, strict=False)))  # fmt: skip
    plan = planned(snap, count)
    assert plan.troubles == {}
    assert check(plan, by_agents(snap, count)) == (replace(plan, remarks={}), ())
    mine, racks, total = shares(snap, count), snap.topology.racks(), 8 * len(snap.nodes)
    queue = sorted(snap.pending, key=lambda j: (j.submit_time, j.id))
    waits = [j.id for j in queue if j.id in plan.reasons]
    for name, nodes in started(plan).items():
        job = next(j for j in snap.pending if j.id == name)
        on = {mine[n] for n, _ in nodes}
        if job.spec.max_spread == "rack" and racks:
            assert len({racks.get(n, n) for n, _ in nodes}) == 1
        if len(on) > 1:
            fits = max(Counter(mine.values()).values()) >= job.spec.nodes
            before = [j.id for j in queue[: queue.index(job)]]
            assert 2 * count * job.spec.gpus >= total or not fits or not set(before) & set(waits)


def test_nodes_are_shared_out_by_whole_racks_where_there_are_enough() -> None:
    nodes = [node(f"n{i}") for i in range(8)]
    flat = snapshot(nodes, [])
    assert list(shares(flat, 4).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(shares(flat, 3).values()) == [0, 0, 0, 1, 1, 2, 2, 2]
    crossed = replace(flat, topology=topology(*("r1", "r2", "r3", "r4") * 2))
    assert list(shares(crossed, 4).values()) == [0, 1, 2, 3] * 2
    assert list(shares(crossed, 2).values()) == [0, 0, 1, 1] * 2
    uneven = replace(flat, topology=topology(*("r1",) * 5, "r2", "r3", "r4"))
    assert list(shares(uneven, 4).values()) == [0, 0, 0, 0, 0, 1, 2, 3]
    two = replace(flat, topology=topology("r1", "r2", "r2", "r1", "r1", "r2", "r2", "r1"))
    assert sorted(Counter(shares(two, 4).values()).items()) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert list(shares(snapshot(nodes[:1], []), 4).values()) == [0]


@QUICK
@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=40),
    st.lists(st.integers(0, 8), min_size=8, max_size=8),
)
# Room that its own gave to jobs which then went elsewhere:
@example(gpus=[1, 1, 8, 8, 1, 1, 4, 8, 1, 1, 4, 1, 4], taken=[0, 3, 0, 1, 2, 3, 0, 6])
@example(gpus=[1, 1, 8, 8], taken=[0, 0, 1, 1, 1, 1, 1, 1])
def test_who_waits_for_room_has_none_on_any_scheduler_s_nodes(gpus: list[int], taken: list[int]) -> None:
    """Offers that lapse leave nobody, and nobody of the same size behind them, without the room that there is."""
    nodes = [node(f"n{i}") for i in range(8)]
    busy = [running(f"r{i}", {f"n{i}": tuple(range(k))}, NOW + 900) for i, k in enumerate(taken) if k]
    jobs = [pending(f"j{i}", k, submit=float(i)) for i, k in enumerate(gpus)]
    snap = snapshot(nodes, jobs, busy, backfill="skip", beliefs=beliefs(0.01, 0.01, 1.0))
    plan = planned(snap, 4)
    assert plan.troubles == {}
    free = {f"n{i}": 8 - k for i, k in enumerate(taken)}
    for where in started(plan).values():
        for name, held in where:
            free[name] -= len(held)
    for job in jobs:
        if job.id in plan.reasons and plan.reasons[job.id].code is not ReasonCode.POLICY:
            assert max(free.values()) < job.spec.gpus


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
def test_the_first_in_the_queue_gets_a_place_that_two_want(backfill: str) -> None:
    """Whichever schedulers the two are of: only one node of the four has room for either."""
    nodes = [node(f"n{i}") for i in range(4)]
    busy = [running(f"r{i}", {f"n{i}": tuple(range(8))}, NOW + 900) for i in range(4) if i != 2]
    for k in range(16):
        first, second = f"z{k}", f"a{k}"  # their ids would sort the other way
        jobs = [pending(second, 8, submit=5.0), pending(first, 8, submit=1.0)]
        snap = snapshot(nodes, jobs, busy, backfill=backfill, beliefs=beliefs(1.0, 1.0, 1.0))
        plan = planned(snap, 4)
        assert list(started(plan)) == [first]
        assert check(plan, by_agents(snap, 4))[1] == ()
        assert second in plan.reasons


def test_many_equal_jobs_fill_the_partition_and_no_gpu_is_given_twice() -> None:
    nodes = [node(f"n{i}") for i in range(8)]
    jobs = [pending(f"j{i:02}", 2, submit=float(i), name="calm") for i in range(40)]
    snap = snapshot(nodes, jobs, backfill="skip", beliefs=beliefs(0.01, 0.01, 1.0),
                    topology=topology(*("r1", "r2", "r3", "r4") * 2))  # fmt: skip
    plan = planned(snap, 4)
    held = [(n, g) for nodes_of in started(plan).values() for n, gpus in nodes_of for g in gpus]
    assert len(held) == len(set(held)) == 64
    assert set(started(plan)) == {f"j{i:02}" for i in range(32)}


def test_a_head_that_no_scheduler_has_room_for_starts_on_all_nodes() -> None:
    """One node is free in each part of two: a job over two would else never start."""
    nodes = [node(f"n{i}") for i in range(8)]
    busy = [running(f"r{i}", {f"n{i}": tuple(range(8))}, NOW + 900) for i in range(8) if i % 4]
    jobs = [pending("wide", 4, nodes=2, submit=1.0), pending("next", 4, nodes=2, submit=2.0)]
    snap = snapshot(nodes, jobs, busy, backfill="skip", beliefs=beliefs(0.01, 0.01, 1.0))
    assert shares(snap, 2) == {f"n{i}": i // 4 for i in range(8)}
    assert [n for n, _ in started(planned(snap, 2))["wide"]] == ["n0", "n4"]


@QUICK
@given(clusters(), st.sampled_from([1, 4]))
def test_until_something_is_learned_contention_decides_and_the_plan_says_so(snap: Snapshot, count: int) -> None:
    bare = replace(snap, beliefs={})
    plan, rule = planned(bare, count), decide(replace(bare, policies={"p": by_agents(bare).policies["p"].fallback}))
    assert plan.troubles == {"p": NOTHING_LEARNED}
    assert (plan.actions, plan.reasons) == (rule.actions, rule.reasons)


@QUICK
@given(clusters(), st.sampled_from([1, 4]))
def test_no_number_is_the_fallback_s_decision_and_leaves_no_trace(snap: Snapshot, count: int) -> None:
    of = weights_from(untrained(0))
    of.wait_out[:] = np.nan
    plan = planned(snap, count, weights(np.concatenate([part.ravel() for part in of])))
    rule = decide(by_agents(replace(snap)), {})
    assert rule.troubles == {"p": "no weights"}
    nobody = {reason.code for reason in rule.reasons.values()} == {ReasonCode.BAD_CONSTRAINTS} and not rule.actions
    assert plan.troubles == ({} if nobody else {"p": NAN_OUTPUT}), "who could never run is not looked at"
    assert (plan.actions, plan.reasons) == (rule.actions, rule.reasons)


def test_a_job_bound_to_one_rack_does_not_lie_in_two() -> None:
    """Nor on nodes that hang on no switch, each of which is a rack by itself."""
    job = pending("j", 8, nodes=2, name="calm")
    job = replace(job, spec=replace(job.spec, max_spread="rack", placement_wait_s=0.0))
    snap = snapshot(FOUR, [job], HALF, beliefs=beliefs(0.01, 0.01, 1.0))
    for racks in (TWO_RACKS, topology("r1", "", "r1", "")):
        busy = [running(f"r{i}", {n: (0,)}, NOW + 900) for i, n in enumerate(("n0", "n2"))]
        held = replace(snap, topology=racks, running=tuple(busy))
        assert planned(held).actions == ()
        anywhere = replace(job, spec=replace(job.spec, max_spread="any"))
        assert {n for n, _ in started(planned(replace(held, pending=(anywhere,))))["j"]} == {"n1", "n3"}


@pytest.mark.parametrize("count", [1, 2])
def test_rather_than_wait_a_job_breaks_up_a_node(count: int) -> None:
    """Two GPUs are left beside a loud job, which costs a quarter; an empty node counts for more than that."""
    loud = named(running("r", {"n0": tuple(range(6))}, NOW + 900), "loud")
    jobs = [pending("j", 2, submit=NOW, name="calm")]
    snap = snapshot([node("n0"), node("n1")], jobs, [loud], beliefs=beliefs(0.5, 0.5, 1.0))
    plan = planned(snap, count)
    assert [n for n, _ in started(plan)["j"]] == ["n1"]


def test_learned_weights_decide() -> None:
    """Weights for which waiting is worth much hold a job back on free nodes, and not for longer than its wait."""
    numbers = weights_from(untrained(0))
    numbers.wait_skip[0] = 10.0
    patient = weights(np.concatenate([part.ravel() for part in numbers]))
    snap = snapshot([node("n0")], [pending("j", 2, submit=NOW - 5)], beliefs=beliefs(1.0, 1.0, 1.0))
    assert planned(snap).actions
    plan = planned(snap, model=patient)
    assert (plan.actions, plan.reasons["j"].code) == ((), ReasonCode.POLICY)
    assert planned(replace(snap, now=NOW + DAY_S), model=patient).actions, "but a day is the most"
    hasty = replace(snap, pending=(replace(snap.pending[0], spec=replace(snap.pending[0].spec, placement_wait_s=0.0)),))
    assert planned(hasty, model=patient).actions, "and its own word goes before the policy's"


def test_starts_in_one_partition_count_on_ways_up_in_the_next() -> None:
    """Both have a node in each of two racks: a job over those of the second waits until the one beside it ends."""
    nodes = [node(f"n{i}", partition="ppqq"[i]) for i in range(4)]
    jobs = [pending(part, 8, 2, partition=part, name=name) for part, name in (("p", "loud"), ("q", "calm"))]
    snap = snapshot(nodes, jobs, beliefs=beliefs(1.0, 1.0, 1.0), topology=topology("r1", "r2", "r1", "r2"))
    plan = planned(snap)
    assert list(started(plan)) == ["p"]
    assert plan.reasons["q"].code is ReasonCode.POLICY
    assert list(started(planned(replace(snap, pending=snap.pending[1:])))) == ["q"], "alone"


def test_weights_of_another_shape_are_refused() -> None:
    arrays = vector.to_arrays(untrained(0), SHAPES)
    assert sum(part.size for part in prepare(TrainedModel("topology", arrays, {}, "", ""))) == vector_size(SHAPES)
    arrays["rack"] = arrays["rack"][:2]
    with pytest.raises(ValueError, match="rack is missing or not of shape"):
        prepare(TrainedModel("topology", arrays, {}, "", ""))


@FEW
@given(reserved_snapshots(racked=True), st.sampled_from([1, 2]))
def test_reserved_nodes_are_left_to_whom_they_are_reserved_for(snap: Snapshot, schedulers: int) -> None:
    snap = by_agents(replace(snap, beliefs={"alice/t": JobClassEstimate(kind="alice/t")}), schedulers)
    sound(snap, decide(snap, dict.fromkeys(snap.policies, RULE)))


@pytest.mark.parametrize("schedulers", [1, 2])
def test_nodes_are_kept_for_what_waits_for_the_end_of_a_reservation(schedulers: int) -> None:
    """``long`` would still run on one of the two when ``all``, which is before it, is to start on both."""
    jobs = [pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1.0)]
    jobs.append(pending("short", 1, submit=2.0))
    busy = [running("r", {"n3": (0, 1, 2, 3)}, NOW + 10 * H)]
    nodes = [node("n1"), node("n2"), node("n3", gpus=4)]
    snap = snapshot(nodes, jobs, busy, backfill="easy", beliefs=beliefs(1.0, 1.0, 1.0))
    snap = with_reservations(snap, reservation("m", ["n1"], 0, 4 * H, maintenance=True))
    plan = planned(snap, schedulers)
    assert not plan.troubles
    assert list(started(plan)) == ["short"]
