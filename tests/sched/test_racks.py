"""Placing by racks, and requests with looser ones behind them, against the same said in plain Python; and live."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import encode
from msgspec.structs import replace

from gpusched.model.jobs import Allocation
from gpusched.model.plan import ReasonCode, Start
from gpusched.model.snapshot import Snapshot
from gpusched.model.units import local_clock
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.fit import request_of, set_feasibility
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.place import choose
from gpusched.sched.state import (
    BEST_FIT,
    EASY,
    FIRST_FIT,
    NONE,
    OK,
    RACK,
    SKIP,
    SPREAD,
    ClusterState,
    PlacementRequest,
    QueueJobs,
    Requests,
    Resources,
    copied,
    ints,
    new_outcome,
    new_releases,
    new_scratch,
    seed_words,
)
from tests.sched.racks import FOUR, HALF, TWO_RACKS, with_place
from tests.sched.reserved import reservation, with_reservations
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, snapshots, started, topology

QUICK = settings(max_examples=80, deadline=None)
NO_MASKS = np.zeros((0, 0), np.uint8)


def resources_of(gpus: list[int]) -> Resources:
    return Resources(ints(gpus), ints([99] * len(gpus)), ints([99] * len(gpus)))


def asks(parts: int, gpus: int, spread: int, hi: int, lo: int = 0) -> PlacementRequest:
    return PlacementRequest(lo, hi, parts, gpus, 0, 0, -1, spread)


def members(rack: list[int], lo: int = 0) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, name in enumerate(rack[lo:], lo):
        found.setdefault(name, []).append(row)
    return found


def reference(free: list[int], rack: list[int], parts: int, gpus: int, spread: int, rule: int) -> list[int] | None:
    """The nodes in order, rack by rack; None: it does not fit."""
    key = {FIRST_FIT: lambda n: n, SPREAD: lambda n: (-free[n], n)}.get(rule, lambda n: (free[n], n))
    racks = members(rack)
    idle = {name: sum(max(0, free[n]) for n in nodes) for name, nodes in racks.items()}
    if rule == RACK and parts == 1:
        fitting = [n for n in range(len(free)) if free[n] >= gpus]
        return [min(fitting, key=lambda n: (free[n], idle[rack[n]], n))] if fitting else None
    fitting_in = {name: sorted((n for n in nodes if free[n] >= gpus), key=key) for name, nodes in racks.items()}
    if spread:
        enough = [name for name in racks if len(fitting_in[name]) >= parts]
        return fitting_in[min(enough, key=lambda r: (idle[r], racks[r][0]))][:parts] if enough else None
    if sum(map(len, fitting_in.values())) < parts:
        return None
    chosen: list[int] = []
    while len(chosen) < parts:
        left = parts - len(chosen)
        enough = [name for name in fitting_in if len(fitting_in[name]) >= left]
        name = (
            min(enough, key=lambda r: (idle[r], racks[r][0]))
            if enough
            else min(fitting_in, key=lambda r: (-len(fitting_in[r]), racks[r][0]))
        )
        chosen += fitting_in.pop(name)[:left]
    return chosen


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """GPUs free by node (-1: not there), and the nodes' racks."""
    free = draw(st.lists(st.integers(-1, 4), min_size=1, max_size=9))
    return free, draw(st.lists(st.integers(0, min(2, len(free) - 1)), min_size=len(free), max_size=len(free)))


@QUICK
@given(
    clusters(),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 1),
    st.sampled_from([RACK, FIRST_FIT, BEST_FIT, SPREAD]),
)
def test_nodes_are_chosen_rack_by_rack(
    cluster: tuple[list[int], list[int]], parts: int, gpus: int, spread: int, rule: int
) -> None:
    free, rack = cluster
    rule = RACK if not spread else rule
    scratch = new_scratch(len(free), 1, ints(rack))
    fits = choose(resources_of(free), NO_MASKS, asks(parts, gpus, spread, len(free)), rule, scratch)
    expected = reference(free, rack, parts, gpus, spread, rule)
    assert (scratch.chosen[:parts].tolist() if fits else None) == expected
    if expected is None:
        return
    used = {rack[n] for n in expected}
    most = {name: sum(free[n] >= gpus for n in nodes) for name, nodes in members(rack).items()}
    fewest = next(
        k for k in range(1, 4) if any(sum(c) >= parts for c in combinations(most.values(), min(k, len(most))))
    )
    assert len(used) == (1 if spread else fewest)


def test_rows_of_another_partition_count_for_nothing() -> None:
    free, rack = [4, 4, 4, 4, 2], [1, 0, 1, 0, 1]
    scratch = new_scratch(5, 1, ints(rack))
    assert choose(resources_of(free), NO_MASKS, asks(2, 2, 1, 5, lo=1), RACK, scratch)
    assert scratch.chosen[:2].tolist() == [4, 2], "of rack 1 only six GPUs are the partition's own"
    assert not choose(resources_of(free), NO_MASKS, asks(3, 2, 1, 5, lo=1), RACK, scratch)


def chains(total: int, hi: int, most: int, racked: bool) -> list[tuple[int, int, int]]:
    """(parts, GPUs, spread) from tightest to loosest for ``total`` GPUs on nodes with up to ``most``."""
    splits = [(p, total // p) for p in range(1, total + 1) if total % p == 0 and total // p <= most and p <= hi]
    return [(p, g, s) for p, g in splits for s in ((1,) if racked and p > 1 else (0,) if p == 1 else (1, 0))]


def requests_of(links: list[list[tuple[int, int, int]]], hi: int) -> tuple[Requests, list[int]]:
    """Every job's chain, loosest first, equal ones once; and the shape of each job."""
    rows: dict[tuple[int, int, int, int], int] = {}
    shapes = []
    for chain in links:
        looser = -1
        for link in reversed(chain):
            looser = rows.setdefault((*link, looser), len(rows))
        shapes.append(looser)
    parts, gpus, spread, looser_of = (list(c) for c in zip(*rows, strict=True))
    n = len(rows)
    return (
        Requests(ints([0] * n), ints([hi] * n), ints(parts), ints(gpus), ints([0] * n), ints([0] * n), ints([-1] * n),
                 ints(spread), ints(looser_of)),
        shapes,
    )  # fmt: skip


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[tuple[int, int, int]]], list[float]]:
    free, rack = draw(clusters())
    jobs = draw(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=7))
    links = [draw(st.permutations(chains(total, len(free), 4, racked) or [(1, 1, 0)])) for total, racked in jobs]
    return free, rack, links, draw(st.lists(st.sampled_from([60.0, 600.0, 6000.0]), min_size=7, max_size=7))


class World:
    """One pass over a queue on an otherwise empty cluster, and what came out."""

    def __init__(self, drawn: tuple[list[int], list[int], list[list[tuple[int, int, int]]], list[float]]) -> None:
        self.free, self.rack, self.links, limits = drawn
        n, jobs = len(self.free), len(self.links)
        self.requests, shapes = requests_of(self.links, n)
        self.scratch = new_scratch(n, self.requests.lo.size, ints(self.rack))
        self.jobs = QueueJobs(ints(shapes), np.array(limits[:jobs]), np.full((jobs, 3), -1), ints([]),
                         np.zeros(self.requests.lo.size, np.int64), NO_MASKS)  # fmt: skip
        self.outcome = new_outcome(jobs, 8 * jobs)
        self.resources = resources_of(self.free)
        self.releases = new_releases(64)
        whole = resources_of([4] * n)
        set_feasibility(whole, copied(whole), self.requests, self.jobs, self.scratch)

    def decide(self, backfill: int, rule: int = RACK) -> tuple[int, float]:
        jobs = np.arange(len(self.links))
        state = ClusterState(self.resources, self.releases, self.requests, self.jobs, self.scratch, self.outcome, NOW)
        return pass_by_rule(state, jobs, backfill, PlacementRule(rule, seed_words(1)))

    def holds(self, job: int, time: float) -> bool:
        """Whether one of the job's requests fits when all that has started by its limit has ended."""
        free = self.resources.gpus.copy()
        for other, (link, nodes) in self.started().items():
            if NOW + self.jobs.limit[other] <= time:
                free[nodes] += link[1]
        return any(reference(free.tolist(), self.rack, *link, RACK) for link in self.links[job])

    def started(self) -> dict[int, tuple[tuple[int, int, int], list[int]]]:
        """Job -> the link it was given, and its nodes."""
        found = {}
        for job in self.outcome.started[: self.outcome.total[0]].tolist():
            shape, at = self.outcome.shape[job], self.outcome.offset[job]
            of = request_of(self.requests, shape)
            link = (int(of.parts), int(of.gpus), int(of.spread))
            found[job] = link, self.outcome.nodes[at : at + of.parts].tolist()
        return found


@QUICK
@given(queues(), st.sampled_from([NONE, SKIP]))
def test_a_job_is_given_the_first_of_its_requests_that_fits(drawn: object, backfill: int) -> None:
    world = World(drawn)  # type: ignore[arg-type]
    world.decide(backfill)
    free, expected = list(world.free), {}
    for job, chain in enumerate(world.links):
        possible = any(reference([4] * len(free), world.rack, *link, RACK) for link in chain)
        assert (world.jobs.feasibility[world.jobs.shape[job]] == OK) == possible
        if not possible:
            continue
        found = next(((link, nodes) for link in chain if (nodes := reference(free, world.rack, *link, RACK))), None)
        if found is None:
            if backfill == NONE:
                break
            continue
        expected[job] = found
        for row in found[1]:
            free[row] -= found[0][1]
    assert world.started() == expected
    assert world.resources.gpus.tolist() == free


@QUICK
@given(queues())
def test_the_head_starts_no_later_for_those_behind_it(drawn: object) -> None:
    """It is promised the first moment at which any of its requests fits, and then one does, whatever was started."""
    alone, world = World(drawn), World(drawn)  # type: ignore[arg-type]
    head, shadow = alone.decide(NONE)
    assert (head, shadow) == world.decide(EASY)
    if head < 0:
        return
    ends = sorted({NOW + alone.jobs.limit[job] for job in alone.started()})
    assert shadow == next((time for time in ends if alone.holds(head, time)), np.inf)
    assert shadow == np.inf or world.holds(head, shadow)


def test_the_reservation_is_of_the_request_that_fits_first() -> None:
    one, both = [(1, 4, 0)], [(1, 4, 0), (2, 4, 0)]
    world = World(([4, 4, 0], [0, 0, 0], [one, [(1, 3, 0)], both, [(1, 1, 0)]], [600.0, 60.0, 60.0, 6000.0]))
    assert world.decide(EASY) == (2, NOW + 60)
    assert world.started().keys() == {0, 1}, "the last would keep node 1 from the head, which is promised it alone"
    never = [(3, 4, 0), (1, 4, 0)]
    world = World(([4, 4, 0], [0, 0, 0], [one, [(1, 3, 0)], never], [600.0, 60.0, 60.0]))
    assert world.decide(EASY) == (2, NOW + 60)


# Live: what a snapshot's jobs ask for, and what is said of it


@QUICK
@given(snapshots(), st.lists(st.sampled_from(["", "r1", "r2"]), min_size=5, max_size=5))
def test_racks_change_nothing_for_whom_they_do_not_concern(snap: Snapshot, racks: list[str]) -> None:
    """An empty topology: rack is best fit. One that no policy looks at: the same plan to the byte."""
    assert encode(decide(with_place(snap, "rack"))) == encode(decide(with_place(snap, "best-fit")))
    assert encode(decide(with_place(snap, "rack-wait"))) == encode(decide(with_place(snap, "best-fit")))
    assert encode(decide(replace(snap, topology=topology(*racks)))) == encode(decide(snap))


@QUICK
@given(snapshots(racked=True))
def test_nobody_is_spread_further_than_it_may(snap: Snapshot) -> None:
    plan, racks, jobs = decide(snap), snap.topology.racks(), {job.id: job for job in snap.pending}
    assert check(plan, snap) == (plan, ())
    for action in plan.actions:
        parts, spec = action.allocation.parts, jobs[action.job_id].spec
        assert sum(len(part.gpus) for part in parts) == spec.gpus
        assert len(parts) == spec.nodes or (spec.max_nodes is not None and len(parts) <= spec.max_nodes)
        if spec.max_spread == "rack" and snap.topology:
            assert len({racks.get(part.node, part.node) for part in parts}) == 1
    left = after(snap, plan)
    again = decide(left)
    if again.actions or any(policy.place == "naive" for policy in snap.policies.values()):
        return
    for job_id, reason in again.reasons.items():
        why = explain(left, job_id).reason
        if ReasonCode.BACKFILL not in (reason.code, why.code):
            assert (why.code, why.message) == (reason.code, reason.message), job_id


def test_rack_prefers_one_rack_and_rack_wait_waits_for_it() -> None:
    jobs = [pending("j", 8, nodes=2, submit=NOW - 60)]
    snap = snapshot(FOUR, jobs, HALF, place="rack", topology=TWO_RACKS)
    assert [name for name, _ in started(decide(snap))["j"]] == ["n1", "n3"]
    waits = with_place(snap, "rack-wait", name="rack-wait", placement_wait_s=3600)
    plan, clock = decide(waits), local_clock(NOW + 3540, NOW)
    assert not plan.actions
    assert plan.reasons["j"].code is ReasonCode.RESOURCES
    assert plan.reasons["j"].message == (
        f"waits for one rack until {clock} at the latest (rack-wait); it could start now on 2 racks"
        "; can start within 0:10:00, by time limits"
    )
    why = explain(waits, "j")
    assert (why.reason, why.racks) == (plan.reasons["j"], 2)
    assert "allow several racks (--placement-wait 0) now" in why.next_steps
    room = replace(waits, running=(HALF[1],))
    assert [name for name, _ in started(decide(room))["j"]] == ["n0", "n1"]
    late = replace(waits, now=NOW + 3541)
    assert [name for name, _ in started(decide(late))["j"]] == ["n1", "n3"], "its wait is over"
    patient = [replace(jobs[0], spec=replace(jobs[0].spec, placement_wait_s=0.0))]
    assert decide(replace(waits, pending=tuple(patient))).actions, "its own word goes before the policy's"


def test_where_it_could_start_now_leaves_out_nodes_reserved_for_others() -> None:
    """A maintenance of n1 begins before the job's limit: of the free nodes n0, n1, n3 it could have n0 and n3."""
    snap = snapshot(FOUR, [pending("j", 8, nodes=2, submit=NOW - 60)], HALF[1:], place="rack-wait", topology=TWO_RACKS)
    policies = {name: replace(policy, placement_wait_s=3600) for name, policy in snap.policies.items()}
    maintenance = reservation("m", ["n1"], 60.0, 7200.0, maintenance=True)
    plan = decide(with_reservations(replace(snap, policies=policies), maintenance))
    assert not plan.actions
    assert "it could start now on 2 racks" in plan.reasons["j"].message


def test_no_job_waits_for_a_rack_that_cannot_hold_it() -> None:
    snap = snapshot(FOUR, [pending("j", 8, nodes=3)], place="rack-wait", topology=TWO_RACKS)
    assert len(started(decide(snap))["j"]) == 3
    down = [replace(FOUR[0], available=False), *FOUR[1:]]
    busy = [running("b", {"n3": (0,)}, NOW + 900)]
    snap = snapshot(down, [pending("j", 8, nodes=2)], busy, place="rack-wait", topology=TWO_RACKS)
    assert not decide(snap).actions, "the other rack can hold it"
    snap = snapshot([*down[:3], replace(FOUR[3], available=False)], [pending("j", 8, nodes=2)], place="rack-wait",
                    topology=TWO_RACKS)  # fmt: skip
    assert len(started(decide(snap))["j"]) == 2, "no rack has two nodes that are well"


def test_a_job_that_may_is_spread_over_more_nodes() -> None:
    spec = {"max_nodes": 8, "max_spread": "any"}
    job = pending("j", 8)
    job = replace(job, spec=replace(job.spec, **spec))
    busy = [running(f"r{i}", {f"n{i}": tuple(range(4))}, NOW + 600) for i in range(4)]
    snap = snapshot(FOUR, [job], busy, place="rack", topology=TWO_RACKS)
    assert [(name, len(gpus)) for name, gpus in started(decide(snap))["j"]] == [("n0", 4), ("n1", 4)]
    busy[1] = running("r1", {"n1": tuple(range(6))}, NOW + 600)
    busy[2] = running("r2", {"n2": tuple(range(6))}, NOW + 600)
    snap = replace(snap, running=tuple(busy))
    assert [(name, len(gpus)) for name, gpus in started(decide(snap))["j"]] == [("n0", 4), ("n3", 4)], "fewest servers"
    bound = replace(job, spec=replace(job.spec, max_spread="rack"))
    plan = decide(replace(snap, pending=(bound,)))
    assert not plan.actions
    assert plan.reasons["j"].code is ReasonCode.RESOURCES
    other = Start("j", replace(started_whole(snap), job_id="j"))
    _, (refused,) = check(replace(plan, actions=(other,)), replace(snap, pending=(bound,)))
    assert "its nodes are in 2 racks; it requests one" in refused.why


def started_whole(snap: Snapshot) -> Allocation:
    (start,) = decide(snap).actions
    assert isinstance(start, Start)
    return start.allocation


def test_policies_that_look_at_no_racks_say_so_to_jobs_that_must_have_one() -> None:
    job = pending("j", 8, nodes=2)
    job = replace(job, spec=replace(job.spec, max_spread="rack"))
    plan = decide(snapshot(FOUR, [job], place="fastest", topology=TWO_RACKS))
    assert plan.reasons["j"].message == "--max-spread rack needs a policy that knows racks; t does not"


def test_an_exclusive_job_has_nodes_of_its_size_to_itself() -> None:
    nodes = [node("n0"), node("n1", gpus=4, cores=40), node("n2", gpus=4, cores=40)]
    job = pending("j", 4, cores_per_node=40, memory_mib_per_node=512 << 10)
    job = replace(job, spec=replace(job.spec, exclusive=True))
    small = running("r", {"n1": ()}, NOW + 60)
    snap = snapshot(nodes, [job, pending("k", 1)], [small], place="first-fit", backfill="skip")
    placed = started(decide(snap))
    assert [name for name, _ in placed["j"]] == ["n2"]
    assert [name for name, _ in placed["k"]] == ["n0"]
    assert check(decide(snap), snap)[1] == ()


@pytest.mark.parametrize(
    ("drained", "says"),
    [
        (4, "waits for 2 GPUs on one node; most free on one node: 1 (n0)"),  # when it gives up, there is no other way
        (0, "waits for fewer nodes in one rack until "),
    ],
)
def test_plan_and_why_agree_on_jobs_that_wait_for_better_nodes(drained: int, says: str) -> None:
    """Found by property: of jobs that ask for the same now, what was said of one was said of the other."""
    nodes = [node(f"n{i}", 2, available=i < 5 - drained, unavailable_reason="DRAINED: fan") for i in range(5)]
    busy = [running(f"r{i}", {f"n{i}": (0,) if i == 0 else (0, 1)}, NOW + 500) for i in range(5)]
    alike = [pending(f"a{i}", 2, submit=-1.0) for i in range(2)]
    job = pending("j", 2)
    job = replace(job, spec=replace(job.spec, max_spread="rack", max_nodes=8, placement_wait_s=1500.0))
    snap = snapshot(nodes, [*alike, job], busy, place="contention", backfill="skip")
    snap = replace(snap, topology=topology("r1", "r1", "r1", "r2", "r2"))
    said = decide(snap).reasons["j"]
    assert said.message.startswith(says)
    assert explain(snap, "j").reason == said
    assert explain(snap, "a1").reason == decide(snap).reasons["a1"]
