"""The gate of ``gpusched train``: what a training with a bug leaves behind is not saved, and the old weights decide."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from gpusched.agents.common.request import UNTRAINED, ResultRow, TrainerResult, TrainingReport, TrainJob
from gpusched.agents.dl2 import train as dl2
from gpusched.agents.dl2.learn import Dl2Recipe
from gpusched.agents.gist.networks import heuristic
from gpusched.agents.gist.scale import ScaleTraining
from gpusched.agents.maifs import train as maifs
from gpusched.agents.rltune.evaluation import MeanFigures
from gpusched.agents.topology import learn as topology
from gpusched.agents.training.gate import judge
from gpusched.cli import main as cli
from gpusched.config.policies import load_policy
from gpusched.config.weightfiles import kept_anyway
from gpusched.sim.policies import policy_of_spec

INVENTORY = Path(__file__).parents[2] / "inventory.yaml"
WORKLOAD = """\
name: exact limits
jobs: 300
start: 2026-01-05
arrivals: {load: 1.1, gpus: 16}
sizes: [{gpus: 1, share: 1}]
run_time: {parts: [{weight: 1, median: 15m, sigma: 1.2}], min: 30s, max: 2d}
limits: {menu: [10m, 1h, 4h, 12h, 2d], over: {median: 1, sigma: 0}}
users: {count: 5}
"""
"""Jobs of one GPU with exact limits: whatever sorts by the limit is as good as the best rule."""
QUICK = {
    "gist": "generations: 1, population: 4, jobs: 60, traces: 1, validation: 6, validate_every: 1, "
    "validation_jobs: 300, use_weight: 0",
    "rltune": "iterations: 1, sequences: 4, sequence: 64, rollouts: 2, imitation: 1, knows: limit, objective: jct",
    "dl2": "rounds: 1, batch: 4, hidden: 8, most: 4",
    "maifs": "generations: 1, population: 4, tries: 1, validations: 2, most: 4",
    "topology": "generations: 4, population: 4, tries: 1, watch: 2, every: 1, window: 60",
}
RACKS = """\
topology: {r1: {nodes: [a, b], uplink: 10G}, r2: {nodes: [c, d], uplink: 10G}}
defaults: {runtime: process, gpus: 4, cores: 16, memory: 64G}
partitions: {p: {nodes: [a, b, c, d], flavors: {one: {gpus: 1, cores: 1, memory: 1G, time: 1h}}}}
"""
GANGS = WORKLOAD.replace("jobs: 300", "jobs: 150").replace(
    "[{gpus: 1, share: 1}]", "[{gpus: 1, share: 1}, {gpus: 4, share: 1}, {gpus: 8, share: 2}]"
)
FEW = WORKLOAD.replace("jobs: 300", "jobs: 80")
SOURCES = {
    "topology": "--generate gangs.yaml --inventory racks.yaml -p p",
    **dict.fromkeys(("dl2", "maifs"), "--generate few.yaml --nodes 2"),
}
"""Where not the workload above: places matter to gangs in racks only; who chooses sizes decides at every event."""


class Trained(NamedTuple):
    """The result of ``gpusched train``: exit code, output, the last line of stderr."""

    code: int
    out: str
    last: str


class Site:
    """A folder with a policy for each agent; ``train`` runs in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        monkeypatch.chdir(folder)
        monkeypatch.setattr(dl2, "Dl2Recipe", partial(Dl2Recipe, imitation_steps=300))  # so many show a bug
        for name, text in (("w", WORKLOAD), ("few", FEW), ("gangs", GANGS), ("racks", RACKS)):
            (folder / f"{name}.yaml").write_text(text)

    def train(self, agent: str, *words: str, source: str = "") -> Trained:
        source = source or SOURCES.get(agent, "--generate w.yaml --nodes 2")
        (self.folder / f"{agent}.yaml").write_text(f"agent: {agent}\ntrain: {{{QUICK[agent]}}}\n")
        self._capfd.readouterr()
        code = cli.run(["train", f"{agent}.yaml", *source.split(), *words])
        out, err = self._capfd.readouterr()
        return Trained(code, out, err.splitlines()[-1] if err else "")

    def files(self, agent: str) -> dict[str, bytes]:
        """The files that count: hidden ones are checkpoints."""
        return {f.name: f.read_bytes() for f in (self.folder / agent).iterdir() if not f.name.startswith(".")}

    def gate(self, agent: str, partition: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.files(agent)[f"{partition}.card.yaml"])["gate"]
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, monkeypatch, capfd)


def minimized_is_maximized(of: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The sign of what the search minimizes is wrong, in its own validation, too."""
    true = getattr(of, name)
    return lambda patch: patch.setattr(of, name, lambda *args: -true(*args))


def imitates_the_opposite(patch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    true = torch.nn.functional.cross_entropy
    patch.setattr(torch.nn.functional, "cross_entropy", lambda *args: -true(*args))


def writes_what_was_not_learned(patch: pytest.MonkeyPatch) -> None:
    true = maifs.train_agent

    def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
        found, rng = true(job, report), np.random.default_rng(0)
        arrays = {name: rng.normal(0.0, 3.0, array.shape) for name, array in found.arrays.items()}
        return replace(found, arrays={name: array.astype(np.float32) for name, array in arrays.items()})

    patch.setattr(maifs, "train_agent", train_agent)


BUGS = {
    "gist": minimized_is_maximized(ScaleTraining, "_cost"),
    "rltune": minimized_is_maximized(MeanFigures, "cost"),
    "dl2": imitates_the_opposite,
    "maifs": writes_what_was_not_learned,
    "topology": minimized_is_maximized(topology, "cost"),
}
OPENS = {"gist": "untrained", "rltune": "no worse"}


@pytest.mark.parametrize("agent", QUICK)
def test_a_training_with_a_bug_is_not_saved_and_the_old_weights_decide(site: Site, agent: str) -> None:
    pytest.importorskip("torch")
    good = site.train(agent, *(() if agent in OPENS else ("--keep-anyway",)))
    assert good.code == 0, good
    assert not list((site.folder / agent).glob(".*"))
    partition = "p" if agent == "topology" else "default"
    before, verdict = site.files(agent), site.gate(agent, partition)
    assert verdict["outcome"] == OPENS.get(agent, verdict["outcome"])
    assert verdict["kept_anyway"] == (verdict["outcome"] == "worse")
    spec = load_policy(site.folder / agent)
    decided = policy_of_spec(spec, partition=partition).model
    with pytest.MonkeyPatch.context() as patch:
        BUGS[agent](patch)
        spoilt = site.train(agent, "--seed", "1", "--json")
    assert spoilt.code == 1
    (found,) = json.loads(spoilt.out)
    assert (found["weights"], found["card_file"], found["card"]["weights"]) == (None, None, "")
    gate = found["card"]["gate"]
    assert gate["outcome"] == "worse"
    assert gate["rule"]["change"] > verdict["rule"]["change"] + 0.03  # it is the bug that is seen
    assert spoilt.last == f"gpusched: {partition}: not saved: {gate['line']}; --keep-anyway saves it all the same"
    assert f"{gate['rule']['change']:+.1%} (" in gate["line"]
    assert f"against {gate['rule']['against']}" in gate["line"]
    assert site.files(agent) == before
    still = policy_of_spec(spec, partition=partition).model
    assert decided is not None
    assert still is not None
    assert still.digest == decided.digest


def learns(monkeypatch: pytest.MonkeyPatch, better_in: tuple[str, ...] = ()) -> list[str]:
    """A trainer that takes no time; its rule is better than its start in these partitions. Return where it trained."""
    trained: list[str] = []

    def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
        trained.append(job.partition)
        arrays, start = heuristic(0, log_age=1.0), heuristic(0, log_limit=-1.0)
        if job.partition in better_in:
            arrays, start = start, arrays
        return TrainerResult(arrays=arrays, about={"knows": "limit"}, score=0.0, hyper_parameters={}, untrained=start)

    pytest.importorskip("torch")
    monkeypatch.setattr("gpusched.agents.gist.train.train_agent", train_agent)
    return trained


def test_kept_anyway_it_ends_at_once_and_is_marked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = learns(monkeypatch)
    closed = site.train("gist")
    assert closed.code == 1
    assert closed.last.startswith("gpusched: error: default: not saved: mean JCT +")
    assert "weights: not saved" in closed.out
    assert site.files("gist") == {}
    assert site.train("gist").last == closed.last
    kept = site.train("gist", "--keep-anyway")
    assert kept.code == 0, kept
    assert trained == ["default"]  # once, for all three
    assert "already trained on these jobs" in kept.last
    assert "gate: worse, kept anyway: mean JCT +" in kept.out
    gate = site.gate("gist")
    assert (gate["outcome"], gate["kept_anyway"]) == ("worse", True)
    assert kept_anyway("gist", "any") == f"worse: {gate['line']}"
    assert sorted(f.name for f in (site.folder / "gist").iterdir()) == [
        "default.card.yaml", "default.safetensors", "policy.yaml",
    ]  # fmt: skip
    assert site.train("gist", "--seed", "1").code == 1  # other inputs: trained anew
    assert trained == ["default"] * 2


def test_partitions_that_pass_are_saved(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "inventory.yaml").write_text(INVENTORY.read_text("utf-8"))
    learns(monkeypatch, better_in=("A100",))
    done = site.train("gist", source="--generate w.yaml --inventory inventory.yaml")
    assert done.code == 1
    assert done.last.startswith("gpusched: error: V100: not saved: mean JCT +")
    assert set(site.files("gist")) == {"A100.card.yaml", "A100.safetensors", "policy.yaml"}
    gate = site.gate("gist", "A100")
    assert gate["outcome"] == "no worse"
    assert gate["start"]["high"] < 0 == round(gate["rule"]["change"], 3)


def test_without_held_out_jobs_nothing_is_trained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = learns(monkeypatch)
    done = site.train("gist", "--hold-out", "0")
    assert (done.code, trained) == (2, [])
    assert "--hold-out 0: no held-out jobs would judge the weights" in done.last
    kept = site.train("gist", "--hold-out", "0", "--keep-anyway")
    assert kept.code == 0, kept
    assert site.gate("gist")["outcome"] == "not judged"
    assert kept_anyway("gist", "default").startswith("not judged: no held-out jobs")


def row(policy: str, change: float | None = None, high: float | None = None, **more: Any) -> ResultRow:
    """A line of a final table; its interval is as wide below."""
    low = None if change is None or high is None else 2 * change - high
    line: dict[str, Any] = {"knows": "limit", "figure": "mean_jct_s", "value": 100.0} | more
    return ResultRow(policy=policy, change=change, change_low=low, change_high=high, **line)


@pytest.mark.parametrize(
    ("rows", "outcome", "line"),
    [
        (
            [row(UNTRAINED, -0.2, -0.1), row("sjf", -0.05, -0.01)], "better",
            "mean JCT -20.0% (-30.0% to -10.0%) against its untrained start, -5.0% (-9.0% to -1.0%) against sjf",
        ),
        (
            [row(UNTRAINED, -0.2, -0.1), row("sjf", -0.05, 0.01)], "no worse",
            "mean JCT -20.0% (-30.0% to -10.0%) against its untrained start, -5.0% (-11.0% to +1.0%) against sjf",
        ),
        ([row(UNTRAINED, -0.2), row("sjf", -0.05)], "no worse",
         "mean JCT -20.0% against its untrained start, -5.0% against sjf"),
        ([row(UNTRAINED, 0.001, 0.3), row("sjf", -0.05, -0.01)], "worse", None),
        ([row(UNTRAINED, -0.2, -0.1), row("sjf", 0.01, 0.3)], "worse", None),
        ([row("sjf", 0.0004)], "no worse", "mean JCT +0.0% against sjf"),  # no line says that +0.0 % is worse
        # the best rule counts, of those that know no more; bounds are no rules
        ([row("fifo", -0.3), row("sjf", 0.1, value=90.0)], "worse", "mean JCT +10.0% against sjf"),
        ([row("fifo", -0.3), row("srtf", 0.1, value=90.0, knows="oracle")], "no worse", "mean JCT -30.0% against fifo"),
        ([row("fifo", -0.3), row("best", 0.1, value=90.0, bound=True)], "no worse", "mean JCT -30.0% against fifo"),
        ([row("fifo", -0.3), row("lower bound", value=9.0, knows="")], "no worse", "mean JCT -30.0% against fifo"),
        ([], "not judged", None),
        ([row("lower bound", knows="")], "not judged", None),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_table(rows: list[ResultRow], outcome: str, line: str | None) -> None:
    verdict = judge([row("agent"), *rows])
    assert (verdict.outcome, verdict.closed) == (outcome, outcome in ("worse", "not judged"))
    assert line is None or verdict.line == line


def test_more_utilization_is_better_and_a_start_is_untrained() -> None:
    def of(agent: float) -> str:
        values = {"agent": agent, UNTRAINED: 0.5, "naive": 0.6, "first fit": 0.7}
        return judge([row(name, figure="utilization", value=value) for name, value in values.items()]).outcome

    assert (of(0.75), of(0.65), of(0.45)) == ("no worse", "worse", "worse")
    equal = [row("agent"), row(UNTRAINED, 0.0, 0.0)]
    assert judge(equal, is_start=True).outcome == "untrained"
    assert judge([*equal, row("sjf", 0.1, 0.2)], is_start=True).outcome == "worse"
    assert judge([]).outcome == "not judged"
