"""Agents that choose sizes in partitions of our own: trained and replayed as a user would."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.dl2 import train as dl2
from gpusched.agents.dl2.learn import Dl2Recipe
from gpusched.cli import main as cli


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "recipe", "decides"),
    [
        (
            "dl2", "rounds: 1, batch: 2, hidden: 4",
            "a linear score of 20 inputs, and a network of 27-4-1 beside it",
        ),
        (
            "maifs", "generations: 1, population: 4, tries: 1, validations: 2",
            "groups of nodes that bid by a linear rule of 10 inputs of a job",
        ),
    ],
)  # fmt: skip
def test_train_and_replay_as_a_user_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], agent: str, recipe: str,
    decides: str,
) -> None:  # fmt: skip
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dl2, "Dl2Recipe", partial(Dl2Recipe, imitation_steps=300))
    (tmp_path / "mine.yaml").write_text(f"agent: {agent}\ntrain: {{{recipe}, most: 4}}\n")

    def gpusched(*words: str) -> str:
        capfd.readouterr()
        code, (out, err) = cli.run(words), capfd.readouterr()
        assert code == 0, err
        return out

    log = tmp_path / "log.csv"
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(400, 150)).astype(int)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        f"{begin + timedelta(seconds=int(t)):%Y-%m-%d %H:%M:%S},{rng.lognormal(7, 1) + 1:.1f},{rng.choice([1, 2, 4])},v"
        for t in at
    ]
    log.write_text("\n".join(["submit_time,duration_s,num_gpus,vc", *rows]) + "\n")
    nodes = ("--nodes", "2", "--gpus-per-node", "8")
    out = gpusched("train", "mine.yaml", "--trace", str(log), *nodes, "--out", "mine", "--keep-anyway", "--json")
    card = json.loads(out)[0]["card"]
    assert card["decides"].startswith(decides)
    assert (card["agent"], card["knows"]) == (agent, "oracle")
    names = {row["policy"] for row in card["metrics"]}
    assert {"mine", "untrained start", "elastic", "drf", "optimus", "proportional", "sia", "easy"} <= names
    shown = gpusched("replay", str(log), *nodes, "--resizable", "1-4", "-P", "mine", "-P", "elastic", "--json")
    found = {row["policy"]: row for row in json.loads(shown)}
    assert set(found) == {"mine", "elastic"}
    assert found["mine"]["jobs"] == 150
    assert found["mine"]["mean_jct_s"] < 2 * found["elastic"]["mean_jct_s"]  # hardly trained; test_gate judges it
    assert f"sizes by {agent} agent" in json.dumps(found["mine"])


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("least: 3, most: 3", "train: no power of two is between 3 and 3 GPUs"),
        ("least: 4, most: 2", "is not a range; 1 <= least <= most"),
        ("rounds: 0", "is no recipe; rounds, batch and hidden are at least 1"),
        ("warm_up: fair", "warm_up is 'fair' (available: history, greedy-gain, drf, optimus, proportional, sia)"),
        ("generations: 4", "there is no hyper-parameter 'generations'"),
        ("least: 64, most: 64", "of at most 64 GPUs: too few to train on"),
    ],
)
def test_a_recipe_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], train: str, said: str
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "mine.yaml").write_text(f"agent: dl2\ntrain: {{{train}}}\n")
    rows = "\n".join(f"2026-01-01 {n // 60:02}:{n % 60:02}:00,60.0,1,v" for n in range(20))
    (tmp_path / "log.csv").write_text(f"submit_time,duration_s,num_gpus,vc\n{rows}\n")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "mine.yaml", "--trace", "log.csv", "--nodes", "1", "--out", "mine", "--force"]) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
