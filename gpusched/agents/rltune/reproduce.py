"""RLTune's headline figures again (Dongare et al., SoCC 2025): utilization, waiting and JCT by trace and base."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import Material, materials
from gpusched.agents.common.request import UNTRAINED, Report, TrainJob, TrainRequest
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.settings import Settings
from gpusched.agents.rltune.table import agent_of, agent_of_model
from gpusched.agents.rltune.train import train_agent
from gpusched.config.weights import Model
from gpusched.model.papers import RLTUNE
from gpusched.model.policy import PolicySpec
from gpusched.sim.engine.build import Options as EngineOptions
from gpusched.sim.policies import composed
from gpusched.study.metrics import Metrics
from gpusched.study.request import Request
from gpusched.study.scenario import load_scenario
from gpusched.study.study import Run, Scenario, carry_out

SETTING = "rltune"
"""The scenario that comes along: jobs, nodes, and the policies that are replayed beside the agent."""
NAMES = {
    "fifo+none": "FCFS", "sjf-estimate-skip": "SJF (estimate)", "smallest-skip": "smallest", "wfp3-skip": "WFP3",
    "unicef-skip": "UNICEF", "f1-skip": "F1", "multifactor-skip": "multifactor",
}  # fmt: skip
"""Policy -> what the paper calls it."""
_TRAINED_AGAINST = {"sjf-estimate-skip": "sjf", "smallest-skip": "smallest"}
"""Policy -> the base of its agent's rewards; the trainer has none for the others, whose agent is that against FCFS."""
_HELD_OUT = 0.3


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to make. Without a trace: a drawn one. None of ``bases``, 0 ``jobs``: as its scenario says."""

    trace: str | None = None
    format: str | None = None
    vcs: tuple[str, ...] = ()
    load: float = 0.9
    seed: int = 0
    bases: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    jobs: int = 0


QUICK = Options(
    bases=("fifo+none",), jobs=600,
    settings={"iterations": 2, "sequences": 4, "sequence": 64, "rollouts": 2, "imitation": 2},
)  # fmt: skip


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One trace and base policy: each mean under the base, under the agent, and the change.

    ``trained``: the base that the agent was trained against. ``knows``: what the base goes by, of run times.
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


def reproduce(options: Options, advance: Callable[[int, int], None]) -> list[Line]:
    """Trains for every trace and base on the earlier part, replays both on the later one."""
    lines: list[Line] = []
    vcs: tuple[str | None, ...] = options.vcs or (None,)
    setting = load_scenario(SETTING)
    policies = options.bases or (*setting.policies, UNTRAINED)
    trained = list(dict.fromkeys(_TRAINED_AGAINST.get(policy, "fcfs") for policy in policies))
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


def as_json(lines: list[Line]) -> dict[str, Any]:
    """For ``--json``."""
    return {"paper": RLTUNE._asdict(), "lines": [msgspec.to_builtins(line) for line in lines]}


def _material(options: Options, vc: str | None, setting: Request) -> Material:
    request = TrainRequest(policy="", trace=options.trace, format=options.format, vc=vc, load=options.load,
                           hold_out=_HELD_OUT)  # fmt: skip
    if options.trace is None:
        assert setting.workload is not None
        drawn = replace(setting.workload, jobs=options.jobs or setting.workload.jobs)
        request = msgspec.structs.replace(request, generate=drawn, nodes=setting.nodes)
    return materials(request)[0]


def _agent(options: Options, name: str, base: str, of: Material, folder: Path) -> tuple[Model, tuple[str, ...]]:
    """The agent trained against one base, and what its training has to say."""
    spec = PolicySpec(name="rltune", agent="rltune", settings={"base": base, **options.settings})
    told = of._replace(held_out=(), workload=None)._asdict()
    job = TrainJob(spec=spec, seed=options.seed, device="cpu", checkpoint=Checkpoint(folder / name, ""), **told)
    trained = train_agent(job, Report())
    return Model("rltune", dict(trained.arrays), dict(trained.about), "", f"<{name}>"), trained.notes


def _lines(
    options: Options, policies: Sequence[str], trace: str, agents: dict[str, tuple[Model, tuple[str, ...]]],
    held_out: Scenario,
) -> list[Line]:  # fmt: skip
    """All bases and agents replayed on the later part; a base that would have to be told the run times is left out."""
    bases = {name: composed(name) for name in policies if name != UNTRAINED}
    settings = replace(Settings(), **options.settings)
    begun = untrained(settings)
    if UNTRAINED in policies and begun is not None:
        bases[UNTRAINED] = agent_of(begun, UNTRAINED, settings)
    mine = {base: agent_of_model("rltune", model) for base, (model, _) in agents.items()}
    runs = [Run(held_out, p, EngineOptions(seed=options.seed)) for p in (*bases.values(), *mine.values())]
    done = list(carry_out(runs))
    theirs = dict(zip(bases, done, strict=False))
    ours = dict(zip(mine, done[len(bases) :], strict=True))
    lines = []
    for name, outcome in theirs.items():
        base = _TRAINED_AGAINST.get(name, "fcfs")
        if outcome.result.knows != "oracle":
            line = _compared(outcome.metrics, ours[base].metrics)
            about: dict[str, Any] = {"trace": trace, "base": NAMES.get(name, name), "trained": base}
            about |= {"knows": outcome.result.knows, "jobs": len(held_out.trace), "notes": agents[base][1][:2]}
            lines.append(Line(**about, **line))
    return lines


def _compared(theirs: Metrics, mine: Metrics) -> dict[str, Any]:
    """A line's figures."""

    def change(new: float | None, old: float | None) -> float | None:
        return new / old - 1 if new is not None and old else None

    return {
        "utilization_base": theirs.utilization, "utilization": mine.utilization,
        "wait_base_s": theirs.mean_wait_s, "wait_s": mine.mean_wait_s,
        "wait_change": change(mine.mean_wait_s, theirs.mean_wait_s),
        "jct_base_s": theirs.mean_jct_s, "jct_s": mine.mean_jct_s,
        "jct_change": change(mine.mean_jct_s, theirs.mean_jct_s),
        "slowdown_base": theirs.mean_bounded_slowdown, "slowdown": mine.mean_bounded_slowdown,
    }  # fmt: skip
