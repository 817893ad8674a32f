"""Two jobs on the same GPUs: the check and the pass against a plain count of the GPUs in use, and what `why` says."""

from __future__ import annotations

from itertools import combinations
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.plan import Action, Plan, Preempt, Start
from gpusched.model.resources import SharingSettings
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import node_arrays_of, waiting_of
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.kernel.beside import MAX_KINDS
from gpusched.sched.sharing.pairs import pairs_of
from gpusched.sched.state import LIMIT, NOT_AVAILABLE, POLICY, RESOURCES, new_outcome
from gpusched.sched.tally import usage_of
from tests.sched.sharing import (
    CORES,
    GPUS,
    MIB,
    Has,
    holders,
    may_be,
    slower,
    snapshot_of,
    worlds,
)
from tests.sched.worlds import NOW, started


def policy_s(snap: Snapshot) -> Plan:
    """The policy's own plan, as where no node shares GPUs."""
    nodes = tuple(msgspec.structs.replace(node, sharing=None, shareable={}) for node in snap.nodes)
    return decide(msgspec.structs.replace(snap, nodes=nodes))


def after(snap: Snapshot, *actions: Action, code: int = RESOURCES) -> list[Start]:
    """Apply the sharing pass after a policy that started these and left the others for that reason."""
    world = node_arrays_of(snap)
    waiting = waiting_of(list(snap.pending), world, {}, snap)
    outcome = new_outcome(len(waiting.views), waiting.parts)
    outcome.code[:] = code
    found = pairs_of(snap, waiting, outcome, actions, {name: waiting.ordered(name, "fifo") for name in waiting.queues})
    return found.starts if found is not None else []


# -- the plain count


def fits_at(has: list[Has], job: Has, nodes: list[str]) -> float:
    """When so many GPUs of one node have no holder, and the cores are there, at the latest."""
    for when in sorted({NOW, *(one.end for one in has)}):
        left = [one for one in has if one.end > when]
        for node in nodes:
            free = sum(not holders(left, node, gpu) for gpu in range(GPUS))
            cores = CORES - sum(one.cores for one in left if one.node == node)
            if free >= len(job.gpus) and cores >= job.cores:
                return max(when, NOW)
    return inf


# -- worlds


@settings(max_examples=300, deadline=None)
@given(worlds(), st.data())
def test_the_check_is_the_plain_count(
    world: tuple[dict[str, SharingSettings | None], list[Has], list[Has]], data: st.DataObject
) -> None:
    modes, has, waits = world
    actions, expected = [], []
    truth = list(has)
    for job in waits:
        node = data.draw(st.sampled_from(list(modes)))
        gpus = data.draw(st.sampled_from(list(combinations(range(GPUS), len(job.gpus)))))
        part = NodeAllocation(rank=0, node=node, gpus=gpus, cores=job.cores, memory_mib=1)
        actions.append(Start(job.id, Allocation(job.id, (part,))))
        if may_be(modes, truth, job, node, gpus):
            expected.append(job.id)
            truth.append(at_work(job, node, gpus))
    plan, rejected = check(Plan(actions=tuple(actions)), snapshot_of(modes, has, waits))
    assert [action.job_id for action in plan.actions] == expected, [one.why for one in rejected]


def at_work(job: Has, node: str, gpus: tuple[int, ...]) -> Has:
    """The job where it has been started."""
    return Has(job.id, job.user, job.name, job.memory_mib, gpus, node, job.cores, NOW + job.limit, True, job.limit)


def placed(waits: list[Has], plan: Plan) -> list[Has]:
    by_id = {job.id: job for job in waits}
    starts = (action for action in plan.actions if isinstance(action, Start))
    return [at_work(by_id[a.job_id], p.node, p.gpus) for a in starts for p in a.allocation.parts]


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_who_shares_may_loses_little_and_holds_up_nobody(
    world: tuple[dict[str, SharingSettings | None], list[Has], list[Has]],
) -> None:
    modes, has, waits = world
    snap = snapshot_of(modes, has, waits)
    plan = policy_s(snap)
    sound, rejected = check(decide(snap), snap)
    assert not rejected
    assert sound.actions[: len(plan.actions)] == plan.actions
    truth = has + placed(waits, plan)
    first = next((job for job in waits if job.id in plan.reasons and len(job.gpus) <= GPUS), None)
    before = fits_at(truth, first, list(modes)) if first is not None else 0.0
    for job in placed(waits, Plan(actions=sound.actions[len(plan.actions) :])):
        assert may_be(modes, truth, job, job.node, job.gpus)
        (other,) = {one.id: one for gpu in job.gpus for one in holders(truth, job.node, gpu)}.values()
        sharing = modes[job.node]
        assert sharing is not None
        assert max(slower(job.name, other.name), slower(other.name, job.name)) <= sharing.slowdown + 1e-9
        truth.append(job)
    if first is not None and first.id not in {job.id for job in truth}:
        assert fits_at(truth, first, list(modes)) <= before


@settings(max_examples=300, deadline=None)
@given(worlds(waits=1))
def test_one_that_waits_alone_shares_wherever_that_may_be(
    world: tuple[dict[str, SharingSettings | None], list[Has], list[Has]],
) -> None:
    modes, has, waits = world
    (job,) = waits
    snap = snapshot_of(modes, has, waits)
    plan = policy_s(snap)
    free = [
        (node, gpus)
        for node in modes
        for gpus in combinations(range(GPUS), len(job.gpus))
        if may_be(modes, has, job, node, gpus) and not any(holders(has, node, gpu) for gpu in gpus)
    ]
    assert bool(plan.actions) == bool(free)  # of its own before any other
    beside = {
        other.id: worst
        for node, sharing in modes.items()
        for gpus in combinations(range(GPUS), len(job.gpus))
        if sharing and may_be(modes, has, job, node, gpus) and (some := holders(has, node, gpus[0]))
        for other in some[:1]
        if (worst := max(slower(job.name, other.name), slower(other.name, job.name))) <= sharing.slowdown
    }
    wider = decide(snap)
    if free or not beside:
        assert wider.actions == plan.actions
        assert free or not job.spec.share or not explain(snap, job.id).sharing.startswith("it may")
        return
    (start,) = started(wider).items()
    ((node, gpus),) = start[1]
    (other,) = holders(has, node, gpus[0])
    assert beside[other.id] == min(beside.values())
    assert f"job {other.id}" in explain(snap, job.id).sharing


# -- by example

OFF, TURNS = None, SharingSettings(mode="time-slicing", slowdown=0.3)
RUNS = Has("r", "ann", "calm", 20, (0, 1, 2), "a", end=NOW + 100)


def one_waits(job: Has, *, has: list[Has] | None = None, mode: SharingSettings | None = TURNS) -> Snapshot:
    return snapshot_of({"a": mode}, [RUNS] if has is None else has, [job])


def test_a_gpu_that_two_have_counts_once_and_comes_free_with_the_last() -> None:
    late = Has("late", "ann", "calm", 20, (0,), "a", end=NOW + 500)
    snap = snapshot_of({"a": TURNS}, [RUNS, late], [])
    first, second = snap.running
    assert [view.allocation.parts[0].gpus for view in (first, second)] == [(1, 2), (0,)]
    assert [(view.shares, view.partner) for view in (first, second)] == [((0, 1, 2), "late"), ((0,), "r")]
    assert not first.spec or not first.spec.preemptible  # what it has would not come free
    assert sum(len(view.allocation.parts[0].gpus) for view in snap.running) == GPUS


def test_fair_share_counts_half_of_a_gpu_that_two_have_for_each() -> None:
    late = Has("late", "bob", "calm", 20, (0,), "a", end=NOW + 500)
    assert usage_of(snapshot_of({"a": TURNS}, [RUNS, late], [])) == {"ann": 2.5, "bob": 0.5}


@pytest.mark.parametrize("change", [{"ready": False}, {"memory_mib": None}])
def test_jobs_that_did_not_agree_or_were_launched_otherwise_do_not_share(change: dict[str, object]) -> None:
    alone = Has(**{**vars(RUNS), **change})  # type: ignore[arg-type]
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)), has=[alone])
    assert not decide(snap).actions
    assert explain(snap, "w").sharing == "it cannot share GPUs now: no running job shares its GPUs"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Has("w", "ann", "busy", 10, (0,)), "; a allows 5 %"),
        (Has("w", "ann", "calm", 30, (0,)), "with job r it needs 50M of GPU memory; GPU 0 of a has 40M for both"),
        (Has("w", "ann", "calm", 10, (0,), cores=6), "node a of job r: 5 of 6 cores free, needs 6 (1 held by jobs)"),
        (
            Has("w", "ann", "strange", 10, (0,)),
            "GPU 0 of a with job r (about 11 % slower, that one 11 %; estimated); a allows 5 %",
        ),
    ],
)
def test_why_it_does_not_share(job: Has, why: str) -> None:
    tight = SharingSettings(mode="time-slicing", slowdown=0.05)
    snap = one_waits(job, mode=tight)
    assert not decide(snap).actions
    said = explain(snap, "w").sharing
    assert said.startswith("it cannot share GPUs now: ")
    assert why in said


def test_two_on_a_gpu_and_one_partner_for_each() -> None:
    jobs = [Has(name, "ann", "calm", 10, (0,)) for name in ("x", "y", "z")]
    snap = snapshot_of({"a": TURNS}, [RUNS], jobs)

    def start(job: str, gpu: int) -> Start:
        part = NodeAllocation(rank=0, node="a", gpus=(gpu,), cores=1, memory_mib=1)
        return Start(job, Allocation(job, (part,)))

    _, (third, other) = check(Plan(actions=(start("x", 0), start("y", 0), start("z", 1))), snap)
    assert third.why == "GPU 0 of a is held by job x: job x shares its GPUs with job r already"
    assert other.why == "GPU 1 of a is held by job r: job r shares its GPUs with job x already"
    (where,) = snap.nodes
    unknown = msgspec.structs.replace(snap, nodes=(msgspec.structs.replace(where, shareable={1: MIB}),))
    sound, (refused,) = check(Plan(actions=(start("x", 0), start("y", 1))), unknown)
    assert refused.why.endswith("GPU 0 of a cannot be shared now: its memory is unknown, or a foreign process uses it")
    assert list(started(sound)) == ["y"]
    alone = snapshot_of({"a": TURNS}, [Has("r", "ann", "calm", None, (0,), "a", end=NOW + 9)], jobs)
    _, (refused,) = check(Plan(actions=(start("x", 0),)), alone)
    assert refused.why == "GPU 0 of a is held by job r: which does not share its GPUs"


@pytest.mark.parametrize(
    ("limit", "cores", "shares"), [(90, 1, True), (110, 1, False), (90, 4, True), (90, 5, True), (110, 0, False)]
)
def test_the_first_of_the_queue_is_not_held_up(limit: int, cores: int, shares: bool) -> None:
    """It needs all GPUs, which r gives back at 100 s; a job beside r has released them by then."""
    first = Has("first", "bob", "calm", None, (0, 1, 2))
    job = Has("w", "ann", "calm", 10, (0,), cores=cores, limit=limit)
    snap = snapshot_of({"a": TURNS}, [RUNS], [first, job])
    assert bool(started(decide(snap))) == shares
    said = explain(snap, "w").sharing
    assert said.startswith("it may share" if shares else "it does not share")
    assert shares or said.endswith("job first, ahead of it, would start later")


def test_cores_that_the_first_of_the_queue_will_need_are_kept_for_it() -> None:
    """It starts when x goes, with the cores that are free now; r stays for longer."""
    has = [
        Has("x", "bob", "calm", None, (0,), "a", end=NOW + 50),
        Has("r", "ann", "calm", 20, (1, 2), "a", end=NOW + 900),
    ]
    first = Has("first", "bob", "calm", None, (0,), cores=5)
    for cores, shares in ((1, False), (0, True)):
        snap = snapshot_of({"a": TURNS}, has, [first, Has("w", "ann", "calm", 10, (1,), cores=cores)])
        assert bool(started(decide(snap))) == shares


def test_it_shares_on_no_node_that_it_may_not_use() -> None:
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)))
    (job,) = snap.pending
    for more in ({"exclude": ("a",)}, {"nodelist": ("b",)}, {"gpu_types": ("V100",)}):
        other = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, **more))
        asked = msgspec.structs.replace(snap, pending=(other,))
        assert not decide(asked).actions
    failed = msgspec.structs.replace(snap, pending=(msgspec.structs.replace(job, excluded_nodes=("a",)),))
    assert not decide(failed).actions
    assert explain(failed, "w").sharing.endswith("node a: an earlier attempt failed here")


def test_a_start_takes_cores_from_later_jobs() -> None:
    has = [Has(f"r{gpu}", "ann", "calm", 20, (gpu,), "a", end=NOW + 100) for gpu in range(3)]
    jobs = [Has(f"w{n}", "ann", "calm", 10, (0,), cores=cores) for n, cores in enumerate((2, 2, 1))]
    snap = snapshot_of({"a": TURNS}, has, jobs)
    wider, rejected = check(decide(snap), snap)
    assert not rejected
    assert started(wider) == {"w0": [("a", (0,))], "w2": [("a", (1,))]}


def test_a_started_job_is_no_longer_the_head() -> None:
    has = [Has(f"r{gpu}", "ann", "calm", 20, (gpu,), "a", end=NOW + 100) for gpu in range(3)]
    jobs = [Has(f"w{n}", "ann", "calm", 10, (0,), limit=limit) for n, limit in enumerate((500, 150, 150))]
    snap = snapshot_of({"a": TURNS}, has, jobs)
    assert list(started(decide(snap))) == ["w0", "w1", "w2"]


def test_it_goes_where_the_slower_of_the_two_loses_least() -> None:
    kinds = enumerate(("rude", "calm", "rude"))
    has = [Has(f"r{gpu}", "ann", kind, 20, (gpu,), "a", end=NOW + 100) for gpu, kind in kinds]
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)), has=has)
    assert started(decide(snap)) == {"w": [("a", (1,))]}


def test_a_job_that_would_delay_the_head_goes_elsewhere() -> None:
    """Beside short it would lose less; but the first of the queue waits for what short gives back."""
    has = [
        Has("short", "ann", "calm", 20, (0, 1, 2), "a", end=NOW + 100),
        Has("long", "ann", "rude", 20, (0, 1, 2), "b", end=NOW + 900),
    ]
    waits = [Has("first", "bob", "calm", None, (0, 1, 2)), Has("w", "ann", "calm", 10, (0,), limit=500)]
    snap = snapshot_of({"a": TURNS, "b": TURNS}, has, waits)
    assert started(decide(snap)) == {"w": [("b", (0,))]}


def test_a_gpu_that_a_newcomer_keeps_longer_comes_free_with_it() -> None:
    """At 200 s the first has its three: of r, of early, who has one of r's until 150, and of q."""
    has = [
        Has("r", "ann", "calm", 20, (0, 1), "a", end=NOW + 100),
        Has("q", "bob", "calm", None, (2,), "a", end=NOW + 200),
        Has("s", "ann", "calm", 20, (0, 1, 2), "b", end=NOW + 900),
    ]
    waits = [
        Has("first", "bob", "calm", None, (0, 1, 2)),
        Has("early", "ann", "calm", 10, (0,), limit=150), Has("late", "ann", "calm", 10, (0,), limit=500),
    ]  # fmt: skip
    snap = snapshot_of({"a": TURNS, "b": TURNS}, has, waits)
    assert started(decide(snap)) == {"early": [("a", (0,))], "late": [("b", (0,))]}


def test_of_a_jobs_gpus_it_shares_those_that_are_well() -> None:
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)))
    (where,) = snap.nodes
    bad = msgspec.structs.replace(where, blocked={0: "BUSY: x"}, shareable={0: MIB, 2: MIB})
    snap = msgspec.structs.replace(snap, nodes=(bad,))
    assert started(decide(snap)) == {"w": [("a", (2,))]}
    none = msgspec.structs.replace(bad, shareable={0: MIB})
    snap = msgspec.structs.replace(snap, nodes=(none,))
    assert not decide(snap).actions
    assert explain(snap, "w").sharing.endswith("job r has 0 GPUs to share; it requests 1")


def test_kinds_are_counted_by_partition() -> None:
    """As many as are considered wait in p, for more memory than there is; the one in q shares nevertheless."""
    has = [RUNS, Has("s", "ann", "calm", 20, (0, 1, 2), "b", end=NOW + 100)]
    many = [Has(f"{n:02}", "ann", "calm", MIB + n, (0,)) for n in range(MAX_KINDS)]
    snap = snapshot_of({"a": TURNS, "b": TURNS}, has, [*many, Has("w", "ann", "calm", 10, (0,))])
    (a, b), (r, s), (*jobs, w), policy = snap.nodes, snap.running, snap.pending, snap.policies["p"]
    there = {"partition": "q"}
    w, s = (msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, **there)) for of in (w, s))
    nodes = a, msgspec.structs.replace(b, **there)
    policies = {"p": policy, "q": policy}
    snap = msgspec.structs.replace(snap, nodes=nodes, running=(r, s), pending=(*jobs, w), policies=policies)
    assert started(decide(snap)) == {"w": [("b", (0,))]}


def test_the_head_delays_no_job_by_sharing() -> None:
    jobs = [Has("w", "ann", "calm", 10, (0,), limit=500), Has("second", "bob", "calm", None, (0, 1, 2))]
    snap = snapshot_of({"a": TURNS}, [RUNS], jobs)
    assert started(decide(snap)) == {"w": [("a", (0,))]}


def test_no_job_shares_with_one_that_is_ending_or_being_preempted() -> None:
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)))
    assert started(decide(snap)) == {"w": [("a", (0,))]}
    ending = msgspec.structs.replace(snap.running[0], state=JobState.COMPLETING)
    assert not decide(msgspec.structs.replace(snap, running=(ending,))).actions
    assert [start.job_id for start in after(snap)] == ["w"]
    assert not after(snap, Preempt("r"))


def test_jobs_that_neither_policy_nor_hold_let_start_do_not_share() -> None:
    snap = one_waits(Has("w", "ann", "calm", 10, (0,)))
    for code in (POLICY, LIMIT, NOT_AVAILABLE):
        assert not after(snap, code=code)
    held = msgspec.structs.replace(snap, pending=(msgspec.structs.replace(snap.pending[0], held_by="user"),))
    assert not decide(held).actions


def test_tasks_of_an_array_share_within_its_bound() -> None:
    jobs = [Has(f"t_{i}", "ann", "calm", 10, (0,)) for i in range(3)]
    twice = [Has(f"r{g}", "ann", "calm", 20, (g,), "a", end=NOW + 100) for g in range(3)]
    snap = snapshot_of({"a": TURNS}, twice, jobs)
    bound = [msgspec.structs.replace(view, array_id="t", array_room=2) for view in snap.pending]
    snap = msgspec.structs.replace(snap, pending=tuple(bound))
    wider, rejected = check(decide(snap), snap)
    assert not rejected
    assert started(wider) == {"t_0": [("a", (0,))], "t_1": [("a", (1,))]}


def test_it_may_share_with_one_that_starts_in_the_same_decision() -> None:
    jobs = [Has("one", "ann", "calm", 10, (0, 1, 2)), Has("two", "ann", "calm", 10, (0, 1))]
    snap = snapshot_of({"a": TURNS}, [], jobs)
    wider, rejected = check(decide(snap), snap)
    assert not rejected
    assert started(wider) == {"one": [("a", (0, 1, 2))], "two": [("a", (0, 1))]}


def test_without_sharing_in_the_inventory_nothing_is_asked() -> None:
    class Never(dict[str, JobClassEstimate]):
        def get(self, kind: str, default: object = None) -> JobClassEstimate:  # type: ignore[override]
            raise AssertionError(kind)

    snap = one_waits(Has("w", "ann", "calm", 10, (0,)), mode=OFF)
    snap = msgspec.structs.replace(snap, beliefs=Never())
    assert not decide(snap).actions
    assert explain(snap, "w").sharing == ""


def test_jobs_of_which_nothing_is_known_share_only_where_a_site_allows_much() -> None:
    for slowdown, starts in ((0.3, 0), (0.6, 0), (0.65, 1)):
        job, other = Has("w", "ann", "x", 10, (0,)), Has("r", "ann", "y", 10, (0, 1, 2), "a", end=NOW + 100)
        snap = one_waits(job, has=[other], mode=SharingSettings(mode="time-slicing", slowdown=slowdown))
        assert len(decide(snap).actions) == starts
