"""RLTune with preemption: repeatable, without knowledge of the future, LAS where it ranks so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import known_at
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, TrainRequest
from gpusched.agents.rltune.live import prepare
from gpusched.agents.rltune.preempting import RankingRule, model_of, odds_of, policy_of, read
from gpusched.agents.rltune.train import train_agent
from gpusched.agents.training.train import train
from gpusched.config.policies import load_policy
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec, PreemptionSettings
from gpusched.sched.decide import decide
from gpusched.sim.policies import ReplayPolicy, policy_by_name, policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import Outage, replay
from gpusched.sim.result import ReplayResult
from gpusched.study.study import Scenario
from gpusched.traces.generate import generate
from tests.agents.preemptible import POOL, WORKLOAD
from tests.sched.worlds import node, pending, snapshot
from tests.sim.worlds import trace_of

TRACE = generate(WORKLOAD, 0)
PRIOR = odds_of(TRACE.gpus, TRACE.duration).prior
INDEX = RankingRule("index", {"index": 1.0, "gpus": 0.5, "stay": 0.5})


def ranked(rule: RankingRule, knows: str = "estimate") -> ReplayPolicy:
    return policy_of(model_of(rule, PRIOR, knows), "mine")


def events(result: ReplayResult) -> tuple[bytes, ...]:
    return tuple(column.tobytes() for column in (result.events.time, result.events.kind, result.events.subject))


def job(folder: Path, seed: int = 0, **settings: Any) -> TrainJob:
    spec = PolicySpec(name="p", agent="rltune", settings={"preempt": True, "search": 3, "replay_jobs": 80, **settings})
    return TrainJob(
        spec=spec, partition="default", scenario=Scenario(TRACE, POOL, power_model(POOL)), held_out=(), workload=None,
        declared=None, seed=seed, device="cpu", checkpoint=Checkpoint(folder / "checkpoint", "key"),
    )  # fmt: skip


def bits(trained: TrainerResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trained.arrays.items()}


@pytest.mark.parametrize("thresholds", [(3600.0,), (600.0, 3600.0, 36000.0)])
def test_ranking_as_las_it_is_las(thresholds: tuple[float, ...]) -> None:
    """On one node there is no choice of whom to stop; on several it stops fewer jobs than LAS."""
    away: dict[str, Any] = {"restart_s": 60.0, "failures": (Outage(0, 40000.0, 90000.0),)}
    away |= {"las_thresholds_gpu_s": thresholds}
    policy = ranked(RankingRule("las", {"served": 1.0}, thresholds), "nothing")
    one = Pool.uniform(1, 16)
    las, mine = replay(TRACE, one, "las", **away), replay(TRACE, one, policy, **away)
    assert las.restarts.sum() > 10
    assert events(mine) == events(las)
    assert replay(TRACE, POOL, policy, **away).restarts.sum() < replay(TRACE, POOL, "las", **away).restarts.sum()


def test_replays_are_repeatable_and_restarts_cost() -> None:
    policy = ranked(INDEX)
    one, two = (replay(TRACE, POOL, policy, restart_s=60.0) for _ in range(2))
    assert events(one) == events(two)
    assert one.restarts.sum() > 0
    assert np.isfinite(one.end).all()
    # all work is done: what a job held its nodes for is its run time, and at most a minute for each restart
    held = one.end - one.last_start
    np.add.at(held, one.cut.job, one.cut.end - one.cut.start)
    assert (held >= TRACE.duration - 1e-6).all()
    assert (held <= TRACE.duration + 60.0 * one.restarts + 1e-6).all()
    np.testing.assert_allclose(held[one.restarts == 0], TRACE.duration[one.restarts == 0])


def test_nothing_is_known_of_what_has_not_ended() -> None:
    """Jobs that end after some instant run longer: until then nothing is done otherwise."""
    before = replay(TRACE, POOL, ranked(INDEX))
    until = float(np.median(before.end))
    longer = np.where(before.end > until, TRACE.duration * 3.0 + 1000.0, TRACE.duration)
    after = replay(replace(TRACE, duration=longer), POOL, ranked(INDEX))
    seen = before.events.time <= until
    count = int(seen.sum())
    assert count > 100
    for column in ("time", "kind", "subject"):
        np.testing.assert_array_equal(
            getattr(before.events, column)[:count], getattr(after.events, column)[:count], strict=True
        )


def test_jobs_whose_predecessors_ran_short_go_first() -> None:
    """Two users; the last two jobs come at once, the one of the user with long jobs first. LAS takes that one."""
    submit, ran = [0.0, 0.0, 5.0, 5.0, 10000.0, 10000.0], [9000.0, 100.0, 9000.0, 100.0, 9000.0, 100.0]
    trace = trace_of(submit, ran, [1] * 6, user=[0, 1] * 3)
    even = np.full_like(PRIOR, 0.3)
    policy = policy_of(model_of(RankingRule("index", {"index": 1.0}), even, "estimate"), "mine")
    result = replay(trace, Pool.uniform(1, 1), policy)
    assert result.end[5] < 10300.0
    assert result.restarts[[0, 2]].sum() > 0
    assert replay(trace, Pool.uniform(1, 1), "las").end[5] > 13000.0


def test_the_choice_on_the_later_part_knows_only_the_earlier_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    class Ground:
        def __init__(self, evaluations: Any, prior: Any, *more: Any) -> None:
            found.append(prior)

        def of(self, policy: ReplayPolicy) -> tuple[float, float]:
            raise InterruptedError

    monkeypatch.setattr("gpusched.agents.rltune.preempting.ReplaySet", Ground)
    with pytest.raises(InterruptedError):
        train_agent(job(tmp_path), TrainingReport())
    early = int(0.7 * len(TRACE))
    known, over = known_at(TRACE, float(TRACE.submit[early - 1]))
    assert len(found) == 2
    for prior in found:
        assert np.array_equal(prior, odds_of(known.gpus, known.duration, over).prior)
        assert not np.array_equal(prior, PRIOR)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    one = train_agent(job(tmp_path), TrainingReport())
    assert bits(train_agent(job(tmp_path), TrainingReport())) == bits(one)
    assert one.about["preempt"] == "yes"
    assert one.hyper_parameters["preempt"] is True
    assert one.notes[0].startswith("preemptive")
    blind = train_agent(job(tmp_path, knows="nothing"), TrainingReport())
    assert blind.about["knows"] == "nothing"
    assert not blind.arrays["prior"].any()
    prepare(TrainedModel("rltune", blind.arrays, blind.about, "", "x"))


def test_a_trained_folder_is_replayed_and_decides_live(tmp_path: Path) -> None:
    log = tmp_path / "log.swf"
    rows = [f"{i + 1} {int(t)} -1 {max(int(d), 1)} {g} -1 -1 {g} -1 -1 1 {u} -1 -1 1 -1 -1 -1" for i, (t, d, g, u) in
            enumerate(zip(TRACE.submit, TRACE.duration, TRACE.gpus, TRACE.user, strict=True))]  # fmt: skip
    log.write_text("\n".join(rows) + "\n")
    file = tmp_path / "mine.yaml"
    rules = "preempt: {min_run: 5m, per_hour: 3, restart: 20s}"
    file.write_text(f"agent: rltune\nfallback: easy\n{rules}\ntrain: {{preempt: true, search: 1}}\n")
    out = tmp_path / "elsewhere"
    nodes: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8}
    request = TrainRequest(policy=str(file), trace=str(log), format="swf", out=str(out), keep_anyway=True, **nodes)
    train(request, TrainingReport())
    card = yaml.safe_load((out / "default.card.yaml").read_text("utf-8"))
    assert {row["policy"] for row in card["metrics"]} >= {"mine", "untrained start", "las", "drf-users", "srtf"}
    assert "no neural network" in card["decides"]
    (note,) = (note for note in card["notes"] if note.startswith("preemptive"))
    assert "after 300 s at the earliest, 3 times an hour at most" in note
    assert "a restart costs 20 s" in note
    policy = policy_by_name(str(out))
    assert policy.knows == "estimate"
    assert policy.source.startswith("rltune agent, preemptive, weights")
    assert replay(TRACE, POOL, policy).restarts.sum() > 0

    spec = load_policy(out)
    assert spec.preempt == PreemptionSettings(min_run_s=300.0, per_hour=3, restart_s=20.0)
    assert policy.restart_s == 20.0
    snap = snapshot([node("a")], [pending("j", 1)])
    model = policy_of_spec(spec).model
    assert model is not None
    snap = msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, spec))
    plan = decide(snap, dict.fromkeys(snap.policies, model))
    assert len(plan.actions) == 1
    assert not plan.troubles


def test_weights_of_another_shape_are_refused_by_name() -> None:
    good = model_of(INDEX, PRIOR, "estimate")
    for name in good.arrays:
        for arrays in ({n: a for n, a in good.arrays.items() if n != name}, {**good.arrays, name: np.zeros((3, 3))}):
            with pytest.raises(ValueError, match=name):
                prepare(replace(good, arrays=arrays))
    with pytest.raises(ValueError, match="knows nothing"):
        prepare(replace(good, about={**good.about, "knows": "nothing"}))


def test_settings_say_what_is_wrong() -> None:
    assert read({"preempt": True, "search": 0}).search == 0
    for given, words in (({"knows": "limit"}, "knows"), ({"serch": 3}, "did you mean"), ({"search": -1}, "at least 0"),
                         ({"objective": "x"}, "objective"), ({"replay_jobs": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            read(given)
        assert words in f"{caught.value} {caught.value.hint or ''}"
