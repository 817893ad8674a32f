"""Reservations of nodes in decisions, against a slow reference that counts minute by minute."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.config.weights import TrainedModel
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.model.plan import ReasonCode, Start
from gpusched.model.policy import AGENTS, AgentTraits
from gpusched.model.reservations import Reservation, overlapping
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.agent import Context
from gpusched.sched.arrays import node_arrays_of, waiting_of
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.eligible import ineligible
from gpusched.sched.explain import explain
from gpusched.sched.reservations.calendar import MAX_LIMITS
from gpusched.sched.stages import place_queue
from tests.sched import worlds
from tests.sched.reserved import (
    H,
    breaks,
    drawn,
    driven,
    of,
    reservation,
    reserved_snapshots,
    some_in_reservations,
    sound,
    with_reservations,
)
from tests.sched.worlds import NOW, node, pending, running, snapshot, started

QUICK = settings(max_examples=60)


def test_only_jobs_that_end_before_a_maintenance_start() -> None:
    """By its limit; to end just as it begins is soon enough."""
    jobs = [pending("fits", 1, limit=2 * H), pending("not", 1, limit=2 * H + 1, submit=1)]
    snap = with_reservations(snapshot([node("n1")], jobs), reservation("m", ["n1"], 2 * H, 4 * H, maintenance=True))
    plan = decide(snap)
    assert list(started(plan)) == ["fits"]
    reason = plan.reasons["not"]
    assert reason.code is ReasonCode.REQ_NODE_NOT_AVAIL
    assert reason.message.startswith("Reserved for maintenance: m in 2:00:00, for 2:00:00")


def test_jobs_of_about_one_limit_are_kept_off_as_the_longest_of_them() -> None:
    """In a queue of more limits than there are rows, of jobs that may use other nodes, too."""
    rng = random.Random(5)
    limits = [rng.randrange(600, 40 * H) for _ in range(300)]
    jobs = [pending(f"j{at}", 1, limit=at, exclude=rng.choice([(), ("n2",)])) for at in limits]
    snap = with_reservations(snapshot([node("n1"), node("n2")], jobs), reservation("m", ["n1"], 8 * H, 9 * H))
    waiting = waiting_of(list(snap.pending), node_arrays_of(snap), {}, snap)
    held, own = waiting.calendar.limit[waiting.requests.mask[waiting.jobs.shape]], waiting.jobs.limit
    assert 2 * MAX_LIMITS < len(set(own)) > len(set(held))
    assert (held >= own).all()
    assert ((held <= 8 * H) == (own <= 8 * H)).all()
    assert set(held) <= set(own)


def test_while_it_lasts_only_its_own_run_there() -> None:
    """Others go to nodes that are not of it, its own to no others."""
    jobs = [pending("other", 1), of("class", pending("own", 1, submit=1)), of("class", pending("big", 8, 2, submit=2))]
    snap = with_reservations(snapshot([node("n1"), node("n2")], jobs), reservation("class", ["n1"], -H, 2 * H))
    plan = decide(snap)
    assert {job: parts[0][0] for job, parts in started(plan).items()} == {"other": "n2", "own": "n1"}
    assert plan.reasons["big"].code is ReasonCode.BAD_CONSTRAINTS


def test_jobs_of_a_reservation_wait_for_it_and_end_with_it() -> None:
    """The reason is Slurm's, and says when."""
    one = reservation("class", ["n1"], 2 * H, 4 * H)
    snap = with_reservations(snapshot([node("n1")], [of("class", pending("own", 1))]), one)
    reason = decide(snap).reasons["own"]
    assert (reason.code, reason.message) == (
        ReasonCode.RESERVATION, "waits for reservation class, which begins in 2:00:00",
    )  # fmt: skip
    late = with_reservations(replace(snap, now=NOW + 3.5 * H), one)
    assert "ends in 0:30:00, before its time limit of 1:00:00" in decide(late).reasons["own"].message
    assert started(decide(with_reservations(replace(snap, now=NOW + 3 * H), one)))


def test_a_job_with_the_duration_of_its_reservation_runs_in_it() -> None:
    """Though nothing is decided in the very second in which it begins; not where the node is another's then."""
    one = reservation("class", ["n1"], -5, H - 5)
    snap = snapshot([node("n1")], [of("class", pending("own", 1, limit=H))])
    assert started(decide(with_reservations(snap, one)))
    plan = decide(with_reservations(snap, one, reservation("m", ["n1"], H - 5, 2 * H, maintenance=True)))
    assert plan.reasons["own"].message.startswith("Reserved for maintenance: m in 0:59:55")


def test_a_long_job_before_a_maintenance_does_not_take_the_heads_protection_from_others() -> None:
    """The first waits for the end of the maintenance, the second for GPUs: the third must not delay the second."""
    jobs = [
        pending("long", 8, limit=100 * H),
        pending("big", 8, 2, limit=H, submit=1),
        pending("small", 1, limit=5 * H, submit=2),
        pending("short", 1, limit=H, submit=3),
    ]
    busy = [running("r", {"n1": tuple(range(8))}, end=NOW + 2 * H)]
    snap = snapshot([node("n1"), node("n2")], jobs, busy, backfill="easy")
    snap = with_reservations(snap, reservation("m", ["n1", "n2"], 50 * H, 60 * H, maintenance=True))
    plan = decide(snap)
    assert list(started(plan)) == ["short"]
    assert plan.reasons["long"].code is ReasonCode.REQ_NODE_NOT_AVAIL
    assert plan.reasons["big"].code is ReasonCode.RESOURCES
    assert "big" in plan.reasons["small"].message


def test_the_reason_names_reservations_of_the_jobs_own_partition() -> None:
    nodes = [node(name, partition=name[0]) for name in ("p1", "q1", "q2", "r1")]
    jobs = [pending(name, 8, nodes=count, partition=name) for name, count in (("p", 1), ("q", 2), ("r", 1))]
    jobs.append(of("own", pending("in-own", 1, partition="r")))
    ones = [reservation(f"of-{n.name}", [n.name], 3200 + i, 4000 + i) for i, n in enumerate(nodes)]
    snap = with_reservations(snapshot(nodes, jobs), *ones, reservation("own", ["r1"], -60, 3100))
    found = {job: reason.message.partition("; ")[0] for job, reason in decide(snap).reasons.items()}
    assert found == {
        "p": f"May be reserved for other job: of-p1 {ones[0].when(NOW)}",
        "q": f"May be reserved for other job: of-q1 {ones[1].when(NOW)}, of-q2 {ones[2].when(NOW)}",
        "r": f"May be reserved for other job: own for another 0:51:40, of-r1 {ones[3].when(NOW)}",
        "in-own": f"May be reserved for other job: of-r1 {ones[3].when(NOW)}",
    }


def test_nodes_are_kept_for_what_waits_for_the_end_of_a_reservation() -> None:
    """A job of all nodes waits for the end of a maintenance of one: on the other nothing starts that lasts longer."""
    jobs = [
        pending("all", 8, 2, limit=24 * H),
        pending("long", 1, limit=5 * H, submit=1),
        pending("short", 1, limit=3 * H, submit=2),
    ]
    for backfill in ("none", "easy"):
        snap = snapshot([node("n1"), node("n2")], jobs, backfill=backfill)
        plan = decide(with_reservations(snap, reservation("m", ["n1"], H, 4 * H, maintenance=True)))
        assert {job: parts[0][0] for job, parts in started(plan).items()} == {"short": "n2"}, backfill
        assert plan.reasons["long"].code is ReasonCode.BACKFILL
        assert plan.reasons["long"].message == "fits now, but would delay job all, which can start in 4:00:00"
        taken = with_reservations(snap, reservation("m", ["n1"], H, 4 * H, maintenance=True))
        explanation = explain(worlds.after(taken, plan), "long")
        assert explanation.reason == plan.reasons["long"]
        assert explanation.next_steps == ("a time limit of at most 4:00:00 would let it start now (-t 4:00:00)",)
    skip = replace(snap.policies["p"], backfill="skip")
    for agent in (None, "dl2", "topology", "rltune"):
        policy = replace(skip, agent=agent, fallback=skip)
        starts = started(decide(replace(taken, policies={"p": policy})))
        assert "long" in starts, f"{agent}: stages that skip keep nothing"


def test_nodes_reserved_by_a_failed_agent_are_free_for_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nodes as EASY does, its fallback keeps none."""

    def fails(_: object, context: Context) -> None:
        queue = context.waiting.ordered("p", "fifo")
        place_queue(context._replace(policy=replace(context.policy, agent=None, backfill="easy")), queue)
        raise ValueError("its network returned NaN")

    live = SimpleNamespace(prepare=lambda model: None, decide_queue=fails)
    monkeypatch.setitem(AGENTS, "fails", AgentTraits())
    monkeypatch.setitem(REGISTRY, "fails", AgentParts(live=lambda: live))
    jobs = [pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1)]
    snap = snapshot([node("n1"), node("n2")], jobs, backfill="skip")
    skip = replace(snap.policies["p"], backfill="skip")
    snap = replace(snap, policies={"p": replace(skip, agent="fails", fallback=skip)})
    snap = with_reservations(snap, reservation("m", ["n1"], H, 4 * H, maintenance=True))
    plan = decide(snap, {"p": TrainedModel("fails", {}, {}, "", "<fails>")})
    assert "returned NaN" in plan.troubles["p"]
    assert list(started(plan)) == ["long"]


@pytest.mark.parametrize("backfill", ["none", "easy", "skip"])
def test_a_mapping_keeps_nodes_where_others_do(backfill: str) -> None:
    jobs = [pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1), pending("short", 1)]
    busy = [running("r", {"n3": (0, 1, 2, 3)}, NOW + 10 * H)]  # where ``long`` could run, too
    nodes = [node("n1"), node("n2"), node("n3", gpus=4)]
    snap = snapshot(nodes, jobs, busy, place="fastest", backfill=backfill)
    plan = decide(with_reservations(snap, reservation("m", ["n1"], 0, 4 * H, maintenance=True)))
    assert set(started(plan)) == ({"long", "short"} if backfill == "skip" else {"short"})


def test_the_head_has_no_place_where_nodes_are_kept_for_another() -> None:
    """Its GPUs come free in time, but it would still run when ``all``, which waits for the maintenance, is to start."""
    jobs = [pending("all", 8, 2, limit=24 * H), pending("head", 8, limit=2 * H, submit=1)]
    snap = snapshot([node("n1"), node("n2")], jobs, [running("r", {"n2": tuple(range(8))}, end=NOW + 3 * H)])
    plan = decide(with_reservations(snap, reservation("m", ["n1"], H, 4 * H, maintenance=True)))
    assert plan.reasons["head"].message.endswith("can start within 1-04:00:00, by time limits")


def test_the_heads_time_is_one_at_which_its_nodes_are_not_reserved() -> None:
    """It fits when the running job ends, but not for its whole time limit; nor before the maintenance is over."""
    busy = [running("r", {"n1": tuple(range(8))}, end=NOW + 2 * H)]
    jobs = [pending("head", 8, limit=3 * H, nodelist=("n1",)), pending("later", 1, limit=5 * H, submit=1)]
    snap = snapshot([node("n1"), node("n2")], jobs, busy, backfill="easy")
    plan = decide(with_reservations(snap, reservation("m", ["n1"], 4 * H, 6 * H)))
    assert plan.reasons["head"].message.endswith("can start within 6:00:00, by time limits")
    taken = with_reservations(snap, reservation("m", ["n1"], 4 * H, 6 * H))
    assert explain(taken, "head").next_steps[0] == "wait: at most 6:00:00 (reservation m ends)"
    assert list(started(plan)) == ["later"]


def test_the_check_refuses_what_breaks_a_reservation() -> None:
    """Of any plan."""
    free = snapshot([node("n1"), node("n2")], [pending("a", 1, limit=2 * H), of("class", pending("b", 1))])
    plan = decide(replace(free, pending=tuple(replace(j, spec=replace(j.spec, reservation="")) for j in free.pending)))
    taken = with_reservations(free, reservation("class", ["n1"], H, 5 * H))
    kept, rejections = check(plan, taken)
    assert not kept.actions
    assert "reserved (reservation class) in 1:00:00, for 4:00:00" in rejections[0].why
    assert "begins in 1:00:00" in rejections[1].why


def test_a_resizable_job_is_not_stopped_where_it_could_not_come_up_again() -> None:
    """Its limit is as it was, but to stop and to start takes time."""
    from gpusched.model.policy import Resizing
    from gpusched.sched.eligible import may_resize

    spec = pending("x", 1).spec
    from gpusched.model.jobs import Elastic

    spec = replace(spec, elastic=Elastic(sizes=(1, 2), base_gpus=1, base_cores=1, base_memory_mib=1, cooldown_s=0))
    job = replace(running("r", {"n1": (0,)}, NOW + H), spec=spec)
    rules = Resizing(min_run_s=0)
    assert may_resize(job, rules, NOW) is None
    assert "n1 is reserved" in (may_resize(replace(job, tied="node n1 is reserved"), rules, NOW) or "")


def test_overlaps_are_found_by_node_and_time() -> None:
    """Neighbours in time are none."""
    one = reservation("a", ["n1", "n2"], 0, H)
    assert overlapping(reservation("b", ["n2", "n3"], H, 2 * H), [one]) is None
    assert overlapping(reservation("b", ["n3"], 0, H), [one]) is None
    assert overlapping(reservation("b", ["n3", "n2"], H - 1, 2 * H), [one]) == (one, "n2")
    assert overlapping(replace(one, end=NOW + 9 * H), [one]) is None, "it may be changed itself"


@QUICK
@given(reserved_snapshots())
def test_no_policy_breaks_a_reservation(snap: Snapshot) -> None:
    """And the check, which counts for itself, finds nothing to refuse; nor does it let anything else through."""
    sound(snap, decide(snap))
    free = replace(snap, nodes=tuple(replace(n, reservations=()) for n in snap.nodes))
    free = replace(free, pending=tuple(replace(j, reserved=None) for j in free.pending))
    wanted = decide(free)
    _, refused = check(wanted, snap)
    broken = {
        a.job_id
        for a in wanted.actions
        if isinstance(a, Start)
        and (breaks(snap, a) or ineligible(next(j for j in snap.pending if j.id == a.job_id), NOW, snap.policies))
    }
    assert broken <= {r.action.job_id for r in refused}


@QUICK
@given(reserved_snapshots(racked=True))
def test_nor_does_one_that_looks_at_racks(snap: Snapshot) -> None:
    """Likewise."""
    sound(snap, decide(snap))


def fits_from(snap: Snapshot, ones: Iterable[Reservation], job: PendingView, time: float) -> bool:
    """Whether a job could run from then on for its limit, by the limits of what runs: the reference."""
    end, found = time + job.spec.time_limit_s, 0
    for n in snap.nodes:
        if any(n.name in one.nodes and not (end <= one.begin or one.end <= time) for one in ones):
            continue
        held = sum(
            len(part.gpus)
            for r in snap.running
            for part in r.allocation.parts
            if part.node == n.name and r.expected_end > time
        )
        found += len(n.gpus) - held >= job.spec.gpus_per_node
    return found >= job.spec.nodes


def promise(snap: Snapshot, ones: Sequence[Reservation], job: PendingView) -> float:
    """The earliest time from which it could run."""
    times = {snap.now, *(r.expected_end for r in snap.running), *(one.end for one in ones)}
    return min((t for t in times if t >= snap.now and fits_from(snap, ones, job, t)), default=float("inf"))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("backfill", ["easy", "none", "conservative"])
def test_the_first_in_the_queue_starts_when_it_was_promised(seed: int, backfill: str) -> None:
    """Whatever is behind it, and what it waits for: the end of a job, or of a reservation. So nobody starves.

    The promise is the reference's, made when a job comes to be the first.
    """
    snap, ones = drawn(random.Random(seed), backfill)
    promised: dict[str, float] = {}
    for now, begun, after in driven(snap, ones):
        snap = after
        assert all(promised.get(job, now) >= now for job in begun)
        if snap.pending:
            first = snap.pending[0]
            promised[first.id] = min(promised.get(first.id, float("inf")), promise(snap, ones, first))
            assert promised[first.id] > now, f"{first.id} could start and does not"
    assert not snap.pending


def test_a_forecast_runs_over_reservations() -> None:
    """Their begin and their end: what waits for the end, what ends before, what is of one."""
    jobs = [
        pending("all", 8, 2, limit=24 * H),
        of("class", pending("own", 8, limit=H, submit=1)),
        pending("short", 8, limit=2 * H, submit=2),
        pending("after", 8, 2, limit=H, submit=3),
    ]
    ones = [reservation("m", ["n1"], 3 * H, 5 * H, maintenance=True), reservation("class", ["n2"], 4 * H, 7 * H)]
    for backfill in ("easy", "none", "conservative"):
        snap = with_reservations(snapshot([node("n1"), node("n2")], jobs, backfill=backfill), *ones)
        ahead = QueueForecast(snap, half_life_s=H, tick_s=1)
        for _ in range(2):  # a run leaves nothing behind
            start = (ahead.run(ahead.by_limits).start - NOW) / H
            found = {view.id: float(when) for view, when in zip(ahead.views, start, strict=True)}
            assert found == {"all": 7.0, "own": 4.0, "short": 0.0, "after": 2.0}, backfill


def test_in_a_forecast_nodes_are_kept_for_a_job_that_waits_for_the_end_of_a_reservation() -> None:
    """``long`` would delay it, ``short`` does not."""
    jobs = [
        pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1),
        pending("short", 1, limit=3 * H, submit=2),
    ]  # fmt: skip
    snap = snapshot([node("n1"), node("n2")], jobs, backfill="easy")
    snap = with_reservations(snap, reservation("m", ["n1"], H, 4 * H, maintenance=True))
    ahead = QueueForecast(snap, half_life_s=H, tick_s=1)
    assert ((ahead.run(ahead.by_limits).start - NOW) / H).tolist() == [4.0, 28.0, 0.0]


def test_in_a_forecast_nodes_that_are_kept_no_more_are_open_at_once() -> None:
    """``r`` ends before its limit, so that ``all`` has its place on n1 and n2, and ``long`` may run on n3."""
    jobs = [
        pending("all", 8, 2, limit=24 * H), pending("short", 1, limit=2 * H, submit=1),
        pending("long", 1, limit=5 * H, submit=2),
    ]  # fmt: skip
    busy = [running("r", {"n2": tuple(range(8))}, end=NOW + 10 * H)]
    snap = snapshot([node("n1"), node("n2"), node("n3")], jobs, busy, backfill="easy")
    snap = with_reservations(snap, reservation("m", ["n1", "n2"], H, 4 * H, maintenance=True))
    ahead = QueueForecast(snap, half_life_s=H, tick_s=1)
    start = ahead.run(RunTimeDraw(ahead.limits, np.array([NOW + 1.5 * H]))).start
    assert ((start - NOW) / H).tolist() == [4.0, 0.0, 1.5]


@pytest.mark.parametrize("backfill", ["none", "easy", "skip", "conservative"])
@pytest.mark.parametrize("seed", range(8))
def test_a_forecast_is_what_happens(seed: int, backfill: str) -> None:
    """As decisions do it, one after the other; also where jobs end early, and where they are in reservations."""
    snap, ones = drawn(random.Random(seed), backfill)
    if seed % 2:
        snap = some_in_reservations(snap, ones)
    share = 0.5 if seed > 4 else 1.0
    ahead = QueueForecast(with_reservations(snap, *ones), half_life_s=H, tick_s=1)
    start = ahead.run(RunTimeDraw(share * ahead.limits, np.zeros(0))).start
    foretold = {view.id: float(when) for view, when in zip(ahead.views, start, strict=True)}
    happened: dict[str, float] = {}
    for now, begun, _ in driven(snap, ones, share):
        happened |= dict.fromkeys(begun, now)
    assert {job: when for job, when in foretold.items() if when < math.inf} == pytest.approx(happened, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_conservative_delays_no_job_around_reservations(seed: int) -> None:
    """Jobs behind one leave it its start, also where it waits for the end of a reservation."""
    snap, ones = drawn(random.Random(seed), "conservative")
    whole = {job: now for now, begun, _ in driven(snap, ones) for job in begun}
    for count in (3, 6, 12, 20):
        first = replace(snap, pending=snap.pending[:count])
        alone = {job: now for now, begun, _ in driven(first, ones) for job in begun}
        assert all(whole[job] <= start for job, start in alone.items())


def test_no_place_is_kept_for_a_job_that_could_start_too_late_for_its_reservation_s_end() -> None:
    kept = Reservation(name="r", nodes=("n",), begin=worlds.NOW - 10, end=worlds.NOW + 10_000, users=("alice",))
    busy = worlds.running("x", {"n": (0, 1, 2, 3)}, worlds.NOW + 5000)

    def begun(limit: int) -> set[str]:
        head = worlds.pending("head", 8, limit=limit, reserved=kept)
        other = worlds.pending("other", 4, limit=9500, submit=1.0, reserved=kept)
        node = worlds.node("n", reservations=(kept,))
        return {*worlds.started(decide(worlds.snapshot([node], [head, other], [busy], backfill="easy")))}

    assert begun(5000) == set(), "else the head would be delayed"
    assert begun(9000) == {"other"}
