"""Replays of own jobs by their lists of nodes, spread and own waits: start by start as live decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from gpusched.errors import UsageError
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.plan import Start
from gpusched.model.slicetables import PUBLISHED
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.alone import SingleJobView
from gpusched.sched.arrays import node_arrays_of
from gpusched.sched.decide import decide
from gpusched.sim.engine.build import ReplayOptions, ResizableJobs
from gpusched.sim.network import learned_network
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from gpusched.sim.sharing import Share
from gpusched.sim.stepper import Stepper
from gpusched.traces.readers.history import _assembled
from gpusched.traces.trace import Trace
from tests.plugin.building import registered
from tests.sched.contention import clusters
from tests.sched.worlds import NOW, snapshots, topology
from tests.sim.plain_ahead import Plain
from tests.sim.worlds import trace_of
from tests.strategies import among, examples

pytestmark = pytest.mark.interpreted

PLACES = ("first-fit", "best-fit", "spread", "rack", "rack-wait", "acme-fit")


@pytest.fixture(autouse=True, scope="module")
def _others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with registered(tmp_path_factory.mktemp("acme"), {"placements": {"acme-fit": "gpusched.sched.placement:spread"}}):
        yield


def history_of(jobs: Sequence[PendingView], lasts: Sequence[float]) -> Trace:
    """The jobs as the history has them, once they have run."""
    records = [
        JobRecord(
            id=j.id, user=j.user, uid=1, spec=j.spec, state=JobState.COMPLETED, submit_time=j.submit_time,
            priority=j.priority,
        )
        for j in jobs
    ]  # fmt: skip
    submits = [job.submit_time for job in jobs]
    return _assembled("h", records, submits, list(lasts), {job.id: job.submit_time for job in jobs}, [])


def pool_of(snap: Snapshot) -> Pool:
    return Pool.of([NodeSpec(len(n.gpus), n.cores, n.memory_mib, n.gpu_type, n.partition, n.name) for n in snap.nodes])


def runs(snap: Snapshot, job: PendingView) -> bool:
    """Whether it would start at once anywhere on empty nodes."""
    alone = changed(job, spec=changed(job.spec, max_spread="", placement_wait_s=0.0))
    return bool(decide(changed(snap, pending=(alone,))).actions)


@st.composite
def queues(draw: st.DrawFn, places: tuple[str, ...] = PLACES) -> Snapshot:
    """Empty nodes, in racks or not, and jobs submitted at once; those that the controller would refuse are left out."""
    snap = draw(snapshots(simple=True, racked=True))
    (policy,) = snap.policies.values()
    policy = changed(
        policy, order=draw(among("fifo", "ljf", "sjf")), place=draw(among(*places)),
        backfill=draw(among("none", "skip", "easy", "conservative")), placement_wait_s=700.0,
    )  # fmt: skip
    if policy.place == "acme-fit" and policy.backfill == "conservative":
        policy = changed(policy, backfill="easy")
    names = st.lists(among(*(n.name for n in snap.nodes)), max_size=3, unique=True).map(tuple)
    snap = changed(
        snap, running=(), policies=dict.fromkeys(snap.policies, policy), usage={},
        topology=snap.topology if draw(st.booleans()) else topology(),
    )  # fmt: skip
    jobs = []
    for i, job in enumerate(snap.pending):
        listed = {"nodelist": draw(names), "exclude": draw(names)} if draw(st.integers(0, 3)) == 0 else {}
        if draw(st.integers(0, 3)) == 0:
            of = draw(st.sampled_from(snap.nodes))
            listed |= {"exclusive": True, "nodes": draw(st.integers(1, 2)), "gpus_per_node": len(of.gpus),
                       "cores_per_node": of.cores, "memory_mib_per_node": of.memory_mib, "max_nodes": None}  # fmt: skip
        elif draw(st.booleans()):
            spread = {"nodes": 1, "gpus_per_node": draw(among(2, 4, 6)), "max_nodes": 4, "max_spread": ""}
            listed |= spread | {"cores_per_node": 2, "placement_wait_s": draw(among(None, 0.0, 900.0))}
        job = changed(job, id=f"j{i:02}", submit_time=NOW, estimate_s=None, spec=changed(job.spec, **listed))
        if runs(snap, job):
            jobs.append(job)
    return changed(snap, pending=tuple(jobs))


class OneQueue(Plain):
    """One partition, which is decided at every instant, with backfill once every ``every_s``."""

    def __init__(self, snap: Snapshot, lasts: dict[str, float], every_s: float) -> None:
        super().__init__(snap, lasts, {})
        self.every_s, self.due, self.policies = every_s, math.inf, snap.policies

    def frees(self) -> list[float]:
        return [self.due] if self.due < math.inf else []

    def freed(self) -> set[str]:
        return {*self.policies} if self.snap.now == self.due else set()

    def begin(self, touched: set[str]) -> None:
        due = self.every_s == 0 or self.snap.now >= self.due
        policies = {name: p if due else changed(p, backfill="none") for name, p in self.policies.items()}
        self.snap = changed(self.snap, policies=policies)
        super().begin(touched)
        self.due = math.inf
        if not due and self.snap.pending:
            self.due = NOW + (math.floor((self.snap.now - NOW) / self.every_s) + 1) * self.every_s


def starts_and_nodes(found: ReplayResult) -> dict[str, tuple[float, set[str]]]:
    jobs, names = np.flatnonzero(found.ran).tolist(), found.pool.names
    return {found.trace.ids[j]: (NOW + found.start[j], {names[n] for n in found.nodes_of(j)}) for j in jobs}


@settings(max_examples=examples(150), deadline=None)
@given(
    snap=queues().filter(lambda snap: snap.pending), lasts=among(0.3, 0.5, 1.0), every_s=among(0.0, 0.0, 250.0),
    share=among("no", "fractions"), cut=among(False, False, True),
)  # fmt: skip
def test_a_history_s_jobs_start_where_and_when_live_decisions_start_them(
    snap: Snapshot, lasts: float, every_s: float, share: Share, cut: bool
) -> None:
    """Also where GPUs may be cut on demand, and no job asks for slices."""
    times = [lasts * job.spec.time_limit_s for job in snap.pending]
    live = OneQueue(snap, dict(zip((job.id for job in snap.pending), times, strict=True)), every_s)
    live.run()
    trace, (policy,) = history_of(snap.pending, times), snap.policies.values()
    pool = pool_of(snap)
    if cut:
        pool = replace(pool, cuttable=tuple(dict.fromkeys(node.gpus, PUBLISHED["A100-80GB"]) for node in snap.nodes))
    found = replay(trace, pool, policy_of_spec(policy), topology=snap.topology, backfill_every_s=every_s, share=share)
    assert starts_and_nodes(found) == {j: (pytest.approx(t), {*live.nodes[j]}) for j, t in live.starts.items()}


@settings(max_examples=examples(100), deadline=None)
@given(snap=queues(("first-fit", "spread", "rack", "rack-wait")).filter(lambda snap: snap.pending), parts=st.data())
def test_jobs_of_more_than_half_a_gpu_start_as_if_they_had_whole_ones(snap: Snapshot, parts: st.DataObject) -> None:
    """Not under EASY: there a head's nodes are closed to jobs that would still run when it starts."""
    (policy,) = snap.policies.values()
    policy = changed(policy, backfill="skip") if policy.backfill == "easy" else policy
    trace = history_of(snap.pending, [0.5 * job.spec.time_limit_s for job in snap.pending])
    milli = np.array(parts.draw(st.lists(among(600, 800, 1000), min_size=len(trace), max_size=len(trace))))
    part, options = replace(trace, gpu_milli=np.where(trace.gpus == 1, milli, 1000)), {"topology": snap.topology}
    whole, shared = (
        replay(of, pool_of(snap), policy_of_spec(policy), share=share, **options)
        for of, share in ((trace, "no"), (part, "fractions"))
    )
    assert starts_and_nodes(whole) == starts_and_nodes(shared)


@settings(max_examples=examples(100), deadline=None)
@given(snap=queues(("naive",)).filter(lambda snap: snap.pending))
def test_the_naive_draw_is_the_live_one(snap: Snapshot) -> None:
    trace, (policy,) = history_of(snap.pending, [60.0] * len(snap.pending)), snap.policies.values()
    live = {a.job_id: {part.node for part in a.allocation.parts} for a in decide(snap).actions if isinstance(a, Start)}
    found = replay(trace, pool_of(snap), policy_of_spec(policy), topology=snap.topology, seed=snap.seed)
    begun = {job: nodes for job, (start, nodes) in starts_and_nodes(found).items() if start == NOW}
    assert begun == live or not live  # where none starts, the replay draws again at once


@settings(max_examples=examples(100), deadline=None)
@given(snap=queues(("first-fit",)).filter(lambda snap: snap.pending), place=among("random", "naive", "tetris"))
def test_drawn_nodes_are_as_many_and_as_near_as_jobs_ask_for(snap: Snapshot, place: str) -> None:
    trace, (policy,) = history_of(snap.pending, [60.0] * len(snap.pending)), snap.policies.values()
    found = replay(trace, pool_of(snap), policy_of_spec(policy), topology=snap.topology, placement=place)
    starts, world = starts_and_nodes(found), node_arrays_of(snap)
    asking = {job.id: job for job in snap.pending}
    never = {trace.ids[j] for j in found.infeasible}
    assert {*starts} == asking.keys() - never
    assert all(asking[job].spec.max_spread == "rack" for job in never)
    for job_id, (start, nodes) in starts.items():
        job = asking[job_id]
        asked = SingleJobView(changed(snap, now=start)).asks(job)
        racks = {world.rack[world.row[node]] for node in nodes}
        assert any(len(nodes) == ask.parts and (len(racks) == 1 or not ask.spread) for ask in asked)


@pytest.mark.compiled
@settings(max_examples=100, deadline=None)
@given(snap=clusters(), waits=st.lists(among(None, 0.0, 900.0), min_size=5), most=st.lists(among(None, 4), min_size=5))
def test_by_what_places_cost_the_first_decision_is_the_live_one(
    snap: Snapshot, waits: list[float | None], most: list[int | None]
) -> None:
    jobs = []
    for i, job in enumerate(snap.pending):
        few = min(job.spec.nodes, len(snap.nodes))  # the controller refuses more
        spec = changed(job.spec, nodes=few, placement_wait_s=waits[i], max_nodes=most[i] if job.spec.gpus > 1 else None)
        jobs.append(changed(job, id=f"j{i:02}", submit_time=snap.now, spec=spec))
    snap = changed(snap, running=(), pending=tuple(jobs))
    plan = decide(snap)
    live = {a.job_id: {part.node for part in a.allocation.parts} for a in plan.actions if isinstance(a, Start)}
    trace, (policy,), pool = history_of(jobs, [60.0] * len(jobs)), snap.policies.values(), pool_of(snap)
    network, _ = learned_network(snap.topology, trace, pool, snap.beliefs)
    found = replay(trace, pool, policy_of_spec(policy), network=network)
    begun = np.flatnonzero(found.ran & (found.start == 0.0))
    assert {trace.ids[j]: {pool.names[n] for n in found.nodes_of(j)} for j in begun} == live


@settings(max_examples=examples(100), deadline=None)
@given(snap=queues(("first-fit", "best-fit", "spread", "rack")).filter(lambda snap: snap.pending))
def test_a_policy_in_python_starts_jobs_as_a_kernel_s_pass_does(snap: Snapshot) -> None:
    """Where it may resize some, too: no job has another size, and its own layouts are made there."""
    trace = history_of(snap.pending, [0.5 * job.spec.time_limit_s for job in snap.pending])
    (policy,) = (changed(one, order="fifo", backfill="skip") for one in snap.policies.values())
    priority = np.zeros(len(trace)) if trace.priority is None else trace.priority
    rigid = ResizableJobs(least=trace.gpus, most=trace.gpus)

    def first_come(stepper: Stepper) -> None:
        for job in sorted(stepper.waiting(), key=lambda job: (-priority[job], job)):
            stepper.start(job)

    expected, *found = (
        starts_and_nodes(
            replay(trace, pool_of(snap), how, topology=snap.topology, placement=policy.place, elastic=elastic)
        )
        for how, elastic in ((policy_of_spec(policy), None), (first_come, None), (first_come, rigid))
    )
    assert found == [expected, expected]


def test_a_policy_in_python_cannot_start_a_job_beyond_its_spread() -> None:
    trace = replace(trace_of([0.0, 0.0], [5.0, 5.0], [8, 1]), one_rack=np.array([True, False]))
    pool = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(3)])
    elastic = ResizableJobs(least=np.ones(2, np.int64), most=np.array([8, 1]))
    for sizes in (None, elastic):
        stepper = Stepper(trace, pool, ReplayOptions(topology=topology("r1", "r2", "r1"), elastic=sizes))
        assert stepper.advance()
        with pytest.raises(UsageError, match="not what it needs"):
            stepper.start(0, [0, 1])
        assert stepper.start(0, [2, 0])


def test_a_policy_in_python_has_the_waits_and_layouts_of_its_placement() -> None:
    trace = replace(trace_of([0.0] * 3, [1e6] * 3, [8, 4, 4]), nodes=np.array([2, 1, 1]))
    pool, racks = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(4)]), topology("a", "b", "a", "b")
    stepper = Stepper(trace, pool, ReplayOptions(topology=racks, placement="rack-wait"))
    assert stepper.advance()
    assert stepper.start(1, [0])
    assert stepper.start(2, [1])
    assert stepper.fits(0) is None, "a node of each rack is free"
    assert stepper.advance()
    assert 0.0 < stepper.now < 1e6
    assert stepper.fits(0) == (2, 3)
    wide = replace(trace, max_nodes=np.array([4, 0, 0]))
    stepper = Stepper(wide, pool, ReplayOptions(topology=racks, placement="load-balancing"))
    assert stepper.advance()
    assert stepper.parts(0) == (4, 2)


def resizing(racks: str, *, hot: bool = False, linear: bool = True, **columns: list[object]) -> Stepper:
    """Jobs of 8, 4 and 1 GPUs on nodes of four in racks, ``aab`` are three; the first may have 4 to 12 GPUs."""
    trace = replace(trace_of([0.0] * 3, [100.0] * 3, [8, 4, 1]), nodes=np.array([2, 1, 1]))
    trace = replace(trace, **{name: np.array(values) for name, values in columns.items()})
    of_ranks = np.array([4, 0, 0]) if hot else None
    sizes = ResizableJobs(least=np.array([4, 4, 1]), most=np.array([12, 4, 1]), linear=linear, rank_gpus=of_ranks)
    pool = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(len(racks))])
    stepper = Stepper(trace, pool, ReplayOptions(topology=topology(*racks), elastic=sizes))
    assert stepper.advance()
    return stepper


@pytest.mark.parametrize("hot", [False, True])
def test_a_policy_in_python_resizes_a_job_within_its_rack(hot: bool) -> None:
    stepper = resizing("abaab", hot=hot, one_rack=[True, False, False])
    assert stepper.start(0, [0, 2])
    assert stepper.start(1, [3])
    assert stepper.advance(10.0)
    assert not stepper.resize(0, 12), "the third node of its rack is taken; those of the other are free"
    with pytest.raises(UsageError, match="not what it needs"):
        stepper.resize(0, 12, [0, 2, 4])
    stepper.preempt(1)
    assert stepper.resize(0, 12)
    assert sorted(stepper.nodes_of(0).tolist()) == [0, 2, 3]
    assert stepper.advance(20.0)
    assert stepper.resize(0, 4)
    assert stepper.parts(0) == (1, 4)
    if not hot:
        stepper.advance(30.0)
        stepper.preempt(0)
        assert stepper.resize(0, 8)
        assert stepper.start(0)
        assert len({"abaab"[node] for node in stepper.nodes_of(0)}) == 1, "at its new size, too"


def test_a_resizable_job_waits_for_one_rack_at_its_size_and_no_longer() -> None:
    stepper = resizing("abab", placement_wait=[60.0, 0.0, 0.0])
    assert stepper.start(1, [0])
    assert stepper.start(2, [1])
    assert stepper.fits(0) is None, "a node of each rack is free"
    assert stepper.resize(0, 4)
    assert stepper.fits(0) == (2,), "one node is in one rack"
    assert stepper.resize(0, 12)
    assert stepper.waiting() == [0], "no rack has three nodes: it waits for none"
    assert stepper.resize(0, 8)
    assert stepper.advance()
    assert stepper.now == 60.0
    assert stepper.fits(0) == (2, 3)


def test_a_resizable_job_keeps_the_nodes_of_its_size_and_its_recorded_speed_is_known() -> None:
    stepper = resizing("aabb", linear=False, one_rack=[True, False, False], max_nodes=[4, 0, 0])
    assert stepper.start(1, [0])
    assert stepper.start(2, [2])
    assert stepper.fits(0) is None, "on four nodes it would fit"
    stepper.preempt(2) if stepper.advance(5.0) else None
    assert stepper.start(0)
    assert stepper.advance(10.0)
    with pytest.raises(UsageError, match="was not measured"):
        stepper.resize(0, 4)
    assert stepper.resize(0, 8)


def test_a_rigid_job_that_no_rack_can_hold_never_runs_beside_resizable_ones() -> None:
    stepper = resizing("abc", one_rack=[True, True, True], max_nodes=[3, 4, 0])
    assert stepper.waiting() == [1, 2], "the first job may, at another size"
    assert stepper.start(1)
    assert stepper.parts(1) == (1, 4)
    trace = replace(trace_of([0.0] * 2, [5.0] * 2, [8, 8]), one_rack=np.ones(2, np.bool_))
    pool = Pool.of([NodeSpec(4, name=f"n{i}") for i in range(2)])
    elastic = ResizableJobs(least=np.array([4, 8]), most=np.array([8, 8]), linear=True)

    def smaller(stepper: Stepper) -> None:
        for job in sorted(stepper._waiting):
            assert stepper.resize(job, 4)
            assert stepper.start(job)

    result = replay(trace, pool, smaller, topology=topology("a", "b"), elastic=elastic)
    assert result.ran.tolist() == [True, False]
    assert result.infeasible_why == ("no rack has so many large enough nodes",)


def test_a_policy_in_python_starts_a_job_on_as_many_nodes_as_it_may_have() -> None:
    trace = replace(trace_of([0.0] * 2, [5.0] * 2, [9, 4]), max_nodes=np.array([3, 4]), nodes=np.array([3, 1]))
    stepper = Stepper(trace, Pool.of([NodeSpec(4, name=f"n{i}") for i in range(4)]))
    assert stepper.advance()
    assert stepper.start(0)
    assert stepper.start(1, [3])
    assert stepper.advance(1.0)
    stepper.preempt(1)
    assert stepper.start(1, [0, 1, 2, 3])
    assert stepper.parts(1) == (4, 1)


def test_jobs_share_a_gpu_where_others_say_how_they_are_spread() -> None:
    trace = trace_of([0.0] * 5, [5.0] * 5, [1, 1, 1, 1, 2])
    waits = np.array([-1, -1, -1, -1, 9])
    trace = replace(trace, gpu_milli=np.array([400, 500, 300, 1000, 1000]), placement_wait=waits)
    pool, racks = Pool.of([NodeSpec(1, name=f"n{i}") for i in range(2)]), topology("r1", "r2")
    found = replay(trace, pool, "fifo+easy", share="fractions", topology=racks)
    assert found.start.tolist() == [0.0, 0.0, 0.0, 5.0, 10.0]


def test_parts_of_gpus_are_placed_by_racks() -> None:
    trace = replace(trace_of([0.0] * 3, [5.0] * 3, [1, 1, 1]), gpu_milli=np.array([400, 500, 600]))
    pool, racks = Pool.of([NodeSpec(1, name=f"n{i}") for i in range(3)]), topology("r1", "r2", "r1")
    found = replay(trace, pool, "fifo+skip", share="fractions", topology=racks, placement="rack")
    assert [found.nodes_of(job).tolist() for job in range(3)] == [[1], [1], [0]]


def test_backfill_in_racks_waits_for_its_interval() -> None:
    trace = trace_of([0.0, 1.0, 2.0], [20.0, 5.0, 5.0], [1, 2, 1])
    pool, racks = Pool.of([NodeSpec(1, name=f"n{i}") for i in range(2)]), topology("r1", "r2")
    found = replay(trace, pool, "fifo+easy", topology=racks, placement="rack", backfill_every_s=8.0)
    assert found.start.tolist() == [0.0, 20.0, 8.0]


@pytest.mark.parametrize("share", ["no", "fractions"])
def test_a_job_keeps_to_its_rack_whatever_is_shared(share: Share) -> None:
    trace = replace(trace_of([0.0] * 2, [5.0] * 2, [1, 2]), one_rack=np.array([False, True]))
    pool, racks = Pool.of([NodeSpec(1, name=f"n{i}") for i in range(3)]), topology("r2", "r1", "r2")
    assert replay(trace, pool, "fifo+skip", share=share, topology=racks).start.tolist() == [0.0, 5.0]
