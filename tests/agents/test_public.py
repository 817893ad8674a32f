"""Weights that come along: each agent is judged on jobs that it has not seen, and files are made twice alike."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import rltune_bound, weights
from gpusched.agents.common.request import UNTRAINED
from gpusched.agents.rltune import public
from gpusched.agents.rltune.preempting import NO_ODDS, odds_of
from gpusched.agents.rltune.public import Candidate, PublicCluster, Transfer, train_public
from gpusched.agents.training import public as command
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import load_file
from gpusched.errors import UsageError
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.study.options import PaperOptions
from gpusched.study.study import Scenario, StudyOutcome
from gpusched.traces.generate import generate
from gpusched.traces.workload import load_workload

DRAWN = load_workload("benchmarks/weights_workload.yaml")
SAYING = [row for row in weights.SHIPPED if row.differs in ("", weights.FOREIGN)]


def cluster(name: str, seed: int, jobs: int = 120) -> PublicCluster:
    trace, pool = generate(replace(DRAWN, jobs=jobs), seed), Pool.uniform(2, 8)
    return PublicCluster(name, (1.0,), (Scenario(trace, pool, power_model(pool)),))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Few orders to choose from: all of them take a minute."""
    for kind in (public._Orders, public._Ranks):
        whole = kind.candidates
        monkeypatch.setattr(
            kind, "candidates", lambda self, whole=whole: [c for c in whole(self) if c.known or c.name == self.default]
        )
    return monkeypatch


def agents_of(
    clusters: list[PublicCluster], few: pytest.MonkeyPatch, policy: str = "rltune-preempt"
) -> tuple[Transfer, list[dict[str, bytes]]]:
    """Train; also the weights by which each cluster was judged."""
    used: list[dict[str, bytes]] = []
    judged = public._judged

    def record(kind: Any, found: Any, agent: ReplayPolicy, scenario: Scenario) -> list[StudyOutcome]:
        assert agent.model is not None
        used.append({name: array.tobytes() for name, array in agent.model.arrays.items()})
        return judged(kind, found, agent, scenario)

    with few.context() as patch:
        patch.setattr(public, "_judged", record)
        return train_public(clusters, load_policy(BUILT_IN / f"{policy}.yaml"), lambda done, total: None), used


def test_a_cluster_is_judged_by_weights_of_the_others_only(few: pytest.MonkeyPatch) -> None:
    """Its own jobs, however they change, change nothing in the agent that it is judged by; the others' do."""
    few.setattr(public, "_counts", lambda gain, jct_gain: True)
    a, b, c = cluster("a", 1), cluster("b", 2), cluster("c", 3)
    (scenario,) = c.scenarios
    longer = scenario._replace(trace=replace(scenario.trace, duration=scenario.trace.duration * 50))
    made, used = agents_of([a, b, c], few)
    _, other = agents_of([a, b, c._replace(scenarios=(longer,))], few)
    assert used[2] == other[2]
    assert used[0] != other[0]
    assert used[1] != other[1]
    everything = [one.scenarios[0].trace for one in (a, b, c)]
    counted = odds_of(*(np.concatenate([getattr(t, name) for t in everything]) for name in ("gpus", "duration")))
    assert np.array_equal(made.result.arrays["prior"], counted.prior)
    assert "odds of run times: counted on the clusters" in made.result.notes
    assert list(made.outcomes) == [("a", 1.0), ("b", 1.0), ("c", 1.0)]
    rows = {row.policy: row for row in made.result.rows or ()}
    jct = [own[0].metrics.mean_jct_s for own in made.outcomes.values()]
    assert rows[public.AGENT].value == pytest.approx(np.mean(jct))  # type: ignore[arg-type]
    assert {UNTRAINED, "fifo+skip", "sjf-estimate-skip", "lower bound"} <= set(rows)
    assert rows["fifo+none"].change_low is not None, "intervals over clusters"
    assert sum(note.startswith(("a at 1:", "b at 1:", "c at 1:")) for note in made.result.notes) == 3


@pytest.mark.parametrize(("better", "counted"), [(0.5, True), (0.0, False), (-0.5, False)])
def test_odds_are_counted_only_where_they_help_others(better: float, counted: bool) -> None:
    """A kind of agent whose cost is known: with counted odds that much less than with the prior."""
    clusters = [cluster(name, seed, 40) for seed, name in enumerate("abc")]

    class Known(public._Ranks):
        def costs(self, policy: Any, of: PublicCluster) -> list[tuple[float, float]]:
            others = [one.scenarios[0].trace for one in clusters if one is not of]
            columns = (np.concatenate([getattr(t, name) for t in others]) for name in ("gpus", "duration"))
            assert np.array_equal(policy.prior, odds_of(*columns).prior), "its own jobs count"
            return [(1.0 - better, 1.0 - better)]

    kind, found = Known(load_policy(BUILT_IN / "rltune-preempt.yaml")), [Candidate("one", True, lambda odds: odds)]  # type: ignore[arg-type, return-value]
    chosen, odds = public._learned(kind, found, {name: {"one": [(1.0, 1.0)]} for name in "abc"}, clusters)
    assert (chosen.name, odds is not NO_ODDS) == ("one", counted)


def rule(name: str, known: bool = False) -> Candidate:
    return Candidate(name, known, lambda odds: pytest.fail("not replayed here"))


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"known": (1.0, 1.0), "default": (0.9, 1.0), "other": (0.88, 1.0)}, "default"),  # nearly as good
        ({"known": (1.0, 1.0), "default": (0.9, 1.0), "other": (0.8, 1.0)}, "other"),
        ({"known": (1.0, 1.0), "default": (1.1, 1.1), "other": (0.8, 1.1)}, "known"),  # its JCT is worse
    ],
)
def test_the_rule_is_the_best_of_the_sound_ones(costs: dict[str, tuple[float, float]], chosen: str) -> None:
    kind = public._Ranks(load_policy(BUILT_IN / "rltune-preempt.yaml"))
    kind.default = "default"
    found = [rule("known", True), rule("default"), rule("other")]
    assert kind.choice(found, {name: [cost] * 2 for name, cost in costs.items()}).name == chosen


def test_the_order_is_the_usual_one_unless_another_is_certainly_better() -> None:
    kind = public._Orders(load_policy(BUILT_IN / "rltune.yaml"))
    found, usual = [rule("sjf", True), rule("other")], [(1.0, 1.0)] * 4
    assert kind.default == "sjf"
    assert kind.choice(found, {"sjf": usual, "other": [(0.9, 0.9)] * 3 + [(1.1, 1.0)]}).name == "other"
    assert kind.choice(found, {"sjf": usual, "other": [(0.5, 0.5)] * 2 + [(1.1, 1.1)] * 2}).name == "sjf"


def test_costs_are_of_several_windows_by_the_estimates_that_decide_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long cluster the last jobs and those before; of a short one all."""
    seen: list[tuple[int, str]] = []
    real = public.replay

    def record(part: Any, *given: Any, **options: Any) -> Any:
        seen.append((part.ids[0], len(part), options["estimator"].name))
        return real(part, *given, **options)

    monkeypatch.setattr(public, "replay", record)
    monkeypatch.setattr(public, "CHOICE_JOBS", 40)
    kind = public._Orders(load_policy(BUILT_IN / "rltune.yaml"))
    policy = kind.candidates()[0].policy(NO_ODDS)
    for jobs, windows in ((30, 1), (79, 1), (100, 2)):
        of = cluster("a", 1, jobs)
        assert len(kind.costs(policy, of)) == windows
        ids = of.scenarios[0].trace.ids
        assert [seen.pop(0) for _ in range(windows)] == [
            (ids[max(0, jobs - 40 * k)], min(jobs, 40), "history") for k in range(1, windows + 1)
        ]


def test_policies_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    few = [cluster("a", 1), cluster("b", 2)]
    with pytest.raises(UsageError, match="at least three"):
        train_public(few, load_policy(BUILT_IN / "rltune.yaml"), lambda done, total: None)
    enough = [*few, cluster("c", 3)]
    with pytest.raises(UsageError, match="knows time limits only"):
        train_public(enough, load_policy(BUILT_IN / "rltune-limit.yaml"), lambda done, total: None)
    out = str(tmp_path / "w.safetensors")
    for options, words in (
        (PaperOptions(out=out), "several clusters"),
        (PaperOptions(out=out, trace="x.csv", policies=("gist",)), "--policy gist"),
    ):
        with pytest.raises(UsageError) as caught:
            command.make_public(options, lambda done, total: None)
        assert words in str(caught.value)


def test_tiny_versions_are_made_twice_alike_and_say_how(tmp_path: Path) -> None:
    """The short version of `make weights`, as CI runs it, for the file that is made fastest."""
    (row,) = [row for row in weights.SHIPPED if "rltune-preempt" in row.file]
    assert weights.short(row, tmp_path) == "equal"
    made = load_file(tmp_path / "first" / weights.WEIGHTS, "rltune")
    assert made.about["command"] == (
        "gpusched reproduce rltune --quick --policy rltune-preempt --trace log.csv --vc a --vc b --vc c"
    )
    assert made.about["seed"] == "none", "it depends on no random draw"
    assert made.about["data"].startswith("log.csv sha256 ")
    card = yaml.safe_load((tmp_path / "first" / "default.card.yaml").read_text())
    assert card["trace"]["public"] is True
    assert card["weights"] == made.digest
    assert card["metrics"][0]["policy"] == public.AGENT
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes((tmp_path / "second" / weights.WEIGHTS).read_bytes()[:-1] + b"\x01")
    assert weights.comparison(changed, tmp_path / "first" / weights.WEIGHTS).startswith("differs: ")


def test_a_file_that_is_not_made_is_told_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = weights.ShippedWeights("bad", "", ("gpusched train",), {})
    monkeypatch.setattr(weights, "SHIPPED", (bad, bad._replace(file="no short", short=())))
    assert weights.main(["--short"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("bad: not made: exit code 2, ")
    assert second.startswith("no short: no short version, ")


@pytest.mark.parametrize("row", SAYING, ids=lambda row: row.file.split("/", 2)[2])
def test_shipped_files_say_what_made_them(row: weights.ShippedWeights) -> None:
    """The table's command and data, in the file's own metadata; and the card beside it, if any, is this file's."""
    file = weights.ROOT / row.file
    model = load_file(file, row.command.split()[2])
    command_of_table = re.sub(r"\{data\}/(\S+/)?", "", row.command.partition(" --out")[0])
    assert model.about["command"].startswith(command_of_table)
    data = "; ".join(f"{Path(name).name} sha256 {digest}" for name, digest in row.data.items())
    assert model.about["data"] == (data or "drawn")
    assert {"seed", "gpusched"} <= model.about.keys()
    if "policies" in row.file:
        card = yaml.safe_load(file.with_name("default.card.yaml").read_text())
        assert card["weights"] == model.digest
        assert card["trace"]["public"] is True


def test_weightings_are_held_against_the_best_rule_of_their_cell(capsys: pytest.CaptureFixture[str]) -> None:
    (scenario,) = cluster("a", 1, 60).scenarios
    rule, (start, shipped, oracle), ratios = rltune_bound.figures(2, scenario)
    names = [one.name for one in rltune_bound.drawn(2)]
    assert (len(ratios), names[0]) == (len(names) + 1, "sjf")
    assert (start, shipped) == (ratios[0], ratios[-1])
    assert oracle < 1.0, "true run times help any rule by estimates"
    assert rule.endswith(" s")
    assert min(ratios) > 0.0

    # two loads, three clusters, three weightings: the second wins most, but on the last cluster only the third does
    won = np.array(
        [[[0.9, 0.8, 1.2], [1.1, 0.8, 1.2], [1.1, 1.3, 0.7]], [[1.1, 0.9, 1.1], [1.1, 0.9, 1.1], [1.1, 1.2, 0.9]]]
    )
    rltune_bound.summary(won)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("best of each cell in hindsight, of 3: 3 at 0.9 (mean -23.3%), 3 at 1.1 (mean -10.0%)")
    assert ", of 3: 2 at 0.9 (mean -3.3%), 2 at 1.1 (mean +0.0%)" in lines[1]
    assert lines[2].startswith("chosen on the other clusters, of 3: 0 at 0.9")
    assert lines[3] == "weightings that win 2 at every load: 1"
