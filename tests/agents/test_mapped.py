"""RLTune trained with the mapping in the loop, on nodes of two GPU types."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.request import TrainingReport, TrainJob
from gpusched.agents.rltune.candidates import rules, without_net
from gpusched.agents.rltune.evaluation import (
    MAPPED_JOBS,
    TraceEvaluation,
    is_mapped,
    mapped_evaluations,
    mapped_policy,
    rates_of,
)
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.agents.rltune.train import train_agent
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.model.interference import JobClassEstimate, JobShape, SpeedSamples, job_class_of
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.sim.policies import policy_of_order
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.study.study import Scenario
from gpusched.traces.generate import generate
from gpusched.traces.trace import Trace
from gpusched.traces.workload import load_workload

SPEEDS = {"cnn": {"V100": 1.0, "K80": 0.9}, "llm": {"V100": 1.0, "K80": 0.1}}
SPEC = PolicySpec(name="m", agent="rltune", place="fastest", mapping=Mapping(speeds=SPEEDS, floor=0.0))
POOL = Pool.of([NodeSpec(8, gpu_type="V100"), NodeSpec(8, gpu_type="K80")])
SETTINGS = RltuneSettings()


def trace(jobs: int = 120) -> Trace:
    """Every other job is one of those that lose nine tenths of their speed on a K80."""
    drawn = generate(replace(load_workload("benchmarks/weights_workload.yaml"), jobs=jobs), 0)
    return replace(drawn, models=("cnn", "llm"), model=np.arange(jobs) % 2)


SCENARIO = Scenario(trace(30), POOL, power_model(POOL))


def test_jobs_run_at_the_speeds_of_the_policys_file() -> None:
    of = rates_of(SPEC, SCENARIO).profiles
    asked = (("llm", "V100", 1), ("llm", "K80", 8), ("llm", "", 1), ("cnn", "K80", 1), ("unknown", "K80", 1))
    assert [of.per_s(*one) for one in asked] == [1.0, 0.1, 1.0, 0.9, 1.0]


def reported(user: str, name: str, **steps_per_s: float) -> dict[str, JobClassEstimate]:
    """What a user's jobs of a name said of their speed on each GPU type, on 2 GPUs."""
    job_class = job_class_of(user, name)
    shapes = tuple(
        SpeedSamples(
            shape=JobShape(gpu_type=kind, unit="steps", gpus=2, max_gpus_per_node=2, nodes=1, racks=1),
            logs=((math.log(speed), 1.0),), count=1, best=math.log(speed),
        )
        for kind, speed in steps_per_s.items()
    )  # fmt: skip
    return {job_class: JobClassEstimate(kind=job_class, shapes=shapes)}


def test_what_jobs_reported_replaces_the_policys_file() -> None:
    """Also where that has no speeds, as the built-in policy's; the same name's jobs of two users count together."""
    learned = reported("ann", "llm-1", V100=10.0, K80=8.0) | reported("bob", "llm-22", V100=10.0, K80=2.0)
    scenario = SCENARIO._replace(learned=learned | reported("ann", "cnn", V100=3.0))
    for spec in (SPEC, load_policy(BUILT_IN / "rltune-milp.yaml")):
        of = rates_of(spec, scenario).profiles
        assert of.per_s("llm-3", "V100", 1) == 1.0
        assert of.per_s("llm-3", "K80", 1) == pytest.approx(0.4), "the geometric mean of both"
    assert rates_of(SPEC, scenario).profiles.per_s("cnn", "K80", 1) == 0.9, "one type only says nothing of others"


def test_a_rule_is_judged_by_where_the_mapping_puts_its_jobs() -> None:
    """Jobs that lose most get the fast type, and the mean JCT is that of such a placement."""
    rule = without_net(rules(SETTINGS)[0], SETTINGS)
    plain = TraceEvaluation(trace(), POOL, SETTINGS)
    (mapped,) = mapped_evaluations([plain], SETTINGS, SPEC, SCENARIO)
    result = mapped.result(rule)
    assert result is not None
    assert np.array_equal(result.end, mapped.result(rule).end)  # type: ignore[union-attr]
    slow = (result.end - result.start) / mapped.trace.duration > 1.5
    assert slow[mapped.trace.model == 0].sum() == 0
    assert 0 < slow.sum() < (mapped.trace.model == 1).sum() / 2, "fewer than half of those that lose most run on a K80"
    assert mapped.play(rule).jct_s > plain.play(rule).jct_s, "there every job runs as recorded"


def test_replays_are_short_and_plain_where_there_is_nothing_to_choose() -> None:
    many = TraceEvaluation(trace(MAPPED_JOBS + 50), POOL, SETTINGS)
    (mapped,) = mapped_evaluations([many], SETTINGS, SPEC, SCENARIO)
    assert mapped.trace.ids == many.trace.ids[50:]
    one_type = TraceEvaluation(trace(30), Pool.uniform(2, 8), SETTINGS)
    assert mapped_evaluations([one_type], SETTINGS, SPEC, SCENARIO) == [one_type]
    assert not is_mapped(replace_place(SPEC, "best-fit"), POOL)
    built_in = load_policy(BUILT_IN / "rltune-milp.yaml")
    assert (built_in.place, is_mapped(built_in, POOL)) == ("milp", True)


def replace_place(spec: PolicySpec, place: Any) -> PolicySpec:
    return PolicySpec(name=spec.name, agent=spec.agent, place=place)


def test_training_chooses_by_mapped_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    few = [rule for rule in rules(SETTINGS) if rule.name in ("fifo", "smallest", "sjf")]
    monkeypatch.setattr("gpusched.agents.rltune.choosing.rules", lambda *_: few)
    played: list[int] = []
    result = TraceEvaluation.result

    def note(self: TraceEvaluation, prepared: Any) -> Any:
        if self._rates is not None:
            played.append(len(self.trace))
        return result(self, prepared)

    monkeypatch.setattr(TraceEvaluation, "result", note)
    quick = {"iterations": 1, "sequences": 2, "sequence": 16, "rollouts": 2, "imitation": 1, "hidden": 4}
    spec = PolicySpec(name="m", agent="rltune", place="fastest", mapping=SPEC.mapping, settings=quick)
    drawn = Scenario(trace(70), POOL, power_model(POOL))
    job = TrainJob(
        spec=spec, partition="p", scenario=drawn, held_out=(drawn,), workload=None, declared=None, seed=0, device="cpu",
        checkpoint=Checkpoint(tmp_path / "checkpoint", "key"),
    )  # fmt: skip
    made = train_agent(job, TrainingReport())
    assert len(played) > 3 * len(few), "rules and networks, on three windows"
    rows = {row.policy: row for row in made.rows or ()}
    assert {"m", "fifo+skip", "smallest-skip", "sjf-estimate-skip"} <= set(rows)
    fifo = mapped_policy(policy_of_order("fifo+skip"), spec)
    alone = replay(drawn.trace, POOL, fifo, rates=rates_of(spec, drawn))
    expected = float((alone.end - drawn.trace.submit).mean())
    assert rows["fifo+skip"].value == pytest.approx(expected), "the heuristics are placed by the same mapping"
