"""DL2's agent and a site's history: past decisions, and a warm-up that imitates them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.data import known_at
from gpusched.agents.common.recorded import RecordedDecision, by_policy, recorded_decisions
from gpusched.agents.dl2 import learn as learning
from gpusched.agents.dl2 import train as dl2
from gpusched.agents.dl2.decide import zero_actor
from gpusched.agents.dl2.history import agreement, record
from gpusched.agents.dl2.live import LiveActor
from gpusched.agents.dl2.train import PartitionWorld, WarmUp, WorkloadLog
from gpusched.cli import main as cli
from gpusched.model.policy import Resizing
from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, Claims
from gpusched.sched.sizing.rules import RULES, wish
from gpusched.traces import file as tracefile
from gpusched.traces.load import load
from gpusched.traces.trace import Trace
from tests.agents.histories import SIZES, drawn, lived, with_store

SLOT_S = 600.0


def history(folder: Path, policy: str, jobs: int) -> tuple[Trace, list[RecordedDecision]]:
    lived(folder, policy, jobs=jobs)
    trace = load(folder)
    return trace, recorded_decisions(trace, 16, Resizing())


def four(folder: Path) -> Trace:
    """Two run on 8 GPUs each, then one shrinks for a third; a rigid one comes when the second has ended."""
    trace = drawn(6, 16, 0, 1.0)
    assert trace.progress is not None
    trace = replace(trace, submit=np.array([0.0, 10, 900, 905, 2000, 2000]), limit=np.full(6, 9000.0))
    attempts: dict[int, list[tuple[float, float, int]]] = {
        0: [(0.0, 1000.0, 8), (1020.0, 2500.0, 4)],
        1: [(10.0, 1800.0, 8)],
        2: [(1021.0, 3000.0, 4)],  # 0 shrank for it
        5: [(2000.0, 2900.0, 4)],  # rigid
        3: [(2700.0, 3000.0, 2)],
    }
    with_store(folder, trace, attempts, "elastic", 1.75e9, 20.0, "p")
    return load(folder)


def test_a_decision_is_rebuilt_with_what_was_known_then(tmp_path: Path) -> None:
    trace = four(tmp_path)
    found = recorded_decisions(trace, 16, Resizing())
    begin = [round(one.at) for one in found]
    assert begin == [0, 10, 1000, 1021, 2700]
    held = [one.claims.jobs["held"].tolist() for one in found]
    assert held == [[0], [8, 0], [8, 8, 0], [8, 0, 0], [4, 0]]
    shrunk = found[2]
    assert shrunk.chosen.tolist() == [4, 8, 4]
    assert shrunk.claims.number[[COUNT, CAPACITY, FREE]].tolist() == [3, 16, 0]
    assert shrunk.claims.allowed[0].tolist() == [1, 1, 1, 1]
    assert shrunk.claims.jobs["age_s"].tolist() == pytest.approx([1000, 990, 100])
    assert shrunk.claims.reported[0].tolist() == [0, 0, 0, 1], "it has reported at 8 only, and at 4 later"
    pace = trace.progress and trace.progress.speeds(0)
    assert pace
    assert shrunk.claims.pace[0, 2] == pytest.approx(pace[8] * 0.5**0.8)
    assert shrunk.pace[0, 2] == pytest.approx(pace[4])
    work = (2500 - 1040) * pace[4]  # of its second attempt 20 s were lost
    assert shrunk.claims.jobs["left_s"][0] * pace[8] == pytest.approx(work, rel=0.02)
    assert found[3].chosen.tolist() == [8, 4, 4], "both start once it has saved its work"
    assert found[3].claims.jobs["restarts"].tolist() == [0, 1, 0]
    assert found[4].claims.number[CAPACITY] == 16 - 4, "the rigid one holds four"


def test_a_recorded_time_limit_of_zero_is_none(tmp_path: Path) -> None:
    trace = four(tmp_path)
    assert trace.progress is not None
    silent = replace(trace, progress=replace(trace.progress, steps=np.full(6, np.nan)))  # else that counts

    def left(limit: np.ndarray[Any, Any]) -> list[list[float]]:
        found = recorded_decisions(replace(silent, limit=limit), 16, Resizing())
        return [one.claims.jobs["left_s"].tolist() for one in found]

    assert left(np.zeros(6)) == left(np.full(6, np.nan)) != left(trace.limit)


@pytest.mark.parametrize("policy", ["drf", "elastic", "optimus", "sia"])
def test_a_history_is_best_explained_by_the_rule_that_made_it(tmp_path: Path, policy: str) -> None:
    trace, found = history(tmp_path, policy, 150)
    assert list(by_policy(found, trace)) == [(policy, len(found))]
    assert len(found) > 150
    same: dict[str, float] = {}
    for name, rule in RULES.items():
        answers = []
        for one in found:
            claims = Claims._make(array.copy() for array in one.claims)
            wish(rule, claims)
            answers.append(np.mean(claims.jobs["wished"] == one.chosen))
        same[name] = float(np.mean(answers))
    own = {"elastic": "greedy-gain"}.get(policy, policy)
    assert same[own] > 0.8
    assert all(share < same[own] - 0.1 for name, share in same.items() if name != own), same


def test_only_what_was_known_at_the_cut_is_taken(tmp_path: Path) -> None:
    trace, found = history(tmp_path, "drf", 150)
    cut = float(trace.submit[100])
    early = recorded_decisions(known_at(trace, cut)[0], 16, Resizing())
    before = [one for one in found if one.at < cut]
    assert 50 < len(before) < len(found)
    # Around the cut, which job was shrunk for which shows later only.
    assert [one.at for one in early][:-2] == [one.at for one in before][: len(early) - 2]
    for one, whole in zip(early[:-20], before, strict=False):
        assert one.chosen.tolist() == whole.chosen.tolist()


def test_which_policy_started_a_job_goes_with_a_trace_into_files(tmp_path: Path) -> None:
    trace = four(tmp_path)
    tracefile.write(tmp_path / "t.gpusched.npz", trace)
    kept = load(tmp_path / "t.gpusched.npz")
    assert kept.policies == ("elastic",)
    assert kept.policy is not None
    assert kept.policy.tolist() == [0] * len(trace)


def test_of_too_many_decisions_some_are_taken_from_all_of_the_time(tmp_path: Path) -> None:
    trace, found = history(tmp_path, "drf", 100)
    few = recorded_decisions(trace, 16, Resizing(), most=10)
    assert len(few) <= 10
    assert (few[0].at, few[-1].at) == (found[0].at, found[-1].at)


def test_a_recorded_step_s_reward_is_what_it_brought(tmp_path: Path) -> None:
    """By speeds that were not known when it was decided; all steps of a decision together: from nothing to its end."""
    _, found = history(tmp_path, "optimus", 60)
    tape, slots = record(LiveActor(zero_actor(), SLOT_S), found, 0.0, 1)
    ends = [*slots[1:].tolist(), int(tape.number[0])]
    for one, first, last in zip(found, slots.tolist(), ends, strict=True):
        brought = 0.0
        for j, job in enumerate(one.claims.jobs):
            may = one.claims.allowed[j].astype(bool)
            known, true = one.claims.pace[j, may], one.pace[j, may]
            at = np.flatnonzero(one.claims.sizes[j, may] == one.chosen[j])[0]
            held = np.flatnonzero(one.claims.sizes[j, may] == job["held"]) if job["held"] else [0]
            left = job["left_s"] / SLOT_S * known[held[0]] / known.max()
            brought += (true[at] - true[0]) / true.max() * max(left, 0.5) ** -0.25
        assert tape.reward[first:last].sum() == pytest.approx(brought, abs=2e-3)


def test_the_warm_up_comes_near_the_site_s_own_policy_whichever_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recipe = learning.Dl2Recipe(hidden=16, imitation_steps=500)
    found: dict[str, Any] = {}
    for policy in ("drf", "optimus"):
        (tmp_path / policy).mkdir()
        trace, decisions = history(tmp_path / policy, policy, 300)
        seen = len(decisions) * 4 // 5
        log = WorkloadLog(trace, 16, np.array(SIZES), SLOT_S, 20.0)
        world = PartitionWorld(log, WarmUp(decisions=decisions[:seen], slot_s=SLOT_S))
        trainer = learning.Dl2Trainer(recipe, world, 0, 1, learning.set_up(0))
        trainer.imitate()
        found[policy] = trainer.networks.weights(), decisions[seen:]
    for policy, (actor, unseen) in found.items():
        other = next(weights for name, (weights, _) in found.items() if name != policy)
        same, chance = agreement(actor, SLOT_S, unseen)
        assert same > 2 * chance, policy
        assert agreement(other, SLOT_S, unseen)[0] < same - 0.05, policy


# As a user


def own_site(folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch, jobs: int = 200) -> None:
    """Lay out a site whose last days were under a policy, and go there."""
    (folder / "inventory.yaml").write_text(
        "defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G}\n"
        f"partitions: {{p: {{policy: {policy}, nodes: [n1, n2], flavors: {{all: {{gpus: 8, cores: 64, memory: 512G,"
        " time: 72h}}}}\n"
    )
    lived(folder / "state", policy, jobs=jobs, start=time.time() - 7 * 86400, days=6.0)
    monkeypatch.setenv("GPUSCHED_STATE", str(folder / "state"))
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("jobs", "train", "said"),
    [
        (200, "", "warm_up: history, {} decisions by optimus; of the last"),
        (110, ", warm_up: proportional", "warm_up: rule proportional"),
    ],
)
def test_a_training_on_the_own_history_names_what_it_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], jobs: int, train: str, said: str
) -> None:
    pytest.importorskip("torch")
    own_site(tmp_path, "optimus", monkeypatch, jobs)
    monkeypatch.setattr(dl2, "Dl2Recipe", partial(learning.Dl2Recipe, imitation_steps=100))
    (tmp_path / "mine.yaml").write_text(f"agent: dl2\ntrain: {{rounds: 1, batch: 1, hidden: 4{train}}}\n")
    words = ["train", "mine.yaml", "--inventory", "inventory.yaml", "--out", "mine", "--hold-out", "0"]
    assert cli.run([*words, "--keep-anyway", "--json"]) == 0
    notes = json.loads(capfd.readouterr().out)[0]["card"]["notes"]
    assert re.match(said.format("[0-9]{3}"), notes[0]), notes
