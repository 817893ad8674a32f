"""Replays under limits of users, groups and classes, against the reference in plain Python."""

from __future__ import annotations

import ast
import copy
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.limits import WEEK_S, Group, Groups, Limits, Qos, Quotas, leaf_of
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.model.snapshot import RunningView, Snapshot
from gpusched.model.topology import Topology
from gpusched.sched.decide import decide
from gpusched.sched.topology.slowdown import KIND, SlowdownModel
from gpusched.sched.topology.tree import tree_of
from gpusched.sim.engine.build import ResizableJobs
from gpusched.sim.engine.placing import PlacementNetwork
from gpusched.sim.engine.quotas import QuotaSet
from gpusched.sim.policies import policy_by_name, policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.traces.slicing import slice_trace
from tests.sched.limited import with_bounds
from tests.sched.worlds import node, pending
from tests.sim import recorded
from tests.sim.reference import Job, Node
from tests.sim.reference_quotas import HOUR, Bound, BoundedConservative, BoundedReference, BoundedSrtf
from tests.sim.reference_rates import PacedJob, PacedNode, Speeds
from tests.sim.worlds import assert_as_reference, engine_inputs, trace_of, workloads
from tests.strategies import among

MODES = {"none": "", "skip": "-skip", "easy": "+easy"}
USERS, GROUPS, CLASSES = ("ann", "bob", "cat"), ("physics", "lasers"), ("rush",)
PLACES = st.sampled_from(["first-fit", "best-fit", "worst-fit"])


@st.composite
def amounts(draw):
    """Limits; most have none of a kind."""
    gpus = draw(among(None, None, None, 2, 4, 8, 12))
    hours = draw(among(None, None, None, 8.0, 20.0, 60.0))
    return Limits(gpus=gpus, jobs=draw(among(None, None, 1, 2)), gpu_hours=hours)


@st.composite
def quotas(draw):
    """Of all, of ann, of a group and one below it, of a class."""
    physics = Group(name="physics", members={"bob": 1}, limits=draw(amounts()))
    lasers = Group(name="lasers", parent="physics", members={"bob": 1, "cat": 1}, limits=draw(amounts()))
    rush = Qos(name="rush", limits=draw(amounts()), per_user=draw(amounts()), exempt=draw(st.booleans()))
    users = {"ann": draw(amounts())} if draw(st.booleans()) else {}
    return Quotas(each=draw(amounts()), users=users, groups=Groups(groups=(physics, lasers)), qos=(rush,))


@st.composite
def bounded(draw):
    """(jobs, nodes, outages, quotas); jobs of users, some for groups and in a class, over minutes or over weeks."""
    jobs, nodes, outages = draw(workloads())
    scale, later = draw(among((1.0, 0.0), (3600.0, 0.0), (1800.0, 500_000.0))), 0.0
    for job in jobs:
        later += scale[1] * draw(among(0, 0, 0, 1))
        job.submit = job.submit * scale[0] + later
        job.duration, job.limit = job.duration * scale[0], job.limit * scale[0]
        job.user, job.group = draw(st.integers(0, 2)), draw(among(-1, -1, 0, 1))
        job.qos = draw(among(-1, -1, 0))
        if job.user == 0:
            job.group = -1
    for away in outages:
        away.start, away.end = away.start * scale[0], away.end * scale[0]
    return jobs, nodes, outages, draw(quotas())


@st.composite
def submitted(draw):
    """The same, of jobs with explicit priorities and tasks of two arrays, and how many of each may run at once."""
    jobs, nodes, outages, of = draw(bounded())
    for job in jobs:
        job.priority, job.array = draw(st.sampled_from([0, 0, 7, -3])), draw(st.sampled_from([-1, -1, 0, 1]))
    return jobs, nodes, outages, of, draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))


def bounds_of(of: Quotas):
    """Return which job counts for which limit, by a second implementation."""
    members = {"ann": "", "bob": "physics", "cat": "lasers"}
    rush = of.qos[0]

    def counts_outside(job):
        return job.qos < 0 or not rush.exempt

    def group_of(job):
        return GROUPS[job.group] if job.group >= 0 else members[USERS[job.user]]

    found = []

    def add(limits, counts):
        found.extend(
            Bound(unit, int(most * (HOUR if unit == "gpu_s" else 1)), counts)
            for unit, most in (("gpus", limits.gpus), ("jobs", limits.jobs), ("gpu_s", limits.gpu_hours))
            if most is not None
        )

    for at, name in enumerate(USERS):
        add(of.users.get(name, of.each), lambda job, at=at: job.user == at and counts_outside(job))
        add(rush.per_user, lambda job, at=at: job.user == at and job.qos == 0)
    physics, lasers = of.groups.groups
    add(physics.limits, lambda job: group_of(job) in GROUPS and counts_outside(job))
    add(lasers.limits, lambda job: group_of(job) == "lasers" and counts_outside(job))
    add(rush.limits, lambda job: job.qos == 0)
    return found


def inputs(jobs, nodes, outages):
    trace, pool = engine_inputs(jobs, nodes)
    user, account, qos = (np.array([getattr(j, n) for j in jobs], np.int64) for n in ("user", "group", "qos"))
    trace = replace(
        trace, epoch=7200.0, user=user, users=USERS, account=account, accounts=GROUPS, qos=qos, classes=CLASSES
    )
    return trace, pool, [Outage(o.node, o.start, o.end, o.drain) for o in outages]


@pytest.mark.parametrize("mode", ["none", "skip", "easy"])
@pytest.mark.parametrize(("order", "name"), [("fifo", "fifo"), ("sjf", "sjf-oracle"), ("smallest", "smallest")])
@given(bounded(), PLACES)
@settings(max_examples=25, deadline=None)
def test_orders_go_as_the_reference(order, name, mode, world, place):
    jobs, nodes, outages, of = world
    trace, pool, failures = inputs(jobs, nodes, outages)
    reference = BoundedReference(copy.deepcopy(jobs), nodes, order, mode, place, outages, bounds=bounds_of(of))
    if order == "sjf":  # limits of GPU hours count time limits all the same
        trace = replace(trace, limit=trace.duration)
        for job in reference.jobs:
            job.limit = job.duration
        reference.never = [j for j, job in enumerate(reference.jobs) if reference.hopeless(job)]
    result = replay(
        trace, pool, name + MODES[mode], placement=place, failures=failures, quotas=QuotaSet(of)
    )  # fmt: skip
    assert_as_reference(result, reference.run())


@pytest.mark.parametrize(("kind", "name"), [(BoundedConservative, "fifo+conservative"), (BoundedSrtf, "srtf")])
@given(bounded(), PLACES)
@settings(max_examples=25, deadline=None)
def test_conservative_backfill_and_srtf_go_as_the_reference(kind, name, world, place):
    jobs, nodes, outages, of = world
    outages = [] if kind is BoundedConservative else outages
    trace, pool, failures = inputs(jobs, nodes, outages)
    paced = [PacedJob(j.submit, j.duration, j.limit, j.gpus, j.cores, j.memory, j.after) for j in jobs]
    for job, old in zip(paced, jobs, strict=True):
        job.user, job.group, job.qos = old.user, old.group, old.qos
    places = [PacedNode(n.gpus, n.cores, n.memory) for n in nodes]
    speeds = Speeds([[1.0] * 3], 1.0, {})
    reference = kind(paced, places, speeds, place=place, away=outages, bounds=bounds_of(of)).run()
    result = replay(trace, pool, name, placement=place, failures=failures, quotas=QuotaSet(of))
    assert_as_reference(result, reference)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["skip", "easy", "conservative"])
@pytest.mark.parametrize("order", ["fifo", "fairshare", "wfp3"])
@given(bounded(), st.sampled_from(["best-fit", "rack", "spread"]))
@settings(max_examples=15, deadline=None)
def test_where_placement_costs_nothing_jobs_start_as_without_costs(order, mode, world, place):
    """The run that knows costs has queues of its own, by request and limits, or walks the queue by live passes."""
    jobs, nodes, _, of = world
    trace, pool, _ = inputs(jobs, nodes, [])
    trace = replace(trace, nodes=np.array([j.parts for j in BoundedReference(jobs, nodes).jobs], np.int64))
    model = SlowdownModel(np.zeros(1, KIND), np.zeros((0, 0)), False)
    model.kinds["compute"] = 1.0
    names = tuple(f"n{i}" for i in range(len(nodes)))
    free = PlacementNetwork(tree_of(Topology(), names), model, np.zeros(len(jobs), np.int64), hold_s=np.inf)
    name, options = order + MODES.get(mode, f"+{mode}"), {"placement": place, "quotas": QuotaSet(of)}
    plain, costly = replay(trace, pool, name, **options), replay(trace, pool, name, network=free, **options)
    np.testing.assert_array_equal(plain.start, costly.start)
    np.testing.assert_array_equal(plain.end, costly.end)


def runs_of(result):
    """(job, begin, end, GPUs) of every run, the cut ones, too."""
    parts = np.diff(result.part_offsets)
    yield from (
        (job, result.last_start[job], result.end[job], int(parts[job] * result.part_gpus[job]))
        for job in np.flatnonzero(np.isfinite(result.end)).tolist()
    )
    for i, job in enumerate(result.cut.job.tolist()):
        span = slice(*result.cut.part_offsets[i : i + 2].tolist())
        each = result.part_gpus[job] if result.cut.part_gpus is None else result.cut.part_gpus[i]
        yield job, result.cut.start[i], result.cut.end[i], int(len(result.cut.part_nodes[span]) * each)


def most_at_once(result):
    """The most GPUs, and jobs, that a user had at one time."""
    found = [0, 0]
    events = sorted(
        (time, sign, job, gpus * sign)
        for job, begin, end, gpus in runs_of(result) if end > begin
        for time, sign in ((begin, 1), (end, -1))
    )  # fmt: skip
    has = np.zeros((result.trace.user.max() + 1, 2), np.int64)
    for _, sign, job, gpus in events:
        has[result.trace.user[job]] += gpus, sign
        found = [max(found[0], has[:, 0].max()), max(found[1], has[:, 1].max())]
    return tuple(found)


def most_under_limits(name, folder):
    """The most GPUs and jobs of a user at once, and how many ended: without limits, and with at most 16 and 3."""
    trace, pool = recorded.workload("mixed")
    policy = policy_by_name(str(folder / f"{name}.yaml") if name in recorded.WITH_WEIGHTS else name)
    options = {"restart_s": 2.5, "seed": 7}
    if policy.chooses_sizes:
        least, most = np.ones(len(trace), np.int64), np.maximum(trace.gpus, 8)
        options["elastic"] = ResizableJobs(least=least, most=most, linear=True)
    free = replay(trace, pool, policy, **options)
    limits = QuotaSet(Quotas(each=Limits(gpus=16, jobs=3)))
    bound = replay(trace, pool, policy, quotas=limits, **options)
    return [(*map(int, most_at_once(found)), int(np.isfinite(found.end).sum())) for found in (free, bound)]


LIMITED = ("fairshare", "las", "elastic", "gist", "rltune", "stopper")


@pytest.fixture(scope="module")
def under_limits(tmp_path_factory):
    """In plain Python: to compile each of them once more, with limits, takes far longer than to run it."""
    folder = tmp_path_factory.mktemp("limited")
    recorded.agent_files(folder)
    program = (
        f"from pathlib import Path\nfrom tests.sim.test_quotas import most_under_limits\n"
        f"print({{name: most_under_limits(name, Path({str(folder)!r})) for name in {LIMITED}}})"
    )
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.parametrize("name", LIMITED)
def test_no_policy_gives_a_user_more_than_its_limits_let(name, under_limits):
    (gpus, jobs, ended), bound = under_limits[name]
    assert gpus > 16
    assert jobs > 3
    assert bound == (16, 3, ended)


class Live:
    """The controller's decision, from instant to instant: snapshots of what is there, and nothing of the engine."""

    def __init__(self, jobs, nodes, known, most, spec, half_life_s=0.0, before=None):
        self.jobs, self.known, self.most = jobs, known, most
        self.half_life_s, self.before = half_life_s, before or {}
        self.nodes = [node(f"n{i}", n.gpus, n.cores, n.memory, partition=n.partition) for i, n in enumerate(nodes)]
        self.policies = {n.partition: spec for n in self.nodes}
        self.start, self.where = {}, {}

    def view(self, i):
        job = self.jobs[i]
        user = USERS[job.user]
        group = self.known.groups.for_job(user, GROUPS[job.group] if job.group >= 0 else "")
        found = pending(
            f"{i:06}", job.gpus // job.parts, job.parts, int(job.limit), job.submit, user=user, group=group,
            cores_per_node=-(-job.cores // job.parts), memory_mib_per_node=-(-job.memory // job.parts),
            partition=job.partition,
        )  # fmt: skip
        array = {"array_id": f"x{job.array}", "array_room": self.most[job.array]} if job.array >= 0 else {}
        spec = msgspec.structs.replace(found.spec, qos="rush" * (job.qos == 0))
        return msgspec.structs.replace(found, spec=spec, priority=job.priority, **array)

    def end(self, i):
        return self.start[i] + self.jobs[i].duration

    def run(self, able):
        while times := self.instants(able):
            now = min(times)
            while self.decide(now, able):
                pass

    def instants(self, able):
        self.now = getattr(self, "now", -1.0)
        times = [self.jobs[i].submit for i in able] + [self.end(i) for i in self.start]
        waits = any(self.jobs[i].submit <= self.now and i not in self.start for i in able)
        if waits and any(self.now < self.end(i) + WEEK_S + HOUR for i in self.start):
            times.append((self.now // HOUR + 1) * HOUR)
        return [t for t in times if t > self.now]

    def usage(self, views, now):
        """GPU hours of each user in each group, halved every half-life: the integral over all that has run."""
        found, kept, first = defaultdict(float), np.log(2.0) / self.half_life_s, min(job.submit for job in self.jobs)
        for leaf, used in self.before.items():
            found[leaf] += used * np.exp(-kept * (now - first))
        for i, begin in self.start.items():
            lasted = min(self.end(i), now) - begin
            decayed = -np.expm1(-kept * lasted) * np.exp(-kept * (now - begin - lasted)) / kept
            found[leaf_of(views[i].user, views[i].group)] += self.jobs[i].gpus * decayed / HOUR
        return found

    def decide(self, now, able):
        self.now, first = now, now // HOUR * HOUR - WEEK_S
        views = {i: self.view(i) for i in able if self.jobs[i].submit <= now}
        over = [i for i in self.start if self.end(i) <= now]
        used = ((i, int(self.jobs[i].gpus * max(0.0, self.end(i) - max(self.start[i], first)))) for i in over)
        run = Counter(views[i].array_id for i in self.start if i not in over)
        for i, v in views.items():
            if v.array_id:
                views[i] = msgspec.structs.replace(v, array_room=v.array_room - run[v.array_id])
        past = tuple((views[i].user, views[i].group, views[i].spec.qos, now, gpu_s) for i, gpu_s in used)
        busy = tuple(
            RunningView(
                id=v.id, user=v.user, group=v.group, spec=v.spec, allocation=self.where[i], start_time=self.start[i],
                expected_end=self.start[i] + self.jobs[i].limit,
            )
            for i, v in views.items() if i in self.start and i not in over
        )  # fmt: skip
        snap = Snapshot(
            now=now, nodes=tuple(self.nodes), running=busy, policies=self.policies, groups=self.known.groups,
            pending=tuple(v for i, v in views.items() if i not in self.start),
            usage=self.usage(views, now) if self.half_life_s else {},
        )  # fmt: skip
        charged = {v.id: float(self.jobs[i].limit) for i, v in views.items()}
        snap = with_bounds(snap, self.known, past, charged)
        actions, limited = decide(snap).actions, {job.id for job in snap.pending if job.bounds or job.array_id}
        for action in actions:
            self.start[int(action.job_id)], self.where[int(action.job_id)] = now, action.allocation
        return any(action.job_id in limited for action in actions)


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
@given(
    submitted(), st.sampled_from(["fifo", "sjf"]), st.sampled_from(["first-fit", "best-fit", "spread"]),
    st.lists(st.booleans(), max_size=8),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_controller_decides_under_limits_as_a_replay_does(backfill, world, order, place, halves):
    decided_alike(*world, PolicySpec(name="t", order=order, place=place, backfill=backfill), halves=halves or (False,))


@pytest.mark.parametrize("backfill", ["none", "skip", "easy"])
@given(
    submitted(), st.tuples(*[st.integers(1, 4)] * 5), st.sampled_from([0.001, 0.01, 0.1, 10.0]),
    st.dictionaries(st.sampled_from(["ann", "physics/bob", "lasers/cat", "physics/dan", "eve"]), st.floats(0.01, 40.0)),
    st.lists(st.booleans(), min_size=2, max_size=8), st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_controller_decides_by_the_tree_of_groups_as_a_replay_does(
    backfill, world, shares, part, before, halves, at_once
):
    """With partitions whose users are the same, and with usage from before, also of users who have no jobs now."""
    jobs, nodes, outages, of, most = world
    of, spec = msgspec.structs.replace(of, groups=shared(of.groups, *shares)), PolicySpec(name="t", order="fairshare")
    spec = msgspec.structs.replace(spec, backfill=backfill)
    for job in jobs if at_once else ():
        job.submit = 0.0
    whole_s = max(job.submit for job in jobs) + sum(job.limit for job in jobs)
    half_life_s = part * whole_s
    decided_alike(jobs, nodes, outages, of, most, spec, half_life_s, before, halves)


def shared(groups, physics, lasers, bob, bobs_lasers, cat):
    above, below = groups.groups
    above = msgspec.structs.replace(above, shares=physics, members={"bob": bob})
    return Groups(
        groups=(above, msgspec.structs.replace(below, shares=lasers, members={"bob": bobs_lasers, "cat": cat}))
    )


def decided_alike(jobs, nodes, _, of, most, spec, half_life_s=0.0, before=None, halves=(False,)):
    """``halves``: in which partition the jobs are in turn, if there is more than one node."""
    for job in jobs:
        job.limit, job.after, job.submit = max(1.0, float(np.ceil(job.limit))), -1, float(np.ceil(job.submit))
        job.duration = min(job.duration, job.limit)
    names = ("p", "q") if len(set(halves)) > 1 and len(nodes) > 1 else ("p",)
    for i, one in enumerate(nodes):
        one.partition = names[i * len(names) // len(nodes)]
    for i, job in enumerate(jobs):
        job.partition = names[halves[i % len(halves)] % len(names)]
    never = sorted(i for name in names for i in hopeless(jobs, nodes, of, name))
    trace, pool, _ = inputs(jobs, nodes, [])
    priority, array = (np.array([getattr(job, name) for job in jobs], np.int64) for name in ("priority", "array"))
    trace = replace(trace, priority=priority, array=array, array_limit=np.array([*most, -1])[array])
    trace = replace(trace, group=np.array([names.index(job.partition) for job in jobs]), groups=names)
    pool = replace(pool, partition=np.array([names.index(one.partition) for one in nodes]), partitions=names)
    options = {"half_life_s": half_life_s, "groups": of.groups, "usage": before or {}} if half_life_s else {}
    result = replay(trace, pool, policy_of_spec(spec), quotas=QuotaSet(of), **options)
    live = Live(jobs, nodes, of, most, spec, half_life_s, before)
    live.run([i for i in range(len(jobs)) if i not in never])
    assert result.infeasible.tolist() == never
    assert {i: result.start[i] for i in np.flatnonzero(np.isfinite(result.start)).tolist()} == live.start
    for i, where in live.where.items():
        assert [int(part.node[1:]) for part in where.parts] == result.nodes_of(i).tolist()


def contended(seed, partitions, jobs=60):
    """Jobs of two users with a limit each, for two nodes of each partition, whose queue is seldom empty."""
    rng, none = np.random.default_rng(seed), Groups(groups=(Group(name="physics"), Group(name="lasers")))
    submits = np.sort(rng.integers(0, 20 * jobs // partitions, jobs)).astype(float).tolist()
    lasts = rng.integers(10, 400, jobs).astype(float).tolist()
    gpus = rng.choice([1, 1, 2, 2, 3, 4, 4, 8], jobs).tolist()
    found = [Job(at, s, 2 * s, size) for at, s, size in zip(submits, lasts, gpus, strict=True)]
    for job, user, scale in zip(
        found, rng.integers(0, 2, jobs).tolist(), rng.choice([0.5, 0.5, 1.0, 2.0], jobs), strict=True
    ):
        job.user, job.group, job.qos, job.priority, job.array = user, -1, -1, 0, -1
        job.limit *= float(scale)
    limits = Quotas(each=Limits(gpus=int(rng.integers(5, 8))), groups=none, qos=(Qos(name="rush"),))
    return found, [Node(4) for _ in range(2 * partitions)], [], limits, (1, 1)


@pytest.mark.interpreted
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(("order", "backfill", "place"), [
    ("fifo", "easy", "best-fit"), ("fifo", "conservative", "rack"), ("fifo", "none", "fastest"),
    ("fifo", "easy", "fastest"), ("fifo", "skip", "milp"), ("fifo", "easy", "milp"),
    ("fairshare", "easy", "best-fit"), ("fairshare", "none", "best-fit"), ("fairshare", "conservative", "best-fit"),
])  # fmt: skip
def test_what_a_start_lets_others_do_within_limits_is_decided_at_once(order, backfill, place, partitions):
    """By a replay; live by the next cycle. A mapping has a window that what starts, here or elsewhere, shifts."""
    mapping = Mapping(window=3, budget_s=30.0)
    spec = PolicySpec(name="t", order=order, backfill=backfill, place=place, mapping=mapping)
    for seed in (1, 2, 36 if order == "fairshare" else 5):
        halves = np.random.default_rng(seed).random(60) < 1 - 1 / partitions
        decided_alike(*contended(seed, partitions), spec, 900.0 * (order == "fairshare"), halves=halves.tolist())


def hopeless(jobs, nodes, of, partition):
    rows = [i for i, job in enumerate(jobs) if job.partition == partition]
    own = [one for one in nodes if one.partition == partition]
    return [rows[i] for i in BoundedReference([jobs[i] for i in rows], own, bounds=bounds_of(of)).never]


@given(bounded())
@settings(max_examples=15, deadline=None)
def test_a_policy_in_python_is_held_to_limits(world):
    jobs, nodes, outages, of = world
    trace, pool, failures = inputs(jobs, nodes, outages)

    def start_any(stepper):
        for job in stepper.waiting():
            stepper.start(job)

    options = {"failures": failures, "quotas": QuotaSet(of), "placement": "best-fit"}
    result, rule = replay(trace, pool, start_any, **options), replay(trace, pool, "fifo-skip", **options)
    np.testing.assert_array_equal(result.start, rule.start)


@given(draws=st.integers(0, 10_000), of=quotas(), order=among("fairshare", "fifo"))
@settings(max_examples=40, deadline=None)
def test_one_partition_is_replayed_as_among_all_that_ran_as_recorded(draws, of, order):
    """What users hold and have used elsewhere counts for their order and limits, as recorded."""
    rng, jobs = np.random.default_rng(draws), 60  # sums of whole seconds are exact
    submit = np.append(np.zeros(2), np.sort(rng.integers(0, 10_000, jobs - 2).astype(float)))
    lasts = rng.integers(100, 6000, jobs).astype(float)
    trace = trace_of(submit, lasts, rng.choice([1, 1, 2, 4], jobs), limit=2 * lasts, user=rng.integers(0, 3, jobs))
    trace = replace(
        trace, epoch=0.0, users=USERS, group=np.append([0, 1], rng.integers(0, 2, jobs - 2)), groups=("a", "b"),
        account=np.where(trace.user > 0, rng.integers(-1, 1, jobs), -1), accounts=GROUPS,
        qos=rng.integers(-1, 1, jobs), classes=CLASSES,
    )  # fmt: skip
    options = {"quotas": QuotaSet(of), "groups": of.groups, "half_life_s": 5000.0}
    policy = policy_of_spec(PolicySpec(name="t", order=order, backfill="skip"))
    whole = replay(trace, Pool.of([NodeSpec(4, partition=name) for name in "ab"]), policy, **options)
    part = slice_trace(replace(trace, wait=whole.start - trace.submit), vc="b")
    alone = replay(part, Pool.of([NodeSpec(4, partition="b")]), policy, **options)
    np.testing.assert_allclose(alone.start, whole.start[trace.group == 1], rtol=1e-9)


def test_runs_of_zero_seconds_in_other_partitions_do_not_count():
    """Its duration is below what seconds can tell apart there."""
    trace = trace_of([0, 1, 2, 100], [100, 10, 10, 1e-30], [1, 1, 1, 4], user=[0, 1, 0, 0])
    trace = replace(trace, users=USERS, group=np.array([0, 0, 0, 1]), groups=("a", "b"), wait=np.zeros(4))
    part = slice_trace(trace, vc="a")
    result = replay(part, Pool.of([NodeSpec(1, partition="a")]), "fairshare", half_life_s=5000.0)
    assert result.start.tolist() == [0, 100, 110]


def test_runs_in_other_partitions_that_began_before_the_replay_hold_gpus():
    trace = trace_of([0, 50, 51, 52], [1000, 100, 10, 10], [4, 1, 1, 1], user=[0, 1, 0, 1])
    trace = replace(trace, users=USERS, group=np.array([1, 0, 0, 0]), groups=("a", "b"), wait=np.zeros(4))
    part = slice_trace(trace, vc="a")
    result = replay(part, Pool.of([NodeSpec(1, partition="a")]), "fairshare", half_life_s=5000.0)
    assert result.start.tolist() == [50, 160, 150]
