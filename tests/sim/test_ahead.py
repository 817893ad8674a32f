"""Running ahead equals what then happens: the live decision called instant by instant, and the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.client.alternatives import spreads_of
from gpusched.forecast.queue import QueueForecast, RunTimeDraw
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import StartForecast
from gpusched.model.interference import ContentionEstimate, JobClassEstimate
from gpusched.model.jobs import Allocation, Dependency, DependencyKind, JobState
from gpusched.model.limits import WEEK_S, Limits, Quotas
from gpusched.model.resources import SharingSettings
from gpusched.model.snapshot import PendingView, RunningView, Snapshot, without_double_counting
from gpusched.sched.alone import in_order
from gpusched.sched.decide import decide
from gpusched.sched.topology.queue import PATIENCE_S
from gpusched.sched.topology.spread import rack_wait_until
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from tests.sched import slices
from tests.sched.contention import Plain as OnePlace
from tests.sched.contention import beliefs, clusters
from tests.sched.limited import Past, class_of, limited, rules_of, with_bounds
from tests.sched.racks import FOUR, HALF, TWO_RACKS
from tests.sched.reserved import of, reservation, with_reservations
from tests.sched.worlds import NOW, node, pending, running, snapshot, snapshots, topology
from tests.sim.plain_ahead import HALF_LIFE_S, Plain
from tests.sim.worlds import trace_of
from tests.strategies import among, examples

pytestmark = pytest.mark.interpreted

HOUR_S = 3600.0


def ahead_of(snap: Snapshot, *variants: PendingView) -> QueueForecast:
    return QueueForecast(snap, half_life_s=HALF_LIFE_S, tick_s=5.0, variants=variants)


def starts(ahead: QueueForecast, times: RunTimeDraw) -> dict[str, float]:
    fate = ahead.run(times)
    assert fate.whole
    return {job.id: float(t) for job, t in zip(ahead.views, fate.start, strict=True) if math.isfinite(t)}


def parts_of_limits(
    ahead: QueueForecast, shares: list[float]
) -> tuple[RunTimeDraw, dict[str, float], dict[str, float]]:
    """How long jobs last and when running ones end, each by the next part of its limit; the same by job."""
    limits, now = ahead.by_limits, ahead.snapshot.now
    share = np.array([shares[i % len(shares)] for i in range(len(limits.lasts) + len(limits.ends))])
    lasts = limits.lasts * share[: len(limits.lasts)]
    ends = now + (limits.ends - now) * share[len(limits.lasts) :]
    waiting, running_ = (dict(zip((job.id for job in jobs), map(float, of), strict=True))
                         for jobs, of in ((ahead.views, lasts), (ahead.snapshot.running, ends)))  # fmt: skip
    return RunTimeDraw(lasts, ends), waiting, running_


class Limited(Plain):
    """With limits, whose bounds are counted anew at every instant; what was used leaves the seven days hour by hour."""

    def __init__(self, world: tuple[Snapshot, Quotas, Past], lasts: dict[str, float], ends: dict[str, float]) -> None:
        snap, self.known, past = world
        super().__init__(snap, lasts, ends)
        self.past: Past = tuple((*who, math.ceil(until / HOUR_S) * HOUR_S, used) for *who, until, used in past)
        self.begun = {job.id: snap.now for job in snap.running}
        self.charged = {job.id: max(0.0, job.expected_end - snap.now) for job in snap.running}
        self.seen = {job.id: job for job in snap.running}

    def limits_now(self) -> None:
        self.snap = with_bounds(self.snap, self.known, self.past, self.charged)

    def begin(self, touched: set[str]) -> None:
        super().begin(touched)
        for job in self.snap.running:
            if job.id not in self.seen:
                self.seen[job.id] = job
                self.charged[job.id] = job.expected_end - self.snap.now
                self.begun[job.id] = self.snap.now

    def freed(self) -> set[str]:
        running, now, touched = {job.id for job in self.snap.running}, self.snap.now, set[str]()
        for job in [job for name, job in self.seen.items() if name not in running]:
            del self.seen[job.id]
            self.past += tuple(self.used_by(job))
            touched |= set(self.snap.policies) if rules_of(job, self.known) else set()
        if now in self.frees():
            touched |= set(self.snap.policies)
        return touched

    def used_by(self, job: RunningView) -> Iterator[tuple[str, str, str, float, int]]:
        """GPU seconds of a job that has just ended, by hour."""
        begin, now, before = self.begun[job.id], self.snap.now, 0
        while begin < now:
            hour = (begin // HOUR_S + 1) * HOUR_S
            used = int(np.round(job.allocation.gpus * (min(hour, now) - self.begun[job.id])))
            if used > before:
                yield job.user, job.group, class_of(job), hour, used - before
            begin, before = hour, used

    def frees(self) -> list[float]:
        return [until + WEEK_S for *_, until, _ in self.past]


@settings(max_examples=150, deadline=None)
@given(
    world=st.one_of(limited(plans=True), limited(simple=True, plans=True)).filter(lambda world: staged(world[0])),
    shares=st.lists(st.sampled_from([0.01, 0.3, 0.5, 0.77, 1.0]), min_size=1),
)
def test_limits_hold_and_let_go_ahead_as_they_do_live(
    world: tuple[Snapshot, Quotas, Past], shares: list[float]
) -> None:
    snap = world[0]
    ahead = ahead_of(snap)
    times, lasts, ends = parts_of_limits(ahead, shares)
    expected = Limited(world, lasts, ends).run()
    assert starts(ahead, times) == pytest.approx(expected)
    assert starts(ahead, times) == pytest.approx(expected), "a second run begins where the first did"


class Paired(Plain):
    """With jobs that share GPUs: who has which is kept, and each GPU that two have is shown at one of them."""

    def __init__(self, snap: Snapshot, lasts: dict[str, float], ends: dict[str, float]) -> None:
        super().__init__(snap, lasts, ends)
        self.full = {job.id: job.shares or job.allocation.parts[0].gpus for job in snap.running}

    def limits_now(self) -> None:
        self.snap = shown_once(self.snap, self.full)

    def holds(self, job: RunningView) -> float:
        """Of a GPU that two have, each has half."""
        others = [self.full[other.id] for other in self.snap.running if other.id == job.partner]
        return len(self.full[job.id]) - sum(len({*self.full[job.id]} & {*gpus}) for gpus in others) / 2

    def begin(self, touched: set[str]) -> None:
        super().begin(touched)
        for job in self.snap.running:
            self.full.setdefault(job.id, job.allocation.parts[0].gpus)


def shown_once(snap: Snapshot, full: dict[str, tuple[int, ...]]) -> Snapshot:
    """The snapshot as the controller makes it of running jobs with all these GPUs."""
    found = {}
    for job in snap.running:
        part = msgspec.structs.replace(job.allocation.parts[0], gpus=full[job.id])
        shares = full[job.id] if job.spec is not None and job.spec.share else ()
        found[job.id] = msgspec.structs.replace(
            job, allocation=Allocation(job.id, (part,)), shares=shares, partner="", state=JobState.RUNNING
        )
    for one, other in combinations([job for job in found.values() if job.shares], 2):
        here = one.allocation.parts[0].node == other.allocation.parts[0].node
        if here and set(one.shares) & set(other.shares):
            for job, mate in zip(without_double_counting(one, other), (other, one), strict=True):
                found[job.id] = msgspec.structs.replace(job, partner=mate.id)
    return msgspec.structs.replace(snap, running=tuple(found.values()))


@st.composite
def pairing(draw: st.DrawFn) -> tuple[Snapshot, dict[str, float], dict[str, float]]:
    """Nodes whose GPUs are shared, some by two jobs already; how long jobs last. What each loses is next to nothing."""
    nodes = [
        msgspec.structs.replace(
            node(f"n{i}", 3, cores=draw(st.integers(4, 8))), sharing=SharingSettings(mode="time-slicing"),
            shareable=dict.fromkeys(range(3), 40),
        )
        for i in range(draw(st.integers(1, 2)))
    ]  # fmt: skip
    jobs = []
    for i in range(draw(st.integers(1, 9))):
        user = draw(among("ann", "bob"))
        job = pending(f"j{i}", draw(st.integers(1, 3)), submit=float(i), limit=draw(among(50, 100, 500)), user=user)
        share = draw(among("", "pairs", "pairs"))
        spec = msgspec.structs.replace(
            job.spec, name=chr(ord("a") + i), cores_per_node=draw(st.integers(1, 2)), share=share,
            gpu_memory_mib=draw(among(10, 20, 30)) if share else None,
        )  # fmt: skip
        jobs.append(msgspec.structs.replace(job, spec=spec))
    believed = {
        f"{job.user}/{job.spec.name}": JobClassEstimate(
            kind=f"{job.user}/{job.spec.name}",
            links=(ContentionEstimate(link="gpu", sensitivity=-12 - i / 7, pressure=-12, cov=(0, 0, 0), count=9),),
        )
        for i, job in enumerate(jobs)
    }
    backfill = draw(among("none", "skip", "easy", "conservative"))
    order = draw(among("fifo", "sjf", "fairshare"))
    snap = snapshot(nodes, jobs, backfill=backfill, order=order, beliefs=believed)
    lasts = {  # no two end at once, for what sharing costs, little as it is, would part them
        job.id: job.spec.time_limit_s * draw(among(0.01, 0.3, 0.5, 0.77, 0.99)) * (1 - i / 97)
        for i, job in enumerate(jobs)
    }
    plain = Paired(snap, lasts, {})
    for _ in range(draw(st.integers(0, 3))):  # some run already
        plain.begin({"p"})
        if not plain.ends:
            break
        plain.move_to(min(plain.ends.values()) if draw(st.booleans()) else plain.snap.now + 1)
        plain.end_jobs()
        plain.limits_now()
    return plain.snap, lasts, dict(plain.ends)


@pytest.mark.compiled
@settings(max_examples=200, deadline=None)
@given(world=pairing())
def test_jobs_share_gpus_ahead_as_they_do_live(world: tuple[Snapshot, dict[str, float], dict[str, float]]) -> None:
    snap, lasts, ends = world
    ahead = ahead_of(snap)
    times = RunTimeDraw(
        np.array([lasts[job.id] for job in ahead.views]), np.array([ends[job.id] for job in snap.running])
    )
    expected = Paired(snap, lasts, dict(ends)).run()
    assert starts(ahead, times) == pytest.approx(expected)
    assert starts(ahead, times) == pytest.approx(expected), "a second run begins where the first did"


def test_limits_ahead_count_a_gpu_of_two_jobs_for_both_as_live() -> None:
    shared = msgspec.structs.replace(
        node("n", 2), sharing=SharingSettings(mode="time-slicing"), shareable=dict.fromkeys(range(2), 40)
    )
    spec = {"share": "pairs", "gpu_memory_mib": 10}
    pair = [running(name, {"n": (0, 1)}, NOW + end, user="ann") for name, end in (("r", 30), ("s", 60))]
    pair = [msgspec.structs.replace(
        job, shares=(0, 1), partner=other, spec=msgspec.structs.replace(pending("x", 2).spec, **spec)
    ) for job, other in zip(pair, "sr", strict=True)]  # fmt: skip
    snap = snapshot([shared, node("m", 4)], [pending("w", 2, user="ann")], list(without_double_counting(*pair)))
    known = Quotas(users={"ann": Limits(gpus=4)})
    bounds = with_bounds(msgspec.structs.replace(snap, running=tuple(pair)), known, ()).bounds
    running_ = tuple(msgspec.structs.replace(job, bounds=(0,)) for job in snap.running)
    waits = tuple(msgspec.structs.replace(job, bounds=(0,)) for job in snap.pending)
    snap = msgspec.structs.replace(snap, bounds=bounds, running=running_, pending=waits)
    ahead = ahead_of(snap)
    assert not decide(snap).actions
    assert starts(ahead, ahead.by_limits) == {"w": NOW + 30}, "live the end of the first leaves two GPUs of the limit"


def test_limits_over_two_partitions_leave_room_to_both_queues_ahead_before_any_job_is_put_beside_another() -> None:
    sharing = {"sharing": SharingSettings(mode="time-slicing", slowdown=1.0), "shareable": {0: 40}}
    nodes = [msgspec.structs.replace(node("n", 1, partition="p"), **sharing), node("m", 1, partition="q")]
    agreed = {"share": "pairs", "gpu_memory_mib": 10}
    jobs = [pending("beside", 1, user="ann", partition="p"), pending("own", 1, user="ann", partition="q")]
    jobs[0] = msgspec.structs.replace(jobs[0], spec=msgspec.structs.replace(jobs[0].spec, **agreed))
    runs = running("r", {"n": (0,)}, NOW + 30, user="ann")
    runs = msgspec.structs.replace(runs, shares=(0,), spec=jobs[0].spec)
    snap = with_bounds(snapshot(nodes, jobs, [runs]), Quotas(users={"ann": Limits(gpus=2)}), ())
    assert {action.job_id for action in decide(snap).actions} == {"own"}
    alone = msgspec.structs.replace(snap, pending=snap.pending[:1])
    assert {action.job_id for action in decide(alone).actions} == {"beside"}
    ahead = ahead_of(snap)
    assert starts(ahead, ahead.by_limits) == {"own": NOW, "beside": NOW + 30}


class Costly(Plain):
    """With what places cost: a job may take any that there is at the end of its patience for it."""

    def gives_up(self, job: PendingView) -> float | None:
        """The next end of its patience, or of its wait for one rack; those for places that it would not choose change
        nothing."""
        plain, parts, room = OnePlace(self.snap), job.spec.nodes, {n.name: 8 for n in self.snap.nodes}
        for other in self.snap.running:
            for part in other.allocation.parts:
                room[part.node] -= len(part.gpus)
        free = [name for name, gpus in room.items() if gpus >= job.spec.gpus_per_node]
        costs = [sum(plain.cost(job.spec.name, dict.fromkeys(where, job.spec.gpus_per_node)))
                 for where in combinations(free, parts)]  # fmt: skip
        own, policy = job.spec.placement_wait_s, self.snap.policies[job.spec.partition]
        wait_s = policy.placement_wait_s if own is None else own
        ends = [job.submit_time + min(cost * cost * PATIENCE_S, wait_s) + 1e-3 for cost in costs]
        ends.append(rack_wait_until(job, policy))
        return min((end for end in ends if end > self.snap.now), default=None)


@settings(max_examples=150, deadline=None)
@given(
    snap=clusters(),
    shares=st.lists(st.sampled_from([0.01, 0.3, 0.5, 0.77, 1.0]), min_size=1),
    order=st.sampled_from(["fifo", "sjf", "fairshare"]),
    waits=st.lists(st.sampled_from([None, None, 0.0, 90_000.0, 250_000.0]), min_size=5, max_size=5),
)
def test_jobs_wait_for_better_places_ahead_as_they_do_live(
    snap: Snapshot, shares: list[float], order: str, waits: list[float | None]
) -> None:
    policies = {name: msgspec.structs.replace(p, order=order) for name, p in snap.policies.items()}
    jobs = tuple(
        msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, placement_wait_s=wait))
        for job, wait in zip(snap.pending, waits, strict=False)
    )
    snap = msgspec.structs.replace(snap, policies=policies, pending=jobs)
    ahead = ahead_of(snap)
    times, lasts, ends = parts_of_limits(ahead, shares)
    expected = Costly(snap, lasts, ends).run()
    for _ in range(2):  # a second run begins where the first did
        found = starts(ahead, times)
        assert found.keys() == expected.keys()
        assert all(abs(found[name] - expected[name]) < 0.1 for name in found), (found, expected)


def test_a_job_whose_wait_for_one_rack_is_over_is_projected_onto_two() -> None:
    """What places cost is that of what it asks for then, also where it asked for one rack before."""
    job = pending("j", 8, nodes=2, submit=NOW - 30.0, user="alice", name="calm", limit=300_000)
    job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, placement_wait_s=50.0))
    snap = snapshot(FOUR, [job], HALF, place="contention", topology=TWO_RACKS, beliefs=beliefs(0.02, 0.02, 1.6))
    ahead = ahead_of(snap)
    assert starts(ahead, ahead.by_limits) == {"j": NOW + 20.0}
    assert decide(msgspec.structs.replace(snap, now=NOW + 20.0)).actions


def limited_to(gpus: int, snap: Snapshot) -> tuple[Snapshot, Quotas, Past]:
    known = Quotas(users={"alice": Limits(gpus=gpus)})
    return with_bounds(snap, known, ()), known, ()


def test_a_job_that_a_limit_will_hold_is_not_the_projected_head() -> None:
    """The first starts and leaves alice nothing; so her second is not the head, but bob's, who is not to be delayed."""
    busy = [running("r", {"n": tuple(range(4))}, NOW + 100)]
    jobs = [
        pending("first", 2, submit=1, limit=10_000), pending("held", 6, submit=2, limit=10),
        pending("head", 6, submit=3, user="bob", limit=10), pending("late", 2, submit=4, user="bob", limit=10_000),
    ]  # fmt: skip
    world = limited_to(6, snapshot([node("n", 8)], jobs, busy, backfill="easy"))
    ahead = ahead_of(world[0])
    found = starts(ahead, ahead.by_limits)
    assert found["head"] == NOW + 100
    limits = {job.id: float(job.spec.time_limit_s) for job in world[0].pending}
    assert found == Limited(world, limits, {"r": NOW + 100}).run()


def test_an_end_in_one_partition_lets_somebody_go_in_another() -> None:
    nodes = [node("n", 4), node("m", 4, partition="q")]
    busy = [running("r", {"n": (0, 1)}, NOW + 100, user="alice")]
    snap, *_ = limited_to(2, snapshot(nodes, [pending("a", 2, partition="q")], busy))
    ahead = ahead_of(snap)
    assert starts(ahead, ahead.by_limits) == {"a": NOW + 100}


def test_ahead_a_slice_counts_as_its_share_of_a_gpu_for_its_user() -> None:
    """Ann holds seven slices, one GPU; Bob two GPUs. The half that comes free is Ann's, then, with 1.5 GPUs, again."""
    nodes = [slices.cut(node("n", 4), {0: slices.SEVEN, 1: {"3g.40gb": (0,)}})]
    busy = [
        msgspec.structs.replace(slices.running("r", {"n": tuple(range(1000, 1007))}, "1g.10gb"), user="ann"),
        msgspec.structs.replace(slices.running("s", {"n": (2, 3)}), user="bob"),
        msgspec.structs.replace(slices.running("t", {"n": (2000,)}, "3g.40gb"), user="cat", expected_end=NOW + 100),
    ]
    jobs = [
        msgspec.structs.replace(slices.pending(name, 1, "3g.40gb", submit=at, limit=60), user=user)
        for at, (name, user) in enumerate((("b", "bob"), ("a", "ann"), ("c", "ann")))
    ]
    ahead = ahead_of(snapshot(nodes, jobs, busy, order="fairshare"))
    assert starts(ahead, ahead.by_limits) == {"a": NOW + 100, "c": NOW + 160, "b": NOW + 220}


def test_ahead_a_job_waits_for_ends_and_for_starts() -> None:
    """``both`` for an end and a start, of which the later counts; ``never`` for one that does not start."""

    def waits(name: str, *others: tuple[DependencyKind, str], **more: int) -> PendingView:
        job = pending(name, 1, **more)
        spec = msgspec.structs.replace(job.spec, dependencies=tuple(Dependency(*other) for other in others))
        return msgspec.structs.replace(job, spec=spec, dependency="waiting")

    ends, starts_ = DependencyKind.AFTERANY, DependencyKind.AFTER
    jobs = [
        waits("begun", (starts_, "big"), submit=0), pending("big", 8, submit=1, limit=50),
        waits("both", (ends, "r"), (starts_, "late"), limit=5), waits("late", (ends, "begun"), limit=10, submit=2),
        waits("never", (starts_, "gone")),
    ]  # fmt: skip
    ahead = ahead_of(snapshot([node("n", 8), node("m", 1)], jobs, [running("r", {"n": (0,)}, NOW + 100)]))
    assert starts(ahead, ahead.by_limits) == {
        "big": NOW + 100,
        "begun": NOW + 100,
        "late": NOW + 3700,
        "both": NOW + 3700,
    }


def test_a_long_queue_is_run_ahead_only_as_far_as_work_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws than wanted where one answer would take long; with not even one, nothing is made up."""
    waiting = [pending(f"{i:03}", 1, submit=float(i)) for i in range(60)]
    snap = snapshot([node("n", gpus=1)], waiting, [running("r", {"n": (0,)}, NOW + 100)])
    made = []
    for allowed in (10**9, 60_000, 10):
        monkeypatch.setattr("gpusched.forecast.start_times._ENOUGH_WORK", allowed)
        foresight = StartForecast(snap, snap.pending[-1], RunTimeSampler([]), half_life_s=1e6, tick_s=1.0)
        made.append((foresight.expected(), foresight.sooner()))
    (all_of, _), (some, _), (none, later) = made
    assert (all_of.runs, none.runs) == (40, 0)
    assert 0 < some.runs < 40
    assert all_of.median == some.median == all_of.by_limits
    assert (none.median, none.low, none.by_limits) == (None, None, None)
    assert not [s for s in later if not np.isfinite(s.start)]


def test_a_job_that_can_start_now_waits_for_no_other_to_end() -> None:
    busy = [running("r", {"n": (0,)}, NOW + 100)]
    for gpus, needs in ((3, []), (4, ["after job r of bob ends"])):
        snap = snapshot([node("n", 4)], [pending("a", gpus)], busy)
        foresight = StartForecast(snap, snap.pending[0], RunTimeSampler([]), half_life_s=1e6, tick_s=1.0)
        foresight.expected()
        assert [sooner.what for sooner in foresight.sooner()] == needs


def test_of_jobs_that_have_to_end_the_one_that_usually_ends_first_is_named() -> None:
    """One of its draws is late."""
    busy = [running(name, {on: (0, 1)}, NOW + 5000) for name, on in (("r", "n"), ("s", "m"))]
    snap = snapshot([node("n", 2), node("m", 2)], [pending("a", 2)], busy)
    foresight = StartForecast(snap, snap.pending[0], RunTimeSampler([]), half_life_s=1e6, tick_s=1.0)
    lasts = foresight.ahead.by_limits.lasts
    foresight._draws = [RunTimeDraw(lasts, NOW + np.array([end, 100.0])) for end in (10.0, 1000.0, 20.0)]
    foresight.expected()
    (first,) = foresight.sooner()
    assert (first.what.split(" of ")[0], first.start, first.nodes) == ("after job r", NOW + 20, ("n",))


def staged(snap: Snapshot) -> bool:
    return all(p.place != "naive" for p in snap.policies.values())


@settings(max_examples=200, deadline=None)
@given(
    snap=st.one_of(
        snapshots(plans=True), snapshots(racked=True, plans=True), snapshots(simple=True, racked=True, plans=True)
    ).filter(staged),
    shares=st.lists(st.sampled_from([0.01, 0.3, 0.5, 0.77, 1.0]), min_size=1),
    chain=st.booleans(),
)
def test_running_ahead_is_deciding_instant_by_instant(snap: Snapshot, shares: list[float], chain: bool) -> None:
    if chain and snap.pending and snap.running:  # the first job waits for the first running one to end
        first, other = snap.pending[0], snap.running[0]
        spec = msgspec.structs.replace(first.spec, dependencies=(Dependency(DependencyKind.AFTERANY, other.id),))
        first = msgspec.structs.replace(first, spec=spec, dependency="waiting", held_by="")
        snap = msgspec.structs.replace(snap, pending=(first, *snap.pending[1:]))
    ahead = ahead_of(snap)
    times, lasts, ends = parts_of_limits(ahead, shares)
    expected = Plain(snap, lasts, ends).run()
    assert starts(ahead, times) == pytest.approx(expected)
    assert starts(ahead, times) == pytest.approx(expected), "a second run begins where the first did"


def racked(seed: int) -> Snapshot:
    """Nodes of 4 in two or three racks, mostly busy, and jobs over several nodes that wait for one rack for a while."""
    rng = np.random.default_rng(seed)
    nodes = [node(f"n{i}", 4, cores=99) for i in range(int(rng.integers(4, 7)))]
    racks = rng.choice(["r1", "r2", "r3", ""], len(nodes), p=[0.4, 0.4, 0.15, 0.05])
    busy = [
        running(f"r{i}", {n.name: tuple(range(int(rng.integers(2, 5))))}, NOW + float(rng.integers(1, 90)))
        for i, n in enumerate(nodes)
        if rng.random() < 0.7
    ]
    jobs = []
    for i in range(int(rng.integers(2, 10))):
        parts, most = int(rng.choice([1, 2, 2, 3])), None
        gpus = int(rng.choice([1, 2, 4]))
        spread = str(rng.choice(["", "any", "rack"], p=[0.6, 0.3, 0.1]))
        if spread and rng.random() < 0.5:
            parts, gpus, most = 1, 4, 4
        job = pending(f"j{i}", gpus, nodes=parts, limit=int(rng.integers(5, 60)), submit=float(rng.integers(970, 1000)))
        wait = rng.choice([np.nan, 0.0, 30.0, 45.0, 60.0, 100.0])
        job = msgspec.structs.replace(job, eligible_time=NOW + 20.0 if rng.random() < 0.1 else None)
        fields = {"max_spread": spread, "max_nodes": most, "placement_wait_s": None if np.isnan(wait) else float(wait)}
        jobs.append(msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, **fields)))
    place = rng.choice(["rack", "rack-wait", "best-fit"])
    backfill = rng.choice(["none", "skip", "easy", "conservative"])
    order = rng.choice(["fifo", "sjf", "fairshare"])
    snap = snapshot(
        nodes, jobs, busy, order=str(order), place=str(place), backfill=str(backfill), topology=topology(*racks)
    )
    policy = msgspec.structs.replace(snap.policies["p"], placement_wait_s=50.0)
    return msgspec.structs.replace(snap, policies={"p": policy})


def test_the_projected_start_of_a_job_that_stops_waiting_for_a_rack_is_the_live_one() -> None:
    gave_up, seeds = 0, examples(60)
    for seed in range(seeds):
        snap = racked(seed)
        ahead = ahead_of(snap)
        limits = ahead.by_limits
        rng = np.random.default_rng(seed)
        times = RunTimeDraw(limits.lasts * rng.choice([0.3, 0.7, 1.0], len(limits.lasts)), limits.ends)
        lasts = {job.id: float(t) for job, t in zip(ahead.views, times.lasts, strict=True)}
        plain = Plain(snap, lasts, {job.id: float(t) for job, t in zip(snap.running, times.ends, strict=True)})
        expected = plain.run()
        found = starts(ahead, times)
        assert found == pytest.approx(expected), seed
        assert {job: ahead.nodes_of(ahead.index[job]) for job in found} == plain.nodes, seed
        until = {j.id: rack_wait_until(j, snap.policies["p"]) for j in snap.pending}
        gave_up += sum(start == until[job] > NOW for job, start in found.items())
    assert gave_up > seeds / 4


def test_bound_to_a_spread_a_job_starts_when_it_would_if_it_had_asked_for_that() -> None:
    differ, seeds = 0, examples(40)
    for seed in range(seeds):
        snap = racked(seed)
        for job in [j for j in snap.pending if j.spec.nodes > 1 or j.spec.max_nodes][:2]:
            views = [bound.view for bound in spreads_of(snap, job)]
            ahead = ahead_of(snap, *views)
            found = []
            for i, view in enumerate(views, ahead.first_variant):
                fate = ahead.run(ahead.by_limits, target=i, without=[ahead.index[job.id]])
                asked = tuple(view if j.id == job.id else j for j in snap.pending)
                lasts = {j.id: float(j.spec.time_limit_s) for j in asked}
                ends = {j.id: j.expected_end for j in snap.running}
                plain = Plain(msgspec.structs.replace(snap, pending=asked), lasts, ends)
                found.append(plain.run().get(job.id, np.inf))
                assert fate.start[i] == pytest.approx(found[-1]), (seed, job.id, i)
            differ += len(set(found)) > 1
    assert differ > seeds / 3


def stays(job: PendingView) -> PendingView:
    """The job without a wait for better nodes: what it asks for hangs on nothing but what there is."""
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, placement_wait_s=0.0))


@settings(max_examples=100, deadline=None)
@given(snap=st.one_of(snapshots(simple=True), snapshots(simple=True, racked=True)), data=st.data())
def test_under_conservative_backfill_nobody_delays_a_job_before_it(snap: Snapshot, data: st.DataObject) -> None:
    """With exact run times: the jobs behind one in the queue leave it the start that it has without them."""
    place = "rack" if snap.topology else "best-fit"
    policy = msgspec.structs.replace(snap.policies["p"], order="fifo", place=place, backfill="conservative")
    snap = msgspec.structs.replace(snap, policies={"p": policy}, pending=tuple(map(stays, snap.pending)))
    ahead = ahead_of(snap)
    ordered = [ahead.index[job.id] for job in in_order(snap, "p")]
    whole = ahead.run(ahead.by_limits).start
    if ordered:
        behind = data.draw(st.integers(1, len(ordered)))
        assert (ahead.run(ahead.by_limits, without=ordered[behind:]).start >= whole)[ordered[:behind]].all()


JOBS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 50)), min_size=1, max_size=25
)


@settings(max_examples=100, deadline=None)
@given(
    jobs=JOBS,
    order=st.sampled_from(["fifo", "sjf"]),
    backfill=st.sampled_from(["none", "skip", "easy", "conservative"]),
    place=st.sampled_from(["first-fit", "best-fit", "spread"]),
)
def test_with_exact_run_times_the_simulator_does_the_same(
    jobs: list[tuple[int, int, int]], order: str, backfill: str, place: str
) -> None:
    nodes = [node(f"n{i}", 8) for i in range(3)]
    views = [pending(f"j{i:02}", g, nodes=n, limit=60 * t) for i, (g, n, t) in enumerate(jobs)]
    found = starts(
        ahead := ahead_of(snapshot(nodes, views, order=order, place=place, backfill=backfill)), ahead.by_limits
    )
    name = {"none": "", "skip": "-skip"}.get(backfill, f"+{backfill}")
    trace = trace_of([0.0] * len(jobs), [60.0 * t for *_, t in jobs], [g * n for g, n, _ in jobs])
    trace = replace(trace, nodes=np.array([n for _, n, _ in jobs]))
    policy = f"{order}{'-limit' if order == 'sjf' else ''}{name}"
    result = replay(trace, Pool.of([NodeSpec(8)] * 3), policy, placement=place)
    assert {f"j{i:02}": NOW + t for i, t in enumerate(result.start.tolist())} == pytest.approx(found)


def test_a_job_of_a_reservation_starts_with_it_where_placement_costs_something() -> None:
    """Its possible places are those that open then, not those of now."""
    one = reservation("class", ["n0", "n1"], HOUR_S, 9 * HOUR_S)
    job = of("class", pending("j", 4, nodes=2, limit=3600, submit=NOW, name="calm"))
    snap = snapshot(
        [node(f"n{i}") for i in range(3)], [job], place="contention", topology=topology("r1", "r1", "r2"),
        beliefs=beliefs(0.02, 0.02, 1.1),
    )  # fmt: skip
    ahead = ahead_of(with_reservations(snap, one))
    assert starts(ahead, ahead.by_limits) == {"j": one.begin}


def test_jobs_that_ask_for_millions_of_nodes_cost_no_more_than_others() -> None:
    """Slurm lets them wait: each took a gigabyte, in the controller and for whoever asked why a job waits."""
    snap = snapshot([node("n1"), node("n2")], [pending("a", 1, nodes=4_000_000), pending("b", 1)])
    ahead = ahead_of(snap)
    assert starts(ahead, ahead.by_limits) == {"b": NOW}
    assert len(ahead._sim.held) == 3
    assert len(ahead._queue.outcome.nodes) == 3
