"""Placement by what was learned of jobs and their neighbours, against plain Python; and its explanation."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import encode
from msgspec.structs import replace

from gpusched.model.interference import JobClassEstimate
from gpusched.model.plan import Plan, ReasonCode
from gpusched.model.snapshot import Snapshot
from gpusched.model.units import local_clock
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.interference.beliefs import cost_of_neighbour
from gpusched.sched.topology.contention import cost_of
from gpusched.sched.topology.live import _BeliefCache
from gpusched.sched.topology.queue import HARMLESS, PATIENCE_S
from tests.sched.contention import LATE, Plain, arrays, beliefs, clusters, named
from tests.sched.racks import FOUR, HALF, TWO_RACKS, with_place
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, snapshots, started, topology

QUICK = settings(max_examples=150, deadline=None)


@QUICK
@given(clusters())
def test_a_place_costs_what_was_learned(snap: Snapshot) -> None:
    world, _, costs = arrays(snap)
    assert costs is not None
    plain = Plain(snap)
    for j, job in enumerate(snap.pending):
        for nodes in combinations(range(len(world.nodes)), job.spec.nodes):
            c, parts = int(costs.of[j]), dict.fromkeys((world.nodes[n].name for n in nodes), job.spec.gpus_per_node)
            if costs.sure_ways.first[c] == costs.sure_ways.first[c + 1]:
                continue
            rows = np.zeros(len(world.nodes), np.int64)
            rows[: len(nodes)] = nodes
            found = cost_of(costs.tree, costs.sure, costs.load, costs.sure_ways, c, rows, job.spec.nodes,
                            job.spec.gpus_per_node, costs.search)  # fmt: skip
            own, harm = plain.cost(job.spec.name, parts)
            assert found[1] == pytest.approx(harm, abs=1e-9)
            least = min(plain.slower(job.spec.name, dict.fromkeys((world.nodes[n].name for n in other), 1))
                        for other in combinations(range(len(world.nodes)), job.spec.nodes))  # fmt: skip
            least = plain.slower(job.spec.name, parts) if least == 1.0 and own < 0 else least
            if least == 1.0:  # else no rack could hold it, and the fewest that could are the best
                assert found[0] == pytest.approx(own, abs=1e-6)


@QUICK
@given(clusters())
def test_who_starts_has_a_place_worth_its_wait_and_who_waits_has_none(snap: Snapshot) -> None:
    plan = decide(snap)
    assert check(plan, snap) == (plan, ())
    left = after(snap, plan)
    waits = {j.id: j for j in snap.pending if j.id in plan.reasons and plan.reasons[j.id].code is ReasonCode.POLICY}
    for job in waits.values():
        assert LATE - job.submit_time < 86_400
        assert plan.reasons[job.id].message.startswith("waits for a better place until ")
    one_rack = Counter(snap.topology.racks().get(n.name, n.name) for n in snap.nodes)
    for action, job in ((a, j) for a in plan.actions for j in snap.pending if a.job_id == j.id):
        parts = {p.node: len(p.gpus) for p in action.allocation.parts}
        others = [r for r in left.running if r.id in {x.id for x in snap.running}]
        own, harm = Plain(replace(snap, running=tuple(others))).cost(job.spec.name, parts)
        if len(parts) > 1 and max(one_rack.values()) < 2 and snap.topology:
            continue  # no rack could hold it: the cost counts from the fewest that could
        cost = own + harm  # without those that started with it, which only add to it
        assert cost <= HARMLESS + 1e-6 or LATE - job.submit_time >= min(86_400, cost**2 * PATIENCE_S) - 1e-3


@QUICK
@given(clusters())
def test_the_head_can_start_when_its_wait_is_over(snap: Snapshot) -> None:
    """Jobs started behind it do not delay it: at the end of its wait it starts at once, by all time limits."""
    policies = {name: replace(policy, backfill="easy") for name, policy in snap.policies.items()}
    snap = replace(snap, policies=policies)
    plan = decide(snap)
    waits = [j for j in snap.pending if j.id in plan.reasons and plan.reasons[j.id].code is ReasonCode.POLICY]
    if not waits:
        return
    head = min((j for j in snap.pending if j.id in plan.reasons), key=lambda j: (j.submit_time, j.id))
    if head not in waits:
        return
    over = head.submit_time + 86_400
    left = after(snap, plan)
    runs = tuple(r for r in left.running if r.expected_end > over)
    later = decide(replace(left, now=over, running=runs))
    assert head.id in started(later)


@QUICK
@given(snapshots(racked=True))
def test_as_long_as_nothing_was_learned_it_is_rack(snap: Snapshot) -> None:
    mine, rack = decide(with_place(snap, "contention")), decide(with_place(snap, "rack"))
    assert encode(replace(mine, remarks={})) == encode(rack)
    bare = replace(snap, topology=topology())
    mine, best = decide(with_place(bare, "contention")), decide(with_place(bare, "best-fit"))
    assert encode(replace(mine, remarks={})) == encode(best)


def agree_on_who_waits(snap: Snapshot, plan: Plan) -> None:
    """What the next plan says of who waits is what `explain` says."""
    left = after(snap, plan)
    again = decide(left)
    if again.actions:
        return
    for job_id, reason in again.reasons.items():
        why = explain(left, job_id).reason
        if ReasonCode.BACKFILL not in (reason.code, why.code):
            assert (why.code, why.message) == (reason.code, reason.message), job_id


@QUICK
@given(clusters())
def test_why_says_what_the_plan_says(snap: Snapshot) -> None:
    agree_on_who_waits(snap, decide(snap))


def test_a_job_waits_for_its_rack_while_that_pays_and_its_reason_says_so() -> None:
    job = pending("j", 8, nodes=2, submit=NOW, name="calm")
    known = beliefs(0.02, 0.02, 1.18)
    snap = snapshot(FOUR, [job], HALF, place="contention", backfill="easy", topology=TWO_RACKS, beliefs=known)
    plan = decide(snap)
    until = NOW + 0.18**2 * PATIENCE_S
    clock = local_clock(until, NOW)
    message = f"waits for a better place until {clock} at the latest; started now, it would run 18 % slower"
    assert (plan.actions, plan.reasons["j"].message) == ((), message)
    explanation = explain(snap, "j")
    assert explanation.reason == plan.reasons["j"]
    assert explanation.racks == 2
    assert explanation.next_steps[0] == "accept what is free (--placement-wait 0) now"
    assert [n for n, _ in started(decide(replace(snap, running=(HALF[1],))))["j"]] == ["n0", "n1"]
    assert [n for n, _ in started(decide(replace(snap, now=until + 1)))["j"]] == ["n1", "n3"]
    capped = with_place(snap, "contention", placement_wait_s=3600.0)
    assert [n for n, _ in started(decide(replace(capped, now=NOW + 3601)))["j"]] == ["n1", "n3"]
    own = replace(job, spec=replace(job.spec, placement_wait_s=0.0))
    assert decide(replace(snap, pending=(own,))).actions, "its own word goes before the policy's"
    assert decide(replace(snap, beliefs=beliefs(0.02, 0.02, 1.04))).actions, "4 % is not worth waiting"


def test_neighbours_are_kept_apart_and_waited_for() -> None:
    """Two loud jobs over both nodes of a rack each: a calm one goes where none is, or waits."""
    nodes = [node(f"n{i}") for i in range(6)]
    loud = [named(running(f"l{i}", {f"n{2 * i}": (0, 1), f"n{2 * i + 1}": (0, 1)}, NOW + 900), "loud")
            for i in range(3)]  # fmt: skip
    job = pending("j", 2, nodes=2, submit=NOW, name="calm", user="alice")
    racks = topology("r1", "r1", "r2", "r2", "r3", "r3")
    snap = snapshot(nodes, [job], loud[:2], place="contention", topology=racks, beliefs=beliefs(1.0, 0.5, 1.0))
    assert {n for n, _ in started(decide(snap))["j"]} == {"n4", "n5"}
    full = replace(snap, running=tuple(loud))
    assert decide(full).reasons["j"].message.endswith(" at the latest; started now, it would run 50 % slower")
    measured = replace(full, beliefs=beliefs(1.0, 0.5, 1.0, pair=0.1))
    cost = cost_of_neighbour(*measured.beliefs.values(), "nic")
    assert 0.1 < cost.slower < 0.25
    assert f"it would run {100 * cost.slower:.0f} % slower" in decide(measured).reasons["j"].message, "measured first"
    harmed = replace(full, pending=(pending("k", 2, nodes=2, submit=NOW, name="loud", user="alice"),),
                     running=tuple(named(job, "calm") for job in loud))  # fmt: skip
    assert "at the latest; started now, it would slow down its neighbours" in decide(harmed).reasons["k"].message


def test_placement_waits_only_for_measured_benefits() -> None:
    unknown = [named(running("l", {"n0": (0, 1), "n1": (0, 1)}, NOW + 900), "other")]
    job = pending("j", 6, nodes=2, submit=NOW, name="new", user="alice")
    racks = topology("r1", "r1")
    snap = snapshot(FOUR[:2], [job], unknown, place="contention", topology=racks, beliefs=beliefs(1.0, 1.0, 2.0))
    assert decide(snap).actions
    nodes = [*FOUR[:2], node("n2"), node("n3")]
    free = replace(snap, nodes=tuple(nodes), topology=topology("r1", "r1", "r2", "r2"),
                   pending=(pending("k", 4, nodes=2, submit=NOW, name="new", user="alice"),))  # fmt: skip
    assert {n for n, _ in started(decide(free))["k"]} == {"n2", "n3"}, "but it keeps away where it can"


def test_a_job_that_waits_for_a_place_reserves_only_under_easy() -> None:
    """The head could start on n1 and n3: who outlasts its wait may not have both and n4, who ends before may."""
    own = {"limit": 90_000, "user": "alice"}
    jobs = [pending("head", 8, nodes=2, submit=NOW - 9, name="calm", user="alice"),
            pending("long", 8, submit=NOW - 8, **own), pending("more", 8, submit=NOW - 7, **own)]  # fmt: skip
    nodes = [*FOUR, node("n4")]
    racks = topology("r1", "r1", "r2", "r2", "r3")
    snap = snapshot(nodes, jobs, HALF, place="contention", backfill="easy", topology=racks,
                    beliefs=beliefs(0.02, 0.02, 1.6))  # fmt: skip
    plan = decide(snap)
    assert plan.reasons["head"].code is ReasonCode.POLICY
    assert len(plan.actions) == 1
    (why,) = (plan.reasons[name] for name in ("long", "more") if name in plan.reasons)
    assert why.code is ReasonCode.BACKFILL
    assert why.message == "fits now, but would run past the start of job head, which waits for a better place"
    assert explain(after(snap, plan), "more").reason == why
    short = [replace(job, spec=replace(job.spec, time_limit_s=80_000)) for job in jobs[1:]]
    assert len(decide(replace(snap, pending=(jobs[0], *short))).actions) == 2
    assert explain(replace(snap, pending=(jobs[0], *short)), "more").reason.code is ReasonCode.POLICY


@QUICK
@given(clusters())
def test_nobody_waits_where_a_good_place_is_free(snap: Snapshot) -> None:
    """Of jobs over one node every place is looked at here; those over several, and EASY's kept room, are left out."""
    policies = {name: replace(policy, backfill="skip") for name, policy in snap.policies.items()}
    plan = decide(replace(snap, policies=policies))
    left = after(snap, plan)
    free = {n.name: 8 for n in snap.nodes}
    for job in left.running:
        for part in job.allocation.parts:
            free[part.node] -= len(part.gpus)
    specs = {job.id: job.spec for job in snap.pending}
    plain = Plain(replace(left, running=tuple(replace(job, spec=job.spec or specs[job.id]) for job in left.running)))
    for job in left.pending:
        gpus = job.spec.gpus_per_node
        rooms = [n for n in free if free[n] >= gpus] if job.spec.nodes == 1 else []
        costs = [sum(plain.cost(job.spec.name, {n: gpus})) for n in rooms]
        if costs:
            assert plan.reasons[job.id].code is ReasonCode.POLICY
            assert min(costs) > HARMLESS


def test_earlier_starts_count_as_neighbours_of_later_ones() -> None:
    """The second would be beside the first, were that not on its links yet."""
    two = [replace(pending(name, 2, nodes=2, submit=NOW, name=name, user="alice"), id=f"j{i}")
           for i, name in enumerate(("loud", "calm"))]  # fmt: skip
    nodes = [node(f"n{i}") for i in range(4)]
    snap = snapshot(nodes, two, place="contention", topology=TWO_RACKS, beliefs=beliefs(1.0, 0.5, 1.0))
    found = started(decide(snap))
    assert not {n for n, _ in found["j0"]} & {n for n, _ in found["j1"]}
    few = replace(snap, nodes=tuple(nodes[:2]), topology=topology("r1", "r1"))
    assert list(decide(few).reasons) == ["j1"]


def test_max_spread_rack_is_respected() -> None:
    """Nodes on no switch are each a rack of their own."""
    job = pending("j", 8, nodes=2, submit=NOW - 90_000, name="calm", user="alice")
    job = replace(job, spec=replace(job.spec, max_spread="rack"))
    for racks in (TWO_RACKS, topology("r1", "r1", "", "")):
        busy = HALF if racks is TWO_RACKS else HALF[:1]
        snap = snapshot(FOUR, [job], busy, place="contention", topology=racks, beliefs=beliefs(0.02, 0.02, 1.0))
        assert decide(snap).reasons["j"].code is ReasonCode.RESOURCES
        assert len(decide(replace(snap, running=())).actions) == 1


def test_of_more_nodes_and_declared_ways_up_counts_what_was_measured() -> None:
    """No job waits for fewer nodes without a measurement of more; narrow uplinks are part of the measurements."""
    job = pending("j", 8, submit=NOW, name="new", user="alice")
    job = replace(job, spec=replace(job.spec, max_nodes=2))
    half = [running(f"r{i}", {f"n{i}": (0, 1, 2, 3)}, NOW + 900) for i in range(4)]
    snap = snapshot(FOUR, [job], half, place="contention", beliefs=beliefs(0.02, 0.02, 1.18), topology=TWO_RACKS)
    assert len(started(decide(snap))["j"]) == 2
    narrow = replace(TWO_RACKS, switches=tuple(replace(s, uplink_gbps=10.0) for s in TWO_RACKS.switches))
    calm = pending("k", 8, nodes=2, submit=NOW, name="calm", user="alice")
    snap = replace(snap, pending=(calm,), running=tuple(HALF), topology=narrow)
    assert "started now, it would run 18 % slower" in decide(snap).reasons["k"].message
    wide, thin = narrow.switches
    snap = replace(snap, topology=replace(narrow, switches=(wide, replace(thin, uplink_gbps=5.0))))
    assert decide(snap).reasons["k"].message != decide(replace(snap, topology=narrow)).reasons["k"].message


@QUICK
@given(snapshots(racked=True), st.sampled_from([1.0, 1.3]), st.sampled_from([0.02, 0.6]))
def test_any_cluster_gets_a_sound_plan_that_why_agrees_with(snap: Snapshot, spread: float, strong: float) -> None:
    known = beliefs(strong, strong, spread)
    known["alice/t"] = replace(known["alice/calm"], kind="alice/t")
    snap = replace(with_place(snap, "contention"), beliefs=known)
    plan = decide(snap)
    assert check(plan, snap) == (plan, ())
    agree_on_who_waits(snap, plan)


def test_a_job_rather_takes_what_only_public_tables_mind_than_waiting() -> None:
    """By all that is believed n0 is cheaper, but what it costs is measured, and worth a wait."""
    busy = [named(running("l", {"n0": (0, 1, 2, 3)}, NOW + 900), "loud"),
            named(running("o", {"n1": (0, 1, 2, 3)}, NOW + 900), "other")]  # fmt: skip
    job = pending("j", 2, submit=NOW, name="new", user="alice")
    snap = snapshot(FOUR[:2], [job], busy, place="contention", beliefs=beliefs(0.02, 0.3, 1.0))
    assert [n for n, _ in started(decide(snap))["j"]] == ["n1"]
    assert [n for n, _ in started(decide(replace(snap, beliefs=beliefs(0.02, 0.2, 1.0))))["j"]] == ["n0"]


def test_a_cache_that_another_thread_fills_can_be_taken_over() -> None:
    """A late agent, a shadow or a forecast goes on with former beliefs while the next cycle begins with new ones."""
    known = JobClassEstimate(kind="a/b")
    former = _BeliefCache({"a/b": known}, None)

    class Row:
        @property
        def alone(self) -> bool:
            former.rows["a/b", len(former.rows) + 100, ()] = Row()  # type: ignore[assignment]
            return True

    former.rows = {("a/b", gpus, ()): Row() for gpus in range(3)}  # type: ignore[misc]
    later = _BeliefCache({"a/b": known}, former)
    assert len(later.rows) == 3
