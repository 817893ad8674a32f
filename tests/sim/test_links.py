"""Where jobs run costs something: rates against a reference in plain Python, and who starts where by the rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpusched.model.topology import Topology
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from tests.sim.links import BLIND, HOLD, WAIT, World
from tests.sim.reference_links import Decider, ends, overlaps
from tests.sim.worlds import trace_of


@pytest.mark.parametrize("seed", range(28))
def test_rates_are_those_of_the_reference_and_nothing_is_given_twice(seed):
    world = World(seed, table=seed % 3 == 0)
    rule = (*BLIND, "random", "contention")[seed % 7]
    result, places = world.play(rule, backfill="easy" if seed % 2 else "skip")
    fits = np.isfinite(result.end)
    assert fits.any()
    ran = np.flatnonzero(fits).tolist()
    best = [Decider(world.cluster, "rack", 0, 0).best(world.kinds, int(world.trace.gpus[j]), places[j][0]) for j in ran]
    expected = ends(
        world.cluster, world.kinds, result.start[ran].tolist(), [places[j] for j in ran],
        world.trace.duration[ran].tolist(), best,
    )  # fmt: skip
    np.testing.assert_allclose(result.end[ran], expected, rtol=1e-6)
    assert not overlaps(result.start[ran], result.end[ran], [places[j] for j in ran], world.gpus)
    for j in ran:
        assert len(places[j][1]) * places[j][2] == world.trace.gpus[j]
        assert len(set(places[j][1])) == len(places[j][1])


@pytest.mark.parametrize("seed", range(30, 50))
def test_blind_rules_start_the_jobs_and_nodes_of_the_reference(seed):
    world = World(seed, table=seed % 4 == 0)
    rule = BLIND[seed % len(BLIND)]
    result, places = world.play(rule)
    jobs = list(zip(world.trace.submit.tolist(), world.trace.duration.tolist(), world.trace.gpus.tolist(),
                    world.network.kind.tolist(), strict=True))  # fmt: skip
    start, nodes, end = Decider(world.cluster, rule, WAIT, HOLD).run(world.kinds, jobs)
    np.testing.assert_allclose(result.start, start, rtol=1e-6)
    np.testing.assert_allclose(result.end, end, rtol=1e-6)
    assert [sorted(place[1]) for place in places] == [sorted(n) for n in nodes]


@pytest.mark.parametrize("seed", range(60, 100))
def test_with_backfill_the_blind_rules_start_the_jobs_and_nodes_of_the_reference(seed):
    world = World(seed, table=seed % 4 == 0)
    rule = BLIND[seed % len(BLIND)]
    result, places = world.play(rule, backfill="easy")
    jobs = list(zip(world.trace.submit.tolist(), world.trace.duration.tolist(), world.trace.gpus.tolist(),
                    world.network.kind.tolist(), strict=True))  # fmt: skip
    decider = Decider(world.cluster, rule, WAIT, HOLD, world.trace.limit.tolist())
    start, nodes, end = decider.run(world.kinds, jobs)
    np.testing.assert_allclose(result.start, start, rtol=1e-6)
    np.testing.assert_allclose(result.end, end, rtol=1e-6)
    assert [sorted(place[1]) for place in places] == [sorted(n) for n in nodes]


def test_with_instant_links_no_job_is_slower_and_packing_rules_are_ideal():
    world = World(4)
    tree = world.network.tree
    free = world.network._replace(tree=tree._replace(weight=np.zeros_like(tree.weight)))
    found = {rule: world.play(rule, free)[0] for rule in (*BLIND, "random", "contention")}
    for result in found.values():
        np.testing.assert_allclose(result.end - result.start, world.trace.duration)
    for rule in ("rack", "contention"):
        np.testing.assert_array_equal(found["best-fit"].start, found[rule].start)


def test_contention_waits_for_a_better_place_and_goes_at_the_bound():
    """Two nodes of 4 with 3 taken on each until 50 and 60: a job of 2 over both would go at half speed."""
    names = ("a", "b")
    tree = tree_of(Topology(), names, nvswitch=True)
    kinds = np.zeros(2, KIND)
    kinds["compute"], kinds["net_a"][1] = 1.0, 1.0
    trace = trace_of([0.0, 0.0, 1.0], [50.0, 60.0, 10.0], [3, 3, 2])
    pool = Pool.of([NodeSpec(4, name=n) for n in names])
    policy = ReplayPolicy(name="c", order="fifo", knows="nothing", source="", backfill="skip", placement="contention")
    kind = np.array([0, 0, 1])
    for patience, hold, expected in (
        (1000.0, 1000.0, 50.0),
        (1000.0, 40.0, 41.0),
        (30.0, 1000.0, 31.3),
        (0.0, 1000.0, 1.0),
    ):
        network = PlacementNetwork(tree, SlowdownModel(kinds, np.zeros((0, 0)), False), kind, 0.0, patience, hold)
        result = replay(trace, pool, policy, network=network)
        ran = 10.0 if expected == 50.0 else 20.0
        assert (result.start[2], result.end[2] - result.start[2]) == pytest.approx((expected, ran), abs=0.5)


@pytest.mark.parametrize(("backfill", "waits", "short", "long"), [("skip", 50.0, 2.0, 3.0), ("easy", 31.0, 2.0, 50.0)])
def test_easy_reserves_nodes_of_a_job_that_waits_for_a_better_place(backfill, waits, short, long):
    """As above, with patience until 31; behind it a job of 1 GPU that has ended by then, and one that has not."""
    names = ("a", "b")
    kinds = np.zeros(2, KIND)
    kinds["compute"], kinds["net_a"][1] = 1.0, 1.0
    trace = trace_of([0.0, 0.0, 1.0, 2.0, 3.0], [50.0, 60.0, 10.0, 10.0, 90.0], [3, 3, 2, 1, 1])
    trace = replace(trace, limit=trace.duration)
    model = SlowdownModel(kinds, np.zeros((0, 0)), False)
    tree = tree_of(Topology(), names, nvswitch=True)
    network = PlacementNetwork(tree, model, np.array([0, 0, 1, 0, 0]), 0.0, 30.0, 1000.0)
    policy = ReplayPolicy(name="c", order="fifo", knows="limit", source="", backfill=backfill, placement="contention")
    result = replay(trace, Pool.of([NodeSpec(4, name=n) for n in names]), policy, network=network)
    assert result.start[2:].tolist() == pytest.approx([waits, short, long])


def test_with_easy_a_job_that_needs_an_unavailable_node_blocks_no_job_and_nodes_are_reserved_for_the_next():
    names = ("a", "b")
    kinds = np.zeros(1, KIND)
    kinds["compute"] = 1.0
    trace = trace_of([0.0, 2.0, 3.0, 4.0, 5.0], [50.0, 10.0, 10.0, 90.0, 20.0], [3, 8, 4, 1, 1])
    trace = replace(trace, limit=trace.duration)
    network = PlacementNetwork(
        tree_of(Topology(), names), SlowdownModel(kinds, np.zeros((0, 0)), False), np.zeros(5, np.int64)
    )
    pool = Pool.of([NodeSpec(4, name=n) for n in names])
    for rule in ("best-fit", "contention"):
        policy = ReplayPolicy(name=rule, order="fifo", knows="limit", source="", backfill="easy", placement=rule)
        result = replay(trace, pool, policy, network=network, failures=(Outage(1, 1.0, 200.0),))
        assert result.start.tolist() == pytest.approx([0.0, 200.0, 50.0, 60.0, 5.0])


@pytest.mark.parametrize(("rule", "node"), [("best-fit", 0), ("contention", 1)])
def test_contention_goes_where_job_and_neighbours_lose_least(rule, node):
    """Two nodes of 4: the bus of the first is in use for half of each step, so the tighter node is the slower one."""
    names = ("a", "b")
    kinds = np.zeros(1, KIND)
    kinds["compute"], kinds["bus_a"], kinds["net_a"] = 1.0, 1.0, 5.0
    kind = np.zeros(2, np.int64)
    network = PlacementNetwork(tree_of(Topology(), names), SlowdownModel(kinds, np.zeros((0, 0)), False), kind)
    policy = ReplayPolicy(name=rule, order="fifo", knows="nothing", source="", backfill="skip", placement=rule)
    pool = Pool.of([NodeSpec(4, name=n) for n in names])
    result = replay(trace_of([0.0, 1.0], [30.0, 30.0], [2, 2]), pool, policy, network=network)
    assert result.part_nodes.tolist() == [0, node]
    # Beside each other each occupies half of its step alone on the bus, so that a step takes 1 + 1.5 seconds, not 2.
    assert result.end[1] - result.start[1] == pytest.approx(30.0 if node else 29.0 * 1.25 + 1.0)


@pytest.mark.parametrize(("rule", "nodes"), [("best-fit", [0, 1]), ("contention", [2, 3])])
def test_contention_minds_what_neighbours_lose(rule, nodes):
    """By a table by which only the first of two jobs over two nodes is slowed by the other."""
    names = ("a", "b", "c", "d")
    tree = tree_of(Topology(), names, nvswitch=True)
    ratio = np.array([[1.0, 0.2], [1.0, 1.0]])
    network = PlacementNetwork(tree, SlowdownModel(np.zeros(2, KIND), ratio, False), np.arange(2))
    trace = replace(trace_of([0.0, 1.0], [30.0, 30.0], [2, 2]), nodes=np.full(2, 2))
    policy = ReplayPolicy(name=rule, order="fifo", knows="nothing", source="", backfill="skip", placement=rule)
    result = replay(trace, Pool.of([NodeSpec(2, name=n) for n in names]), policy, network=network)
    assert result.part_nodes.tolist() == [0, 1, *nodes]
    assert result.end.tolist() == ([30.0, 31.0] if rule == "contention" else [54.0, 31.0])


def test_jobs_without_gpus_use_no_links():
    """However many: room for a use by each GPU."""
    names = ("a", "b")
    pool = Pool.of([NodeSpec(1, 64, name=n) for n in names])
    trace = replace(trace_of(np.zeros(20), np.ones(20), np.zeros(20), cores=np.full(20, 2)), nodes=np.full(20, 2))
    kinds = np.ones(1, KIND)
    network = PlacementNetwork(
        tree_of(Topology(), names), SlowdownModel(kinds, np.zeros((0, 0)), False), np.zeros(20, np.int64)
    )
    policy = ReplayPolicy(name="c", order="fifo", knows="nothing", source="", backfill="skip", placement="contention")
    np.testing.assert_allclose(replay(trace, pool, policy, network=network).end, 1.0)
