"""RLTune with preemption, live: as in replays at every instant, and never a job that must not be stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.agents.rltune import replay as rltune_replay
from gpusched.agents.rltune.preempting import RankingRule, policy_of
from gpusched.estimation import REMEMBERED
from gpusched.model.jobs import JobSpec, JobState, Preemptions
from gpusched.model.limits import Quotas
from gpusched.model.plan import Plan, Preempt, ReasonCode
from gpusched.model.policy import PreemptionSettings
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim.replay import replay
from gpusched.traces.generate import generate
from tests.agents.preemptible import POOL, WORKLOAD
from tests.sched import gist_decisions as gist
from tests.sched.limited import Past, limited
from tests.sched.preempting_decisions import (
    LIMITS,
    PRIORITIES,
    RANKS,
    STAYS,
    Film,
    by_agent,
    policy,
    stopped,
    weights,
)
from tests.sched.reserved import FEW, H, drawn, reservation, reserved_snapshots, sound, with_reservations
from tests.sched.worlds import NOW, node, pending, running, snapshot, started
from tests.sim.reserved import POOL as FOUR
from tests.sim.reserved import bookings, trace_of


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gist.workloads(), st.sampled_from([*RANKS, STAYS]), st.sampled_from(LIMITS), st.data(),
       st.sampled_from(["first-fit", "best-fit", "rack"]), st.sampled_from([1, 3, REMEMBERED]))  # fmt: skip
def test_live_and_replay_stop_and_start_the_same(
    workload: Any, rule: RankingRule, rules: PreemptionSettings, data: st.DataObject, place: str, remembered: int
) -> None:
    """At every instant the same jobs are stopped; who needs not wait for them starts, others once they are gone."""
    trace, pool = workload
    count, often = len(trace), st.sampled_from([True, True, True, False])
    priority = data.draw(st.one_of(st.just([0] * count), st.lists(PRIORITIES, min_size=count, max_size=count)))
    trace = replace(
        trace, preemptible=np.array(data.draw(st.lists(often, min_size=count, max_size=count))),
        priority=np.array(priority) if any(priority) else None,
    )  # fmt: skip
    spec, of = policy(rules, place), weights(rule)
    with mock.patch.object(rltune_replay, "REMEMBERED", remembered):
        asked = trace, pool, replace(policy_of(of, "r"), spec=spec, placement=place)
        result = replay(*asked, restart_s=rules.restart_s)
    film = Film(result, remembered=remembered)
    for now in np.unique(result.events.time).tolist():
        plan = by_agent(film.at(now), spec, of)
        cut = {trace.ids[r.job] for r in film.runs if r.cut and r.end == now}
        begin = {trace.ids[r.job]: [pool.names[n] for n in r.nodes] for r in film.runs if r.start == now}
        assert stopped(plan).keys() == cut
        first = {job: [name for name, _ in parts] for job, parts in started(plan).items()}
        assert first.items() <= begin.items()
        assert all(gainer in begin for gainer in stopped(plan).values())
        sound, refused = check(plan, msgspec.structs.replace(film.at(now), policies={"p": spec}))
        assert refused == ()
        assert sound.actions == plan.actions
        if not cut:
            assert first == begin
        elif place == "first-fit" and rule is not STAYS:
            later = by_agent(film.at(now, gone=True, begun=first), spec, of)
            assert stopped(later) == {}
            # What was stopped counts in the hazard rates by then, so that jobs may change places in the order; it
            # may itself go on at once where it fits beside those it was stopped for, in a replay at the next instant.
            assert begin.keys() <= first.keys() | started(later).keys() <= begin.keys() | cut


@pytest.mark.parametrize("rules", LIMITS)
@pytest.mark.parametrize("seed", range(6))
def test_live_and_replay_keep_the_same_nodes_for_a_job_that_waits_for_the_end_of_a_reservation(
    seed: int, rules: PreemptionSettings
) -> None:
    """At every instant the same jobs are stopped and start, and nothing breaks a reservation."""
    draw = random.Random(seed)
    snap, ones = drawn(draw, "skip")
    ones = [
        Reservation(
            name=one.name,
            nodes=tuple(FOUR.names[int(n[1:])] for n in one.nodes),
            begin=one.begin - NOW,
            end=one.end - NOW,
        )
        for one in ones
    ]
    submit = np.array(sorted(draw.randrange(40) * H for _ in snap.pending), np.float64)
    may = np.array([draw.random() < 0.5 for _ in snap.pending])
    trace = replace(trace_of(snap), submit=submit, preemptible=may)
    trace = replace(trace, duration=trace.limit * np.array([draw.choice([0.5, 1.0]) for _ in snap.pending]))
    spec, of = policy(rules), weights(RANKS[seed % len(RANKS)])
    result = replay(trace, FOUR, replace(policy_of(of, "r"), spec=spec, placement="first-fit"),
                    restart_s=rules.restart_s, reservations=bookings(ones, snap, 0.0))  # fmt: skip
    assert np.isfinite(result.end).all()
    film = Film(result, ones)
    for now in np.unique(result.events.time).tolist():
        plan = by_agent(film.at(now), spec, of)
        cut = {trace.ids[r.job] for r in film.runs if r.cut and r.end == now}
        begin = {trace.ids[r.job]: [FOUR.names[n] for n in r.nodes] for r in film.runs if r.start == now}
        assert stopped(plan).keys() == cut
        first = {job: [name for name, _ in parts] for job, parts in started(plan).items()}
        assert first.items() <= begin.items()
        assert cut or first == begin
        assert check(plan, msgspec.structs.replace(film.at(now), policies={"p": spec}))[1] == ()


def test_nonpreemptible_jobs_do_not_start_on_reserved_nodes() -> None:
    """`all` waits for the end of a maintenance of n1: `long` would delay it on n2, `short` would not."""
    jobs = [
        pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1),
        pending("short", 1, limit=3 * H, submit=2),
    ]  # fmt: skip
    one = reservation("m", ["n1"], H, 4 * H, maintenance=True)
    free = with_reservations(snapshot([node("n1"), node("n2")], jobs), one)
    plan = by_agent(free, policy(RULES), LAS)
    assert {job: parts[0][0] for job, parts in started(plan).items()} == {"short": "n2"}
    assert plan.reasons["long"].code is ReasonCode.BACKFILL
    assert plan.reasons["long"].message == "fits now, but would delay job all, which can start in 4:00:00"
    busy = [runs("busy", {"n2": (0,)}, NOW - 10.0, preemptible=False)]
    busy = [msgspec.structs.replace(busy[0], expected_end=NOW + 6 * H)]
    plan = by_agent(msgspec.structs.replace(free, running=tuple(busy)), policy(RULES), LAS)
    assert started(plan).keys() == {"long", "short"}, "who must not be stopped is in its way until then"
    before = [pending("before", 1, limit=5 * H), pending("all", 1, 2, limit=24 * H, submit=1)]
    plan = by_agent(with_reservations(snapshot([node("n1"), node("n2")], before), one), policy(RULES), LAS)
    assert {job: parts[0][0] for job, parts in started(plan).items()} == {"before": "n2"}, "kept from those behind"


def test_replays_leave_alone_what_is_protected() -> None:
    trace = generate(WORKLOAD, 0)
    may = np.arange(len(trace)) % 3 > 0
    spec = policy(PreemptionSettings(min_run_s=600.0, per_hour=1))
    result = replay(replace(trace, preemptible=may), POOL, replace(policy_of(weights(RANKS[1]), "r"), spec=spec))
    assert len(result.cut.job) > 20
    assert (result.cut.end - result.cut.start >= 600.0).all()
    assert may[result.cut.job].all()
    for job in set(result.cut.job.tolist()):
        assert (np.diff(np.sort(result.cut.end[result.cut.job == job])) >= 3600.0).all()


# Snapshots


RULES = PreemptionSettings(min_run_s=60.0, per_hour=2, restart_s=0.0)


def runs(job_id: str, where: dict[str, tuple[int, ...]], since: float, **more: Any) -> RunningView:
    """A preemptible job that has run for ``NOW - since`` seconds."""
    gpus = len(next(iter(where.values())))
    spec = JobSpec(
        name="t", partition="p", nodes=len(where), gpus_per_node=gpus, cores_per_node=1, memory_mib_per_node=1024,
        time_limit_s=10**6, preemptible=more.pop("preemptible", True),
    )  # fmt: skip
    view = running(job_id, where, NOW + 10**6)
    return msgspec.structs.replace(view, start_time=since, submit_time=since, spec=spec, **more)


LAS = weights(RankingRule("las", {"served": 1.0}, (100.0,)))
LONG = {"a": tuple(range(8))}


def plan_of(busy: list[RunningView], jobs: list[PendingView], **more: Any) -> Plan:
    return by_agent(snapshot([node("a")], jobs, busy, **more), policy(RULES), LAS)


def test_a_long_job_is_stopped_for_a_new_one_which_waits_until_it_is_gone() -> None:
    plan = plan_of([runs("long", LONG, 0.0)], [pending("new", 1, submit=NOW)])
    assert stopped(plan) == {"long": "new"}
    assert started(plan) == {}
    assert plan.reasons["new"].code == ReasonCode.RESOURCES
    assert "waits for job long to leave" in plan.reasons["new"].message
    leaving = runs("long", LONG, 0.0, state=JobState.COMPLETING)
    leaving = msgspec.structs.replace(leaving, expected_end=NOW + 30)
    again = plan_of([leaving], [pending("new", 1, submit=NOW)])
    assert again.actions == ()
    assert "waits for job long to leave" in again.reasons["new"].message


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("is not preemptible", {"preemptible": False}),
        ("has run for less than 0:01:00", {"start_time": NOW - 59.0, "preemptions": Preemptions(kept_s=9000.0)}),
        ("preempted 2 times within an hour", {"preemptions": Preemptions(count=2, times=(NOW - 3000.0, NOW - 900.0))}),
        ("is STARTING", {"state": JobState.STARTING}),
        ("is COMPLETING", {"state": JobState.COMPLETING}),
    ],
)
def test_nonpreemptible_jobs_are_not_stopped_and_the_check_refuses_it(why: str, changes: dict[str, Any]) -> None:
    since = changes.pop("start_time", 0.0)
    busy, new = [runs("long", LONG, since, **changes)], [pending("new", 1, submit=NOW)]
    assert stopped(plan_of(busy, new)) == {}
    snap = msgspec.structs.replace(snapshot([node("a")], new, busy), policies={"p": policy(RULES)})
    sound, refused = check(Plan(actions=(Preempt("long", "new"),)), snap)
    assert sound.actions == ()
    assert why in refused[0].why


def test_an_hour_after_it_may_be_stopped_again() -> None:
    often = Preemptions(count=2, times=(NOW - 3600.0, NOW - 900.0))
    assert stopped(plan_of([runs("long", LONG, 0.0, preemptions=often)], [pending("new", 1, submit=NOW)])) != {}


def test_no_job_is_preempted_unless_another_needs_its_nodes() -> None:
    """A GPU of it is lost: it could not be started there again, which is no reason to stop it."""
    lame = node("a", blocked={3: "LOST: fell off the bus"})
    snap = snapshot([lame, node("b")], [pending("new", 1, submit=NOW)], [runs("long", LONG, 0.0)])
    plan = by_agent(snap, policy(RULES), LAS)
    assert stopped(plan) == {}
    assert list(started(plan)) == ["new"]
    full = snapshot([node("a")], [pending("large", 16, submit=NOW)], [runs("long", LONG, 0.0)])
    assert stopped(by_agent(full, policy(RULES), LAS)) == {}


def test_operators_priorities_go_before_ranks() -> None:
    new = [pending("new", 1, submit=NOW)]
    assert stopped(plan_of([runs("long", LONG, 0.0, priority=1)], new)) == {}
    young = [runs("young", LONG, NOW - 61.0, preemptions=None)]
    high = [pending("high", 8, submit=NOW, priority=5)]
    assert stopped(plan_of(young, high)) == {"young": "high"}


def test_no_job_is_preempted_for_one_of_equal_rank() -> None:
    """Both have had as much; the one that waits was there before."""
    had = Preemptions(count=1, times=(1.0,), kept_s=9000.0)
    plan = plan_of([runs("runs", LONG, 100.0)], [pending("waits", 8, submit=0.0, preemptions=had)])
    assert stopped(plan) == {}
    assert stopped(plan_of([runs("runs", LONG, 100.0)], [pending("new", 8, submit=0.0)])) == {"runs": "new"}


def test_run_time_before_a_preemption_counts() -> None:
    """Both wait; the one that has run for long in earlier attempts goes after the one that has not."""
    had = Preemptions(count=1, times=(1.0,), kept_s=9000.0)
    jobs = [pending("old", 8, submit=0.0, preemptions=had), pending("new", 8, submit=NOW)]
    assert list(started(plan_of([], jobs))) == ["new"]


def test_arrays_and_constraints_hold_here_too() -> None:
    jobs = [pending(f"a_{i}", 1, submit=NOW, array_id="a", array_room=1) for i in range(3)]
    jobs += [pending("elsewhere", 1, submit=NOW, nodelist=("b",)), pending("huge", 99, submit=NOW)]
    plan = plan_of([runs("long", {"a": (0, 1, 2, 3)}, 0.0)], jobs)
    assert list(started(plan)) == ["a_0"]
    codes = {job: reason.code for job, reason in plan.reasons.items()}
    assert codes["a_1"] == codes["a_2"] == ReasonCode.ARRAY_TASK_LIMIT
    assert codes["elsewhere"] == codes["huge"] == ReasonCode.BAD_CONSTRAINTS


def test_the_fallback_preempts_no_job() -> None:
    snap = snapshot([node("a")], [pending("new", 1, submit=NOW)], [runs("long", LONG, 0.0)])
    plan = decide(msgspec.structs.replace(snap, policies={"p": policy(RULES)}), {})
    assert plan.troubles
    assert plan.actions == ()


@FEW
@given(limited(), st.sampled_from(RANKS))
def test_limits_bind_who_waits(case: tuple[Snapshot, Quotas, Past], rank: RankingRule) -> None:
    snap = msgspec.structs.replace(case[0], policies=dict.fromkeys(case[0].policies, policy(LIMITS[0])))
    plan = decide(snap, dict.fromkeys(snap.policies, weights(rank)))
    assert plan.troubles == {}
    assert check(plan, snap)[1] == ()


@FEW
@given(reserved_snapshots())
def test_reserved_nodes_are_left_to_whom_they_are_reserved_for(snap: Snapshot) -> None:
    """Also in the second of several partitions, whose requests have other numbers there."""
    snap = msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, policy(LIMITS[0])))
    sound(snap, decide(snap, dict.fromkeys(snap.policies, weights(RANKS[1]))))
