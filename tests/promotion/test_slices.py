"""Decisions on MIG slices under an agent's policy: by the agent, its policy's stages, or its fallback, with a note."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.config.policies import load_policy
from gpusched.config.weights import load_model, save_model
from gpusched.controller.deciding import Decider
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.policy import AGENTS, AgentTraits
from gpusched.model.resources import Inventory, Partition
from gpusched.model.slices import slice_index
from gpusched.promotion.live import slice_fallbacks
from gpusched.queue.store import Store
from gpusched.sched.agent import Context, Unusable
from gpusched.sched.decide import decide
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.stages import place_queue
from tests.sched import slices as slicing
from tests.sched.worlds import node, snapshot, started


@pytest.mark.parametrize("agent", [*AGENTS, "orders"])
def test_an_agent_whose_fallback_decides_about_slices_says_so(
    tmp_path: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/mine.yaml").write_text(f"agent: {agent}\n")
    line = "p: mine decides about whole GPUs only; easy about MIG slices" if agent == "orders" else None
    monkeypatch.setitem(AGENTS, "orders", AgentTraits())
    (tmp_path / "inventory.yaml").write_text("")
    inventory = Inventory(
        path=str(tmp_path / "inventory.yaml"), partitions=(Partition(name="p", nodes=(), flavors=(), policy="mine"),)
    )
    spec = JobSpec(
        name="j", partition="p", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60,
        profile="1g.10gb",
    )  # fmt: skip
    job = JobRecord(id="j", user="ann", uid=0, spec=spec, state=JobState.PENDING, submit_time=0.0)
    assert slice_fallbacks(inventory, None, [job]).get("p") == line
    assert slice_fallbacks(inventory, None, []) == {}


@pytest.mark.parametrize("agent", ["dl2", "maifs", "topology"])
def test_of_agents_that_choose_sizes_or_places_the_file_s_order_and_backfill_decide_about_slices(
    tmp_path: Path, agent: str
) -> None:
    """Nor does a job in slices send the jobs for whole GPUs to the fallback."""
    (tmp_path / "mine.yaml").write_text(f"agent: {agent}\nbackfill: none\n")
    policy = load_policy(tmp_path / "mine.yaml")
    assert policy.effective_fallback.backfill == "easy"
    jobs = [slicing.pending("first", 8, "1g.10gb", nodes=1), slicing.pending("short", 1, "1g.10gb", limit=60),
            slicing.pending("whole", 1)]  # fmt: skip
    cut = slicing.cut(node("a", gpus=3), {1: slicing.SEVEN, 2: slicing.SEVEN})
    busy = [slicing.running("r", {"a": tuple(slice_index(1, i) for i in range(7))}, "1g.10gb")]
    snap = replace(snapshot([cut], jobs, busy), policies={"p": policy})
    plan = decide(snap)
    assert started(plan) == {"whole": [("a", (0,))]}, "behind the first nothing starts, as the file says"
    assert set(plan.troubles) <= {"p"}, "no weights, which are for whole GPUs"
    by_fallback = decide(replace(snap, policies={"p": policy.effective_fallback}))
    assert started(by_fallback)["short"], "easy would start it"


@pytest.mark.parametrize(("slices", "failing"), [(True, ""), (True, "p/1g.10gb"), (False, "")])
def test_queues_of_slices_are_the_agent_s_with_the_weights_of_their_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: bool, failing: str
) -> None:
    asked: list[str] = []

    def decide_queue(weights: object, context: Context) -> tuple[list[int], QueueBlock]:
        asked.append(context.partition)
        if context.partition == failing:
            raise Unusable("it does not like slices")
        queue = context.waiting.ordered(context.partition, "fifo")
        return queue.tolist(), place_queue(context._replace(policy=context.policy.effective_fallback), queue)

    live = SimpleNamespace(prepare=lambda model: model.arrays, decide_queue=decide_queue)
    monkeypatch.setitem(AGENTS, "orders", AgentTraits(slices=slices))
    monkeypatch.setitem(REGISTRY, "orders", AgentParts(live=lambda: live))
    (tmp_path / "mine").mkdir()
    (tmp_path / "state").mkdir()
    save_model(tmp_path / "mine/p.safetensors", "orders", {"x": np.array([4])})
    (tmp_path / "mine.yaml").write_text("agent: orders\nbudget: 10m\nfallback: easy\n")
    policy = load_policy(tmp_path / "mine.yaml")
    jobs = [slicing.pending("s", 2, "1g.10gb"), slicing.pending("w", 1)]
    snap = replace(snapshot([slicing.cut(node("a", gpus=2), {1: slicing.SEVEN})], jobs), policies={"p": policy})
    decider = Decider(Store.create_or_open(tmp_path / "state"))
    found = decider.decide(snap, {"p": load_model(tmp_path / "mine", "p", "orders").digest})
    assert started(found.plan) == {"s": [("a", (2000, 2001))], "w": [("a", (0,))]}
    assert sorted(asked) == (["p", "p/1g.10gb"] if slices else ["p"])
    assert found.deciders["p"] is policy
    by_fallback = failing or not slices
    assert found.deciders["p/1g.10gb"].name == ("easy" if by_fallback else policy.name)
    fallbacks = decider._store.fallbacks()
    assert [one.why for one in fallbacks.values()] == (["it does not like slices"] if failing else [])
    assert set(fallbacks) <= {"p"}
