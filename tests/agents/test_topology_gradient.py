"""Training of the topology agent by gradient: the recording, the jobs compared with, and the changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpusched.agents.common.vector import split_vector, vector_size
from gpusched.agents.topology import gradient
from gpusched.agents.topology.gradient import (
    GradientRecipe,
    TorchNetwork,
    advantages,
    alive,
    learn_by_gradient,
    rollout,
)
from gpusched.agents.topology.learn import TrainingCase
from gpusched.agents.topology.network import SHAPES, start, weights_from
from gpusched.agents.topology.replay import agents_spec, replayed
from gpusched.agents.topology.workloads import draw, settings
from gpusched.sim.engine.placing import PlacementNetwork

torch = pytest.importorskip("torch")
RACKS = settings()["16x4-racks"]
NOISE = 0.08


def case(seed: int, jobs: int = 300) -> TrainingCase:
    trace, kind = draw(RACKS, 1.0, seed, jobs)
    return TrainingCase(trace, RACKS.pool, PlacementNetwork(RACKS.tree, RACKS.model, kind), agents_spec(1))


def wild(seed: int) -> np.ndarray:
    """Weights whose rule still holds about, with all layers in use."""
    numbers = start(0) + np.random.default_rng(seed).normal(0, 0.02, vector_size(SHAPES))
    return numbers.astype(np.float32).astype(np.float64)


def _starts() -> tuple[np.ndarray, np.ndarray]:
    return start(0), alive(start(0))


def test_torch_computes_what_the_compiled_network_said_at_each_recorded_decision() -> None:
    numbers, one = wild(1), case(3, 900)
    noise = np.random.default_rng(2).normal(0, NOISE, len(one.trace))
    tape = rollout(one, weights_from(numbers), noise).tape
    rows = np.arange(int(tape.used[0]))
    assert len(rows) > 30
    assert (tape.on[rows, :, 1, :, 0] > 0).any(), "jobs are seen on NICs"
    with torch.no_grad():
        place, wait = TorchNetwork(numbers).outputs(tape, rows)
    assert np.abs(tape.out[rows]).min(0).max() > 0
    assert place.numpy() == pytest.approx(tape.out[rows, 0], abs=1e-5)
    assert wait.numpy() == pytest.approx(tape.out[rows, 1], abs=1e-5)
    waited = {job: np.flatnonzero(tape.job[rows] == job) for job in set(tape.job[rows].tolist())}
    assert max(len(of) for of in waited.values()) > 1, "who waits is seen again"


def test_without_noise_a_rollout_is_the_replay() -> None:
    numbers, one = wild(1), case(4)
    end = replayed(one.trace, one.pool, one.network, weights_from(numbers), one.spec).end
    begun, lives = (replayed(one.trace, one.pool, one.network, weights_from(n), one.spec).end for n in _starts())
    assert np.array_equal(begun, lives), "layers are drawn otherwise, and say nothing yet"
    assert np.array_equal(rollout(one, weights_from(numbers), np.zeros(len(one.trace))).jct, end - one.trace.submit)
    other = rollout(one, weights_from(numbers), np.full(len(one.trace), 2 * NOISE))
    assert not np.array_equal(other.jct, end - one.trace.submit)


def test_a_job_is_judged_by_the_jobs_submitted_near_it() -> None:
    submit = np.array([0.0, 3600.0, 40 * 3600.0])
    jct = np.array([[100.0, 100.0, 500.0], [100.0, 300.0, 100.0]])
    found = advantages(submit, jct)
    assert found[0, 0] > 0 > found[1, 0], "the second job took less in the first rollout"
    assert found[0, 1] == found[0, 0], "the first was submitted within two hours before"
    assert found[0, 2] < 0, "the third has no others near"
    assert found.sum(0) == pytest.approx(np.zeros(3))
    assert advantages(submit, np.where(jct == 500.0, np.nan, jct))[:, 2] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("imitates", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_better_rollouts_are_reinforced(imitates: bool, sign: float) -> None:
    """Rollouts in which jobs waited longer (or shorter) were better: waiting comes to be worth more (or less)."""
    one, numbers = case(5), wild(1)
    up = np.abs(np.random.default_rng(2).normal(0, NOISE, len(one.trace)))
    noise = np.stack([up, -up])
    played = [rollout(one, weights_from(numbers), own) for own in noise]
    gain = sign * np.stack([np.ones(len(up)), -np.ones(len(up))])
    network = TorchNetwork(numbers)
    optimizer = torch.optim.SGD(network.learned, 1e-3)
    rows = np.arange(int(played[0].tape.used[0]))

    def longer() -> float:
        with torch.no_grad():
            place, wait = network.outputs(played[0].tape, rows)
        return float((wait - place).mean())

    before = longer()
    gradient._loss(network, played, noise, gain, GradientRecipe(near=0.0), imitates).backward()
    optimizer.step()
    assert (longer() - before) * sign > 0


def test_every_layer_is_learned_and_the_same_seed_gives_the_same() -> None:
    recipe = GradientRecipe(steps=4, imitate=2, batch=1, rollouts=4, rate=0.02)
    with ThreadPoolExecutor(2) as pool:
        found = [
            learn_by_gradient(alive(start(0)), recipe, lambda step: [case(10 + step)], 0, pool, lambda step, n: None)
            for _ in range(2)
        ]
    assert np.array_equal(*found)
    before, after = (dict(zip(SHAPES, split_vector(n, SHAPES), strict=True)) for n in (alive(start(0)), found[0]))
    same = {name for name in SHAPES if np.allclose(before[name], after[name], atol=1e-7)}
    assert same == {name for name in SHAPES if name.startswith("hand.")}
