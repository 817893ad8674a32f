"""Agents that place jobs: what their network computes, what they may do, and what learning brings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.agents.common.vector import to_arrays, to_vector, vector_size
from gpusched.agents.topology import network
from gpusched.agents.topology import reproduce as reproduction
from gpusched.agents.topology.learn import TopologyResult
from gpusched.agents.topology.network import HAND, PLACE, SHAPES, WAIT, WIDTH, untrained, weights_from
from gpusched.agents.topology.replay import agents_spec, new_replay_state, placed_by, replayed, run_agents
from gpusched.agents.topology.reproduce import run_of
from gpusched.agents.topology.workloads import draw
from gpusched.agents.topology.workloads import settings as clusters
from gpusched.compiled.loading import kind_of
from gpusched.config.weights import save_model
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.policy import PolicySpec
from gpusched.sched.state import Resources
from gpusched.sched.topology.load import FULL_STEP, enter, new_load, speed_of
from gpusched.sched.topology.slowdown import needs_of
from gpusched.sched.topology.tree import links_of, new_use
from gpusched.sim.engine.build import ReplayOptions, log_of, result_of, world_of
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.engine.state import GROW, RUNNING
from gpusched.sim.network import machines, read_pairs
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.study.options import PaperOptions
from tests.agents import inside
from tests.traces.samples import real

DAY_S = 86_400.0
SETTINGS = clusters()
RACKS = SETTINGS["16x4-racks"]


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape) for name, shape in SHAPES.items()}


def busy(seed: int) -> tuple[Any, Any, Resources]:
    """Links with some jobs on them, and what is free."""
    rng, tree = np.random.default_rng(seed), RACKS.tree
    model = machines()["aws"].model()
    load = new_load(tree, rng.integers(0, 6, 12), np.full(12, 4), np.ones(12), 400)
    free, use, needs = np.full(16, 4), new_use(tree), np.zeros(len(tree.weight))
    for job in range(12):
        parts = int(rng.choice([1, 2, 4]))
        nodes = rng.choice(np.flatnonzero(free >= 1), parts, replace=False)
        count = links_of(tree, nodes, parts, 2, use)
        alone = needs_of(tree, model, int(load.jobs[job]["kind"]), use, count, needs)
        enter(load, job, use, needs, count, alone)
        load.jobs[job]["speed"] = rng.uniform(0.2, 1.0)
        free[nodes] -= 1
    return tree, load, Resources(free, np.zeros(16, np.int64), np.zeros(16, np.int64))


def relu(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_messages_are_as_written_down_in_plain_numpy(parts: int) -> None:
    weights, (tree, load, resources) = drawn(3), busy(4)
    agent = weights_from(np.concatenate([weights[name].ravel() for name in SHAPES]))
    racks, part = np.arange(16) // 4, np.arange(16) * parts // 16
    graph = network.new_graph(tree, racks, np.full(16, 4), part, parts)
    graph.waiting[:], graph.blocked[:] = 0.7, 0.3
    network.pass_messages(agent, tree, load, resources, graph)

    def said(name: str, link: int) -> np.ndarray:
        total = np.zeros(WIDTH)
        for use in load.uses[:-1]:
            job = load.jobs[use["job"]]
            if use["link"] == link and use["part"] > 0 and job["first"] >= 0:
                seen = [1.0, use["part"] / FULL_STEP, min(job["gpus"] / 4, 3.0) / 3.0, job["speed"]]
                total += relu(np.array(seen) @ weights[name])
        return total

    pressure = np.minimum(load.pressure / FULL_STEP, 3.0)
    server = np.array([
        relu(np.concatenate([[resources.gpus[n] / 4, pressure[n], pressure[16 + n]], said("on.bus", n),
                             said("on.nic", 16 + n)]) @ weights["server"])
        for n in range(16)
    ])  # fmt: skip
    assert graph.server == pytest.approx(server)
    rack = np.array([
        relu(np.concatenate([[resources.gpus[4 * r : 4 * r + 4].sum() / 16, resources.gpus[4 * r : 4 * r + 4].max() / 4,
                              pressure[32 + tree.rack[4 * r]]], server[4 * r : 4 * r + 4].mean(0)]) @ weights["rack"])
        for r in range(4)
    ])  # fmt: skip
    assert graph.rack == pytest.approx(rack)
    of = 4 // parts
    whole = np.array([
        relu(np.concatenate([[resources.gpus[16 // parts * p : 16 // parts * (p + 1)].sum() * parts / 64, 0.7, 0.3],
                             rack[of * p : of * (p + 1)].mean(0)]) @ weights["whole"])
        for p in range(parts)
    ])  # fmt: skip
    assert graph.whole == pytest.approx(whole)

    def value(name: str, inputs: np.ndarray) -> float:
        skip = weights[f"{name}.skip"]
        return float(inputs[: len(skip)] @ skip + relu(inputs @ weights[f"{name}.in"]) @ weights[f"{name}.out"])

    nodes, rng = np.array([1, 6, 7]), np.random.default_rng(1)
    graph.place[:PLACE], graph.wait[:WAIT], graph.hand[:HAND] = rng.random(PLACE), rng.random(WAIT), rng.random(HAND)
    own, waits, hand = graph.place[:PLACE].copy(), graph.wait[:WAIT].copy(), graph.hand[:HAND].copy()
    assert network.value_of_place(agent, graph, 0, nodes, 3) == pytest.approx(
        value("place", np.concatenate([own, server[nodes].mean(0), rack[nodes // 4].mean(0), whole[0]]))
    )
    assert network.value_of_waiting(agent, graph, 0) == pytest.approx(value("wait", np.concatenate([waits, whole[0]])))
    to = parts - 1
    assert network.value_of_handing(agent, graph, 0, to) == pytest.approx(
        value("hand", np.concatenate([hand, whole[0], whole[to]]))
    )


def test_weights_of_another_shape_are_rejected() -> None:
    arrays = to_arrays(untrained(0), SHAPES)
    assert np.allclose(to_vector(arrays, SHAPES), untrained(0), atol=1e-6)
    with pytest.raises(ValueError, match=r"wait\.in is missing or not of shape"):
        to_vector({**arrays, "wait.in": arrays["wait.in"][:-1]}, SHAPES)


@given(st.integers(0, 999), st.sampled_from([1, 2, 4]), st.sampled_from(["16x4-racks", "8x8-racks", "16x4"]))
@settings(max_examples=25, deadline=None)
def test_whatever_the_weights_every_job_runs_once_within_what_there_is(seed: int, parts: int, name: str) -> None:
    setting, rng = SETTINGS[name], np.random.default_rng(seed)
    trace, kind = draw(setting, 1.0, seed, 60)
    model, pool = machines()[setting.machine].model(), setting.pool
    wild = weights_from(rng.normal(0, 1.0, vector_size(SHAPES)))
    result = replayed(trace, pool, PlacementNetwork(setting.tree, model, kind), wild, agents_spec(parts))
    assert not np.isnan(result.end).any()
    assert (result.start >= trace.submit).all()
    assert (result.end - result.start >= trace.duration - 1e-5).all(), "nobody is faster than alone at its best"
    nodes = [result.nodes_of(job) for job in range(len(trace))]
    assert [len(of) * gpus for of, gpus in zip(nodes, result.part_gpus, strict=True)] == trace.gpus.tolist()
    for job in range(len(trace)):
        assert len(set(nodes[job])) == len(nodes[job])
    for at in result.start:
        held = np.zeros(len(pool))
        for job in np.flatnonzero((result.start <= at) & (result.end > at)):
            held[nodes[job]] += result.part_gpus[job]
        assert (held <= pool.gpus).all()


def test_four_schedulers_that_hand_jobs_on_do_about_what_one_does() -> None:
    handed, jct = weights_from(untrained(0)), []
    never = handed._replace(hand_skip=np.array([-100.0, *handed.hand_skip[1:]]))
    for seed in range(8):
        trace, kind = draw(RACKS, 0.9, seed, 1500)
        here = PlacementNetwork(RACKS.tree, machines()["aws"].model(), kind)
        jct.append([
            float((replayed(trace, RACKS.pool, here, agent, agents_spec(parts)).end - trace.submit).mean())
            for agent, parts in ((handed, 1), (handed, 4), (never, 4))
        ])  # fmt: skip
    one, four, alone = np.log(jct).mean(0)
    assert four < one + 0.05
    assert alone > one + 0.05, "where each keeps to its own nodes while they have free GPUs"


@pytest.mark.parametrize("parts", [1, 4])
def test_of_what_one_decision_tried_nothing_is_left_for_the_next(parts: int) -> None:
    """Links and speeds are as the engine has them, whatever schedulers would have started meanwhile."""
    trace, kind = draw(RACKS, 1.1, 3, 300)
    here, spec = PlacementNetwork(RACKS.tree, machines()["aws"].model(), kind), PolicySpec(name="a", agent="topology")
    spec = changed(spec, backfill="skip", schedulers=parts)
    plain = world_of(trace, RACKS.pool, placed_by("contention"), ReplayOptions(network=here))
    world, acting = new_replay_state(plain, weights_from(untrained(0)), spec)
    log, load, most = log_of(world), acting.walk.costs.load, 0
    log = log._replace(events=log.events[:100])
    while run_agents(world.sim, log, world.passes, acting) == GROW:
        runs = world.sim.state["status"] == RUNNING
        assert ((load.jobs["alone"] > 0) == runs).all(), "nobody else is on links"
        for job in np.flatnonzero(runs):
            at, links = load.jobs[job]["first"], []
            while at >= 0:
                links.append(int(load.uses[at]["link"]))
                at = load.uses[at]["more"]
            begin = world.sim.jobs["offset"][job]
            held = world.sim.held[begin : begin + world.sim.shapes["parts"][world.sim.jobs["shape"][job]]]
            assert len(links) == len(set(links)), "once on each"
            assert {link for link in links if link < len(RACKS.pool)} <= set(held.tolist())
        speeds = [speed_of(acting.walk.costs.model, load, job) for job in np.flatnonzero(runs)]
        assert load.jobs["speed"][runs] == pytest.approx(speeds)
        log = log._replace(events=np.append(log.events, np.zeros(2, log.events.dtype)))
        most = max(most, int(runs.sum()))
    assert most > 8, "seen while they are busy"
    assert not np.isnan(result_of(world, log, 1.0).end).any()
    assert (acting.auctions[0].begun > 0).any() == (parts > 1)
    assert load.pressure.tolist() == [0] * len(load.pressure)
    assert (load.jobs["first"] == -1).all()
    assert (load.on == -1).all()
    assert acting.walk.size[0] == 0


def test_code_for_one_partition_serves_several() -> None:
    """To compile it takes half a minute, and before any replay there is one of a single partition."""
    trace, kind = draw(RACKS, 0.9, 3, 20)
    here, half = PlacementNetwork(RACKS.tree, machines()["aws"].model(), kind), len(RACKS.pool) // 2
    nodes = [NodeSpec(4, partition="ab"[node >= half]) for node in range(2 * half)]
    kinds = []
    for pool in (Pool.of([node._replace(partition="") for node in nodes]), Pool.of(nodes)):
        world = world_of(trace, pool, placed_by("contention"), ReplayOptions(network=here))
        world, acting = new_replay_state(world, weights_from(untrained(0)), agents_spec(2))
        kinds.append(kind_of((world.sim, world.passes, acting)))
    assert kinds[0] == kinds[1]


def test_they_are_replayed_as_any_policy_by_what_their_file_says(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    numbers = np.random.default_rng(3).normal(0, 0.5, vector_size(SHAPES)).astype(np.float32).astype(np.float64)
    save_model(tmp_path / "agents/default.safetensors", "topology", to_arrays(numbers, SHAPES), {})
    (tmp_path / "agents.yaml").write_text("agent: topology\nschedulers: 4\norder: fifo\nbackfill: skip\n")
    trace, kind = draw(RACKS, 0.9, 3, 300)
    here = PlacementNetwork(RACKS.tree, machines()["aws"].model(), kind)
    policy = policy_by_name(str(tmp_path / "agents.yaml"))
    found = replay(trace, RACKS.pool, policy, network=here)
    mine, alone = (replayed(trace, RACKS.pool, here, weights_from(numbers), agents_spec(n, DAY_S)) for n in (4, 1))
    assert np.array_equal(found.start, mine.start)
    assert not np.array_equal(found.start, alone.start)
    (tmp_path / "agents.yaml").write_text("agent: topology\nschedulers: 4\norder: ljf\nbackfill: skip\n")
    largest = replay(trace, RACKS.pool, policy_by_name(str(tmp_path / "agents.yaml")), network=here)
    large = trace.gpus >= 8
    assert (largest.start - trace.submit)[large].mean() < (found.start - trace.submit)[large].mean()
    with pytest.raises(UsageError, match="say --topology FILE"):
        replay(trace, RACKS.pool, policy)
    with pytest.raises(UsageError, match="cannot be combined with --placement rack"):
        replay(trace, RACKS.pool, policy, network=here, placement="rack")


def test_the_untrained_network_is_about_as_good_as_the_rule() -> None:
    jct = {}
    for name in ("untrained", "contention"):
        drawn_jobs = [draw(RACKS, 0.9, seed, 1500) for seed in range(4)]
        jct[name] = np.mean([(run_of(RACKS, of, 0, name).end - of[0].submit).mean() for of in drawn_jobs])
    assert jct["untrained"] == pytest.approx(jct["contention"], rel=0.1)


def test_trained_weights_beat_their_start_on_unseen_jobs() -> None:
    """Where links are shared, in the mean over loads and seeds; by a table of pairs `contention` is far off."""
    lost = []
    for name in ("16x4", "16x4-racks", "8x8-racks"):
        for load, seed in ((0.7, 41), (0.7, 42), (0.9, 41), (0.9, 42), (1.1, 41), (1.1, 42)):
            drawn_jobs = draw(SETTINGS[name], load, seed)
            agents, start = (
                (run_of(SETTINGS[name], drawn_jobs, seed, policy).end - drawn_jobs[0].submit).mean()
                for policy in ("agents", "untrained")
            )
            lost.append(np.log(agents / start))
    assert np.mean(lost) < 0.02
    pairs = read_pairs(real("../profiles/contention/deepshare_pairs.csv"))
    table = SETTINGS["16x4"]._replace(pairs=pairs, combine="product", mix="table")
    for seed in (41, 42):
        drawn_jobs = draw(table, 0.9, seed, 700)
        agents, rule = (
            (run_of(table, drawn_jobs, seed, policy).end - drawn_jobs[0].submit).mean()
            for policy in ("agents", "contention")
        )
        assert agents < 0.9 * rule


def test_weights_that_are_worse_than_their_start_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, result = tmp_path / "w.safetensors", TopologyResult(untrained(0), untrained(0), ((0, 1.0), (8, 1.01)))
    monkeypatch.setattr(reproduction, "learn", lambda *args: result)
    with pytest.raises(GpuschedError, match=r"cost \+1.0100, untrained ones \+1.0000"):
        reproduction._trained(PaperOptions(out=str(out)), lambda done, of: None)
    assert not out.exists()


def test_weights_are_learned_written_and_taken(tmp_path: Path) -> None:
    words = ("reproduce", "topology", "--topology", "16x4", "--load", "0.9", "--quick", "--json")

    def gpusched(*more: str) -> subprocess.CompletedProcess[str]:
        return inside.run(*words, *more, cwd=tmp_path)

    wanted = ("--policy", "agents-4", "--policy", "untrained-4")
    learned = gpusched("--out", "w.safetensors", *wanted)
    assert learned.returncode == 0, learned.stderr
    again = gpusched("--weights", "w.safetensors", *wanted)
    assert again.stdout == learned.stdout
    found = {row["policy"]: row for row in json.loads(again.stdout)}
    assert set(found) == {"agents-4", "untrained-4"}
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    assert gpusched("--weights", "w.safetensors", *wanted).stdout.count("\n") == 1
