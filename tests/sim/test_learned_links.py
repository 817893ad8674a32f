"""Replays in which placement costs what was learned of job classes: speeds as believed, decisions as live."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.agents.common.vector import vector_size
from gpusched.agents.topology.network import SHAPES, untrained, weights_from
from gpusched.agents.topology.replay import placed_by, replayed
from gpusched.model.snapshot import Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.engine.build import Outage
from gpusched.sim.network import learned_network
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import replay
from gpusched.sim.result import END
from gpusched.study.study import PlannedReplay, Scenario, costs_for, run_all
from tests.sched.contention import LATE, NAMES, beliefs, clusters
from tests.sched.topology_decisions import by_agents, weights
from tests.sched.worlds import started, topology
from tests.sim.reserved import trace_of as trace_of_snapshot
from tests.sim.worlds import trace_of

FOUR = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(4)])
TWO = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(2)])


def of_alice(trace, names):
    """The same jobs as alice's, with these names."""
    known = sorted(set(names))
    model = np.array([known.index(name) for name in names], np.int64)
    return replace(trace, users=("alice",), user=np.zeros(len(names), np.int64), models=tuple(known), model=model)


def test_a_job_over_two_racks_takes_as_much_longer_as_was_learned() -> None:
    """Three nodes are busy until the first is free again: the rest of a job on two nodes is in another rack."""
    jobs = of_alice(trace_of([0, 0, 0, 1], [100, 900, 900, 1000], [4, 4, 4, 8]), ["new", "new", "new", "calm"])
    racks, known = topology("r1", "r1", "r2", "r2"), beliefs(0.5, 0.5, 1.6)
    network, note = learned_network(racks, jobs, FOUR, known)
    found = replay(jobs, FOUR, placed_by("best-fit"), network=network)
    assert set(found.nodes_of(3)) == {0, 3}
    assert found.end[3] - found.start[3] == pytest.approx(1600.0)
    waits = replay(jobs, FOUR, placed_by("contention"), network=network)
    assert waits.end[3] - waits.start[3] == pytest.approx(1000.0)
    assert note == "what placement costs as learned of 2 job classes: 1 of 4 jobs are of these"


def test_measured_speeds_of_gpu_types_and_what_places_cost_go_together() -> None:
    jobs = of_alice(trace_of([0, 0, 0, 1], [100, 900, 900, 1000], [4, 4, 4, 8]), ["new", "new", "new", "calm"])
    pool = Pool.of([NodeSpec(4, gpu_type="B", name=f"n{i}") for i in range(4)])
    speeds = {("calm", "A"): Series({(8, 2): 4.0}, "nodes"), ("calm", "B"): Series({(8, 2): 8.0}, "nodes")}
    rates = Rates(profiles=Profiles(series=speeds), recorded_on="A")
    network, _ = learned_network(topology("r1", "r1", "r2", "r2"), jobs, pool, beliefs(0.5, 0.5, 1.6))
    found = replay(jobs, pool, placed_by("best-fit"), network=network, rates=rates)
    assert found.end[3] - found.start[3] == pytest.approx(1600.0 / 2)


def test_a_neighbour_on_the_nic_takes_what_was_learned_of_the_two() -> None:
    jobs = of_alice(trace_of([0, 0], [1000, 3000], [4, 4]), ["calm", "loud"])
    jobs = replace(jobs, nodes=np.full(2, 2, np.int64))
    network, _ = learned_network(topology("r1", "r1"), jobs, TWO, beliefs(0.6, 0.5, 1.0))
    found = replay(jobs, TWO, placed_by("best-fit"), network=network)
    assert found.end[0] == pytest.approx(1000 * (1 + 0.6 * 0.5))
    pair, _ = learned_network(topology("r1", "r1"), jobs, TWO, beliefs(0.6, 0.5, 1.0, pair=0.9))
    measured = replay(jobs, TWO, placed_by("best-fit"), network=pair)
    assert measured.end[0] > 1.5 * 1000, "what was measured of a pair goes before its parts"


def test_a_job_that_starts_again_beside_another_one_of_the_same_pass_ends_once() -> None:
    """Its node was away; the other one is before it in the queue, and slows it down."""
    jobs = of_alice(trace_of([0, 1, 15], [900, 100, 100], [4, 2, 2]), ["new", "calm", "loud"])
    jobs = replace(jobs, priority=np.array([0, 0, 1]))
    network, _ = learned_network(topology("r1", "r1"), jobs, TWO, beliefs(0.5, 0.5, 1.0))
    at_once = replace(placed_by("contention"), placement_wait_s=0.0)
    found = replay(jobs, TWO, at_once, network=network, failures=(Outage(1, 10.0, 20.0),))
    assert found.start.tolist() == [0.0, 1.0, 20.0]
    assert (found.events.kind == END).sum() == 3
    assert found.last_start.tolist() == [0.0, 20.0, 20.0]
    assert found.end[2] < found.end[1] <= 20.0 + 100 * (1 + 0.5 * 0.5)


@given(clusters(), st.sampled_from([1, 4]), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_the_replay_s_first_decision_is_the_live_one(snap: Snapshot, count: int, seed: int) -> None:
    """Jobs that all wait for empty nodes, under any weights."""
    numbers = untrained(0) if seed == 0 else np.random.default_rng(seed).normal(0, 0.3, vector_size(SHAPES))
    numbers = numbers.astype(np.float32).astype(np.float64)
    most = len(snap.nodes)  # a replay has a job that asks for more on fewer (`sim.pool`), the controller never
    specs = [
        changed(job.spec, max_spread="", placement_wait_s=None, nodes=min(job.spec.nodes, most)) for job in snap.pending
    ]
    pending = tuple(
        changed(job, submit_time=LATE, id=f"j{i}", spec=spec)
        for i, (job, spec) in enumerate(zip(snap.pending, specs, strict=True))
    )
    asked = by_agents(changed(snap, running=(), pending=pending), count)
    plan = decide(asked, dict.fromkeys(asked.policies, weights(numbers)))
    assert plan.troubles == {}
    live = {name: {node for node, _ in where} for name, where in started(plan).items()}

    trace = of_alice(trace_of_snapshot(asked), [job.spec.name for job in pending])
    pool = Pool.of([NodeSpec(8, name=node.name) for node in asked.nodes])
    network, _ = learned_network(asked.topology, trace, pool, asked.beliefs)
    found = replayed(trace, pool, network, weights_from(numbers), next(iter(asked.policies.values())))
    begun = {
        trace.ids[j]: {pool.names[n] for n in found.nodes_of(j)}
        for j in np.flatnonzero((found.start == 0.0) & ~np.isnan(found.end))
    }
    assert begun == live


def test_other_policies_are_replayed_by_what_was_learned() -> None:
    jobs = of_alice(trace_of(range(40), [500.0] * 40, [2, 4, 8, 1] * 10), [*NAMES, "calm"] * 10)
    network, _ = learned_network(topology("r1", "r1", "r2", "r2"), jobs, FOUR, beliefs(0.5, 0.5, 2.0))
    ends = [replay(jobs, FOUR, policy_by_name(name), network=network).end for name in ("fifo", "easy", "rack-wait")]
    assert all(np.isfinite(end).all() for end in ends)
    assert all((end - jobs.submit >= jobs.duration - 1e-6).all() for end in ends)


def test_contention_goes_by_what_was_learned_of_the_history_as_live() -> None:
    """Whatever it is compared with."""
    jobs, known = of_alice(trace_of([0, 1], [9, 9], [4, 8]), ["calm", "loud"]), beliefs(0.5, 0.5, 1.6)
    racks = topology("r1", "r1", "r2", "r2")
    scenario = Scenario(jobs, FOUR, power_model(FOUR), topology=racks, learned=known)
    contention, easy, srtf = map(policy_by_name, ("contention", "easy", "srtf"))
    network, notes = costs_for([contention, easy, srtf], scenario)
    assert network is not None
    assert "what placement costs as learned" in notes[0]
    for policies, of in (([easy], known), ([contention], {})):
        assert costs_for(policies, scenario._replace(learned=of)) == (None, ())


@pytest.mark.parametrize("place", ["rack", "rack-wait", "contention"])
def test_a_history_s_jobs_are_placed_by_its_racks_where_nothing_was_learned(place: str) -> None:
    """Whatever they are compared with: the second job leaves the other rack whole for the third."""
    jobs = replace(trace_of([0, 0, 1], [9, 5, 9], [4, 4, 8]), nodes=np.array([1, 1, 2]))
    scenario = Scenario(jobs, FOUR, power_model(FOUR), topology=topology("r1", "r2", "r2", "r1"))
    runs = [PlannedReplay(scenario, policy_by_name(name)) for name in (place, "easy")]
    racked, blind = run_all(runs)
    assert racked.result.placement == place.replace("contention", "rack")
    assert set(racked.result.nodes_of(2)) == {1, 2}
    assert set(blind.result.nodes_of(2)) == {2, 3}
