"""Attention over the window: compiled as in torch, refused where it is of another shape, live as in replays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gpusched.agents.common.attention import NONE, PARTS, apply_attention, arrays_of, attention_of
from gpusched.agents.common.nets import net_of
from gpusched.agents.rltune.history import FEATURES
from gpusched.agents.rltune.live import OUTPUTS, prepare
from gpusched.agents.rltune.ppo import PPONetwork
from gpusched.compiled.loading import kind_of
from gpusched.config.weights import TrainedModel
from gpusched.sched.check import check
from tests.sched import gist_decisions as gist
from tests.sched import rltune_decisions as plain
from tests.sched.worlds import node, pending, snapshot, started

torch = pytest.importorskip("torch")

INPUTS, HIDDEN = len(FEATURES), 8


def attentive(seed: int = 0, window: int = 256) -> dict[str, np.ndarray]:
    """Wild weights with attention, which moves scores as much as the rest."""
    rng = np.random.default_rng(100 + seed)
    arrays = plain.arrays_of(plain.rule({"estimate": -0.1}), 1.0, seed, window)
    more = {f"attention.{part}": rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for part in PARTS}
    return arrays | more


MODEL = plain.model(attentive(), "attentive")


@pytest.mark.parametrize("jobs", [1, 5, 48])
def test_the_compiled_pass_computes_what_torch_does_whatever_stands_beside_the_window(jobs: int) -> None:
    torch.manual_seed(1)
    network = PPONetwork(INPUTS, 16, OUTPUTS, attention=True)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.3)
    net = net_of(network.arrays(), "net", INPUTS, OUTPUTS)
    rows = np.zeros((48, INPUTS), np.float32)
    rows[:jobs] = np.random.default_rng(2).normal(size=(jobs, INPUTS))
    found = np.empty((jobs, OUTPUTS), np.float32)
    apply_attention(net, attention_of(network.arrays(), net), rows[:jobs], found)
    with torch.no_grad():
        expected = network(torch.from_numpy(rows)[None], torch.arange(48)[None] < jobs)[0, :jobs].numpy()
    assert np.abs(found - expected).max() <= 1e-4
    alone = np.empty((jobs, OUTPUTS), np.float32)
    apply_attention(net, np.zeros((3, 16, 16), np.float32), rows[:jobs], alone)
    assert np.abs(alone - found).max() > 1e-2, "the matrices are read"


def test_the_weights_survive_being_taken_apart() -> None:
    of = prepare(MODEL).scorer.attention
    assert {n: a.tobytes() for n, a in arrays_of(of).items()} == {
        n: a.tobytes() for n, a in MODEL.arrays.items() if n.startswith("attention.")
    }
    assert kind_of(of) == kind_of(NONE), "one compiled pass for both"


@pytest.mark.parametrize("part", PARTS)
def test_weights_of_another_shape_are_refused_by_name(part: str) -> None:
    name = f"attention.{part}"
    for bad in ({name: np.zeros((HIDDEN, HIDDEN + 1), np.float32)}, {name: None}):
        arrays = {n: a for n, a in {**MODEL.arrays, **bad}.items() if a is not None}
        with pytest.raises(ValueError, match=name):
            prepare(plain.model(arrays))
    flat = {n: a for n, a in MODEL.arrays.items() if not n.startswith("net.")}
    flat |= {"net.0.weight": np.zeros((OUTPUTS, INPUTS), np.float32), "net.0.bias": np.zeros(OUTPUTS, np.float32)}
    with pytest.raises(ValueError, match="hidden layer"):
        prepare(plain.model(flat))


def test_nan_scores_use_the_fallback() -> None:
    huge = {n: np.full_like(a, 3e38) if n.startswith("attention.") else a for n, a in MODEL.arrays.items()}
    plan = plain.by_agent(snapshot([node("a")], [pending("x", 1), pending("y", 8)]), plain.model(huge, "huge"))
    assert "returned NaN" in plan.troubles["p"]
    assert list(started(plan)) == ["x"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gist.workloads(), plain.MODELS)
def test_live_and_replay_choose_the_same(workload, wild: TrainedModel) -> None:
    """At every instant of a replay: the same jobs on the same nodes, also with a window that leaves jobs out."""
    of = plain.model(attentive(len(wild.path), int(wild.arrays["window"][0])), f"attentive {wild.path}")
    result = plain.replayed(*workload, of)
    for now in np.unique(result.events.time).tolist():
        snap = plain.live_at(result, now)
        plan = plain.by_agent(snap, of)
        assert plan.troubles == {}
        assert check(plan, snap)[1] == ()
        new = np.flatnonzero(result.start == now).tolist()
        expected = {result.trace.ids[j]: [result.pool.names[n] for n in result.nodes_of(j).tolist()] for j in new}
        assert {job: [name for name, _ in parts] for job, parts in started(plan).items()} == expected
