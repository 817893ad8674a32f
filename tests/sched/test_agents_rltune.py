"""The RLTune agent's deciding pass: sound whatever its weights, known rules where it is one, live as in replays."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from gpusched.agents.rltune.candidates import agent_of, agent_of_model
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.history import FACTS, group_jobs
from gpusched.agents.rltune.live import prepare
from gpusched.agents.rltune.preempt import history_of
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import TrainedModel, load_model, save_model
from gpusched.estimation.estimators import Estimator, HistoryEstimator, LastTwo
from gpusched.estimation.odds import CLASSES, LEVELS, HazardRates, end_within, note_passed
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import SharingSettings
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from tests.sched import gist_decisions as gist
from tests.sched.reserved import FEW, reserved_snapshots, sound
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
from tests.sched.sharing import Has, snapshot_of
from tests.sched.sharing import worlds as sharing_worlds
from tests.sched.worlds import NOW, node, pending, snapshot, snapshots, started
from tests.sim.worlds import trace_of

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
    broken = {n: np.full_like(a, np.nan) if a.dtype == np.float32 else a for n, a in wild.arrays.items()}
    narrow = {**wild.arrays, "linear": wild.arrays["linear"][:, :-1]}
    lacking = {n: a for n, a in wild.arrays.items() if n != "scale"}
    queues = {j.spec.partition for j in snap.pending if not j.held_by and not j.dependency and j.eligible_time is None}
    for bad in (None, model(narrow, "narrow"), model(lacking, "lacking"), model(broken, "broken")):
        plan = by_agent(snap, bad)
        assert plan.actions == plain.actions
        assert plan.reasons == plain.reasons
        assert set(plan.troubles) == queues


@pytest.mark.parametrize("name", ["linear", "mean", "scale", "strength", "window", "net.0.weight"])
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


def test_the_shortest_by_estimate_goes_first_unless_it_knows_nothing() -> None:
    jobs = [pending("a", 8, limit=9000, estimate_s=5e3), pending("b", 8, limit=9000, estimate_s=60.0)]
    shortest = arrays_of(rule({"estimate": -1.0}))
    snap = snapshot([node("n")], jobs)
    assert list(started(by_agent(snap, model(shortest)))) == ["b"]
    blind = by_agent(snap, model(shortest, "blind", knows="nothing"))
    assert list(started(blind)) == ["a"], "one that knows nothing does not look"


def test_more_of_a_burst_wait_than_of_another() -> None:
    """The larger burst goes first, each burst's jobs in order of submission."""
    jobs = [pending("lone", 8), *(pending(f"many-{i}", 8, submit=1.0 + i, user="bob") for i in range(3))]
    bursts = model(arrays_of(rule({"burst_waiting": 1.0})), "bursts")
    assert list(started(by_agent(snapshot([node("n"), node("m")], jobs), bursts))) == ["many-0", "many-1"]


def test_jobs_beyond_the_networks_window_go_by_the_rule() -> None:
    """However long the queue, the shortest goes first: a window of two jobs bounds the network only."""
    jobs = [pending(f"j{i}", 8, submit=float(i), user=f"u{i}", estimate_s=1000.0 - i) for i in range(9)]
    few = model(arrays_of(rule({"estimate": -1.0}), window=2), "few")
    assert list(started(by_agent(snapshot([node("n")], jobs), few))) == ["j8"]


START = untrained(RltuneSettings())
assert START is not None
BEGUN = agent_of(START, "start", RltuneSettings())
BY_ESTIMATE = PolicySpec(name="s", order="sjf-estimate", place="best-fit", backfill="skip")


@QUICK
@given(snapshots())
def test_its_start_is_the_rule_by_estimates_live(snap: Snapshot) -> None:
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, BY_ESTIMATE)))
    plan = by_agent(snap, BEGUN.model)
    assert plan.troubles == {}
    assert plan.actions == plain.actions
    assert plan.reasons == plain.reasons


BESIDE = Has("r", "ann", "calm", 20, (0, 1, 2), "a"), [Has(f"w{i}", "bob", "calm", 20, (0, 1, 2)) for i in range(2)]


@QUICK
@given(sharing_worlds(waits=6))
@example(({"a": SharingSettings(mode="time-slicing", slowdown=1.0)}, [BESIDE[0]], BESIDE[1]))
def test_its_start_is_the_rule_by_estimates_where_jobs_share_gpus(
    world: tuple[dict[str, SharingSettings | None], list[Has], list[Has]],
) -> None:
    """Also who is put beside whom: the shortest are asked first, here those submitted last."""
    snap = snapshot_of(*world)
    pending = [msgspec.structs.replace(job, estimate_s=99.0 - i) for i, job in enumerate(snap.pending)]
    snap = msgspec.structs.replace(snap, pending=tuple(pending))
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, BY_ESTIMATE)))
    assert by_agent(snap, BEGUN.model).actions == plain.actions


@FEW
@given(reserved_snapshots())
def test_its_start_is_the_rule_by_estimates_beside_reservations(snap: Snapshot) -> None:
    plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, BY_ESTIMATE)))
    assert by_agent(snap, BEGUN.model).actions == plain.actions


@pytest.mark.parametrize("estimator", [HistoryEstimator(), LastTwo()], ids=lambda one: one.name)
def test_its_start_is_the_rule_by_estimates_in_replays(estimator: Estimator) -> None:
    """Start by start, with queues longer than the network's window."""
    rng = np.random.default_rng(8)
    jobs = 900
    trace = trace_of(
        np.cumsum(rng.exponential(20, jobs)), rng.lognormal(6, 2, jobs), rng.choice([1, 2, 4, 8, 16], jobs),
        user=rng.integers(0, 5, jobs), limit=np.full(jobs, 1e5),
    )  # fmt: skip
    own, plain = (
        replay(trace, Pool.uniform(5, 8), policy, estimator=estimator) for policy in (BEGUN, "sjf-estimate-skip")
    )
    waiting = (trace.submit[:, None] <= plain.start) & (plain.start < plain.start[:, None])
    assert waiting.sum(0).max() > 256
    assert own.events.tobytes() == plain.events.tobytes()
    assert own.start.tobytes() == plain.start.tobytes()


def test_kinds_and_bursts() -> None:
    submit = np.array([0.0, 10.0, 20.0, 5000.0, 5500.0, 5900.0])
    kind, burst = group_jobs(submit, np.array([1, 2, 1, 1, 1, 2]))
    assert kind.tolist() == [0, 1, 0, 0, 0, 1]
    assert burst.tolist() == [0, 2, 0, 1, 1, 3]


def test_hazard_rates_follow_the_observed_run_times() -> None:
    """Of three bursts of one kind: one whose jobs ran 8 s, one whose first job runs for a day, and an unseen one."""
    facts = np.zeros(9, FACTS)
    facts["gpus"], facts["burst"] = 1.0, np.arange(9) // 3
    rates = HazardRates(np.full((CLASSES, LEVELS), 0.2), np.array([20.0, 5.0, 1.0]))
    history = history_of(facts)
    assert end_within(history, rates, 8, 0) == pytest.approx(0.2)
    for job in (0, 1):
        note_passed(history, job, 8.0, True)
    note_passed(history, 3, 86400.0, False)
    short, long, other = (end_within(history, rates, job, 0) for job in (2, 5, 8))
    assert long < other < short


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


def test_an_agent_that_knows_nothing_reads_no_run_times_or_limits() -> None:
    """Other run times of jobs that end after the last start, and other limits, change nothing."""
    rng = np.random.default_rng(5)
    submit = np.sort(rng.uniform(0, 100, 60))
    gpus, duration = rng.choice([1, 2, 4, 8], 60), np.full(60, 500.0)
    of = model(arrays_of(rule({"estimate": -1.0}), 1.0), "blind", knows="nothing")
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
