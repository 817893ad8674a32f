"""Properties of every snapshot."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpusched.model.limits import Limits, Quotas
from gpusched.model.plan import Plan, ReasonCode, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.alone import in_order
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.limits import Rooms
from gpusched.sched.topology.spread import SpreadRequest, split_requests
from tests.sched.limited import with_bounds
from tests.sched.worlds import NOW, after, pending, running, snapshot, snapshots, started
from tests.sched.worlds import node as a_node
from tests.strategies import among

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def with_policy(snap: Snapshot, **change: str) -> Snapshot:
    policies = {k: msgspec.structs.replace(p, **change) for k, p in snap.policies.items()}
    return msgspec.structs.replace(snap, policies=policies)


@QUICK
@given(snapshots(plans=True))
def test_what_is_started_is_sound(snap: Snapshot) -> None:
    """Counted here by hand: no GPU twice, gangs whole on distinct nodes, nothing over, nothing on a broken node."""
    plan = decide(snap)
    nodes = {n.name: n for n in snap.nodes}
    taken = {(p.node, g) for r in snap.running for p in r.allocation.parts for g in p.gpus}
    cores = {n.name: n.cores for n in snap.nodes}
    memory = {n.name: n.memory_mib for n in snap.nodes}
    for part in (p for r in snap.running for p in r.allocation.parts):
        cores[part.node] -= part.cores
        memory[part.node] -= part.memory_mib
    jobs = {j.id: j for j in snap.pending}
    for action in plan.actions:
        assert isinstance(action, Start)
        job, parts = jobs[action.job_id], action.allocation.parts
        assert len(parts) == job.spec.nodes == len({p.node for p in parts})
        assert not job.held_by
        assert not job.dependency
        for part in parts:
            node = nodes[part.node]
            assert node.available
            assert node.partition == job.spec.partition
            assert not job.spec.nodelist or node.name in job.spec.nodelist
            assert node.name not in (*job.spec.exclude, *job.excluded_nodes)
            assert not job.spec.gpu_types or node.gpu_type in job.spec.gpu_types
            assert len(part.gpus) == job.spec.gpus_per_node
            for gpu in part.gpus:
                assert gpu in node.gpus
                assert gpu not in node.blocked
                assert (node.name, gpu) not in taken
                taken.add((node.name, gpu))
            cores[node.name] -= part.cores
            memory[node.name] -= part.memory_mib
            assert cores[node.name] >= 0
            assert memory[node.name] >= 0


@QUICK
@given(snapshots(plans=True))
def test_the_check_accepts_it_and_every_job_has_an_answer(snap: Snapshot) -> None:
    plan = decide(snap)
    checked, rejections = check(plan, snap)
    assert rejections == ()
    assert checked == plan
    assert started(plan).keys() | plan.reasons.keys() == {j.id for j in snap.pending}
    assert not started(plan).keys() & plan.reasons.keys()
    assert all(r.message for r in plan.reasons.values())


@QUICK
@given(snapshots(plans=True))
def test_the_same_snapshot_gives_the_same_plan(snap: Snapshot) -> None:
    assert decide(snap) == decide(msgspec.json.decode(msgspec.json.encode(snap), type=Snapshot))


@QUICK
@given(snapshots())
def test_the_order_of_pending_does_not_matter_but_for_its_own_sake(snap: Snapshot) -> None:
    assert decide(snap).actions == decide(msgspec.structs.replace(snap, pending=snap.pending[::-1])).actions


BLOCKING = {ReasonCode.RESOURCES, ReasonCode.PRIORITY, ReasonCode.BACKFILL, ReasonCode.POLICY}


@QUICK
@given(snapshots())
def test_strict_order_never_overtakes(snap: Snapshot) -> None:
    snap = with_policy(snap, backfill="none")
    plan = decide(snap)
    for partition in snap.policies:
        order = [j.id for j in in_order(snap, partition)]
        blocked = [i for i, j in enumerate(order) if j in plan.reasons and plan.reasons[j].code in BLOCKING]
        if blocked:
            assert not any(j in started(plan) for j in order[blocked[0] :])


@QUICK
@given(snapshots())
def test_skip_leaves_nothing_that_fits(snap: Snapshot) -> None:
    """Operation-conserving: once its plan is done, whatever still waits for resources fits nowhere."""
    snap = with_policy(snap, backfill="skip", place="best-fit")
    left = after(snap, decide(snap))
    assert decide(left).actions == ()


def _of(snap: Snapshot, job_id: str) -> PendingView:
    return next(j for j in snap.pending if j.id == job_id)


def start_of_head(snap: Snapshot, head: str, decide_as: Snapshot) -> float:
    """When ``head`` starts if all jobs run exactly to their limits: an event loop over `decide` itself."""
    while True:
        plan = decide(decide_as)
        if head in started(plan):
            return decide_as.now
        decide_as = after(decide_as, plan)
        now = min(max(r.expected_end, decide_as.now) for r in decide_as.running)
        left = tuple(r for r in decide_as.running if r.expected_end > now)
        decide_as = msgspec.structs.replace(decide_as, now=now, running=left)


def alone(snap: Snapshot, head: PendingView, before: Plan) -> float:
    """When the head fits if nothing else is started: counted release by release, without gpusched's code."""
    times = sorted({max(r.expected_end, snap.now) for r in before_running(snap, before)} | {snap.now})
    for time in times:
        fitting = 0
        for node in snap.nodes:
            held = [
                p
                for r in before_running(snap, before)
                if max(r.expected_end, snap.now) > time or (time == snap.now and r.expected_end > snap.now)
                for p in r.allocation.parts
                if p.node == node.name
            ]
            gpus = len(node.gpus) - sum(len(p.gpus) for p in held)
            cores = node.cores - sum(p.cores for p in held)
            memory = node.memory_mib - sum(p.memory_mib for p in held)
            spec = head.spec
            fitting += (
                gpus >= spec.gpus_per_node and cores >= spec.cores_per_node and memory >= spec.memory_mib_per_node
            )
        if fitting >= head.spec.nodes:
            return time
    raise AssertionError("the head fits on the empty partition, by its reason")


def before_running(snap: Snapshot, before: Plan) -> list:
    return list(after(snap, before).running)


@QUICK
@given(snapshots(simple=True))
def test_easy_never_delays_the_head(snap: Snapshot) -> None:
    """Against a plain count of when the head could start with nothing behind it."""
    strict = decide(with_policy(snap, backfill="none"))
    heads = [j for j, r in strict.reasons.items() if r.code == ReasonCode.RESOURCES]
    assume(heads)
    head = _of(snap, heads[0])
    latest = alone(snap, head, strict)
    easy = with_policy(snap, backfill="easy")
    if all(p.order == "fairshare" for p in easy.policies.values()):
        easy = with_policy(easy, order="fifo")
        assume(decide(with_policy(easy, backfill="none")).reasons.get(head.id) == strict.reasons[head.id])
        latest = alone(snap, head, decide(with_policy(easy, backfill="none")))
    assert start_of_head(snap, head.id, easy) <= latest


@st.composite
def crowded(draw: st.DrawFn) -> Snapshot:
    """A head that must wait for what runs, and behind it jobs that last beyond its start: all want the leftovers."""
    nodes = [
        a_node(f"n{i}", cores=draw(among(8, 12)), memory_mib=16384) for i in range(draw(st.integers(1, 2)))
    ]
    held = draw(st.integers(3, 7))
    busy = [running(f"r{i}", {n.name: tuple(range(held))}, NOW + 3600 * (1 + i)) for i, n in enumerate(nodes)]
    head = pending("head", draw(st.integers(9 - held, 7)), nodes=draw(st.integers(1, len(nodes))), cores_per_node=4,
                   memory_mib_per_node=8192)  # fmt: skip
    late = [
        pending(f"j{i}", draw(st.integers(0, 2)), limit=36000, submit=1.0 + i, cores_per_node=draw(st.integers(1, 4)),
                memory_mib_per_node=draw(among(512, 4096)))
        for i in range(draw(st.integers(2, 6)))
    ]  # fmt: skip
    place = draw(among("first-fit", "best-fit", "spread"))
    return snapshot(nodes, [head, *late], busy, backfill="easy", place=place)


@QUICK
@given(crowded())
def test_easy_never_delays_the_head_for_what_it_will_leave_over(snap: Snapshot) -> None:
    """As above, where several jobs fit beside the head, but not all of them."""
    strict = decide(with_policy(snap, backfill="none"))
    assume(strict.reasons.get("head") is not None)
    latest = alone(snap, _of(snap, "head"), strict)
    assert start_of_head(snap, "head", snap) <= latest


class PlannedByHand:
    """Conservative backfill in plain Python: what is held from when to when, and each job's first place, best fit."""

    def __init__(self, snap: Snapshot) -> None:
        self.snap, self.rooms = snap, Rooms(snap)
        soon = math.nextafter(snap.now, math.inf)
        self.held = [
            (-math.inf, max(r.expected_end, soon), p.node, len(p.gpus), p.cores, p.memory_mib)
            for r in snap.running
            for p in r.allocation.parts
        ]  # fmt: skip
        self.starts: dict[str, list[str]] = {}
        for job in in_order(snap, "p"):
            asked = split_requests(job.spec)
            if self.rooms.full(job) is None and any(self.nodes(a, math.inf, 0.0) for a in asked):
                self.plan(job, asked)

    def plan(self, job: PendingView, asked: Sequence[SpreadRequest]) -> None:
        now, lasts = self.snap.now, float(job.spec.time_limit_s)
        times = sorted({now, *(t for begin, end, *_ in self.held for t in (begin, end) if t > now)})
        begin, ask, nodes = next((t, a, found) for t in times for a in asked if (found := self.nodes(a, t, lasts)))
        self.held += [(begin, begin + lasts, node, *ask.needs) for node in nodes]
        if begin == now:
            self.starts[job.id] = nodes
            self.rooms.take(job)

    def nodes(self, ask: SpreadRequest, begin: float, lasts: float) -> list[str] | None:
        """The nodes that have enough from ``begin`` on for so long; None: there are too few."""
        times = [begin, *(t for t, *_ in self.held if begin < t < begin + lasts)]
        fit = []
        for node in self.snap.nodes:
            total = (len(node.gpus), node.cores, node.memory_mib)
            own = [h for h in self.held if h[2] == node.name]
            free = [[n - sum(h[3 + i] for h in own if h[0] <= t < h[1]) for i, n in enumerate(total)] for t in times]
            least = [min(column) for column in zip(*free, strict=True)]
            if all(f >= n for f, n in zip(least, ask.needs, strict=True)):
                fit.append((least, node.name))
        return [name for _, name in sorted(fit)[: ask.parts]] if len(fit) >= ask.parts else None


def contended(seed: int) -> Snapshot:
    """Few nodes, mostly busy, and many jobs, alike but for their limits; some may be on several nodes."""
    rng = random.Random(seed)
    nodes = [a_node(f"n{i}", rng.choice([4, 8]), cores=rng.choice([8, 12])) for i in range(rng.randint(2, 4))]
    busy = [
        running(f"r{i}{k}", {n.name: n.gpus[2 * k : 2 * k + 2]}, NOW + rng.choice([-5, 100, 200, 300, 700]), user="bob")
        for i, n in enumerate(nodes)
        for k in range(rng.randint(0, len(n.gpus) // 2))
    ]
    jobs = []
    for i in range(rng.randint(4, 14)):
        gpus, wide = rng.choice([0, 1, 2, 2, 4, 4]), rng.random() < 0.3
        job = pending(
            f"j{i:02}", gpus, nodes=1 if wide else rng.choice([1, 1, 1, 2]), limit=rng.choice([50, 100, 150, 400, 900]),
            submit=float(i), cores_per_node=rng.choice([1, 1, 4]), user=rng.choice(["alice", "bob", "bob"]),
        )  # fmt: skip
        if wide and gpus > 1:
            job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, max_spread="any", max_nodes=8))
        jobs.append(job)
    snap = snapshot(nodes, jobs, busy, place="best-fit", backfill="conservative")
    return with_bounds(snap, Quotas(users={"alice": Limits(gpus=6)}), ())


def test_conservative_plans_as_by_hand() -> None:
    """Under limits, and with jobs that may be on more nodes than they would rather have."""
    codes: Counter[ReasonCode] = Counter()
    for seed in range(250):
        snap = contended(seed)
        by_hand, plan = PlannedByHand(snap), decide(snap)
        assert {job: [node for node, _ in parts] for job, parts in started(plan).items()} == by_hand.starts, seed
        assert check(plan, snap)[1] == ()
        codes.update(reason.code for reason in plan.reasons.values())
    assert min(codes[code] for code in (ReasonCode.BACKFILL, ReasonCode.PRIORITY, ReasonCode.ASSOC_GRP_GRES)) > 50


@pytest.mark.slow
def test_compiled_and_plain_agree(tmp_path: Path) -> None:
    """The same random snapshots give the same plans, to the letter: compiled, and as plain Python.

    By numba alone: tests/sim/test_engine.py, which compiles half as much.
    """
    plans = {}
    modes: dict[str, dict[str, str]] = {"": {}, "plain": {"NUMBA_DISABLE_JIT": "1"}}
    for mode, variables in modes.items():
        env = {**os.environ, **variables}
        script = "from tests.sched.test_properties import print_plans; print_plans()"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        plans[mode] = json.loads(done.stdout)
    assert len(plans[""]) >= 150
    assert plans["plain"] == plans[""]


def print_plans() -> None:
    """Plans of the snapshots that hypothesis draws without randomness of its own."""
    plans = []

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(snapshots())
    def collect(snap: Snapshot) -> None:
        plans.append(msgspec.to_builtins(decide(snap)))

    collect()
    print(json.dumps(plans))


def test_policies_of_all_names_are_known() -> None:
    from typing import get_args

    from gpusched.model.policy import MAPPING_PLACES, Backfill, Place
    from gpusched.sched.state import BACKFILLS, PLACES

    assert {*PLACES, *MAPPING_PLACES} == set(get_args(Place))
    assert set(BACKFILLS) == set(get_args(Backfill))
    assert PolicySpec(name="x").order == "fifo"
