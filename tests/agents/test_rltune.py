"""RLTune's training: repeatable, resumable, guarded; through the command, moved elsewhere, on a trace never seen."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common import torch_
from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.request import TrainerResult, TrainingProgress, TrainingReport, TrainJob
from gpusched.agents.rltune.candidates import (
    CandidateRule,
    agent_of,
    arrays_of,
    heuristics,
    rules,
    with_net,
    without_net,
)
from gpusched.agents.rltune.choosing import Option, choose_base, choose_strength, preferred
from gpusched.agents.rltune.episodes import Episode, _reordered, cut_episodes
from gpusched.agents.rltune.evaluation import MeanFigures, TraceEvaluation, evaluations
from gpusched.agents.rltune.history import GPUS
from gpusched.agents.rltune.live import prepare
from gpusched.agents.rltune.ppo import Learner, _windows
from gpusched.agents.rltune.public import _judged, _Orders
from gpusched.agents.rltune.reproduce import _lines
from gpusched.agents.rltune.settings import KNOWS, RltuneSettings, read
from gpusched.agents.rltune.table import table_of
from gpusched.agents.rltune.train import train_agent
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.estimation.estimators import Estimator, HistoryEstimator, LastTwo
from gpusched.model.policy import PolicySpec
from gpusched.sim.policies import policy_of_order
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import one_job, replay
from gpusched.study.options import PaperOptions
from gpusched.study.study import Scenario
from gpusched.traces.file import FLOATS, INTS
from gpusched.traces.generate import generate
from gpusched.traces.workload import RunTime, SizeClass, Workload
from tests.agents import inside

WORKLOAD = Workload(
    jobs=400, start=0.0, load=1.0, load_gpus=16, name="small", users=6, burst_share=0.6, burst_size=8.0,
    sizes=tuple(SizeClass(gpus=g, share=s) for g, s in ((1, 0.6), (2, 0.2), (4, 0.1), (8, 0.1))),
    run_time=RunTime(parts=((0.5, 120.0, 0.8), (0.5, 14400.0, 1.0))),
)  # fmt: skip
QUICK: dict[str, Any] = {"iterations": 2, "sequences": 4, "sequence": 48, "rollouts": 2, "imitation": 2, "hidden": 8}


def scenario() -> Scenario:
    pool = Pool.uniform(2, 8)
    return Scenario(generate(WORKLOAD, 0), pool, power_model(pool))


def job(folder: Path, seed: int = 0, **settings: Any) -> TrainJob:
    return TrainJob(
        spec=PolicySpec(name="rltune", agent="rltune", settings={**QUICK, **settings}), partition="default",
        scenario=scenario(), held_out=(), workload=None, declared=None, seed=seed, device="cpu",
        checkpoint=Checkpoint(folder / "checkpoint", "key", every_s=0.0),
    )  # fmt: skip


def bits(trained: TrainerResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trained.arrays.items()}


def test_jobs_in_another_order_keep_all_that_is_theirs():
    trace = replace(one_job(), preemptible=np.ones(1, bool), account=np.zeros(1, np.int64), accounts=("a",))
    columns = {name: np.arange(3) for name in (*FLOATS, *INTS, "preemptible", "account")}
    other = _reordered(replace(trace, ids=("a", "b", "c"), **columns), np.array([2, 0, 1]))
    assert other.ids == ("c", "a", "b")
    assert all(getattr(other, name).tolist() == [2, 0, 1] for name in columns if name != "depends_on")
    assert other.qos is None


class Killed(Exception):
    pass


def test_the_same_seed_gives_the_same_weights_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the guard says: the networks are compared, so it is made to take the last one."""
    monkeypatch.setattr("gpusched.agents.rltune.train.choose_strength", lambda options, *_: (options[-1], []))
    few = rules(RltuneSettings())[:3]  # to replay all of them five times takes a minute
    monkeypatch.setattr("gpusched.agents.rltune.choosing.rules", lambda *_: few)
    one = train_agent(job(tmp_path / "a"), TrainingReport())
    assert one.arrays["strength"][0] > 0
    assert bits(train_agent(job(tmp_path / "c", seed=1), TrainingReport())) != bits(one)

    def kill(progress: TrainingProgress) -> None:
        if progress.label == "network" and progress.done == 2:
            raise Killed

    with pytest.raises(Killed):
        train_agent(job(tmp_path / "d"), TrainingReport(show=kill))
    assert (tmp_path / "d" / "checkpoint").is_file()
    assert bits(train_agent(job(tmp_path / "d"), TrainingReport())) == bits(one), "trained twice, and once in two parts"
    prepare(TrainedModel("rltune", one.arrays, one.about, "", "x"))  # type: ignore[arg-type]


def test_the_base_is_the_usual_rule_or_certainly_better() -> None:
    settings = RltuneSettings()
    found = evaluations(scenario().trace, scenario(), settings, False)
    choice = choose_base(found, settings, lambda done, total: None)
    usual = float(np.mean([a.play(without_net(rules(settings)[0], settings)).cost("slowdown") for a in found]))
    assert (choice.usual, choice.usual_cost) == ("sjf", pytest.approx(usual))
    assert choice.rule.name == "sjf" or choice.cost < usual - 0.01


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([(0.9, 0.9), (0.9, 0.9), (0.9, 0.9), (1.02, 1.0)], "other"),  # better in three of four
        ([(0.7, 0.9), (0.7, 0.9), (1.02, 0.9), (1.02, 0.9)], "usual"),  # better in the mean, by two of four
        ([(0.9, 0.9), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], "other"),  # the same where it makes no difference
        ([(0.995, 0.9)] * 4, "usual"),  # by less than 1 %
        ([(0.9, 1.1)] * 4, "usual"),  # its JCT is worse
    ],
)
def test_another_rule_must_be_certainly_better(other: list[tuple[float, float]], chosen: str) -> None:
    assert preferred({"usual": [(1.0, 1.0)] * 4, "other": other, "worst": [(2.0, 2.0)] * 4}, "usual") == chosen


def test_the_rules_to_choose_from_depend_on_the_known_run_times() -> None:
    names = {knows: [rule.name for rule in rules(RltuneSettings(knows=knows), True)] for knows in KNOWS}
    assert {knows: of[0] for knows, of in names.items()} == {
        "nothing": "fifo", "limit": "by limit", "estimate": "sjf", "oracle": "sjf"}  # fmt: skip
    assert names["nothing"] == ["fifo", "smallest"]
    assert not any("sjf" in name for name in names["limit"])
    assert names["estimate"] == names["oracle"] == list(dict.fromkeys(names["estimate"]))
    assert {rule.name for rule in heuristics(RltuneSettings())} == {"fifo", "smallest", "sjf"}


def test_a_network_that_harms_is_not_believed() -> None:
    settings = RltuneSettings()
    base = without_net(CandidateRule("fifo", {"waited": 0.01}), settings)
    inputs = len(base.scorer.mean)
    harm = np.zeros((1, inputs), np.float32)
    harm[0, GPUS] = 50.0  # the largest first
    arrays = {"net.0.weight": harm, "net.0.bias": np.zeros(1, np.float32)}
    bad = with_net(base, arrays, np.zeros(inputs, np.float32), np.ones(inputs, np.float32), 1.0)
    evaluation = [TraceEvaluation(scenario().trace, scenario().pool, settings)]
    found, words = choose_strength([Option("bad", 1.0, bad)], base, evaluation, evaluation, settings)
    assert found.strength == 0.0
    assert "later" in words[0]


class KnownFigures:
    """A replay whose figures are known: policy -> mean JCT, which is all that counts here."""

    def __init__(self, **jct: float) -> None:
        self.jct = jct

    def play(self, prepared: Any) -> MeanFigures:
        return MeanFigures(1.0, self.jct[prepared], 1.0, 0.5)


@pytest.mark.parametrize(
    ("before", "later", "chosen"),
    [
        (90.0, 90.0, "net"),
        (100.0, 90.0, "net"),  # as good before is good enough
        (101.0, 90.0, "none"),  # worse before, however much better later: it may be luck
        (50.0, 99.5, "none"),  # not surely better later
        (50.0, 101.0, "none"),
    ],
)
def test_a_network_must_be_better_later_and_no_worse_before(before: float, later: float, chosen: str) -> None:
    options: Any = [Option("net", 1.0, "net")]  # type: ignore[arg-type]
    early: Any = [KnownFigures(none=100.0, net=before)]
    late: Any = [KnownFigures(none=100.0, net=later)]
    found, words = choose_strength(options, "none", early, late, RltuneSettings(objective="jct"))  # type: ignore[arg-type]
    assert found.prepared == chosen
    assert words == [f"net x 1: {1 - later / 100:+.1%} later, {1 - before / 100:+.1%} before"]


def test_settings_say_what_is_wrong() -> None:
    assert read({"knows": "nothing", "window": 8}).window == 8
    for given, words in (({"knows": "all"}, "knows"), ({"windo": 3}, "did you mean"), ({"window": 0}, "at least 1"),
                         ({"temperature": 0.0}, "temperature")):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            read(given)
        assert words in f"{caught.value} {caught.value.hint or ''}"


def gpusched(*words: str) -> str:
    done = inside.run(*words, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_move_and_replay_elsewhere(tmp_path: Path) -> None:
    """The commands that others rely on, on a small log."""
    trace = generate(WORKLOAD, 0)
    rows = ["submit_time,duration_s,num_gpus,vc"]
    for i, (at, run, gpus) in enumerate(zip(trace.submit, trace.duration, trace.gpus, strict=True)):
        submitted = datetime(2017, 10, 1, tzinfo=UTC) + timedelta(seconds=int(at))
        rows.append(f"{submitted:%Y-%m-%d %H:%M:%S},{max(int(run), 1)},{gpus},{'ab'[i % 2]}")
    log = tmp_path / "log.csv"
    log.write_text("\n".join(rows) + "\n")
    policy = tmp_path / "rltune.yaml"
    train = "".join(f"  {k}: {v}\n" for k, v in QUICK.items())
    policy.write_text(f"agent: rltune\nfallback: easy\ntrain:\n{train}")
    out = tmp_path / "out"
    made = json.loads(gpusched(
        "train", str(policy), "--trace", str(log), "--format", "philly-csv", "--vc", "a", "--load", "0.9",
        "--out", str(out), "--keep-anyway", "--json",
    ))[0]  # fmt: skip
    assert made["card"]["knows"] == "estimate"
    assert any(note.startswith("base rule") for note in made["card"]["notes"])
    assert any("mean bounded slowdown" in note for note in made["card"]["notes"])
    policies = {row["policy"] for row in made["card"]["metrics"]}
    assert {"rltune", "fifo+none", "smallest-skip", "sjf-estimate-skip", "untrained start"} <= policies
    assert made["card"]["metrics"][1]["policy"] == "untrained start"
    same = {row["policy"]: row["value"] for row in made["card"]["metrics"]}
    assert same["untrained start"] == same["sjf-estimate-skip"], "it starts as the rule by the same estimates"
    assert made["card"]["decides"].startswith("a linear rule '")
    moved = tmp_path / "elsewhere"
    shutil.move(out, moved)
    replay = ["replay", str(log), "--format", "philly-csv", "--vc", "b", "--load", "0.9", "--policy", str(moved),
              "--policy", "fifo", "--policy", "rltune", "--policy", "sjf-estimate-skip", "--json"]  # fmt: skip
    rows_of = {row["policy"]: row for row in json.loads(gpusched(*replay))}
    mine = rows_of[str(moved)]
    assert mine["knows"] == "estimate"
    assert mine["mean_jct_s"] <= rows_of["fifo"]["mean_jct_s"]
    figures = [
        {k: v for k, v in rows_of[name].items() if k.startswith("mean_")} for name in ("rltune", "sjf-estimate-skip")
    ]
    assert figures[0] == figures[1], "the included weights are that rule"


def test_the_paper_again_in_seconds(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    made = json.loads(gpusched("reproduce", "rltune", "--quick", "--json", "--html", str(page)))
    assert made["paper"] == {"utilization": 0.2, "wait": -0.81, "jct": -0.7}
    (line,) = made["lines"]
    assert (line["base"], line["trained"], line["knows"]) == ("FCFS", "fcfs", "nothing")
    assert line["wait_change"] < 0
    assert "Queueing delay" in page.read_text()


def test_rules_that_judge_an_agent_estimate_run_times_as_live(tmp_path: Path) -> None:
    """In training's table, in that of other clusters, and in the paper's: all feed a verdict or a published figure."""
    name, held, spec = "sjf-estimate-skip", scenario(), PolicySpec(name="rltune", agent="rltune")
    agent = agent_of(without_net(rules(RltuneSettings())[0], RltuneSettings()), "rltune", RltuneSettings())

    def jct(estimator: Estimator) -> float:
        result = replay(held.trace, held.pool, name, estimator=estimator)
        return float(np.mean(result.end - held.trace.submit))

    rows, _ = table_of(agent, [policy_of_order(name)], replace(job(tmp_path), held_out=(held,)), TrainingReport())
    others = {one.result.policy: one.metrics.mean_jct_s for one in _judged(_Orders(spec), (), agent, held)}
    assert agent.model is not None
    (line,) = _lines(PaperOptions(), (name,), "", {"sjf": (agent.model, ())}, held)
    found = [next(row.value for row in rows or () if row.policy == name), others[name], line.jct_base_s]
    assert found == [pytest.approx(jct(HistoryEstimator()))] * 3
    assert found != [pytest.approx(jct(LastTwo()))] * 3


def attentive(seed: int) -> tuple[Learner, list[Episode]]:
    """A learner with attention that has not learned yet, and what it can learn from."""
    settings = read({**QUICK, "attention": True})
    base = without_net(CandidateRule("sjf", {"estimate": -1.0}), settings)
    before = TraceEvaluation(scenario().trace, scenario().pool, settings).result(base)
    assert before is not None
    torch_.set_up(seed)
    return Learner(base, settings, seed), cut_episodes(before, settings, 4, np.random.default_rng(0))


def test_attention_learns_the_same_from_the_same_seed_and_goes_on_where_it_was() -> None:
    def learned(seed: int, pause: bool) -> dict[str, bytes]:
        learner, episodes = attentive(seed)
        start = learner.net.arrays()
        learner.imitate(episodes, lambda done: None)
        if pause:
            state = learner.state()
            learner = attentive(seed)[0]
            learner.restore(*state)
        learner.improve(episodes, [0.0] * len(episodes))
        found = learner.net.arrays()
        assert all((found[n] != start[n]).any() for n in start if n.startswith("attention.")), "all parts learn"
        taken = arrays_of(prepare(TrainedModel("rltune", arrays_of(learner.policy()), {}, "", "x")))
        assert {n: taken[n].tobytes() for n in found} == {n: a.tobytes() for n, a in found.items()}
        return {n: a.tobytes() for n, a in found.items()}

    one = learned(0, pause=False)
    assert learned(0, pause=True) == one
    assert learned(1, pause=False) != one


def test_windows_of_recorded_picks_keep_their_jobs_together() -> None:
    """The training data of attention: every window once, its rows side by side with what is off of each."""
    learner, episodes = attentive(0)
    recorded = learner.plays(episodes, 1)
    trajectories = [p.trajectory for mine in recorded for p in mine]
    rows = np.concatenate([trajectory.rows[: trajectory.used[0]] for trajectory in trajectories])
    windows, off, present = _windows(recorded, rows, rows[:, GPUS].copy(), learner.policy().scorer.window[0])
    assert (
        len(windows) == sum(len(np.unique(trajectory.first[: trajectory.used[1]])) for trajectory in trajectories) > 10
    )
    sizes = [
        int(s)
        for trajectory in trajectories
        for s in trajectory.size[np.unique(trajectory.first[: trajectory.used[1]], return_index=True)[1]]
    ]
    assert present.sum(axis=1).tolist() == sizes
    assert (windows[..., GPUS][present] == off[present]).all()
    assert not windows[~present].any()
