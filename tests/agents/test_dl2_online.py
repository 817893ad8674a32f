"""How DL2's agent learns from what another policy decided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.recorded import RecordedDecision, recorded_decisions
from gpusched.agents.dl2.decide import Actor, zero_actor
from gpusched.agents.dl2.history import record
from gpusched.agents.dl2.learn import Dl2Recipe, Dl2Trainer, PublicSetting, set_up
from gpusched.agents.dl2.live import LiveActor, choose
from gpusched.agents.dl2.online import OnlineRecipe, progress, update_agent
from gpusched.agents.dl2.weights import actor_of, arrays_of
from gpusched.config.weights import TrainedModel
from gpusched.errors import GpuschedError
from gpusched.model.policy import Resizing
from gpusched.traces.load import load
from tests.agents.histories import lived

SLOT_S, RESTART = 600.0, 1 / 30


def sizes(actor: Actor, decisions: list[RecordedDecision]) -> list[Any]:
    return [choose(LiveActor(actor, SLOT_S), one.claims, None) for one in decisions]


def brought(decisions: list[RecordedDecision], chosen: list[Any]) -> float:
    return progress(decisions, chosen, SLOT_S, RESTART)


def test_progress_is_one_at_the_best_sizes_and_less_for_resized_jobs(tmp_path: Path) -> None:
    lived(tmp_path, "drf", jobs=60)
    found = recorded_decisions(load(tmp_path), 16, Resizing())
    best = [
        one.claims.sizes[np.arange(len(one.chosen)), np.where(one.claims.allowed, one.pace, 0.0).argmax(axis=1)]
        for one in found
    ]
    assert progress(found, best, SLOT_S, 0.0) == pytest.approx(1.0)
    assert 0.9 < brought(found, best) < 1.0
    assert brought(found, [one.chosen for one in found]) < brought(found, best)


def test_of_what_others_did_it_imitates_what_brought_more(tmp_path: Path) -> None:
    """In every state one gave what was recorded, and three others the least to all."""
    pytest.importorskip("torch")
    lived(tmp_path, "drf", jobs=150)
    found = recorded_decisions(load(tmp_path), 16, Resizing())
    least = [
        one._replace(chosen=one.claims.sizes[np.arange(len(one.chosen)), one.claims.allowed.argmax(axis=1)])
        for one in found
    ]
    recipe = Dl2Recipe(hidden=8, rate=0.003)
    trainer = Dl2Trainer(recipe, PublicSetting(recipe, {}), 0, 1, set_up(0))
    trainer.start_from(zero_actor(8)._replace(own=trainer.networks.weights().own, out=np.full(8, 0.05, np.float32)), {})
    mixed = [*found, *least, *least, *least]
    for number in range(8):
        recording = record(LiveActor(trainer.networks.weights(), SLOT_S), mixed, RESTART, number, steps=2000)
        if number == 0:
            trainer.fit_critic([recording])
        trainer.imitate_by_advantage([recording])
    low, high = (brought(found, [one.chosen for one in all_of]) for all_of in (least, found))
    learned = brought(found, sizes(trainer.networks.weights(), found))
    assert learned > low + 0.7 * (high - low)


def job_of(folder: Path, seed: int = 0) -> Any:
    scenario = SimpleNamespace(trace=load(folder), pool=SimpleNamespace(total_gpus=16))
    return SimpleNamespace(scenario=scenario, spec=SimpleNamespace(resize=Resizing()), seed=seed, device="cpu")


def test_an_update_goes_on_from_weights_and_critic_and_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lived(tmp_path, "drf", jobs=100)
    rng = np.random.default_rng(0)
    drawn = Actor(*(rng.normal(0, 0.1, part.shape).astype(np.float32) for part in zero_actor(4)))
    model = TrainedModel("dl2", arrays_of({"trained": drawn}), {"slot_s": "600", "restart_s": "20"}, "", "<test>")
    recipe = OnlineRecipe(rounds=3, steps=500)
    one, other = (update_agent(job_of(tmp_path), model, -1.0, recipe) for _ in range(2))
    assert one.notes == other.notes
    assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    updated = TrainedModel("dl2", one.arrays, one.about, "", "<test>")
    for kept, begun in zip(actor_of(updated), drawn, strict=True):
        assert np.abs(kept - begun).max() < 1.0, "some steps away"
    fresh = Dl2Trainer(Dl2Recipe(hidden=4), PublicSetting(Dl2Recipe(), {}), 0, 1, set_up(0))
    critic = {n.removeprefix("critic."): a for n, a in one.arrays.items() if n.startswith("critic.")}
    fresh.start_from(actor_of(updated), critic)
    assert all(np.array_equal(fresh.critic_arrays()[name], critic[name]) for name in critic)
    with pytest.raises(GpuschedError, match=r"0 new decisions on sizes; 20 are needed"):
        update_agent(job_of(tmp_path), model, 1e9, recipe)
