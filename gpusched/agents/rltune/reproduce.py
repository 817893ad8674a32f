"""RLTune's main results (Dongare et al., SoCC 2025): utilization, waiting and JCT by trace and base."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import TrainingData, load_training_data
from gpusched.agents.common.request import UNTRAINED, TrainingReport, TrainJob, TrainRequest
from gpusched.agents.rltune.candidates import agent_of, agent_of_model
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.agents.rltune.train import train_agent
from gpusched.config.weights import TrainedModel
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.model.policy import PolicySpec
from gpusched.sim.engine.build import ReplayOptions as EngineOptions
from gpusched.sim.policies import policy_of_order
from gpusched.study.metrics import Metrics
from gpusched.study.options import PaperOptions, ReplayRequest
from gpusched.study.paper import Advance, Paper, read_paper
from gpusched.study.scenario import load_scenario
from gpusched.study.study import PlannedReplay, Scenario, run_all


class QuickSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a quick check: base policies, and number of generated jobs."""

    policies: tuple[str, ...]
    jobs: int


class Rltune(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/rltune.yaml``.

    Attributes:
        names: Policy -> its name in the paper.
        trained: Policy -> the base of its agent's rewards; FCFS for policies not listed.
        load: Of a log. hold_out: The later part, on which all policies are replayed.
    """

    names: dict[str, str]
    trained: dict[str, str]
    load: float
    hold_out: float
    quick: QuickSettings

    def trained_against(self, policy: str) -> str:
        """Return the base of the agent compared with a policy."""
        return self.trained.get(policy, "fcfs")


@cache
def rltune() -> Rltune:
    """Return the shipped setting; jobs, nodes and the other policies are in the scenario of that name."""
    return read_paper("rltune", Rltune)


_QUICK: dict[str, Any] = {"iterations": 2, "sequences": 4, "sequence": 64, "rollouts": 2, "imitation": 2}


class ComparisonLine(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and base policy: each mean under the base, under the agent, and the change.

    ``trained``: the base that the agent was trained against. ``knows``: the base's information on run times.
    """

    trace: str
    base: str
    trained: str
    knows: str
    jobs: int
    utilization_base: float | None
    utilization: float | None
    wait_base_s: float | None
    wait_s: float | None
    wait_change: float | None
    jct_base_s: float | None
    jct_s: float | None
    jct_change: float | None
    slowdown_base: float | None
    slowdown: float | None
    notes: tuple[str, ...]


def reproduce(options: PaperOptions, advance: Advance) -> list[ComparisonLine]:
    """Train an agent for every trace and base on the earlier part; replay both on the later one."""
    lines: list[ComparisonLine] = []
    vcs: tuple[str | None, ...] = options.vcs or (None,)
    of, setting = rltune(), load_scenario("rltune")
    policies = of.quick.policies if options.quick else (*setting.policies, UNTRAINED)
    trained = list(dict.fromkeys(map(of.trained_against, policies)))
    done, total = 0, len(vcs) * len(trained)
    with tempfile.TemporaryDirectory() as folder:
        for vc in vcs:
            material = _material(options, vc, setting)
            agents = {}
            for base in trained:
                advance(done, total)
                agents[base] = _agent(options, f"{vc or 'all'}-{base}", base, material, Path(folder))
                done += 1
            lines += _lines(options, policies, vc or material.scenario.trace.name, agents, material.held_out[0])
    advance(total, total)
    return lines


def as_json(lines: list[ComparisonLine]) -> dict[str, Any]:
    """Convert to ``--json``."""
    return {"paper": rltune().published, "lines": [msgspec.to_builtins(line) for line in lines]}


def _material(options: PaperOptions, vc: str | None, setting: ReplayRequest) -> TrainingData:
    request = TrainRequest(policy="", trace=options.trace, format=options.format, vc=vc, load=rltune().load,
                           hold_out=rltune().hold_out)  # fmt: skip
    if options.trace is None:
        assert setting.workload is not None
        drawn = replace(setting.workload, jobs=rltune().quick.jobs) if options.quick else setting.workload
        request = msgspec.structs.replace(request, generate=drawn, nodes=setting.nodes)
    return load_training_data(request)[0]


def _agent(
    options: PaperOptions, name: str, base: str, of: TrainingData, folder: Path
) -> tuple[TrainedModel, tuple[str, ...]]:
    """Return the agent trained against one base, and the notes of its training."""
    spec = PolicySpec(name="rltune", agent="rltune", settings={"base": base, **(_QUICK if options.quick else {})})
    material_fields = of._replace(held_out=(), workload=None)._asdict()
    seed, checkpoint = rltune().drawn_with(options)[0], Checkpoint(folder / name, "")
    job = TrainJob(spec=spec, seed=seed, device="cpu", checkpoint=checkpoint, **material_fields)
    trained = train_agent(job, TrainingReport())
    return TrainedModel("rltune", dict(trained.arrays), dict(trained.about), "", f"<{name}>"), trained.notes


def _lines(
    options: PaperOptions, policies: Sequence[str], trace: str, agents: dict[str, tuple[TrainedModel, tuple[str, ...]]],
    held_out: Scenario,
) -> list[ComparisonLine]:  # fmt: skip
    """Replay all bases and agents on the later part; bases that need true run times are excluded."""
    bases = {name: policy_of_order(name) for name in policies if name != UNTRAINED}
    settings, seed = replace(RltuneSettings(), **(_QUICK if options.quick else {})), rltune().drawn_with(options)[0]
    untrained_agent = untrained(settings)
    if UNTRAINED in policies and untrained_agent is not None:
        bases[UNTRAINED] = agent_of(untrained_agent, UNTRAINED, settings)
    mine = {base: agent_of_model("rltune", model) for base, (model, _) in agents.items()}
    as_live = EngineOptions(seed=seed, estimator=HistoryEstimator())
    runs = [PlannedReplay(held_out, p, as_live) for p in (*bases.values(), *mine.values())]
    done = list(run_all(runs))
    base_outcomes = dict(zip(bases, done, strict=False))
    agent_outcomes = dict(zip(mine, done[len(bases) :], strict=True))
    lines = []
    for name, outcome in base_outcomes.items():
        base = rltune().trained_against(name)
        if outcome.result.knows != "oracle":
            line = _compared(outcome.metrics, agent_outcomes[base].metrics)
            about: dict[str, Any] = {"trace": trace, "base": rltune().names.get(name, name), "trained": base}
            about |= {"knows": outcome.result.knows, "jobs": len(held_out.trace), "notes": agents[base][1][:2]}
            lines.append(ComparisonLine(**about, **line))
    return lines


def _compared(base_outcomes: Metrics, mine: Metrics) -> dict[str, Any]:
    """Return the figures of a line."""

    def change(new: float | None, old: float | None) -> float | None:
        return new / old - 1 if new is not None and old else None

    return {
        "utilization_base": base_outcomes.utilization, "utilization": mine.utilization,
        "wait_base_s": base_outcomes.mean_wait_s, "wait_s": mine.mean_wait_s,
        "wait_change": change(mine.mean_wait_s, base_outcomes.mean_wait_s),
        "jct_base_s": base_outcomes.mean_jct_s, "jct_s": mine.mean_jct_s,
        "jct_change": change(mine.mean_jct_s, base_outcomes.mean_jct_s),
        "slowdown_base": base_outcomes.mean_bounded_slowdown, "slowdown": mine.mean_bounded_slowdown,
    }  # fmt: skip
