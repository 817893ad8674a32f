"""Resizable jobs whose places cost something: in replays as the controller decides on snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.agents.common.vector import to_arrays, vector_size
from gpusched.agents.maifs.network import SHAPES as MAIFS_WEIGHTS
from gpusched.agents.maifs.network import untrained
from gpusched.config.weights import TrainedModel
from gpusched.model.interference import job_class_of
from gpusched.model.jobs import Allocation, JobSpec
from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Resize, Start
from gpusched.model.policy import AGENTS, AgentTraits, PolicySpec
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.model.topology import Switch, Topology
from gpusched.sched import stages
from gpusched.sched.check import check
from gpusched.sched.topology.live import SlowdownTable, learned_tree
from gpusched.sched.topology.load import new_load
from gpusched.sched.topology.slowdown import KIND, SlowdownModel, needs_of
from gpusched.sched.topology.spread import rack_wait_until
from gpusched.sched.topology.tree import links_of, new_use, tree_of
from gpusched.sim.engine.build import ReplayOptions, ResizableJobs
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.engine.state import Links, SizeClasses
from gpusched.sim.network import learned_network
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool, demand_of
from gpusched.sim.replay import replay
from gpusched.sim.reserving import Booking
from gpusched.sim.resizing import elastic_of
from gpusched.sim.result import PREEMPTED, RESIZED
from gpusched.sim.stepper import Stepper
from gpusched.traces.trace import Trace
from tests.sched.contention import NAMES, beliefs
from tests.sched.worlds import topology
from tests.sim.reference_sized import SizedPolicy
from tests.sim.sized_worlds import (
    AWAY,
    FAILING,
    SPECS,
    Thrifty,
    assert_same,
    mixed,
    some_sizes,
    with_ranges,
    with_ranks,
)
from tests.sim.worlds import trace_of

POOL = Pool.of([NodeSpec(4, 64, 1 << 16, "A", "p", name=f"n{i}") for i in range(6)])
RACKS = topology("r1", "r1", "r1", "r2", "r2", "r2")
KNOWN = beliefs(0.3, 0.5, 1.6, 0.4)
pytestmark = pytest.mark.interpreted


def with_waits(trace: Trace, seed: int) -> Trace:
    """The same jobs, some with waits of their own for one rack."""
    waits = np.random.default_rng(seed).choice([-1, -1, 0, 300, 4000], len(trace))
    return replace(trace, placement_wait=waits)


def waits_of(trace: Trace) -> list[float | None]:
    return (
        [None] * len(trace)
        if trace.placement_wait is None
        else [w if w >= 0 else None for w in trace.placement_wait.tolist()]
    )


def waiting(spec: JobSpec, wait_s: float | None) -> JobSpec:
    return msgspec.structs.replace(spec, placement_wait_s=wait_s)


def ends_of_waits(snapshot: Snapshot, policy: PolicySpec) -> dict[str, float]:
    ends = {job.id: rack_wait_until(job, policy) for job in snapshot.pending}
    return {job: end for job, end in ends.items() if end > snapshot.now}


class CostlySized(SizedPolicy):
    """The same where places and neighbours cost what was learned: each job's kind is that of its size.

    ``waits``: until when those who wait for a better place do, by the last decision.
    """

    def __init__(
        self, spec: PolicySpec, trace: Trace, options: ReplayOptions, patch: pytest.MonkeyPatch, pool: Pool = POOL,
        model: TrainedModel | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, trace, pool, options, model)
        self._policy, self._options, self._pool, self._waits = spec, options, pool, waits_of(trace)
        self._trace = replace(trace, placement_wait=None)  # that is the controller's affair
        self.waits, table, jobs = dict[str, float](), SlowdownTable(KNOWN), len(trace)
        tree = learned_tree(RACKS, pool.names, table)
        self._kinds = {
            (name, gpus, nodes): table.row(job_class_of("alice", name), gpus, (nodes,))
            for name in NAMES for nodes in range(1, 7) for gpus in range(nodes, 8 * nodes + 1, nodes)
        }  # fmt: skip
        load = new_load(tree, np.zeros(jobs, np.int64), np.zeros(jobs, np.int64), np.ones(jobs), 500)
        kind, gpus = np.full((2, 6 * jobs), -1)
        of = np.arange(6 * jobs).reshape(jobs, 6)
        self._classes = SizeClasses(of, kind, gpus, np.ones(6 * jobs), np.zeros(0, np.int64))
        self._links = Links(
            tree, table.model(len(pool), True), load, new_use(tree), np.zeros(len(tree.weight)),
            np.zeros(jobs, np.int64), self._classes,
        )  # fmt: skip
        patch.setattr(stages, "set_wait_reasons", self._heard(stages.set_wait_reasons))

    def _heard(self, of: Any) -> Any:
        def set_wait_reasons(context: Any, costs: Any, waits: Any) -> None:
            self.waits |= {context.waiting.views[job].id: until for job, until in waits.items()}
            of(context, costs, waits)

        return set_wait_reasons

    def replayed(self) -> Any:
        stepper = Stepper(self._trace, self._pool, self._options)
        stepper._world = stepper._world._replace(sim=stepper._world.sim._replace(links=self._links))
        while stepper.advance(min(self.waits.values(), default=np.inf)):
            self(stepper)
        return stepper.result(self.__name__)

    def _snapshot(self, stepper: Stepper) -> Snapshot:
        """Who waits for one rack is looked at again when that is over."""
        found = msgspec.structs.replace(super()._snapshot(stepper), topology=RACKS, beliefs=KNOWN)
        self.waits = ends_of_waits(found, self._policy)
        return found

    def _spec(self, stepper: Stepper, job: int) -> JobSpec:
        known = job in self._specs
        spec = super()._spec(stepper, job)
        if not known:
            spec = self._specs[job] = waiting(
                msgspec.structs.replace(spec, name=NAMES[self._trace.model[job]]), self._waits[job]
            )
        return spec

    def _running(self, stepper: Stepper, job: int) -> RunningView:
        return msgspec.structs.replace(super()._running(stepper, job), user="alice")

    def _pending(self, stepper: Stepper, job: int) -> PendingView:
        return msgspec.structs.replace(super()._pending(stepper, job), user="alice")

    def _note(self, job: int, spec: JobSpec, allocation: Allocation) -> None:
        """Set what the job is on its links from now on, a hot one with any ranks; its step is shortest in one rack."""
        links, known = self._links, [(len(allocation.parts), allocation.gpus)]
        if spec.is_hot:
            known = [(count, count * len(allocation.parts[0].gpus)) for count in range(1, 7)]
        for column, (parts, gpus) in enumerate(known):
            at = self._classes.of[job, column]
            kind = self._kinds[NAMES[self._trace.model[job]], gpus, parts]
            count = links_of(links.tree, np.arange(parts), parts, gpus // parts, links.use)
            self._classes.kind[at], self._classes.gpus[at] = kind, gpus
            self._classes.best[at] = needs_of(links.tree, links.model, kind, links.use, count, links.needs)

    def _start(self, stepper: Stepper, job: int, allocation: Allocation) -> None:
        self._note(job, self._spec(stepper, job), allocation)
        super()._start(stepper, job, allocation)


def world(trace: Trace) -> Trace:
    """The same jobs, of three classes."""
    model, user = np.random.default_rng(0).integers(0, len(NAMES), len(trace)), np.zeros(len(trace), np.int64)
    trace = replace(trace, users=("alice",), user=user, models=NAMES, model=model)
    return replace(trace, nodes=demand_of(trace, POOL).parts)


def halves(trace: Trace) -> Trace:
    """Without jobs of six GPUs, which would be over three nodes."""
    return world(replace(trace, gpus=np.where(trace.gpus == 6, 8, trace.gpus)))


def replay_both(
    spec: PolicySpec, trace: Trace, patch: pytest.MonkeyPatch, pool: Pool = POOL, model: TrainedModel | None = None,
    **options: Any
) -> tuple[Any, CostlySized]:  # fmt: skip
    """The fast replay, held to the one by snapshots, and the policy of that."""
    options = {"restart_s": 20.0, "failures": AWAY, **options}
    slow = CostlySized(spec, trace, ReplayOptions(**options), patch, pool, model)
    expected = slow.replayed()
    policy = policy_of_spec(msgspec.structs.replace(spec, agent=None))
    network, _ = learned_network(RACKS, trace, pool, KNOWN)
    fast = replay(trace, pool, replace(policy, model=model, spec=spec), network=network, **options)
    assert_same(fast, expected)
    for snapshot, plan in slow.seen:
        assert check(plan, snapshot)[1] == ()
    return fast, slow


class Racked(SizedPolicy):
    """The same in racks, where no place costs anything; jobs wait for one as ``waits`` says."""

    def __init__(self, spec: PolicySpec, trace: Trace, options: ReplayOptions, waits: list[float | None]) -> None:
        super().__init__(spec, trace, POOL, options)
        self._policy, self._waits, self.ends = spec, waits, dict[str, float]()

    def _snapshot(self, stepper: Stepper) -> Snapshot:
        found = msgspec.structs.replace(super()._snapshot(stepper), topology=RACKS)
        self.ends = ends_of_waits(found, self._policy)
        return found

    def _spec(self, stepper: Stepper, job: int) -> JobSpec:
        known = job in self._specs
        spec = super()._spec(stepper, job)
        if not known:
            spec = self._specs[job] = waiting(spec, self._waits[job])
        return spec


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("place", ["best-fit", "rack"])
def test_racks_count_for_jobs_and_ranks_that_join_where_nothing_was_learned(place: str, waits: bool) -> None:
    spec, trace = msgspec.structs.replace(SPECS["elastic"], place=place), with_ranks(mixed(1, 40), 1)
    options: dict[str, Any] = {"elastic": elastic_of(trace), "restart_s": 20.0, "failures": AWAY}
    own = with_waits(trace, 1) if waits else trace
    slow, policy = Racked(spec, trace, ReplayOptions(**options), waits_of(own)), policy_of_spec(spec)
    stepper = Stepper(trace, POOL, ReplayOptions(placement=place, **options))
    while stepper.advance(min(slow.ends.values(), default=np.inf)):
        slow(stepper)
    fast = replay(own, POOL, policy, topology=RACKS, **options)
    assert_same(fast, stepper.result(""))
    assert fast.part_nodes.tolist() != replay(trace, POOL, policy, **options).part_nodes.tolist()
    assert (reasons(slow, "waits for one rack") > 0) == waits


def reasons(slow: SizedPolicy, text: str) -> int:
    return sum(text in reason.message for _, plan in slow.seen for reason in plan.reasons.values())


def resizes(slow: CostlySized) -> list[Resize]:
    return [action for _, plan in slow.seen for action in plan.actions if isinstance(action, Resize)]


@pytest.mark.parametrize(
    ("name", "seed", "backfill", "wait_s", "own"),
    [("elastic", 1, "easy", 600.0, True), ("drf", 2, "skip", 3000.0, True), ("elastic", 3, "none", 86_400.0, False)],
)
@pytest.mark.parametrize(
    "place", [pytest.param("contention", marks=pytest.mark.compiled), "rack-wait", "rack", "best-fit"]
)
def test_the_fast_replay_decides_as_the_controller_does_on_snapshots(
    name: str, place: str, seed: int, backfill: str, wait_s: float, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = msgspec.structs.replace(SPECS[name], place=place, placement_wait_s=wait_s, backfill=backfill)
    trace = with_waits(halves(mixed(seed)), seed) if own else halves(mixed(seed))
    _, slow = replay_both(spec, trace, monkeypatch, elastic=some_sizes(trace, seed))
    assert len(resizes(slow)) > 10
    if place == "contention":
        assert reasons(slow, "waits for a better place") > (0 if own else 3)
    if place == "rack-wait" or own:
        assert reasons(slow, "waits for one rack") > 0


@pytest.mark.parametrize(("seed", "place"), [(3, "contention"), (5, "rack-wait")])
@pytest.mark.parametrize("name", ["elastic", "sia"])
def test_ranks_join_and_leave_and_are_lost_where_neighbours_cost(
    name: str, seed: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = msgspec.structs.replace(SPECS[name], place=place, placement_wait_s=3000.0)
    trace = with_ranks(mixed(seed, 50), seed, (1, 2, 4))
    nodes = np.where(trace.nodes > 0, trace.nodes, demand_of(trace, POOL).parts)
    trace = replace(world(trace), nodes=nodes)
    fast, slow = replay_both(spec, trace, monkeypatch, elastic=elastic_of(trace), failures=FAILING)
    assert (fast.events.kind == RESIZED).sum() > 5
    assert any(resize.joins for resize in resizes(slow))
    assert slow.lost > 0


@pytest.mark.parametrize(("agent", "place"), [("thrifty", "contention"), ("thrifty", "best-fit"), ("", "rack-wait")])
def test_cores_and_memory_within_ranges_are_granted_where_places_cost(
    agent: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's layouts are those of its own request."""
    few = Pool.of([NodeSpec(4, cores, 1 << 14, "A", "p", name=f"n{i}") for i, cores in enumerate((20, 20, 12) * 2)])
    trace, model, spec = halves(mixed(2)), None, msgspec.structs.replace(SPECS["drf"], place=place)
    nodes = demand_of(trace, few).parts
    trace = replace(trace, nodes=nodes, placement_wait=np.where(nodes > 1, 4000, -1))
    if agent:
        monkeypatch.setitem(AGENTS, "thrifty", AgentTraits(sizes=True))
        monkeypatch.setitem(REGISTRY, "thrifty", AgentParts(sizes=lambda: Thrifty))
        model = TrainedModel("thrifty", {"mood": np.array([1])}, {}, "", "thrifty costs")
        spec = msgspec.structs.replace(spec, agent="thrifty")
    _, slow = replay_both(spec, trace, monkeypatch, few, model, elastic=with_ranges(trace, 1))
    starts = [action.allocation for _, plan in slow.seen for action in plan.actions if isinstance(action, Start)]
    own = trace.cores / trace.gpus
    assert sum(a.parts[0].cores * len(a.parts) < own[int(a.job_id)] * a.gpus for a in starts) > 3


def test_maifs_agents_choose_in_racks_as_they_do_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know racks where a topology does, as live."""
    numbers = untrained(1) + np.random.default_rng(1).normal(0, 0.3, vector_size(MAIFS_WEIGHTS))
    model = TrainedModel("maifs", to_arrays(numbers, MAIFS_WEIGHTS), {}, "", "maifs costs")
    spec, trace = msgspec.structs.replace(SPECS["drf"], agent="maifs", place="contention"), halves(mixed(2))
    _, slow = replay_both(spec, trace, monkeypatch, model=model, elastic=some_sizes(trace, 2))
    assert not any(plan.troubles for _, plan in slow.seen)
    assert len(resizes(slow)) > 10


def free_and_plain(place: str, backfill: str) -> list[bool]:
    """Whether a replay where places cost nothing is one without costs, beside limits and a reservation."""
    found, spec = [], msgspec.structs.replace(SPECS["elastic"], place=place, backfill=backfill)
    for seed in (1, 2):
        trace = replace(halves(mixed(seed, 40)), user=np.arange(40) % 2, users=("ann", "bob"))
        model = SlowdownModel(np.zeros(1, KIND), np.zeros((0, 0)), False)
        model.kinds["compute"] = 1.0
        free = PlacementNetwork(tree_of(Topology(), POOL.names), model, np.zeros(40, np.int64))
        options: dict[str, Any] = {
            "elastic": some_sizes(trace, seed), "failures": AWAY, "restart_s": 20.0,
            "quotas": QuotaSet(Quotas(each=Limits(gpus=16, jobs=8))),
            "reservations": [Booking("m", (1,), 500.0, 2000.0)],
        }  # fmt: skip
        plain, costly = (
            replay(trace, POOL, policy_of_spec(spec), network=network, **options) for network in (None, free)
        )
        assert_same(plain, costly)
        found.append(bool((plain.events.kind == PREEMPTED).sum() > 5))
    return found


@pytest.mark.parametrize("how", [("best-fit", "easy"), ("spread", "conservative"), ("first-fit", "skip")])
def test_where_places_cost_nothing_sizes_are_chosen_as_without_costs(how: tuple[str, str]) -> None:
    """In plain Python: limits would be compiled once more."""
    program = f"from tests.sim.test_sized_costs import free_and_plain\nprint(*free_and_plain(*{how}))\n"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(("one_rack", "end"), [(False, 10.0), (True, 20.0)])
def test_a_job_in_one_rack_only_has_no_size_that_no_rack_has(one_rack: bool, end: float) -> None:
    racks = Topology(switches=tuple(Switch(name=f"rack {node}", nodes=(node,)) for node in "ab"))
    trace = replace(trace_of([0.0, 0.0], [80.0, 1.0], [1, 0]), one_rack=np.array([one_rack, False]))
    sizes = ResizableJobs(least=np.array([1, 0]), most=np.array([8, 0]), linear=True)
    pool = Pool.of([NodeSpec(4, name=node) for node in "ab"])
    found = replay(trace, pool, "elastic", placement="rack", topology=racks, elastic=sizes)
    assert found.end.tolist() == [end, 1.0]
