"""Placement with costs: the indexed replays against the kernel's pass over the whole queue, and that against live."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.agents.common.vector import vector_size
from gpusched.agents.topology.live import prepare
from gpusched.agents.topology.network import SHAPES, untrained
from gpusched.agents.topology.replay import new_replay_state, run_agents
from gpusched.config.weights import TrainedModel
from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Plan, ReasonCode
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.decide import decide
from gpusched.sched.state import POLICY
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.pace import join_links
from gpusched.sim.engine.placing_walk import Walk, run_walk
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.engine.state import ARRIVED, GROW, IN_SYSTEM, NEVER, PARTS, RUNNING, RUNS, WAITING
from gpusched.sim.network import learned_network
from gpusched.sim.placed import walked, walks, with_ways
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.reserving import Booking
from tests.sched import worlds
from tests.sched.contention import LATE, NAMES, arrays, beliefs, clusters, named
from tests.sched.limited import with_bounds
from tests.sched.reserved import with_reservations
from tests.sched.topology_decisions import by_agents, weights
from tests.sched.worlds import pending, snapshot, started, topology
from tests.sim.links import BLIND, World
from tests.sim.worlds import trace_of
from tests.strategies import among


def ordered(rule: str, order: str, backfill: str, wait_s: float | None = None) -> ReplayPolicy:
    knows = "nothing" if (order, backfill) == ("fifo", "skip") else "limit"
    return ReplayPolicy(
        name=rule, order=order, knows=knows, source="", backfill=backfill, placement=rule, placement_wait_s=wait_s
    )


def both(world: World, policy: ReplayPolicy, outages: tuple[Outage, ...]):
    """A replay as usual, and by the kernel's pass."""
    fast, walk = (
        replay(world.trace, world.pool, policy, network=world.network, failures=outages, seed=1, generic=generic)
        for generic in (False, True)
    )
    assert np.isfinite(walk.start).any()
    return fast, walk


@pytest.mark.parametrize("backfill", ["skip", "easy"])
@pytest.mark.parametrize("rule", [*BLIND, "contention"])
def test_the_indexed_replay_starts_the_jobs_and_nodes_of_the_kernel(rule: str, backfill: str) -> None:
    """Also where jobs outlast limits, nodes go away, jobs have priorities, and the order is not that of submission.

    In 165 and 188 a limit is over before a wait for a rack is, and the next decision depends on when that is made.
    """
    for seed in (*range(90), 165, 188):
        world = World(seed, table=seed % 3 == 0)
        if seed % 8 == 4 and seed < 90:
            levels = np.random.default_rng(seed).integers(0, 3, len(world.trace))
            world.trace = replace(world.trace, priority=levels)
        away = (Outage(seed % len(world.gpus), 15.0, 35.0, drain=seed % 4 == 1),) if seed % 2 and seed < 90 else ()
        fast, walk = both(world, ordered(rule, ("fifo", "fifo", "sjf", "ljf")[seed % 4], backfill), away)
        np.testing.assert_allclose(fast.start, walk.start, rtol=1e-9, err_msg=f"seed {seed}")
        assert fast.part_nodes.tolist() == walk.part_nodes.tolist(), seed
        np.testing.assert_allclose(fast.end, walk.end, rtol=1e-9, err_msg=f"seed {seed}")


def test_priorities_go_before_the_largest_of_tetris() -> None:
    trace = replace(trace_of([0, 1, 1], [10.0] * 3, [4, 1, 4]), nodes=np.ones(3, np.int64))
    network = World(0).network._replace(tree=tree_of(Topology(), ("n",)), kind=np.zeros(3, np.int64))
    for priority, first in ((0, 2), (5, 1)):
        with_priority = replace(trace, priority=np.array([0, priority, 0]))
        result = replay(with_priority, Pool.of([NodeSpec(4)]), ordered("tetris", "fifo", "skip"), network=network)
        assert np.argmin(result.start[1:]) + 1 == first


def test_without_placement_costs_easy_is_the_kernel_s_too() -> None:
    """A job that outlasts the shadow makes other nodes the tightest for the first, as in 19, 165, 193 and 217."""
    for seed in (9, 19, 165, 193, 217, *range(300, 330)):
        world = World(seed, count=60)
        for place in ("best-fit", "worst-fit"):
            fast, walk = (replay(world.trace, world.pool, "fifo+easy", placement=place, generic=g) for g in (0, 1))
            np.testing.assert_array_equal(fast.start, walk.start)
            assert fast.part_nodes.tolist() == walk.part_nodes.tolist()


@st.composite
def states(draw: st.DrawFn) -> Snapshot:
    """Clusters with something learned, in which jobs wait for better places or for their rack; only GPUs bind."""
    snap = draw(clusters())
    fitting = [job for job in snap.pending if job.spec.nodes <= len(snap.nodes)]
    bare = {"max_spread": "", "cores_per_node": 0, "memory_mib_per_node": 0}
    users = st.sampled_from(["alice", "bob"])
    jobs = tuple(changed(job, spec=changed(job.spec, **bare), user=draw(users)) for job in fitting)
    busy = tuple(
        changed(job, allocation=changed(job.allocation, parts=tuple(changed(p, cores=0, memory_mib=0) for p in parts)))
        for job in snap.running
        for parts in [job.allocation.parts]
    )
    away = draw(st.sets(st.sampled_from([node.name for node in snap.nodes]), max_size=len(snap.nodes) - 1))
    nodes = tuple(changed(node, available=node.name not in away) for node in snap.nodes)
    snap = changed(snap, nodes=nodes)
    (policy,) = snap.policies.values()
    policy = changed(
        policy, place=draw(among("contention", "rack-wait")),
        backfill=draw(among("skip", "easy")), order=draw(among("fifo", "fairshare")),
        placement_wait_s=draw(among(1800.0, 86_400.0)),
    )  # fmt: skip
    if policy.place == "rack-wait":
        policy = changed(policy, backfill=draw(among("skip", "easy", "conservative")))
    snap = changed(snap, usage=draw(st.dictionaries(users, st.floats(0.0, 20.0))))
    return changed(snap, pending=jobs, running=busy, policies={"p": policy})


MAINTENANCE = Reservation(name="m", nodes=("n0",), begin=LATE + 1800, end=LATE + 9000)
BOOKED = (Booking("m", (0,), MAINTENANCE.begin, MAINTENANCE.end),)

Starts = dict[str, list[tuple[str, int]]]
"""Job -> its nodes, and the GPUs of each."""


def first_decision(
    snap: Snapshot, model: TrainedModel | None = None, quotas: QuotaSet | None = None, booked: tuple[Booking, ...] = ()
) -> tuple[Starts, set[str]]:
    """Return starts in a replay that begins in the snapshot's state, and jobs that wait for a better place.

    Who runs might have had other numbers of nodes. Jobs are numbered as live: those that wait, then those that run; the
    last, without GPUs, starts at once, so that the run ends for want of room in its log. ``model``: of topology agents,
    who decide then. ``quotas`` count for those that wait.
    """
    (policy,) = snap.policies.values()
    if not snap.pending:
        return {}, set()
    nodes, waiting, _ = arrays(snap)
    pending, running = waiting.views, snap.running
    jobs, first = len(pending) + len(running) + 1, len(pending)
    parts = [v.spec.nodes for v in pending] + [0 if snap.beliefs else len(r.allocation.parts) for r in running] + [1]
    gpus = [v.spec.gpus for v in pending] + [r.allocation.gpus for r in running] + [0]
    limit = [float(v.spec.time_limit_s) for v in pending] + [r.expected_end - LATE for r in running] + [1.0]
    submit = np.array([v.submit_time for v in pending] + [LATE] * (len(running) + 1))
    name = [NAMES.index(one.spec.name) for one in (*pending, *running)]
    users = ("alice", "bob", "last")
    user = [*(users.index(one.user) for one in (*pending, *running)), 2]
    trace = replace(
        trace_of(submit, limit, gpus, limit=limit, user=user), nodes=np.array(parts), users=users,
        ids=(*(v.id for v in pending), *(r.id for r in running), "last"), model=np.array([*name, -1]), models=NAMES,
    )  # fmt: skip
    pool = Pool.of([NodeSpec(len(node.gpus), name=node.name) for node in nodes.nodes])
    network = learned_network(snap.topology, trace, pool, snap.beliefs)[0] if snap.beliefs else None
    order_by = "fairshare" if policy.order == "fairshare" else "fifo"
    rule = ordered(policy.place, order_by, policy.backfill, policy.placement_wait_s)
    away = [Outage(row, LATE, np.inf, drain=True) for row, one in enumerate(nodes.nodes) if not one.available]
    options = ReplayOptions(
        network=network, topology=snap.topology, generic=True, quotas=quotas, reservations=booked, failures=away
    )  # fmt: skip
    world = world_of(trace, pool, rule, options)
    assert walks(world)
    if model is None:
        world, walk = walked(*with_ways(world))
        run = lambda log: run_walk(world.sim, log, world.passes, walk)  # noqa: E731
    else:
        world, acting = new_replay_state(world, prepare(model), policy)
        walk, run = acting.walk, lambda log: run_agents(world.sim, log, world.passes, acting)
    sim, log, links = world.sim, log_of(world), world.sim.links
    for row, job in enumerate(running, first):
        at, own = sim.jobs["offset"][row], [(nodes.row[p.node], len(p.gpus)) for p in job.allocation.parts]
        ways = slice(*walk.placing.ways.first[walk.placing.of[row] :][:2])
        sim.jobs["shape"][row] = next(way for way in walk.alone[ways] if sim.shapes["parts"][way] == len(own))
        for i, (node, count) in enumerate(own):
            sim.held[at + i] = node
            sim.node["free"][node] -= count
            sim.resources.gpus[node] -= count
            slot = world.passes.releases.used[0]
            for name, value in (("end", job.expected_end), ("node", node), ("gpus", count), ("owner", row)):
                getattr(world.passes.releases, name)[slot] = value
            world.passes.releases.used[0] += 1
        sim.state["status"][row], sim.state["start"][row] = RUNNING, LATE
        sim.counter[PARTS] += len(own)
        join_links(links, sim, row)
    walk.costs.since[-1] = 0.0  # the last waits for no better place
    size = np.array([v.spec.gpus for v in pending])
    keys = {"sjf": np.array(limit[:first]), "ljf": -size}.get(policy.order, 0 * size)
    for leaf, of in zip(walk.queue.leaf, user, strict=True):
        held = sum(job.allocation.gpus for job in running if job.user == users[of])
        walk.queue.users[leaf] = 3600.0 * snap.usage.get(users[of], 0.0), LATE, held, 0
    order = [*np.lexsort(([v.id for v in pending], submit[:first], keys)).tolist(), jobs - 1]
    order = [job for job in order if sim.state["status"][job] != NEVER]
    walk.waiting[: len(order)], walk.size[0] = order, len(order)
    sim.jobs["rank"][order] = np.arange(len(order))
    sim.state["status"][order] = WAITING
    sim.counter[RUNS], sim.counter[IN_SYSTEM], sim.counter[ARRIVED], sim.clock[1] = len(running), jobs, jobs, LATE
    sim.clock[0] = np.nextafter(LATE, 0.0)  # rows of the calendar that turned before are as they are now
    log = log._replace(cuts=log.cuts[: len(running)])
    assert run(log) == GROW
    assert sim.clock[0] == LATE
    return _found(walk, world, [v.id for v in pending])


def _found(walk: Walk, world, names: list[str]) -> tuple[Starts, set[str]]:
    sim, starts = world.sim, {}
    for job, name in enumerate(names):
        if sim.state["status"][job] == RUNNING:
            at = sim.jobs["offset"][job]
            held = sim.held[at : at + sim.shapes["parts"][sim.jobs["shape"][job]]]
            gpus = int(sim.shapes["gpus"][sim.jobs["shape"][job]])
            starts[name] = [(world.pool.names[node], gpus) for node in held]
    return starts, {name for job, name in enumerate(names) if walk.outcome.code[job] == POLICY}


def counted(plan: Plan) -> Starts:
    """Return the starts of a plan."""
    return {job: [(node, len(gpus)) for node, gpus in parts] for job, parts in started(plan).items()}


def beside_a_node_away() -> Snapshot:
    """Without n0 no rack has room for j0: over two racks is the best that it can have."""
    nodes = [changed(worlds.node(f"n{i}"), available=i > 0) for i in range(3)]
    job = pending("j0", 1, nodes=2, limit=300_000, submit=LATE, name="calm")
    return snapshot(
        nodes, [job], place="contention", now=LATE, backfill="skip", topology=topology("r1", "r1", "r2"),
        beliefs=beliefs(0.02, 0.02, 1.1),
    )  # fmt: skip


def beside_one_over_two_racks() -> Snapshot:
    """What r0 would lose to j0 is worth 14 hours of waiting; that r0 has no better place counts for nothing more."""
    busy = named(worlds.running("r0", {"n0": (0, 1, 2, 3), "n1": (0, 1, 2, 3)}, LATE + 7200, cores=0), "calm")
    job = pending("j0", 2, nodes=2, limit=300_000, submit=LATE - 60_000, name="loud")
    return snapshot(
        [worlds.node(f"n{i}", 6) for i in range(2)], [job], [busy], place="contention", now=LATE, backfill="skip",
        topology=topology("r1", "r2"), beliefs=beliefs(0.3, 0.3, 1.6),
    )  # fmt: skip


@pytest.mark.interpreted
@settings(max_examples=150, deadline=None)
@example(beside_a_node_away(), False)
@example(beside_one_over_two_racks(), False)
@given(states(), st.booleans())
def test_live_decides_as_a_replay_does_from_the_same_state(snap: Snapshot, reserved: bool) -> None:
    snap = with_reservations(snap, MAINTENANCE) if reserved else snap
    plan = decide(snap)
    starts, waits = first_decision(snap, booked=BOOKED if reserved else ())
    assert starts == counted(plan)
    assert waits == {job for job, reason in plan.reasons.items() if reason.code is ReasonCode.POLICY}


@settings(max_examples=150, deadline=None)
@given(states(), among("rack", "rack-wait", "contention"), st.booleans())
def test_racks_count_where_nothing_was_learned_live_as_in_a_replay(snap: Snapshot, place: str, reserved: bool) -> None:
    assume(snap.topology)
    (policy,) = snap.policies.values()
    snap = changed(snap, beliefs={}, policies={"p": changed(policy, place=place)})
    snap = with_reservations(snap, MAINTENANCE) if reserved else snap
    starts, waits = first_decision(snap, booked=BOOKED if reserved else ())
    assert starts == counted(decide(snap))
    assert not waits


def beside_a_maintenance() -> Snapshot:
    """Of n0 and n1 in one rack n0 is open for short jobs only: j1 could start over two racks, where it is slower."""
    jobs = [
        pending(f"j{i}", 1, nodes=nodes, limit=limit, submit=LATE, name="calm")
        for i, (nodes, limit) in enumerate([(1, 600), (2, 300_000), (1, 600), (1, 600), (1, 600)])
    ]
    return snapshot(
        [worlds.node(f"n{i}") for i in range(3)], jobs, place="contention", now=LATE, backfill="skip",
        topology=topology("r1", "r1", "r2"), beliefs=beliefs(0.02, 0.02, 1.1),
    )  # fmt: skip


def test_a_job_waits_for_a_reserved_rack_live_as_in_a_replay() -> None:
    """What its best place is does not depend on what is reserved just now, as on what runs there."""
    snap = with_reservations(beside_a_maintenance(), MAINTENANCE)
    plan = decide(snap)
    starts, waits = first_decision(snap, booked=BOOKED)
    assert starts == counted(plan)
    assert waits == {job for job, reason in plan.reasons.items() if reason.code is ReasonCode.POLICY} == {"j1"}


def test_a_job_waits_for_one_rack_that_is_reserved_for_now_live_as_in_a_replay() -> None:
    snap = beside_a_maintenance()
    (policy,) = snap.policies.values()
    policy = changed(policy, place="rack-wait", placement_wait_s=86_400.0)
    snap = with_reservations(changed(snap, policies={"p": policy}), MAINTENANCE)
    plan = decide(snap)
    assert first_decision(snap, booked=BOOKED)[0] == counted(plan)
    assert counted(plan).keys() == {"j0", "j2", "j3", "j4"}
    assert "waits for one rack" in plan.reasons["j1"].message


@pytest.mark.interpreted
@settings(max_examples=200, deadline=None)
@example(beside_a_maintenance(), 1, "fifo", 0, None, True)
@example(beside_a_node_away(), 1, "fifo", 0, None, False)
@given(
    states(), st.sampled_from([1, 3]), st.sampled_from(["fifo", "sjf", "ljf", "fairshare"]), st.integers(0, 3),
    st.sampled_from([None, 1, 3]), st.booleans(),
)  # fmt: skip
def test_topology_agents_decide_live_as_in_a_replay(
    snap: Snapshot, schedulers: int, order: str, seed: int, most: int | None, reserved: bool
) -> None:
    """So many schedulers, by their policy's order and backfill, under limits, beside a reservation and who keeps clear.

    Four times as many jobs wait, so that offers cross, and several want the same place.
    """
    more = [(job, i) for job in snap.pending for i in range(1, 4)]
    more = [changed(job, id=f"{job.id}.{i}", submit_time=job.submit_time - i) for job, i in more]
    snap = changed(snap, pending=(*snap.pending, *more))
    (behind,) = snap.policies.values()
    behind = changed(behind, order=order, backfill=behind.backfill.replace("conservative", "easy"))
    asked = by_agents(changed(snap, policies={"p": behind}), schedulers)
    (policy,) = asked.policies.values()
    asked = changed(asked, policies={"p": changed(policy, placement_wait_s=behind.placement_wait_s)})
    numbers = untrained(0) if seed == 0 else np.random.default_rng(seed).normal(0, 0.5, vector_size(SHAPES))
    booked: tuple[Booking, ...] = ()
    limits = None
    if reserved:
        asked, booked = with_reservations(asked, MAINTENANCE), BOOKED
    if most is not None:
        run = sum(job.user == "alice" for job in snap.running)
        live, quotas = (Quotas(users={"alice": Limits(jobs=jobs)}) for jobs in (most + run, most))
        asked, limits = with_bounds(asked, live, ()), QuotaSet(quotas)
    model = weights(numbers)
    plan = decide(asked, {"p": model})
    assert not plan.troubles
    starts, waits = first_decision(asked, model, limits, booked)
    assert starts == counted(plan)
    assert waits == {job for job, reason in plan.reasons.items() if reason.code is ReasonCode.POLICY}
