"""The RLTune agent's deciding pass: sound whatever its weights, known rules where it is one, live as in replays."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gpusched.agents.rltune.history import FACTS, group_jobs, history_of
from gpusched.agents.rltune.live import prepare
from gpusched.agents.rltune.table import agent_of_model
from gpusched.config.weights import TrainedModel, load_model, save_model
from gpusched.estimation.odds import CLASSES, LEVELS, HazardRates, expected, note_passed
from gpusched.model.plan import ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import FinishedView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim.pool import NodeSpec, Pool
from tests.sched import gist_decisions as gist
from tests.sched.reserved import FEW, H, reservation, reserved_snapshots, sound, with_reservations
from tests.sched.rltune_decisions import (
    EASY,
    MODELS,
    RLTUNE,
    SKIP,
    WILD,
    arrays_of,
    by_agent,
    live_at,
    model,
    replayed,
    rule,
)
from tests.sched.worlds import NOW, node, pending, running, snapshot, snapshots, started
from tests.sim.worlds import trace_of

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_nodes_are_kept_for_what_waits_for_the_end_of_a_reservation() -> None:
    """Though it goes over whoever does not fit: ``long`` would delay ``all``, which is before it."""
    jobs = [pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H, submit=1)]
    jobs.append(pending("short", 1, submit=2))
    snap = snapshot([node("n1"), node("n2")], jobs)
    snap = with_reservations(snap, reservation("m", ["n1"], 0, 4 * H, maintenance=True))
    plan = by_agent(snap, SKIP)
    assert not plan.troubles
    assert list(started(plan)) == ["short"]
    assert plan.reasons["long"].message == "fits now, but would delay job all, which can start in 4:00:00"


@QUICK
@given(snapshots(), MODELS)
def test_whatever_the_weights_the_plan_is_sound(snap: Snapshot, wild: TrainedModel) -> None:
    plan = by_agent(snap, wild)
    assert plan.troubles == {}
    checked, rejections = check(plan, snap)
    assert rejections == ()
    assert checked == plan
    assert started(plan).keys() | plan.reasons.keys() == {j.id for j in snap.pending}
    assert all(r.message for r in plan.reasons.values())


@QUICK
@given(snapshots(simple=True))
def test_in_order_of_waiting_without_holding_it_is_fifo_that_skips(snap: Snapshot) -> None:
    """Submission times are far apart, so that no scores are equal by rounding."""
    jobs = tuple(msgspec.structs.replace(j, submit_time=NOW - 4000.0 / 2**i) for i, j in enumerate(snap.pending[:9]))
    snap = msgspec.structs.replace(snap, pending=jobs)
    staged = PolicySpec(name="s", order="fifo", place="best-fit", backfill="skip")
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, staged)))
    assert by_agent(snap, SKIP).actions == plain.actions


@QUICK
@given(snapshots(), MODELS)
def test_where_it_cannot_decide_the_fallback_does_and_nothing_else_changes(snap: Snapshot, wild: TrainedModel) -> None:
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, EASY)))
    huge = {n: np.full_like(a, 3e38) if a.dtype == np.float32 else a for n, a in wild.arrays.items()}
    narrow = {**wild.arrays, "linear": wild.arrays["linear"][:, :-1]}
    lacking = {n: a for n, a in wild.arrays.items() if n != "scale"}
    queues = {j.spec.partition for j in snap.pending if not j.held_by and not j.dependency and j.eligible_time is None}
    for bad in (None, model(narrow, "narrow"), model(lacking, "lacking"), model(huge, "huge")):
        plan = by_agent(snap, bad)
        assert plan.actions == plain.actions
        assert plan.reasons == plain.reasons
        assert set(plan.troubles) == queues


@pytest.mark.parametrize("name", ["linear", "mean", "scale", "strength", "window", "prior", "few", "net.0.weight"])
def test_weights_of_another_shape_are_refused_by_name(name: str) -> None:
    arrays = arrays_of(rule({}))
    with pytest.raises(ValueError, match=name.partition(".")[0]):
        prepare(model({n: a for n, a in arrays.items() if n != name}))


def test_weights_that_do_not_say_what_they_know_go_by_limits() -> None:
    silent = replace(SKIP, about={"backfill": "skip"})
    assert prepare(silent).knows == agent_of_model("a", silent).knows == "limit"


def test_operators_priorities_go_before_scores() -> None:
    by_gpus = model(arrays_of(rule({"gpus": -1.0})), "smallest")
    jobs = [pending("large", 8, priority=5), pending("small", 1)]
    assert list(started(by_agent(snapshot([node("a")], jobs), by_gpus))) == ["large"]
    jobs = [pending("large", 8), pending("small", 1)]
    assert list(started(by_agent(snapshot([node("a")], jobs), by_gpus))) == ["small"]


def test_nodes_are_held_for_the_first_job_where_the_score_says_so() -> None:
    """A whole-node job is first; with holding the small job must not take the node that comes free first."""
    busy = [running("r", {"a": (0,)}, NOW + 60), running("s", {"b": (0, 1, 2, 3)}, NOW + 9000)]
    jobs = [pending("whole", 8, submit=0.0), pending("four", 4, submit=900.0), pending("five", 5, submit=950.0)]
    snap = snapshot([node("a"), node("b")], jobs, busy)
    held = model(arrays_of(rule({"waited": 1.0}, {"gpus": 1.0, "one": -3.0})), "holds")
    assert started(by_agent(snap, SKIP)).keys() == {"four", "five"}
    plan = by_agent(snap, held)
    assert len(started(plan)) == 1
    assert plan.reasons["whole"].code == ReasonCode.RESOURCES


def test_what_ended_of_the_same_user_tells_who_is_short() -> None:
    def done(user: str, ran: float, at: float) -> FinishedView:
        return FinishedView(user=user, partition="p", nodes=1, gpus=8, cores=8, memory_mib=8192, submit_time=at,
                            end_time=at + ran, ran_s=ran)  # fmt: skip

    past = tuple(done(user, ran, 1e5 * i) for i in range(4) for user, ran in (("slow", 5e4), ("quick", 60.0)))
    jobs = [pending("a", 8, user="slow", limit=10**6), pending("b", 8, user="quick", limit=10**6)]
    snap = msgspec.structs.replace(snapshot([node("n")], jobs), finished=past)
    shortest = arrays_of(rule({"estimate": -1.0}))
    assert list(started(by_agent(snap, model(shortest)))) == ["b"]
    blind = by_agent(snap, model(shortest, "blind", knows="nothing"))
    assert list(started(blind)) == ["a"], "one that knows nothing does not look"


def test_kinds_and_bursts() -> None:
    submit = np.array([0.0, 10.0, 20.0, 5000.0, 5500.0, 5900.0])
    kind, burst = group_jobs(submit, np.array([1, 2, 1, 1, 1, 2]))
    assert kind.tolist() == [0, 1, 0, 0, 0, 1]
    assert burst.tolist() == [0, 2, 0, 1, 1, 3]


def test_odds_of_run_times_follow_what_was_seen() -> None:
    """Of three bursts of one kind: one whose jobs ran 8 s, one whose first job runs for a day, and an unseen one."""
    facts = np.zeros(9, FACTS)
    facts["share"] = 1.0
    facts["gpus"], facts["burst"] = 1.0, np.arange(9) // 3
    odds = HazardRates(np.full((CLASSES, LEVELS), 0.2), np.array([20.0, 5.0, 1.0]))
    history = history_of(facts)
    plain = expected(history, odds, 8, np.nan)
    for job in (0, 1):
        note_passed(history, job, 8.0, True)
    note_passed(history, 3, 86400.0, False)
    (short, worth_short), (long, worth_long), other = (expected(history, odds, j, np.nan) for j in (2, 5, 8))
    assert short < other[0] < long
    assert worth_short > other[1] > worth_long
    assert np.isfinite(plain).all()
    assert expected(history, odds, 5, np.log(600.0))[0] <= np.log(600.0)
    # Ends are spread evenly within a level: a single level's mean is its middle.
    sure = HazardRates(np.ones((CLASSES, LEVELS)), odds.few)
    assert expected(history_of(facts), sure, 8, np.nan)[0] == pytest.approx(np.log(7.5))


def test_the_weights_survive_their_file(tmp_path) -> None:
    save_model(tmp_path / "p.safetensors", "rltune", WILD[1].arrays, {"knows": "estimate"})
    read = load_model(tmp_path, "p", "rltune")
    assert {n: a.tobytes() for n, a in read.arrays.items()} == {n: a.tobytes() for n, a in WILD[1].arrays.items()}


# Live and in the simulator


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gist.workloads(), MODELS)
def test_live_and_replay_choose_the_same(workload, wild: TrainedModel) -> None:
    """At every instant of a replay: the same jobs in the same order on the same nodes."""
    result = replayed(*workload, wild)
    for now in np.unique(result.events.time).tolist():
        plan = by_agent(live_at(result, now), wild)
        assert plan.troubles == {}
        new = np.flatnonzero(result.start == now).tolist()
        expected = {result.trace.ids[j]: [result.pool.names[n] for n in result.nodes_of(j).tolist()] for j in new}
        assert {job: [name for name, _ in parts] for job, parts in started(plan).items()} == expected


def test_the_same_replay_twice_is_the_same_and_every_job_ends() -> None:
    rng = np.random.default_rng(3)
    trace = trace_of(np.cumsum(rng.exponential(60, 300)), rng.exponential(3000, 300), rng.choice([1, 2, 4, 8, 16], 300),
                     limit=np.full(300, np.inf))  # fmt: skip
    pool = Pool.uniform(4, 8)
    one, two = replayed(trace, pool, WILD[1]), replayed(trace, pool, WILD[1])
    assert one.events.tobytes() == two.events.tobytes()
    assert one.ran.all()


def test_one_that_knows_nothing_never_reads_run_times_or_limits() -> None:
    """Other run times of jobs that end after the last start, and other limits, change nothing."""
    rng = np.random.default_rng(5)
    submit = np.sort(rng.uniform(0, 100, 60))
    gpus, duration = rng.choice([1, 2, 4, 8], 60), np.full(60, 500.0)
    of = model(arrays_of(rule({"estimate": -1.0, "kind_mean": 2.0}), 1.0), "blind", knows="nothing")
    plain = replayed(trace_of(submit, duration, gpus), Pool.uniform(3, 8), of)
    other = replayed(trace_of(submit, duration, gpus, limit=rng.uniform(500, 9000, 60)), Pool.uniform(3, 8), of)
    assert plain.start.tobytes() == other.start.tobytes()


def test_a_job_without_gpus_starts_while_none_is_free() -> None:
    """Behind one that needs some, as live."""
    trace = trace_of([0.0, 1.0, 2.0], [100.0] * 3, [8, 8, 0], cores=[4, 4, 2], memory=[1, 1, 1])
    result = replayed(trace, Pool.of([NodeSpec(8, 16, 64)]), SKIP)
    assert result.start.tolist() == [0.0, 100.0, 2.0]


@FEW
@given(reserved_snapshots(), MODELS)
def test_reserved_nodes_are_left_to_whom_they_are_reserved_for(snap: Snapshot, wild: TrainedModel) -> None:
    snap = msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, RLTUNE))
    sound(snap, decide(snap, dict.fromkeys(snap.policies, wild)))
