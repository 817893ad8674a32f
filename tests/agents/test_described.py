"""Descriptions of weights: no rule is called a network, and nothing untrained trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpusched.agents.common.evaluate import final_table, untrained_policy
from gpusched.agents.common.request import UNTRAINED
from gpusched.agents.describe import describe_weights
from gpusched.agents.gist.networks import STARTS, start
from gpusched.agents.gist.scale import policy_of
from gpusched.agents.rltune.candidates import arrays_of, with_net
from gpusched.agents.rltune.choosing import untrained
from gpusched.agents.rltune.preempting import NO_ODDS, model_of
from gpusched.agents.rltune.preempting import RankingRule as Rank
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.client import policies
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import TrainedModel, load_model, save_model
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.study.study import Scenario
from tests.sim.worlds import trace_of

ROOT = Path(__file__).parents[2]


def of(agent: str, arrays: Any, **about: str) -> str:
    return describe_weights(TrainedModel(agent, arrays, about, "", ""))


@pytest.mark.parametrize("servers", ["8", "32"])
def test_the_agents_that_come_along_are_linear_rules(servers: str) -> None:
    model = load_model(ROOT / "benchmarks" / "agents" / servers, "default", "gist")
    assert not any(array.any() for name, array in model.arrays.items() if not name.endswith(".base"))
    said = describe_weights(model)
    assert said == "a linear rule of 21 weights (job 6, server 8, hold 7), no neural network"


def test_a_start_is_untrained_until_a_weight_moves_and_a_network_is_one_once_it_speaks() -> None:
    arrays = start("found, small", width=8)
    assert of("gist", arrays) == (
        "untrained, its start 'found, small': a linear rule of 21 weights (job 6, server 8, hold 7), no neural network"
    ).replace("21 weights (job 6, server 8, hold 7)", _counted(arrays))
    moved = {**arrays, "job.base": arrays["job.base"] * np.float32(1.01)}
    assert of("gist", moved).startswith("a linear rule of ")
    spoken = {**moved, "job.1.weight": np.ones_like(moved["job.1.weight"])}
    assert of("gist", spoken).endswith(", and a neural network of width 8")
    assert "no neural network" not in of("gist", spoken)


def _counted(arrays: Any) -> str:
    used = {q: int(np.count_nonzero(arrays[f"{q}.base"])) for q in ("job", "server", "hold")}
    return f"{sum(used.values())} weights ({', '.join(f'{q} {n}' for q, n in used.items())})"


def test_rltune_is_a_rule_by_estimates_and_a_network_only_with_strength() -> None:
    settings = RltuneSettings()
    begun = untrained(settings)
    assert begun is not None
    rule = of("rltune", arrays_of(begun), base="sjf", knows="estimate")
    assert rule == "a linear rule 'sjf' of 1 weight chosen by replays, by estimated run times, no neural network"
    inputs = len(begun.scorer.mean)
    ones = np.ones(inputs, np.float32)
    arrays = {"net.0.weight": np.ones((4, inputs), np.float32), "net.0.bias": ones[:4],
              "net.1.weight": np.ones((1, 4), np.float32), "net.1.bias": ones[:1]}  # fmt: skip
    for strength, ends in ((0.5, "and a neural network of width 4 at strength 0.5"), (0.0, "no neural network")):
        assert of("rltune", arrays_of(with_net(begun, arrays, ones, ones, strength))).endswith(ends)
    blind = RltuneSettings(knows="nothing")
    assert untrained(blind) is None
    rank = model_of(Rank("index", {"index": 1.0}), NO_ODDS.prior, "estimate")
    assert "chosen by replays, by odds of run times, no neural network" in describe_weights(rank)


def test_the_final_table_has_the_untrained_start_beside_the_agent() -> None:
    pool = Pool.uniform(1, 8)
    trace = trace_of([0.0, 0.0, 1.0, 2.0], [50.0, 60.0, 10.0, 5.0], [8, 8, 1, 2], limit=[100.0, 90.0, 20.0, 5.0])
    agent = policy_of(start("first come, easy", width=0), "mine")
    assert untrained_policy(agent, None) is None
    begun = untrained_policy(agent, start("shortest limit, easy", width=0))
    assert begun is not None
    rows = final_table(agent, [Scenario(trace, pool, power_model(pool))], untrained=begun)
    assert [row.policy for row in rows[:2]] == ["mine", UNTRAINED]
    by_name = {row.policy: row.value for row in rows}
    assert by_name[UNTRAINED] == by_name["sjf+easy"]
    assert rows[0].value != rows[1].value


def test_no_policy_file_calls_a_rule_a_network() -> None:
    """The files that come along name agents whose defaults have none, or keep it only where it proved better."""
    for file in BUILT_IN.glob("*.yaml"):
        spec = load_policy(file)
        text = file.read_text("utf-8").lower()
        if spec.agent is None:
            continue
        assert "rule" in text, file
        assert "one network scores" not in text
        if spec.agent == "gist":
            assert "linear" in text
    assert set(STARTS)


def test_weights_that_cannot_be_used_are_not_said_to_decide(tmp_path: Path) -> None:
    """As of a version with other inputs: live the fallback decides."""
    save_model(tmp_path / "default.safetensors", "rltune", {"linear": np.zeros((1, 18), np.float32)})
    spec = msgspec.structs.replace(load_policy(BUILT_IN / "rltune.yaml"), folder=str(tmp_path))
    assert policies._weights(spec) == {"default": "the fallback: linear is (1, 18), expected (1, 20)"}
