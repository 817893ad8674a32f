"""``gpusched train topology``: its windows, however long the history is, and what jobs of a trace cost each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.request import TrainingReport, TrainJob
from gpusched.agents.common.vector import split_vector, to_vector
from gpusched.agents.topology import learn, train
from gpusched.agents.topology.network import IDLE, IDLE_WEIGHT, SHAPES, start
from gpusched.agents.topology.replay import agents_spec
from gpusched.agents.topology.train import TopologyTrainSettings, train_agent
from gpusched.agents.topology.workloads import draw, settings
from gpusched.config.weights import load_file
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.power import power_model
from gpusched.study.study import Scenario
from tests.agents import inside

RACKS = settings()["16x4-racks"]
QUICK = {"generations": 2, "population": 4, "tries": 2, "watch": 2, "every": 1, "window": 60}
SITE = """\
topology: {r1: {nodes: [a, b], uplink: 50G}, r2: {nodes: [c, d], uplink: 50G}}
defaults: {runtime: process, gpus: 4, cores: 16, memory: 64G}
partitions:
  p: {nodes: [a, b, c, d], flavors: {one: {gpus: 1, cores: 1, memory: 1G, time: 1h}}}
"""
JOB = "{0} {1} -1 {2} {3} -1 -1 {3} 9000 -1 1 1 1 -1 1 -1 -1 -1\n"


def job(folder: Path, jobs: int, seed: int = 0, load: float = 0.9, **settings: int) -> TrainJob:
    trace, _ = draw(RACKS, load, 3, jobs)
    scenario = Scenario(trace, RACKS.pool, power_model(RACKS.pool), topology=RACKS.topology)
    spec = agents_spec(1)
    spec.settings.update(QUICK | settings)
    return TrainJob(
        spec=spec, partition="p", scenario=scenario, held_out=(), workload=None, declared=None, seed=seed, device="cpu",
        checkpoint=Checkpoint(folder / "c", "key"),
    )  # fmt: skip


def test_windows_of_a_long_history_are_bounded_and_those_for_the_choice_come_last(tmp_path: Path) -> None:
    """20,000 jobs at more than the capacity: one replay of all would have thousands pending."""
    asked = job(tmp_path, 20_000, load=1.3)
    hyper = TopologyTrainSettings(window=500, tries=6, watch=4)
    tries, chosen, note = train._cases(asked, hyper)
    assert "what links cost by aws figures" in note
    learned = [case for generation in range(3) for case in tries(generation)]
    assert {len(case.trace) for case in (*learned, *chosen)} == {500}
    cut = asked.scenario.trace.submit[15_000]
    assert max(case.trace.submit[-1] for case in learned) < cut <= min(case.trace.submit[0] for case in chosen)
    assert len({case.trace.submit[0] for case in learned}) > 12, "drawn anew"
    assert chosen[-1].trace.submit[-1] == asked.scenario.trace.submit[-1]
    for case in learned[:3]:
        row = np.flatnonzero(asked.scenario.trace.submit == case.trace.submit[0])[0]
        assert np.array_equal(case.network.kind, train.placement_costs(asked.scenario)[0].kind[row : row + 500])


def test_it_starts_with_the_number_set_by_hand_and_resumes(tmp_path: Path) -> None:
    result = train_agent(job(tmp_path, 300), TrainingReport())
    assert result.untrained is not None
    assert result.untrained["wait.skip"][IDLE] == IDLE_WEIGHT == -1.0
    assert sum(np.count_nonzero(result.untrained[name]) for name in SHAPES if name.endswith((".skip", ".out"))) == 1
    moved = {name for name in SHAPES if not np.array_equal(result.arrays[name], result.untrained[name])}
    assert moved <= {name for name in SHAPES if name.endswith((".skip", ".out"))}
    again = train_agent(job(tmp_path, 300), TrainingReport())
    assert all(np.array_equal(again.arrays[name], result.arrays[name]) for name in SHAPES)

    class Killed(Exception):
        pass

    def stop(progress: object) -> None:
        raise Killed

    (tmp_path / "k").mkdir()
    try:
        train_agent(job(tmp_path / "k", 300), TrainingReport(show=stop))
    except Killed:
        resumed = train_agent(job(tmp_path / "k", 300), TrainingReport())
    assert all(np.array_equal(resumed.arrays[name], result.arrays[name]) for name in SHAPES)


def test_a_replay_that_cannot_be_among_the_best_ends_early_and_costs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these weights every job waits for a better place for its longest time."""
    trace, kind = draw(RACKS, 1.0, 4, 300)
    case = learn.TrainingCase(trace, RACKS.pool, PlacementNetwork(RACKS.tree, RACKS.model, kind), agents_spec(1))
    waits = dict(zip(SHAPES, split_vector(start(0).copy(), SHAPES), strict=True))
    waits["wait.skip"][:] = 5.0
    bad, bounded = to_vector(waits, SHAPES), learn.within(case)
    good, spent = learn._replayed(start(0), case)
    assert spent[-1] == pytest.approx((good.end - trace.submit).sum())
    third = np.minimum(good.end, trace.submit[100]) - trace.submit
    assert spent[100] == pytest.approx(third[:100].sum(), rel=0.05), "until about when the next arrives"
    assert np.array_equal(bounded.most_s, spent + 0.2 * spent[-1])
    assert learn.cost(start(0), bounded) == learn.cost(start(0), case), "who is not so bad is judged as before"
    (ended, until), (whole, _) = (learn._replayed(bad, one) for one in (bounded, case))
    assert (until > bounded.most_s).any()
    assert ended.decisions < whole.decisions / 4
    assert learn.cost(bad, bounded) > learn.cost(start(0), bounded) + 5

    judged: list[float] = []

    def cost(numbers: np.ndarray, case: learn.TrainingCase) -> float:
        judged.append(case.most_s[-1])
        return 0.0

    monkeypatch.setattr(learn, "cost", cost)
    recipe = learn.TopologyRecipe(generations=1, population=4, every=1)
    learn.search(learn.new_search(4, 0), recipe, lambda generation: [case], [case], 1, lambda done, of: None)
    assert judged == [spent[-1] + 0.2 * spent[-1]] * 7, "the start, four candidates, their mean, and that of all means"


def test_the_best_on_the_windows_for_the_choice_is_kept(tmp_path: Path) -> None:
    asked = job(tmp_path, 300, gradient=2)
    result = train_agent(asked, TrainingReport())
    _, chosen, _ = train._cases(asked, TopologyTrainSettings(**{**QUICK, "gradient": 2}))
    own, begun = (
        np.mean([train.cost(to_vector(arrays, SHAPES), case) for case in chosen])
        for arrays in (result.arrays, result.untrained or {})
    )
    assert own <= begun
    assert result.score == -own
    assert "the gradient" in result.notes[1]


def test_a_trace_on_the_inventory_s_racks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "inventory.yaml").write_text(SITE)
    (tmp_path / "topology.yaml").write_text("agent: topology\nbackfill: skip\ntrain: " + json.dumps(QUICK))
    rows = [JOB.format(i, 60 * i, rng.integers(60, 4000), rng.choice([1, 2, 4, 8])) for i in range(150)]
    (tmp_path / "log.swf").write_text("".join(rows))
    words = ("--trace", "log.swf", "--inventory", "inventory.yaml", "--out", "policies/topology", "--json")
    done = inside.run("train", "topology.yaml", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ((made,), metrics) = (json.loads(done.stdout), json.loads(done.stdout)[0]["card"]["metrics"])
    assert made["card"]["knows"] == "nothing", "the order of submission and skipping ask for no run times"
    assert "what links cost by aws figures" in made["card"]["notes"][0]
    assert {row["policy"]: row.get("knows") for row in metrics}["contention"] == "nothing"
    model = load_file(tmp_path / "policies/topology/p.safetensors", "topology")
    assert {name: array.shape for name, array in model.arrays.items()} == SHAPES
    assert start(0).size == sum(array.size for array in model.arrays.values())
