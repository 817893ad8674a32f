"""``place: milp`` and ``fastest`` under an agent's order: sound, in its budget, live as in replays."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import gpusched.sched.stages as stages
from gpusched.agents.rltune.live import SHARE
from gpusched.config.policies import load_policy
from gpusched.config.weights import TrainedModel, save_model
from gpusched.controller.deciding import Decider
from gpusched.errors import UsageError
from gpusched.model.policy import MAPPING_PLACES, Mapping, PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.queue.store import Store
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from tests.logged import messages
from tests.sched import rltune_decisions as plain
from tests.sched.worlds import node, pending, snapshot, snapshots, started
from tests.sim.worlds import trace_of

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPEEDS = {"cnn": {"A100": 1.0, "V100": 0.9}, "llm": {"A100": 1.0, "V100": 0.4}}
# what a job leaves over is weighed by the jobs that wait, in replays by all of the trace
MAPPING = Mapping(speeds=SPEEDS, fragment_cost=0.0, budget_s=30.0)


def spec_of(place: str, mapping: Mapping = MAPPING, budget_s: float = 30.0) -> PolicySpec:
    return PolicySpec(name="rltune", agent="rltune", fallback=plain.EASY, place=place, mapping=mapping,  # type: ignore[arg-type]
                      budget_s=budget_s)  # fmt: skip


def by_agent(snap: Snapshot, of: TrainedModel, spec: PolicySpec):
    snap = msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, spec))
    return decide(snap, dict.fromkeys(snap.policies, of)), snap


@pytest.mark.parametrize("place", MAPPING_PLACES)
@QUICK
@given(snapshots(), plain.MODELS)
def test_plans_are_sound(place: str, snap: Snapshot, wild: TrainedModel) -> None:
    plan, snap = by_agent(snap, wild, spec_of(place))
    assert plan.troubles == {}
    assert check(plan, snap)[1] == ()
    assert {*started(plan), *plan.reasons} == {job.id for job in snap.pending}


def test_the_order_is_the_agents_and_the_nodes_are_the_mappings() -> None:
    """Two nodes for three jobs of a node each: the smallest first by score; who loses most gets the fast one."""
    nodes = [node("a", gpus=8, gpu_type="A100"), node("v", gpus=8, gpu_type="V100")]
    jobs = [pending("cnn-old", 8, submit=1.0, name="cnn"), pending("cnn-new", 7, submit=2.0, name="cnn"),
            pending("llm-new", 7, submit=3.0, name="llm")]  # fmt: skip
    by_size = plain.model(plain.arrays_of(plain.rule({"gpus": -1.0})), "smallest first")
    spec = spec_of("milp", msgspec.structs.replace(MAPPING, order_weight=5.0))
    plan, _ = by_agent(snapshot(nodes, jobs), by_size, spec)
    assert {job: where[0][0] for job, where in started(plan).items()} == {"cnn-new": "v", "llm-new": "a"}
    assert plan.remarks["p"].startswith("2 of 3 jobs mapped, worth ")


def test_the_optimiser_has_a_part_of_the_agents_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late agent loses its turn, so the mapping's own budget must not use it up."""
    given_s = []
    real = stages.deadline
    monkeypatch.setattr(stages, "deadline", lambda budget_s: given_s.append(budget_s) or real(budget_s))
    snap = snapshot([node("a")], [pending("j", 1)])
    by_agent(snap, plain.SKIP, spec_of("milp", budget_s=0.2))
    by_agent(snap, plain.SKIP, spec_of("milp", Mapping(budget_s=0.01), budget_s=0.2))
    assert given_s == [pytest.approx(0.2 * SHARE), 0.01]
    hasty, _ = by_agent(snap, plain.SKIP, spec_of("milp", Mapping(budget_s=1e-9)))
    assert started(hasty).keys() == {"j"}, "without any time the greedy answer counts"


def mixed(seed: int):
    """A trace of two models on two kinds of GPUs."""
    rng = np.random.default_rng(seed)
    jobs = 40
    duration = rng.choice([30.0, 600.0, 1800.0, 7200.0], jobs)
    submit = np.cumsum(rng.choice([0.0, 1.0, 60.0, 900.0], jobs))
    trace = trace_of(submit, duration, rng.choice([1, 1, 2, 4, 8], jobs), limit=duration * rng.choice([1, 2, 8], jobs))
    trace = replace(trace, model=rng.integers(0, 2, jobs), models=("cnn", "llm"))
    pool = Pool.of([NodeSpec(4, gpu_type="A100"), NodeSpec(4, gpu_type="V100"), NodeSpec(8, gpu_type="V100")])
    return trace, pool


def orders(place: str, by: int | str) -> ReplayPolicy:
    """An agent's order, by its number; or first come, first served with that backfill."""
    if isinstance(by, int):
        return ReplayPolicy(name="r", order="rltune", knows="estimate", source="", backfill="skip", placement=place,
                            model=plain.WILD[by], spec=spec_of(place))  # fmt: skip
    spec = PolicySpec(name="m", place=place, mapping=MAPPING, backfill=by)  # type: ignore[arg-type]
    return ReplayPolicy(name="m", order="fifo", knows="limit", source="", backfill=by, placement=place, spec=spec)


@pytest.mark.parametrize("place", MAPPING_PLACES)
@pytest.mark.parametrize("by", [0, 1, "none", "skip", "easy"])
def test_live_and_replay_choose_the_same(place: str, by: int | str) -> None:
    """At every instant: the same jobs on the same nodes of a small cluster of two kinds; every job ends."""
    policy = orders(place, by)
    assert policy.spec is not None
    trace, pool = mixed(int(by == 1))
    result = replay(trace, pool, policy)
    assert result.ran.all()
    names = dict(zip(trace.ids, (trace.models[m] for m in trace.model.tolist()), strict=True))
    types = [pool.gpu_types[k] for k in pool.gpu_type.tolist()]
    compared = 0
    for now in np.unique(result.events.time).tolist():
        snap = plain.live_at(result, now)
        nodes = tuple(msgspec.structs.replace(n, gpu_type=t) for n, t in zip(snap.nodes, types, strict=True))
        jobs = tuple(
            msgspec.structs.replace(j, spec=msgspec.structs.replace(j.spec, name=names[j.id])) for j in snap.pending
        )
        snap = msgspec.structs.replace(snap, nodes=nodes, pending=jobs, policies={"p": policy.spec})
        plan = decide(snap, {} if policy.model is None else {"p": policy.model})
        assert plan.troubles == {}
        assert check(plan, snap)[1] == ()
        new = np.flatnonzero(result.start == now).tolist()
        expected = {trace.ids[j]: [pool.names[n] for n in result.nodes_of(j).tolist()] for j in new}
        assert {job: sorted(name for name, _ in parts) for job, parts in started(plan).items()} == {
            job: sorted(names) for job, names in expected.items()
        }
        compared += len(expected)
    assert compared == len(trace)


def test_an_agent_that_chooses_nodes_itself_is_not_mapped() -> None:
    trace, pool = mixed(0)
    gist = TrainedModel("gist", {}, {"knows": "limit"}, "", "g")
    policy = ReplayPolicy(name="g", order="gist", knows="limit", source="", placement="milp", model=gist)
    with pytest.raises(UsageError, match="cannot be combined with --placement milp"):
        replay(trace, pool, policy)


def test_the_controller_logs_each_mapping_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy of a file with weights beside it, asked as the controller asks: gain and gap, said when they change."""
    (tmp_path / "learned").mkdir()
    save_model(tmp_path / "learned/p.safetensors", "rltune", plain.WILD[0].arrays, plain.WILD[0].about)
    file = tmp_path / "learned.yaml"
    file.write_text("agent: rltune\nfallback: easy\nbudget: 10m\nplace: milp\nmapping:\n  budget: 30s\n")
    policies = {"p": load_policy(file)}
    with closing(Store.create_or_open(tmp_path)) as store:
        decider = Decider(store)
        decider.warm_up(policies, {})
        snap = msgspec.structs.replace(snapshot([node("a")], [pending("x", 1), pending("y", 2)]), policies=policies)
        first = decider.decide(snap, {})
        assert first.deciders == policies
        assert started(first.plan).keys() == {"x", "y"}
        worth = "worth 0 GPUs more than greedily, at most 0.00% below the best"
        assert messages(caplog) == [f"p: 2 of 2 jobs mapped, {worth}"]
        decider.decide(snap, {})
        assert len(messages(caplog)) == 1
        one = msgspec.structs.replace(snap, pending=snap.pending[:1])
        decider.decide(one, {})
        assert messages(caplog)[1:] == [f"p: 1 of 1 jobs mapped, {worth}"]
