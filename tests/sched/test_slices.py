"""MIG slices in decisions: who gets them, that nobody gets one twice, and what a node has left for whole GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.limits import Bound, LimitRule, limit_units
from gpusched.model.plan import Plan, ReasonCode, Start
from gpusched.model.slices import slice_index
from gpusched.model.slicetables import GPU_PARTS, PUBLISHED, gpus_counted, parts_of
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.slices.split import joined, split
from tests.sched.slices import MIXED, SEVEN, cut, pending, running
from tests.sched.worlds import after, node, snapshot, started
from tests.strategies import among


def decided(snap: Snapshot) -> Plan:
    """Return the decision, of which the check refuses nothing."""
    plan, rejections = check(decide(snap), snap)
    assert rejections == ()
    return plan


def test_jobs_for_slices_get_slices_and_jobs_for_gpus_whole_ones() -> None:
    nodes = [cut(node("a", gpus=2), {1: MIXED})]
    jobs = [pending("one", 2, "1g.10gb"), pending("big", 1, "3g.40gb"), pending("gpu", 1), pending("next", 1)]
    plan = decided(snapshot(nodes, jobs, backfill="easy"))
    assert started(plan) == {"one": [("a", (2004, 2005))], "big": [("a", (2000,))], "gpu": [("a", (0,))]}
    assert plan.reasons["next"].code is ReasonCode.RESOURCES, "the cut GPU is none for it"


def test_a_slice_is_one_jobs() -> None:
    nodes = [cut(node("a", gpus=1), {0: SEVEN}), cut(node("b", gpus=1), {0: SEVEN})]
    busy = [running("r", {"a": (1000, 1001, 1002)}, "1g.10gb")]
    jobs = [pending("gang", 4, "1g.10gb", nodes=2), pending("x", 3, "1g.10gb"), pending("y", 1, "1g.10gb")]
    plan = decided(snapshot(nodes, jobs, busy, backfill="easy"))
    assert started(plan) == {"gang": [("a", (1003, 1004, 1005, 1006)), ("b", (1000, 1001, 1002, 1003))],
                             "x": [("b", (1004, 1005, 1006))]}  # fmt: skip
    assert plan.reasons["y"].code is ReasonCode.RESOURCES


def test_a_queue_for_slices_does_not_hold_up_whole_gpus() -> None:
    nodes = [cut(node("a", gpus=2), {1: SEVEN})]
    jobs = [pending("eight", 8, "1g.10gb"), pending("none", 1, "2g.20gb"), pending("gpu", 1)]
    plan = decided(snapshot(nodes, jobs))
    assert started(plan) == {"gpu": [("a", (0,))]}
    assert {plan.reasons[name].code for name in ("eight", "none")} == {ReasonCode.BAD_CONSTRAINTS}


def test_a_job_names_nodes_as_they_are_called() -> None:
    nodes = [cut(node(name, gpus=1), {0: SEVEN}) for name in "abc"]
    jobs = [pending("c", 1, "1g.10gb", nodelist=("c",)), pending("b", 1, "1g.10gb", exclude=("a",)),
            pending("d", 1, "1g.10gb", excluded_nodes=("a", "b"))]  # fmt: skip
    assert {name: where[0][0] for name, where in started(decided(snapshot(nodes, jobs))).items()} == {
        "c": "c", "b": "b", "d": "c"}  # fmt: skip


def test_unusable_slices_are_not_allocated() -> None:
    blocked = {slice_index(0, start): "BUSY: pid 1" for start in range(6)}
    nodes = [replace(cut(node("a", gpus=1), {0: SEVEN}), blocked=blocked)]
    plan = decided(snapshot(nodes, [pending("x", 1, "1g.10gb"), pending("y", 1, "1g.10gb")], backfill="easy"))
    assert started(plan) == {"x": [("a", (1006,))]}


@pytest.mark.parametrize(
    ("profile", "gpus", "why"),
    [
        ("", (1,), "GPU 1 of a is cut into slices"),
        ("", (2000,), "node a has no GPU 2000"),
        ("1g.10gb", (0,), "node a has no slice 0"),
        ("1g.10gb", (2000,), "node a has no slice 1:1g.10gb@0"),
        ("3g.40gb", (2000, 2000), "a GPU of a is allocated twice"),
    ],
)
def test_the_check_knows_what_a_slice_is(profile: str, gpus: tuple[int, ...], why: str) -> None:
    snap = snapshot([cut(node("a", gpus=2), {1: MIXED})], [pending("j", len(gpus), profile)])
    part = NodeAllocation(rank=0, node="a", gpus=gpus, cores=1, memory_mib=1024)
    start = Start("j", Allocation("j", (part,)))
    plan, rejections = check(Plan(actions=(start,)), snap)
    assert not plan.actions
    assert rejections[0].why == why


def test_slices_have_their_share_of_the_nodes_cores_and_whole_gpus_the_rest() -> None:
    rows = split(snapshot([cut(node("a", gpus=4, cores=64), {3: MIXED})], [])).nodes
    assert {row.name: (row.partition, row.gpus, row.cores) for row in rows} == {
        "a": ("p", (0, 1, 2), 50),  # of the cut GPU's 16, 14 are its slices'
        "a/3g.40gb": ("p/3g.40gb", (4000,), 8),
        "a/1g.10gb": ("p/1g.10gb", (4004, 4005, 4006), 6),
    }


def test_cores_that_a_job_already_had_come_to_slices_when_it_ends() -> None:
    nodes, job = [cut(node("a", gpus=4, cores=64), {3: MIXED})], pending("x", 1, "1g.10gb", cores_per_node=6)
    free = {
        held: started(decided(snapshot(nodes, [job], [running("r", {"a": (0,)}, cores=held)], backfill="easy")))
        for held in (50, 58, 59, 64)
    }
    assert free == {50: {"x": [("a", (4004,))]}, 58: {"x": [("a", (4004,))]}, 59: {}, 64: {}}, "the 3g.40gb lends first"
    waits = decided(snapshot(nodes, [job], [running("r", {"a": (0,)}, cores=60)], backfill="easy")).reasons["x"]
    assert waits.code is ReasonCode.RESOURCES
    assert "10:00" in waits.message, "it can start when that job ends"


def test_nothing_is_split_where_there_are_no_slices() -> None:
    snap = snapshot([node("a")], [pending("j", 1)])
    assert split(snap) is snap
    once = split(snapshot([cut(node("a"), {0: SEVEN})], [pending("j", 1, "1g.10gb")]))
    assert split(once) is once
    plan = decide(once)
    assert joined(plan) == plan


def test_a_share_is_the_larger_of_compute_and_memory() -> None:
    assert [parts_of(name) for name in ("", "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "7g.80gb")] == [
        56, 8, 8, 14, 16, 28, 56]  # fmt: skip
    assert [parts_of(name) for name in ("1g.6gb", "2g.12gb", "4g.24gb", "2g.99gb")] == [14, 28, 56, 16]
    assert gpus_counted(7, "1g.10gb") == 1.0
    for profiles in PUBLISHED.values():
        for one in profiles:
            assert one.max_count * parts_of(one.name) <= GPU_PARTS


GEOMETRIES = st.sampled_from([{}, SEVEN, MIXED, {"3g.40gb": (0, 4)}, {"7g.80gb": (0,)}, {"2g.20gb": (0, 2, 4)}])
PROFILES = st.sampled_from(["", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"])


@st.composite
def sliced(draw: st.DrawFn) -> Snapshot:
    nodes = [
        cut(node(f"n{i}", gpus=4, cores=draw(among(8, 32))),
            {gpu: draw(GEOMETRIES) for gpu in range(4)})
        for i in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    jobs = [
        pending(f"j{i}", draw(st.integers(1, 4)), draw(PROFILES), nodes=draw(st.integers(1, 2)),
                cores_per_node=draw(st.integers(1, 6)), limit=draw(among(600, 3600)))
        for i in range(draw(st.integers(0, 12)))
    ]  # fmt: skip
    whole = [(n.name, gpu) for n in nodes for gpu in n.gpus if all(one.number // 1000 - 1 != gpu for one in n.slices)]
    busy = [running(f"r{name}{gpu}", {name: (gpu,)}, cores=draw(st.integers(1, 12))) for name, gpu in whole[:5]]
    backfill, place = draw(among("none", "easy")), draw(among("first-fit", "best-fit"))
    return snapshot(nodes, jobs, busy, backfill=backfill, place=place)


@given(sliced())
def test_every_decision_stands_the_check_and_a_second_one_gives_nothing_twice(snap: Snapshot) -> None:
    assert {row.name: row.cores for row in split(snap).nodes if row.cores < 0} == {}
    plan = decided(snap)
    assert set(started(plan)) | set(plan.reasons) == {view.id for view in snap.pending}
    later = after(snap, plan)
    again = decided(later)
    taken = [(part.node, gpu) for view in after(later, again).running for part in view.allocation.parts
             for gpu in part.gpus]  # fmt: skip
    assert len(taken) == len(set(taken))


def limited(snap: Snapshot, unit: str, limit: int, used: float = 0) -> Snapshot:
    """Everybody counts for one limit."""
    bound = Bound(LimitRule(("alice", "", ""), "user alice", unit, limit, "AssocGrpGRES"), used)  # type: ignore[arg-type]
    views = tuple(replace(job, bounds=(0,)) for job in snap.pending)
    return replace(snap, bounds=(bound,), pending=views, running=tuple(replace(r, bounds=(0,)) for r in snap.running))


def test_limits_count_slices_by_their_share_of_a_gpu() -> None:
    nodes = [cut(node("a", gpus=4), {0: SEVEN, 1: SEVEN, 2: {"3g.40gb": (0, 4)}})]
    jobs = [pending(f"j{i:02}", 1, "1g.10gb", limit=3600) for i in range(14)]
    snap = limited(snapshot(nodes, [*jobs, pending("z", 1, "3g.40gb")], backfill="skip"), "gpus", 1)
    plan = decided(snap)
    assert list(started(plan)) == [f"j{i:02}" for i in range(7)], "seven sevenths"
    assert plan.reasons["j07"].message == "limit of user alice: 1 of 1 GPU in use; this job needs 0.14"
    half = limited(snapshot(nodes, [*jobs[:3], pending("a", 1, "3g.40gb"), pending("b", 1, "3g.40gb")]), "gpus", 1)
    assert sorted(started(decided(half))) == ["a", "j00", "j01", "j02"], "three sevenths and a half"
    hours = limited(snapshot(nodes, jobs), "gpu_s", 1800)
    assert len(started(decided(hours))) == 3, "an hour of a seventh is 514 GPU seconds"
    busy = [running("r", {"a": (1000, 1001, 1002)}, "1g.10gb")]
    assert len(started(decided(limited(snapshot(nodes, jobs, busy), "gpus", 1, 3 / 7)))) == 4
    whole = limited(snapshot(nodes, [pending("g", 1)], busy), "gpus", 1, 3 / 7)
    assert started(decided(whole)) == {}


def test_advice_about_limits_counts_slices_by_their_share() -> None:
    """A job that waits for its limit alone is advised to request less only if it exceeds the limit by itself."""
    nodes = [cut(node("a", gpus=4), {gpu: SEVEN for gpu in range(4)})]

    def steps(count: int, unit: str, limit: int, last: float = 3600) -> str:
        job = pending("j", count, "1g.10gb", limit=last)
        return "; ".join(explain(limited(snapshot(nodes, [job]), unit, limit, limit), "j").next_steps)

    assert "cancel" not in steps(14, "gpus", 4), "14 sevenths are two GPUs"
    assert "at most 7 slices of 1g.10gb (--gpus 1g.10gb:7)" in steps(14, "gpus", 1)
    assert "cancel" not in steps(7, "gpu_s", 3600), "an hour of seven sevenths"
    assert "a time limit of at most 0:30:00 (-t 0:30:00)" in steps(14, "gpu_s", 3600)
    assert "time limit" not in steps(7, "gpu_s", 36000), "a longer one would not help"
    week = snapshot([node("a", gpus=4)], [pending("j", 1, limit=14 * 86400.0)])
    full = explain(limited(week, "gpu_s", 7 * 86400, 7 * 86400), "j").next_steps
    assert not any("cancel" in step for step in full), "of a longer one seven days count"


def test_advice_to_request_less_is_in_slices() -> None:
    nodes = [cut(node(name, gpus=1), {0: SEVEN}) for name in "ab"]
    busy = [running("r", {"a": (1000, 1001, 1002)}, "1g.10gb"), running("s", {"b": (1000, 1001, 1002)}, "1g.10gb")]
    found = explain(snapshot(nodes, [pending("j", 6, "1g.10gb")], busy), "j").next_steps
    assert "request at most 4 slices of 1g.10gb per node (--gpus-per-node 1g.10gb:4)" in found
    assert "spread it over 2 nodes, if it supports that (-N 2 --gpus-per-node 1g.10gb:3)" in found
    down = [replace(one, available=False, unavailable_reason="DRAINED: fan") for one in nodes]
    message = explain(snapshot(down, [pending("j", 1, "1g.10gb")]), "j").reason.message
    assert message.endswith("not available: a (DRAINED: fan), b (DRAINED: fan)")


@given(sliced(), st.sampled_from(["gpus", "jobs", "gpu_s"]), st.integers(1, 4), st.booleans())
def test_one_limit_holds_over_the_queues_of_all_profiles_together(
    snap: Snapshot, unit: str, limit: int, has_used: bool
) -> None:
    limit *= 3600 if unit == "gpu_s" else 1
    specs = {job.id: job.spec for job in snap.pending}
    costs = {
        name: limit_units(unit, gpus_counted(spec.gpus, spec.profile), spec.time_limit_s)  # type: ignore[arg-type]
        for name, spec in specs.items()
    }
    used = limit / 3 if has_used else 0.0
    plan = decided(limited(replace(snap, running=()), unit, limit, used))
    total = used + sum(costs[name] for name in started(plan))
    assert total <= limit + 1e-6
    for name, reason in plan.reasons.items():
        if reason.code == "AssocGrpGRES":  # what would have fitted beside all that started was not refused
            assert total + costs[name] > limit + 1e-9


def test_why_says_what_it_takes_to_cut_slices_on_demand() -> None:
    """Of nodes that can be cut, where slices are missing; of the slices there it counts those that are free."""
    table = PUBLISHED["A100-80GB"]
    whole, some = node("a", gpus=1), cut(node("b", gpus=2), {1: MIXED})
    some = replace(some, blocked={2004: "UNUSABLE: x"})
    fixed = cut(node("c", gpus=1), {0: {"1g.10gb": (0,)}})
    nodes = [*(replace(one, cuttable=dict.fromkeys(range(len(one.gpus)), table)) for one in (whole, some)), fixed]
    busy = [running("r", {"b": (2005,)}, "1g.10gb"), running("s", {"c": (1000,)}, "1g.10gb")]

    def said(count: int, profile: str, **more: int) -> dict[str, tuple[str, str]]:
        found = explain(snapshot(nodes, [pending("j", count, profile, **more)], busy), "j").nodes
        return {one.node: (one.dimension, one.text) for one in found}

    anew = "and a GPU is cut anew only when nothing runs on it"
    found = said(2, "1g.10gb")
    assert found["b"] == ("gpus", f"2 of 4 slices free; there is no 1g.10gb free, {anew}")
    assert found["c"] == ("gpus", "0 of 1 slice of 1g.10gb free, needs 2 (1 held by jobs)")
    assert said(1, "2g.20gb")["b"] == ("gpus", f"2 of 4 slices free; a 2g.20gb needs 2 next to each other, {anew}")
    assert said(1, "2g.20gb")["a"] == ("gpus", f"a 2g.20gb needs 2 next to each other, {anew}")
    assert said(1, "1g.10gb")["a"] == ("gpus", f"there is no 1g.10gb free, {anew}")
    assert said(1, "1g.10gb", cores_per_node=81)["b"][0] == "cores", "not for want of slices"
    assert said(3, "")["b"] == ("gpus", "1 of 2 GPUs free, needs 3 (1 held by jobs)")
