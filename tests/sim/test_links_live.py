"""Replays in which links slow jobs down, start by start as live decisions: by mapping, agents, and on MIG slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from gpusched.agents.topology.network import SHAPES
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.interference import JobClassEstimate
from gpusched.model.policy import Backfill, Mapping, PolicySpec
from gpusched.sim.engine.mapped import _solver
from gpusched.sim.network import learned_network, network_for
from gpusched.sim.policies import ReplayPolicy, policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.result import ReplayResult
from gpusched.traces.trace import Trace
from tests.sched.contention import beliefs, paces
from tests.sched.gist_decisions import GIST
from tests.sched.rltune_decisions import RLTUNE, WILD
from tests.sched.worlds import topology
from tests.sim.slice_worlds import (
    A100,
    KNOWN,
    LAS,
    NODE,
    RACKS,
    WIDE,
    by_controller,
    by_live_decisions,
    named_jobs,
    preempting,
    wild,
)

pytestmark = pytest.mark.interpreted

SLOW_ON_FOUR = {
    name: changed(of, shapes=(*of.shapes, paces(4, 1, 10.0 / 3.0, 8))) for name, of in KNOWN.items()
}  # fmt: skip
Beliefs = dict[str, JobClassEstimate]
POOL = Pool.of([NODE._replace(name=f"n{i}", gpus=6) for i in range(5)])




def both(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, pool: Pool, policy: ReplayPolicy, learned: Beliefs = KNOWN,
    **options: Any,
) -> ReplayResult:  # fmt: skip
    """The replay, equal to that by live decisions."""
    network, _ = learned_network(RACKS, trace, pool, learned)
    costs = {"network": network, "learned": learned, "topology": RACKS, **options}
    fast = replay(trace, pool, policy, **costs)
    live = by_live_decisions(monkeypatch, trace, pool, policy, **costs)
    np.testing.assert_allclose(fast.start, live.start)
    np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
    np.testing.assert_allclose(fast.end, live.end)
    assert fast.ran.sum() > len(trace) // 3
    if not policy.places:
        slower = fast.end - fast.start > trace.duration + 1.0
        assert slower[fast.restarts == 0].any(), "links slow jobs down"
    return fast


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
@pytest.mark.parametrize("place", ["contention", "rack-wait", "best-fit"])
def test_slices_are_placed_where_placement_costs_something_as_live(
    place: str, backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, order in enumerate(("fifo", "sjf")):
        spec = PolicySpec(name="r", order=order, place=place, backfill=backfill, placement_wait_s=1500.0)
        outages = [Outage(seed, 2000.0, 4000.0)]
        result = both(monkeypatch, named_jobs(seed), POOL, policy_of_spec(spec), failures=outages)
        assert result.trace.profile is not None
        assert (result.ran & (result.trace.profile >= 0)).sum() > 40


SPEEDS = {"calm": {"V100": 0.6, "A100": 1.0}, "*": {"V100": 1.0, "A100": 0.8}}


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
@pytest.mark.parametrize("place", ["fastest", "milp"])
def test_a_mapping_chooses_nodes_as_live_and_links_slow_its_jobs_down(
    place: str, backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "milp":
        pytest.importorskip("highspy")
        monkeypatch.setattr("gpusched.sched.stages.deadline", lambda _: _solver())
    spec = PolicySpec(name="m", place=place, backfill=backfill, mapping=Mapping(speeds=SPEEDS, window=8))
    count = 20 if place == "milp" else 120
    both(monkeypatch, named_jobs(3, count), WIDE, policy_of_spec(spec))


def ordered(spec: PolicySpec, model: TrainedModel, backfill: Backfill = "skip") -> ReplayPolicy:
    return ReplayPolicy(
        name="a", order=model.agent, knows=model.knows, source="", backfill=backfill, placement=spec.place, spec=spec,
        model=model,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["contention", "best-fit", "rack", "fastest"])
def test_an_agent_orders_and_its_policy_places_as_live(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cost a job that says no number of nodes has the fewest, and costs what is known of these, as live."""
    spec = changed(RLTUNE, place=place, placement_wait_s=1500.0, mapping=Mapping(speeds=SPEEDS, window=8))
    trace, silent = named_jobs(4, 80), np.arange(80) % 3 == 0
    gpus, profile = np.where(silent, 8, trace.gpus), np.where(silent, -1, trace.profile)
    some = replace(trace, nodes=np.where(silent, -1, trace.nodes), gpus=gpus, profile=profile)
    outage = Outage(1, 2000.0, 4000.0)
    result = both(monkeypatch, some, WIDE, ordered(spec, WILD[0]), SLOW_ON_FOUR, failures=[outage])
    easy = both(monkeypatch, trace, WIDE, policy_of_spec(PolicySpec(name="e", place=place, backfill="skip")))
    assert (result.start != easy.start).any(), "by scores"


@pytest.mark.compiled
def test_agents_that_choose_nodes_themselves_do_so_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    both(monkeypatch, named_jobs(5, 80), WIDE, ordered(GIST, wild(1)))
    trace = replace(named_jobs(1, 60), preemptible=np.arange(60) % 4 > 0)
    stopped = both(monkeypatch, trace, WIDE, preempting(LAS), restart_s=20.0)
    assert stopped.restarts.sum() > 3
    network, _ = learned_network(RACKS, trace, WIDE, KNOWN)
    for policy in (ordered(GIST, wild(1)), preempting(LAS)):
        with pytest.raises(UsageError, match=r"cannot be (combined|replayed) with (--placement contention|placement)"):
            replay(trace, WIDE, policy, network=network, placement="contention")


def topology_agent(schedulers: int, wait_s: float) -> ReplayPolicy:
    spec = PolicySpec(
        name="t", agent="topology", place="contention", backfill="skip", schedulers=schedulers, placement_wait_s=wait_s
    )  # fmt: skip
    weights = np.random.default_rng(0)
    model = TrainedModel("topology", {n: weights.normal(0, 0.5, of) for n, of in SHAPES.items()}, {}, "", "wild")
    return ordered(spec, model)


@pytest.mark.compiled
@pytest.mark.parametrize(("schedulers", "wait_s"), [(1, 0.0), (1, 1500.0), (3, 1500.0)])
def test_for_agents_that_place_their_policy_decides_about_slices_as_live(
    schedulers: int, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole GPUs' jobs go on several nodes, those in slices press on the same ways up.

    A job's scheduler is drawn by its id. One that waits is decided about again, without an event, at the same times.
    """
    trace = replace(named_jobs(schedulers), ids=tuple(f"{i:09}" for i in range(120)))
    result = both(monkeypatch, trace, POOL, topology_agent(schedulers, wait_s))
    assert result.trace.profile is not None
    assert (result.ran & (result.trace.profile >= 0)).sum() > 40


@pytest.mark.parametrize("agent", ["rltune", "topology"])
def test_agents_of_several_partitions_see_each_other_s_starts_on_links_as_the_controller_asks_them(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs over two racks start at once in both partitions: the second's find the ways up that the first's leave."""
    pool = Pool.of([NODE._replace(gpus=7, partition="pq"[i // 4], name=f"n{i}") for i in range(8)])
    racks, known, numbers = topology(*"abcdabcd"), beliefs(1.0, 1.0, 1.2, 1.0), np.arange(80)
    wide, trace = numbers % 9 > 0, named_jobs(1, 80)
    trace = replace(
        trace, ids=tuple(f"{i:09}" for i in numbers), nodes=np.where(wide, 2, 1), gpus=np.where(wide, 4, 1),
        profile=np.where(wide, -1, 0), group=numbers % 2, groups=("p", "q"), user=np.zeros(80, np.int64),
        model=numbers // 2 % 2, submit=np.floor(trace.submit / 300) * 300, duration=np.ceil(trace.duration / 300) * 300,
    )  # fmt: skip
    spec = changed(RLTUNE, place="contention", placement_wait_s=1500.0)
    policy = ordered(spec, WILD[0]) if agent == "rltune" else topology_agent(3, 1500.0)
    network, _ = learned_network(racks, trace, pool, known)
    costs: dict[str, Any] = {"network": network, "learned": known, "topology": racks}
    fast = replay(trace, pool, policy, **costs)
    with by_controller(policy, tmp_path, monkeypatch) as asked:
        live = by_live_decisions(monkeypatch, trace, pool, asked, **costs)
    np.testing.assert_allclose(fast.start, live.start)
    np.testing.assert_array_equal(fast.part_nodes, live.part_nodes)
    np.testing.assert_allclose(fast.end, live.end)
    assert fast.ran.all()


ON_DEMAND = Pool.of(
    [NodeSpec(4, name=f"n{i}", gpu_type="A100", cuttable=tuple((gpu, A100) for gpu in range(3))) for i in range(4)]
)


@pytest.mark.parametrize("place", ["contention", "fastest", "best-fit"])
def test_where_gpus_are_cut_links_slow_jobs_down_and_costs_are_those_learned(place: str) -> None:
    trace, spec = named_jobs(7, 40), PolicySpec(name="c", place=place, backfill="skip", placement_wait_s=1500.0)
    network, _ = learned_network(RACKS, trace, ON_DEMAND, KNOWN)
    policy = policy_of_spec(spec)
    result = replay(trace, ON_DEMAND, policy, network=network, topology=RACKS)
    free = replay(trace, ON_DEMAND, policy, topology=RACKS)
    assert result.ran.sum() == free.ran.sum() > 25
    assert np.nansum(result.end - result.start) > np.nansum(free.end - free.start)
    assert "a GPU was cut" in result.notes[-1]
    public, _ = network_for(RACKS, trace, ON_DEMAND)
    if place == "contention":
        with pytest.raises(UsageError, match="c: this replay decides as live, where placement goes by costs learned"):
            replay(trace, ON_DEMAND, policy, network=public)
    else:
        assert replay(trace, ON_DEMAND, policy, network=public).ran.sum() > 25
