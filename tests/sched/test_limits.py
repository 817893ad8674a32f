"""Limits of users, groups and classes: nothing starts beyond them, nothing within them waits for them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.jobs import Allocation, Elastic, NodeAllocation, Resizes
from gpusched.model.limits import Bound, Group, Groups, LimitRule, Limits, Qos, Quotas
from gpusched.model.plan import LIMITS, Plan, ReasonCode, Resize, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.accounts import accounts_of
from gpusched.sched.bounds import exceeds, room_along, within_bounds
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.limits import Rooms
from tests.sched.limited import Past, limited, taken, with_bounds
from tests.sched.worlds import NOW, node, pending, running, snapshot, started

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KNOWN = Quotas(
    each=Limits(gpus=4, jobs=3, gpu_hours=20),
    qos=(Qos(name="high", per_user=Limits(gpus=1)), Qos(name="spare", exempt=True)),
)


def bounded(snap: Snapshot, known: Quotas = KNOWN, past: Past = ()) -> Snapshot:
    return with_bounds(snap, known, past)


def in_class(job: PendingView, qos: str) -> PendingView:
    return replace(job, spec=replace(job.spec, qos=qos))


@QUICK
@given(limited(), st.sampled_from(["", "fastest", "rack"]))
def test_nothing_starts_beyond_a_limit(world: tuple[Snapshot, Quotas, Past], place: str) -> None:
    """Counted here by hand, for all placements; and the check, which counts for itself, agrees."""
    snap, known, past = world
    if place:
        policies = {name: replace(policy, place=place) for name, policy in snap.policies.items()}
        snap = replace(snap, policies=policies)
    plan = decide(snap)
    jobs = {job.id: job for job in snap.pending}
    new = [(jobs[a.job_id], jobs[a.job_id].spec.gpus, jobs[a.job_id].spec.time_limit_s) for a in plan.actions]
    old = [(r, r.allocation.gpus, max(0.0, r.expected_end - snap.now)) for r in snap.running]
    before, after = taken(known, old, past, snap.now), taken(known, [*old, *new], past, snap.now)
    assert all(count <= rule.limit for rule, count in after.items() if count > before[rule])
    checked, rejections = check(plan, snap)
    assert rejections == ()
    assert checked == plan
    for job_id, reason in plan.reasons.items():
        if reason.code not in LIMITS:
            continue
        job = jobs[job_id]
        more = taken(known, [*old, *new, (job, job.spec.gpus, job.spec.time_limit_s)], past, snap.now)
        assert any(more[r] > max(r.limit, after[r]) and r.reason == reason.code for r in more), "it waits for no limit"


@QUICK
@given(limited())
def test_whom_a_limit_holds_takes_nothing_from_others(world: tuple[Snapshot, Quotas, Past]) -> None:
    """He reserves nothing and blocks nobody: without him the others start as they do."""
    snap, *_ = world
    policies = {name: replace(policy, place="first-fit") for name, policy in snap.policies.items()}
    snap = replace(snap, policies=policies)
    plan = decide(snap)
    held = {job_id for job_id, reason in plan.reasons.items() if reason.code in LIMITS}
    without = replace(snap, pending=tuple(job for job in snap.pending if job.id not in held))
    assert started(decide(without)) == started(plan)


@QUICK
@given(limited())
def test_explain_says_the_same(world: tuple[Snapshot, Quotas, Past]) -> None:
    snap, *_ = world
    plan = decide(snap)
    if plan.actions:
        return
    for job_id, reason in plan.reasons.items():
        found = explain(snap, job_id).reason
        if reason.code in LIMITS:
            assert found == reason
        else:
            assert found.code not in LIMITS


def test_explain_knows_no_draws_of_the_naive_placement() -> None:
    """By first fit `a` would start, and take what is left of the limit."""
    busy = [running(user, {node: gpus}, NOW + 60, user=user)
            for user, node, gpus in (("bob", "n0", tuple(range(8))), ("alice", "n1", (0,)))]  # fmt: skip
    jobs = [pending("a", 2), pending("b", 2, submit=1.0), pending("c", 4, submit=2.0)]
    world = snapshot([node("n0"), node("n1")], jobs, busy, place="naive", backfill="skip")
    world = bounded(world, Quotas(each=Limits(gpus=4)))
    unlucky = next(snap for seed in range(1000) if not decide(snap := replace(world, seed=seed)).actions)
    plan = decide(unlucky)
    assert plan.reasons["c"].message.startswith("limit of user alice: 1 of 4 GPUs in use; this job needs 4")
    assert explain(unlucky, "c").reason == plan.reasons["c"]
    found = explain(unlucky, "b")
    assert (found.reason.code, found.position, found.beside) == (plan.reasons["b"].code, 2, "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limited(), st.lists(st.integers(-3, 9), min_size=1))
def test_what_is_left_along_a_chain_says_what_each_bound_says(
    world: tuple[Snapshot, Quotas, Past], rooms: list[int]
) -> None:
    snap, *_ = world
    if not snap.pending:
        return
    gpus, limit = np.array([j.spec.gpus for j in snap.pending]), np.array([j.limit_s for j in snap.pending], float)
    account, room, links = accounts_of(snap.pending, gpus, limit, snap.bounds)
    room[:] = [rooms[i % len(rooms)] for i in range(len(room))]
    least = np.zeros((len(links), 3), np.int64)
    room_along(links, room, least)
    for job in range(len(snap.pending)):
        assert within_bounds(least, account, job) == (not exceeds(links, room, account, job))


@pytest.mark.parametrize("place", ["first-fit", "rack", "fastest"])
def test_a_user_has_no_more_gpus_than_he_may_and_others_go_on(place: str) -> None:
    jobs = [pending(f"a{i}", 2) for i in range(3)] + [pending("b", 2, user="bob", submit=1.0)]
    plan = decide(bounded(snapshot([node("n", gpus=8)], jobs, place=place, backfill="skip")))
    assert list(started(plan)) == ["a0", "a1", "b"]
    why = plan.reasons["a2"]
    assert (why.code, why.message) == (
        ReasonCode.ASSOC_GRP_GRES, "limit of user alice: 4 of 4 GPUs in use; this job needs 2",
    )  # fmt: skip


def test_the_reason_says_when_there_is_room() -> None:
    busy = [running(f"r{i}", {"n": (i,)}, NOW + 60 * (i + 1), user="alice") for i in range(4)]
    said = "limit of user alice: 4 of 4 GPUs in use; this job needs 2; quota frees within 0:02:00"
    fewer = bounded(snapshot([node("n", gpus=8)], [pending("a", 2)], busy), Quotas(each=Limits(gpus=4)))
    assert decide(fewer).reasons["a"].message == said
    assert explain(fewer, "a").reason.message == said
    assert explain(fewer, "a").next_steps == ("check your limits: gpusched quota",)


def test_the_reason_names_the_jobs_ahead_once_the_limit_frees() -> None:
    """So that "quota frees within two minutes" does not contradict a start expected days later."""
    busy = [running(f"r{i}", {"n": (i,)}, NOW + 60 * (i + 1), user="alice") for i in range(4)]
    jobs = [pending(f"a{i}", 2, submit=float(i)) for i in range(4)] + [pending("b", 8, user="bob", submit=2.5)]
    snap = bounded(snapshot([node("n", gpus=8)], jobs, busy), Quotas(each=Limits(gpus=4)))
    assert explain(snap, "a0").beside == ""
    assert explain(snap, "a1").beside == "1 pending job under the same limit goes first"
    assert explain(snap, "a3").beside == "3 pending jobs under the same limit go first"
    free = bounded(snapshot([node("n", gpus=8)], jobs, busy), Quotas(users={"alice": Limits(gpus=4)}))
    assert explain(free, "a3").beside == "3 pending jobs under the same limit and 1 other go first"
    group = Groups(groups=(Group(name="g", members={"alice": 1}, limits=Limits(gpus=4)),))
    known = Quotas(users={"alice": Limits(gpus=4)}, groups=group)
    both = snapshot([node("n", gpus=8)], [replace(jobs[0], group="g")], [replace(job, group="g") for job in busy])
    both = bounded(both, known)
    assert explain(both, "a0").reason.message.startswith("limit of user alice")
    assert "group g" in explain(both, "a0").beside
    assert "quota frees within 0:02:00" in explain(both, "a0").beside


def test_gpu_hours_count_what_running_jobs_may_still_use_and_come_back_after_a_week() -> None:
    known = Quotas(each=Limits(gpu_hours=4))
    day = 86400.0
    past: Past = (("alice", "", "", NOW - day, 3600),)
    busy = [running("r", {"n": (0,)}, NOW + 3600, user="alice")]
    fits, over = pending("fits", 2, limit=3600), pending("over", 2, limit=3700)
    assert list(started(decide(bounded(snapshot([node("n")], [fits], busy), known, past)))) == ["fits"]
    why = decide(bounded(snapshot([node("n")], [over], busy), known, past)).reasons["over"]
    assert why.code is ReasonCode.ASSOC_GRP_GRES_MINUTES
    assert why.message == (
        "limit of user alice: 2 of 4 GPU hours in seven days used or running; this job may use 2.1; "
        "quota frees within 6-00:00:00"
    )


def test_a_class_has_its_own_limits_and_an_exempt_one_nothing_else() -> None:
    busy = [running("r", {"n": (0, 1, 2, 3)}, NOW + 60, user="alice")]
    jobs = [in_class(pending("high", 2), "high"), in_class(pending("spare", 2), "spare"), pending("plain", 1)]
    plan = decide(bounded(snapshot([node("n")], jobs, busy)))
    assert list(started(plan)) == ["spare"]
    assert plan.reasons["high"].code is ReasonCode.QOS_MAX_GRES_PER_USER
    assert plan.reasons["high"].message == "limit of user alice in class high: at most 1 GPU at once; this job needs 2"
    assert plan.reasons["plain"].code is ReasonCode.ASSOC_GRP_GRES


def test_a_job_held_by_a_limit_reserves_and_blocks_nothing() -> None:
    busy = [running("r", {"n": (0, 1, 2, 3)}, NOW + 60, user="alice")]
    jobs = [pending("first", 4, limit=60), pending("long", 4, limit=10**6, user="bob", submit=1.0)]
    for backfill in ("none", "easy"):
        snap = bounded(snapshot([node("n")], jobs, busy, backfill=backfill), Quotas(each=Limits(gpus=4)))
        assert list(started(decide(snap))) == ["long"]


def test_a_limit_that_was_lowered_keeps_jobs_without_gpus_running() -> None:
    busy = [running("r", {"n": (0, 1, 2, 3)}, NOW + 60, user="alice")]
    jobs = [pending("cpu", 0), pending("gpu", 1)]
    plan = decide(bounded(snapshot([node("n")], jobs, busy), Quotas(each=Limits(gpus=2))))
    assert list(started(plan)) == ["cpu"]


def test_the_check_refuses_what_exceeds_a_limit() -> None:
    snap = bounded(snapshot([node("n")], [pending("a", 3), pending("b", 3)]))

    def start(name: str, gpus: tuple[int, ...]) -> Start:
        return Start(name, Allocation(name, (NodeAllocation(rank=0, node="n", gpus=gpus, cores=3, memory_mib=3072),)))

    kept, rejections = check(Plan(actions=(start("a", (0, 1, 2)), start("b", (3, 4, 5)))), snap)
    assert [action.job_id for action in kept.actions] == ["a"]
    assert [r.why for r in rejections] == ["limit of user alice: 3 of 4 GPUs in use; this job needs 3"]


@pytest.mark.parametrize("sizes", ["drf", "optimus"])
def test_resizable_jobs_grow_within_their_users_limits(sizes: Literal["drf", "optimus"]) -> None:
    elastic = Elastic(sizes=(1, 2, 4, 8), base_gpus=1, base_cores=1, base_memory_mib=1024, cooldown_s=0)
    policy = PolicySpec(name="t", sizes=sizes)
    waits = pending("a", 1)
    waits = replace(waits, spec=replace(waits.spec, elastic=elastic))
    snap = replace(snapshot([node("n")], [waits]), policies={"p": policy})
    alone = decide(snap)
    assert len(started(alone)["a"][0][1]) == 8, "with no limit it has all"
    assert len(started(decide(bounded(snap)))["a"][0][1]) == 4

    runs = running("r", {"n": (0, 1)}, NOW + 36000, user="alice")
    runs = replace(runs, spec=replace(waits.spec, gpus_per_node=2), start_time=NOW - 36000)
    snap = replace(snap, pending=(), running=(runs,))
    assert decide(bounded(snap)).actions == (), "its 20 GPU hours are what it may still use with two"
    for limits in (Limits(gpus=4), Limits(gpu_hours=40)):
        within = bounded(snap, Quotas(each=limits))
        assert [a.gpus for a in decide(within).actions if isinstance(a, Resize)] == [4]
        assert check(Plan(actions=(Resize("r", 4),)), within)[1] == ()
        rooms = Rooms(within)
        assert rooms.refuse_resize(within.running[0], 1) is None
        assert rooms.bounds == within.bounds, "what it gives up is free once it has"
        assert (rooms.refuse_resize(within.running[0], 4), rooms.bounds[0].room) == (None, 0)
    _, rejections = check(Plan(actions=(Resize("r", 8),)), bounded(snap))
    assert "limit of user alice: at most 4 GPUs at once" in rejections[0].why


def test_a_resized_job_is_charged_for_the_rest_of_its_limit() -> None:
    """What it ran before is charged already: charged for its whole limit again, it would not go on for days."""
    half = replace(
        pending("a", 1, limit=36_000), resizes=Resizes(count=1, had_s=18_000.0), resume_at=1,
    )  # fmt: skip
    rule = LimitRule(("alice", "", ""), "user alice", "gpu_s", 36_000, "AssocGrpGRESMinutes")
    snap = snapshot([node("n")], [replace(half, bounds=(0,))])
    snap = replace(snap, bounds=(Bound(rule, used=18_000, frees=((NOW + 500_000.0, 18_000),)),))
    plan, rejections = check(decide(snap), snap)
    assert (list(started(plan)), rejections) == (["a"], ())
    more = replace(snap, bounds=(Bound(rule, used=18_001),))
    assert decide(more).reasons["a"].message.endswith("this job may use 5")
    for had_s in (36_000.0, 36_001.0):
        over = replace(half, resizes=Resizes(count=1, had_s=had_s), bounds=(0,))
        full = replace(snap, pending=(over,), bounds=(Bound(rule, used=36_000),))
        assert list(started(decide(full))) == ["a"]
        rooms = Rooms(full)
        assert rooms.full(over) is None, "nothing of its limit is left"
        rooms.take(over)
        assert rooms.bounds == full.bounds


def test_a_bound_may_be_exceeded_already() -> None:
    rule = LimitRule(("u", "", ""), "user u", "gpus", 4, "AssocGrpGRES")
    assert Bound(rule, used=6).room == -2
    job = pending("j", 1, bounds=(0,))
    for used, most in ((3, 1), (4, 0), (6, 0)):
        rooms = Rooms(replace(snapshot([node("n")], [job]), bounds=(Bound(rule, used=used),)))
        for gpus in range(3):
            assert rooms.exceeds(job, gpus) == (gpus > most)
            assert (rooms.full(job, gpus) is not None) == (gpus > most)
