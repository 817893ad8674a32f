"""Small examples, exact."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from benchmarks.decide import breakdown, build
from gpusched.model.plan import ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.units import local_clock
from gpusched.sched.alone import in_order
from gpusched.sched.decide import decide
from gpusched.sched.gpus import links_matrix, nearest_gpus
from gpusched.sched.place import sort_key
from gpusched.sched.state import BEST_FIT, SPREAD, PlacementRequest, seed_words
from gpusched.sched.text import jobs_ahead
from tests.sched.reserved import reservation, with_reservations
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, started

HOUR = 3600
# GIST Table 2, partition V100: flavor -> (nodes, GPUs, cores, MiB per node, hours)
GIST = {
    "s": (1, 2, 20, 131072, 72),
    "m": (1, 4, 40, 262144, 168),
    "l": (1, 8, 80, 524288, 336),
    "f": (2, 8, 80, 524288, 504),
}
# DGX-1 with V100: NVLink pairs of the hybrid cube mesh, and those with two links
DOUBLE = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
SINGLE = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}


def cube_mesh() -> dict[int, dict[int, int]]:
    def closeness(a: int, b: int) -> int:
        pair = (min(a, b), max(a, b))
        return 5 if pair in DOUBLE else 4 if pair in SINGLE else 1

    return {a: {b: closeness(a, b) for b in range(8) if b != a} for a in range(8)}


def gist(flavors: str, **policy: str):
    jobs = []
    for i, flavor in enumerate(flavors):
        nodes, gpus, cores, memory, hours = GIST[flavor]
        more = {"cores_per_node": cores, "memory_mib_per_node": memory}
        jobs.append(pending(f"{i}{flavor}", gpus, nodes, hours * HOUR, float(i), **more))
    return snapshot([node("dgx1"), node("dgx2")], jobs, **policy)


def where(plan) -> dict[str, list[str]]:
    return {job: [name for name, _ in parts] for job, parts in started(plan).items()}


@pytest.mark.parametrize("order", ["fifo", "sjf"])
def test_jobs_of_slurm_go_by_its_priority_then_by_time_then_by_number(order: str) -> None:
    """Where the policy's own order leaves that open."""
    last = ["100", "36", "36_10", "36_2", "9", "36_2~2", "36+1", "36+0"]
    jobs = [pending(job, 8, submit=5.0) for job in last]
    jobs += [pending("101", 8, submit=4.0), pending("102", 8, submit=9.0, standing=7)]
    jobs += [pending("103", 8, limit=60, submit=9.0)]
    expected = ["102", "101", "9", "36", "36+0", "36+1", "36_2", "36_2~2", "36_10", "100"]
    expected = ["103", *expected] if order == "sjf" else [*expected, "103"]
    snap = snapshot([node(f"n{i:02d}") for i in range(len(jobs))], jobs, order=order)
    assert [job.id for job in in_order(snap, "p")] == expected
    placed = where(decide(snap))
    assert sorted(placed, key=placed.__getitem__) == expected


def test_gist_largest_first_packs_what_fifo_cannot() -> None:
    assert where(decide(gist("ssml", order="ljf", backfill="skip"))) == {
        "3l": ["dgx1"],
        "2m": ["dgx2"],
        "0s": ["dgx2"],
        "1s": ["dgx2"],
    }
    assert where(decide(gist("ssml"))) == {"0s": ["dgx1"], "1s": ["dgx1"], "2m": ["dgx1"], "3l": ["dgx2"]}


def test_gist_full_flavor_waits_for_both_servers_and_blocks() -> None:
    plan = decide(gist("sfs"))
    assert where(plan) == {"0s": ["dgx1"]}
    assert plan.reasons["1f"].code == ReasonCode.RESOURCES
    assert plan.reasons["1f"].message == (
        "waits for 8 GPUs on each of 2 nodes; 1 node has enough free; can start within 3-00:00:00, by time limits"
    )
    assert plan.reasons["2s"].message == "1 job of equal or higher priority is ahead of it"
    assert where(decide(gist("f"))) == {"0f": ["dgx1", "dgx2"]}


@pytest.mark.parametrize(("place", "expected"), [("first-fit", "a"), ("best-fit", "b"), ("spread", "c")])
def test_place_rules(place: str, expected: str) -> None:
    busy = [running("r1", {"a": (0, 1)}, 9e9), running("r2", {"b": (0, 1, 2, 3)}, 9e9)]
    snap = snapshot([node("a"), node("b"), node("c")], [pending("j", 4)], busy, place=place)
    assert where(decide(snap)) == {"j": [expected]}


def test_best_fit_compares_gpus_then_cores_then_memory() -> None:
    nodes = [node("a", cores=90), node("b", cores=80, memory_mib=600 << 10), node("c", cores=80)]
    assert where(decide(snapshot(nodes, [pending("j", 8)], place="best-fit"))) == {"j": ["c"]}


@pytest.mark.parametrize(("rule", "least"), [(BEST_FIT, True), (SPREAD, False)])
def test_nodes_are_ordered_by_gpus_then_cores_then_memory_exactly(rule: int, least: bool) -> None:
    """Against the order of tuples, over close and far figures."""
    rng = random.Random(1)
    request = PlacementRequest(lo=0, hi=1, parts=1, gpus=1, cores=2, memory=3 << 10, mask=-1)
    free = [
        (rng.randint(1, 8), rng.choice([2, 3, 80, 1023]), rng.choice([3072, 3073, 4096, 1 << 20])) for _ in range(60)
    ]
    keys = {of: sort_key(rule, *of, request) for of in free}
    assert sorted(keys, key=lambda of: keys[of]) == sorted(keys, reverse=not least)
    assert len(set(keys.values())) == len(keys) > 30


@pytest.mark.parametrize("short", ["gpus", "cores", "memory"])
def test_spread_compares_free_gpus_then_cores_then_memory(short: str) -> None:
    """Each node has more of all that comes later; the one with most of the first that differs is taken."""
    more = {"gpus": (7, 8), "cores": (70, 80), "memory": (500, 512)}
    sizes = [dict(zip(more, (v[side] for v in more.values()), strict=True)) for side in (1, 1)]
    sizes[0][short] = more[short][0]
    for later in list(more)[list(more).index(short) + 1 :]:
        sizes[1][later] = more[later][0]
    nodes = [node(n, s["gpus"], s["cores"], s["memory"] << 10) for n, s in zip("ab", sizes, strict=True)]
    assert where(decide(snapshot(nodes, [pending("j", 1)], place="spread"))) == {"j": ["b"]}
    expected = {"gpus": "a", "cores": "a", "memory": "a"}[short]
    assert where(decide(snapshot(nodes, [pending("j", 1)], place="best-fit"))) == {"j": [expected]}


def test_a_gang_takes_distinct_nodes_in_the_rules_order() -> None:
    busy = [running("r", {"a": (0,)}, 9e9), running("s", {"c": (0, 1)}, 9e9)]
    snap = snapshot([node("a"), node("b"), node("c")], [pending("j", 4, nodes=2)], busy, place="best-fit")
    assert where(decide(snap)) == {"j": ["c", "a"]}


def test_naive_draws_one_server_and_gives_up_for_the_cycle() -> None:
    busy = [running("r", {"a": tuple(range(8))}, 9e9)]
    outcomes = set()
    for seed in range(200):
        plan = decide(snapshot([node("a"), node("b")], [pending("j", 1)], busy, place="naive", seed=seed))
        outcomes.add(tuple(where(plan).get("j", ["-"])))
        if plan.reasons:
            assert plan.reasons["j"].code == ReasonCode.POLICY
    assert outcomes == {("b",), ("-",)}


def test_seeds_are_mixed_by_splitmix64() -> None:
    """The first numbers of the published generator, for the seeds 0 and 1234567."""
    assert [int(seed_words(seed)[0]) for seed in (0, 1234567)] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_naive_is_uniform() -> None:
    nodes = [node(n) for n in "abcd"]
    drawn = [where(decide(snapshot(nodes, [pending("j", 1)], place="naive", seed=s)))["j"][0] for s in range(2000)]
    assert all(430 < drawn.count(n) < 570 for n in "abcd")  # 500 +- 3.6 sigma


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fifo", "abc"), ("ljf", "bca"), ("sjf", "cab"), ("fairshare", "cba")],
)
def test_orders(order: str, expected: str) -> None:
    jobs = [
        pending("a", 1, limit=200, submit=1.0, user="heavy"),
        pending("b", 4, limit=300, submit=2.0, user="middle"),
        pending("c", 2, limit=100, submit=3.0, user="light"),
    ]
    usage = {"heavy": 10.0, "middle": 5.0, "light": 1.0}
    assert "".join(started(decide(snapshot([node("n")], jobs, order=order, usage=usage)))) == expected
    boosted = [*jobs[:2], pending("c", 2, limit=900, submit=9.0, user="heavy", priority=1)]
    assert next(iter(started(decide(snapshot([node("n")], boosted, order=order, usage=usage))))) == "c"


def test_largest_first_is_by_gpus_then_cores_then_memory() -> None:
    """Each of them as the whole job has it, on all its nodes."""
    jobs = [
        pending("a", 1, cores_per_node=2, memory_mib_per_node=900),
        pending("b", 1, submit=1.0, cores_per_node=2, memory_mib_per_node=1000),
        pending("c", 1, submit=2.0, cores_per_node=3, memory_mib_per_node=10),
        pending("d", 0, nodes=2, submit=3.0, cores_per_node=9, memory_mib_per_node=9000),
        pending("e", 0, submit=4.0, cores_per_node=18, memory_mib_per_node=17999),
        pending("f", 1, nodes=2, submit=5.0, cores_per_node=1, memory_mib_per_node=1),
    ]
    snap = snapshot([node("n"), node("m")], jobs, order="ljf")
    assert "".join(started(decide(snap))) == "fcbade"
    assert "".join(job.id for job in in_order(snap, "p")) == "fcbade"
    few = [pending("g", 0, memory_mib_per_node=5), pending("h", 0, nodes=2, memory_mib_per_node=3)]
    assert [job.id for job in in_order(snapshot([node("n")], few, order="ljf"), "p")] == ["h", "g"]


def test_estimates_go_before_limits_but_never_beyond_them() -> None:
    jobs = [
        pending("a", 1, limit=100, submit=1.0),
        pending("b", 1, limit=300, submit=2.0, estimate_s=50.0),
        pending("c", 1, limit=80, submit=3.0, estimate_s=900.0),
    ]
    assert "".join(started(decide(snapshot([node("n")], jobs, order="sjf-estimate")))) == "bca"
    assert "".join(started(decide(snapshot([node("n")], jobs, order="sjf")))) == "cab"


def test_fairshare_counts_what_is_held_now() -> None:
    jobs = [pending("a", 1, user="alice"), pending("b", 1, submit=1.0, user="bob")]
    snap = snapshot([node("n")], jobs, [running("r", {"n": (0, 1)}, 9e9, user="alice")], order="fairshare")
    assert list(started(decide(snap))) == ["b", "a"]
    for usage, first in ((1.5, "b"), (2.5, "a")):  # one hour for every GPU: alice's two count as two
        one = msgspec.structs.replace(snap, usage={"bob": usage})
        assert next(iter(started(decide(one)))) == first


def test_array_tasks_go_by_number_and_no_more_than_there_is_room_for() -> None:
    jobs = [pending(f"a_{i}", 1, array_id="a", array_room=3) for i in (10, 9, 2, 1)]
    plan = decide(snapshot([node("n")], [*jobs, pending("b", 1, submit=1.0)]))
    assert list(started(plan)) == ["a_1", "a_2", "a_9", "b"]
    assert plan.reasons["a_10"].code == ReasonCode.ARRAY_TASK_LIMIT


def test_each_array_has_its_own_bound() -> None:
    jobs = [pending(f"{a}_{i}", 1, array_id=a, array_room=room) for a, room in (("a", 3), ("b", 1), ("c", 2))
            for i in range(4)]  # fmt: skip
    plan = decide(snapshot([node("n"), node("m")], jobs))
    assert list(started(plan)) == ["a_0", "a_1", "a_2", "b_0", "c_0", "c_1"]


@pytest.mark.parametrize("names", ["pqr", "rqp"])
def test_ends_in_other_partitions_or_on_broken_nodes_help_no_head(names: str) -> None:
    """Of three partitions the middle one's head waits for its own node's job alone."""
    nodes = [node(f"n{p}", partition=p) for p in names]
    nodes.append(node("bad", partition="q", available=False, unavailable_reason="DOWN"))
    busy = [running(f"r{n.name}", {n.name: tuple(range(8))}, NOW + (HOUR if n.name == "nq" else 60)) for n in nodes]
    plan = decide(snapshot(nodes, [pending("j", 8, partition="q")], busy, backfill="easy"))
    assert plan.reasons["j"].message.endswith("within 1:00:00, by time limits")


def test_easy_lets_short_jobs_and_leftovers_pass_but_not_the_rest() -> None:
    """One node of 8: 4 held for an hour; the head wants 6; behind it 2 short, 2 that fit beside it, 2 that do not."""
    jobs = [
        pending("head", 6),
        pending("short", 2, limit=HOUR, submit=1.0),
        pending("beside", 2, limit=9 * HOUR, submit=2.0),
        pending("delays", 1, limit=9 * HOUR, submit=3.0),
    ]
    snap = snapshot([node("n")], jobs, [running("r", {"n": (0, 1, 2, 3)}, NOW + HOUR)], backfill="easy")
    plan = decide(snap)
    assert list(started(plan)) == ["short", "beside"]
    assert plan.reasons["head"].message.endswith("; can start within 1:00:00, by time limits")
    assert plan.reasons["delays"].code == ReasonCode.PRIORITY  # the node is full by its turn
    long_first = decide(
        snapshot(
            [node("n")], [jobs[0], pending("a", 3, limit=9 * HOUR, submit=1.0), jobs[3]], snap.running, backfill="easy"
        )
    )
    assert long_first.reasons["a"].code == ReasonCode.BACKFILL
    assert long_first.reasons["a"].message == "fits now, but would delay job head, which can start in 1:00:00"
    assert list(started(long_first)) == ["delays"]


def test_an_overrunning_job_is_expected_to_end_now() -> None:
    jobs = [pending("head", 8), pending("b", 4, limit=60, submit=1.0)]
    plan = decide(snapshot([node("n")], jobs, [running("r", {"n": (0, 1, 2, 3)}, NOW - 5)], backfill="easy"))
    assert plan.reasons["b"].code == ReasonCode.BACKFILL
    assert plan.reasons["head"].message.endswith("within 0:00:00, by time limits")


def test_a_job_that_cannot_run_now_blocks_no_other() -> None:
    nodes = [
        node("a"),
        node("b", available=False, unavailable_reason="DRAINED: fan"),
        node("c", blocked={3: "BUSY: pid 4711 of alice"}),
    ]
    jobs = [
        pending("both", 8, nodes=2),
        pending("huge", 16, submit=1.0),
        pending("held", 1, held_by="user", submit=2.0),
        pending("later", 1, eligible_time=NOW + 90, submit=3.0),
        pending("never", 1, dependency="never", dependency_message="job x failed", submit=4.0),
        pending("lost", 1, partition="nowhere", submit=4.5),
        pending("ok", 8, submit=5.0),
    ]
    plan = decide(snapshot(nodes, jobs))
    assert where(plan) == {"ok": ["a"]}
    assert {j: (r.code.value, r.message) for j, r in plan.reasons.items()} == {
        "both": (
            "ReqNodeNotAvail",
            "needs 8 GPUs on each of 2 nodes; 1 node has enough usable; not available: b (DRAINED: fan), "
            "GPU 3 of c (BUSY: pid 4711 of alice)",
        ),
        "huge": ("BadConstraints", "needs 16 GPUs on one node; most on one node: 8 (a)"),
        "held": ("JobHeldUser", "held by its user"),
        "later": ("BeginTime", f"not before {local_clock(NOW + 90, NOW)} (begin time)"),
        "never": ("DependencyNeverSatisfied", "job x failed"),
        "lost": ("PartitionUnknown", "there is no partition nowhere"),
    }


def test_a_job_without_gpus_does_not_run_on_a_node_that_is_not_there_either() -> None:
    """Nor does it stop others, though the node's cores look free."""
    nodes = [node("a", available=False, unavailable_reason="DOWN"), node("b", gpus=1, cores=2)]
    plan = decide(snapshot(nodes, [pending("j", 0, cores_per_node=9), pending("k", 1, submit=1.0)]))
    assert plan.reasons["j"].code == ReasonCode.REQ_NODE_NOT_AVAIL
    assert where(plan) == {"k": ["b"]}


def test_cores_and_memory_can_be_what_is_short() -> None:
    busy = [running("r", {"n": (0,)}, NOW + 60, cores=79)]
    plan = decide(snapshot([node("n")], [pending("j", 2)], busy))
    assert plan.reasons["j"].message == (
        "waits for 2 cores with 2 GPUs on one node; most free on one node: 1 (n); "
        "can start within 0:01:00, by time limits"
    )
    plan = decide(snapshot([node("n")], [pending("j", 1, memory_mib_per_node=600 << 10)]))
    assert plan.reasons["j"].message == "needs 600G of memory with 1 GPU on one node; most on one node: 512G (n)"


def test_memory_is_short_where_gpus_and_cores_are_not() -> None:
    """Of the nodes with room for the rest the one that comes nearest is named, and those with enough are counted."""
    nodes = [node("a", memory_mib=64 << 10), node("b", memory_mib=96 << 10), node("c", memory_mib=80 << 10)]
    wide = decide(snapshot(nodes, [pending("j", 1, nodes=2, memory_mib_per_node=90 << 10)]))
    assert wide.reasons["j"].code == ReasonCode.BAD_CONSTRAINTS
    assert wide.reasons["j"].message == ("needs 90G of memory with 1 GPU on each of 2 nodes; 1 node has enough")
    busy = [running("r", {"b": (0,)}, NOW + 60)]  # 1024 MiB of it
    plan = decide(snapshot(nodes, [pending("j", 1, memory_mib_per_node=96 << 10)], busy))
    assert plan.reasons["j"].message == (
        "waits for 96G of memory with 1 GPU on one node; most free on one node: 95G (b); "
        "can start within 0:01:00, by time limits"
    )


@pytest.mark.parametrize("first", [True, False])
def test_the_job_that_would_be_delayed_is_named_at_any_position(first: bool) -> None:
    head = [pending("head", 6)]
    others = [pending("starts", 1, limit=60, submit=0.5), pending("waits", 3, limit=9 * HOUR, submit=1.0)]
    jobs = head + others if first else others + head
    plan = decide(snapshot([node("n")], jobs, [running("r", {"n": (0, 1, 2, 3)}, NOW + HOUR)], backfill="easy"))
    assert list(started(plan)) == ["starts"]
    assert plan.reasons["waits"].message == "fits now, but would delay job head, which can start in 1:00:00"


def test_easy_hands_out_once_what_the_head_leaves_over() -> None:
    """The head leaves 2 of 8 GPUs, 10 of 16 cores, 10 of 16 GiB over: of three long jobs two pass and one waits."""
    head = pending("head", 6, memory_mib_per_node=6 << 10)
    cores, memory = {"cores_per_node": 5, "memory_mib_per_node": 16}, {"memory_mib_per_node": 5 << 10}
    for gpus, more in ((1, {}), (0, cores), (0, memory)):
        jobs = [head, *(pending(f"j{i}", gpus, limit=9 * HOUR, submit=1.0 + i, **more) for i in range(3))]
        free = node("n", cores=16, memory_mib=16 << 10)
        plan = decide(snapshot([free], jobs, [running("r", {"n": (0, 1, 2, 3)}, NOW + HOUR)], backfill="easy"))
        assert list(started(plan)) == ["j0", "j1"], more
        assert plan.reasons["j2"].code == ReasonCode.BACKFILL


def test_a_lost_gpu_under_a_running_job_does_not_come_back() -> None:
    busy = [running("r", {"n": (0, 1, 2, 3)}, NOW + 60)]
    plan = decide(snapshot([node("n", blocked={0: "LOST"})], [pending("j", 7), pending("k", 8)], busy))
    assert plan.reasons["j"].message.endswith("within 0:01:00, by time limits")
    assert plan.reasons["k"].code == ReasonCode.REQ_NODE_NOT_AVAIL


def test_ten_thousand_reasons_share_few_objects() -> None:
    jobs = [pending(f"j{i}", 8, submit=float(i)) for i in range(3000)]
    reasons = decide(snapshot([node("n")], jobs)).reasons
    assert len(reasons) == 2999
    assert len({id(r) for r in reasons.values()}) < 250
    assert jobs_ahead(99) == "99 jobs of equal or higher priority are ahead of it"
    assert jobs_ahead(1299) == "at least 1200 jobs of equal or higher priority are ahead of it"


def test_gpus_of_a_v100_dgx1_are_taken_by_nvlink() -> None:
    """The two halves 0-3 and 4-7 are fully linked; single jobs leave them whole."""
    snap = snapshot([node("n", links=cube_mesh())], [pending("j", 4)])
    assert started(decide(snap)) == {"j": [("n", (0, 1, 2, 3))]}
    pair = decide(snapshot([node("n", links=cube_mesh())], [pending("j", 2)]))
    ((_, gpus),) = started(pair)["j"]
    assert gpus in DOUBLE
    held = snapshot([node("n", links=cube_mesh())], [pending("j", 4)], [running("r", {"n": (1, 6)}, 9e9)])
    ((_, gpus),) = started(decide(held))["j"]
    assert gpus == (0, 3, 4, 7)  # the ring of double links and 3-7
    one = snapshot([node("n", links=cube_mesh())], [pending("j", 1)], [running("r", {"n": (0, 1, 2)}, 9e9)])
    assert started(decide(one)) == {"j": [("n", (3,))]}  # the lone one, not one of the island


def test_nearest_gpus_of_many_are_found_greedily() -> None:
    islands = {a: {b: 9 if a // 8 == b // 8 else 1 for b in range(24) if b != a} for a in range(24)}
    matrix = links_matrix(range(24), islands)
    assert nearest_gpus(matrix, tuple(range(3, 24)), 8) == tuple(range(8, 16))
    assert nearest_gpus(matrix, (1, 2), 5) == (1, 2)


def test_declared_indices_are_what_is_handed_out() -> None:
    from gpusched.model.snapshot import NodeView

    odd = NodeView(name="n", partition="p", gpus=(2, 5, 7), cores=8, memory_mib=99999)
    plan = decide(snapshot([odd], [pending("j", 2), pending("k", 1)], [running("r", {"gone": (0,), "n": (0,)}, 9e9)]))
    assert started(plan) == {"j": [("n", (2, 5))], "k": [("n", (7,))]}


def test_nothing_to_do() -> None:
    assert decide(snapshot([], [])).actions == ()
    plan = decide(snapshot([], [pending("j", 1)]))
    assert plan.reasons["j"].code == ReasonCode.BAD_CONSTRAINTS
    snap = snapshot([node("n")], [pending("j", 1)])
    assert after(snap, decide(snap)).pending == ()


def test_a_begin_in_another_year_has_its_year() -> None:
    plan = decide(snapshot([node("n")], [pending("later", 1, eligible_time=NOW + 400 * 24 * HOUR)]))
    assert re.fullmatch(r"not before \d+ Feb 1971 \d\d:\d\d \(begin time\)", plan.reasons["later"].message)


def test_the_benchmark_of_decisions_times_each_stage() -> None:
    snap = build(4, 20, 0.5, PolicySpec(name="b", place="best-fit", backfill="easy"), links=True)
    assert breakdown(snap, 1).keys() == {"nodes", "queue", "passes", "reasons", "starts"}


def test_next_tasks_of_an_array_count_as_jobs_ahead_while_its_first_holds_others_back() -> None:
    """Held back by a limit of its own it delays nobody."""
    busy = [running("r", {"a": (0,)}, NOW + 60)]
    jobs = [pending("a_1", 8, array_id="a", array_room=9, behind=4), pending("b", 8, submit=1.0, behind=2)]
    jobs += [pending("full_1", 1, submit=2.0, array_id="full", array_room=0, behind=7), pending("last", 8, submit=3.0)]
    reasons = decide(snapshot([node("a")], jobs, busy)).reasons
    assert reasons["b"].message.startswith("5 jobs of equal or higher priority")
    assert reasons["full_1"].code == ReasonCode.ARRAY_TASK_LIMIT
    assert reasons["last"].message.startswith("8 jobs of equal or higher priority")


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"gpus": 9}, ReasonCode.BAD_CONSTRAINTS, "needs 9 GPUs on one node; most on one node: 8 (a)"),
        ({"gpus": 8}, ReasonCode.REQ_NODE_NOT_AVAIL,
         "needs 8 GPUs on one node; most usable on one node: 7 (b); not available: a (fan), GPU 1 of b (LOST)"),
        ({"gpus": 7}, ReasonCode.RESOURCES, "waits for 7 GPUs on one node; most free on one node: 6 (b)"),
    ],
)  # fmt: skip
def test_what_is_short_is_counted_as_if_nothing_were_reserved_where_that_is_not_why(
    more: dict[str, int], code: ReasonCode, said: str
) -> None:
    """Of nodes that are declared, that are well, and that are free; node a has the most GPUs and is reserved."""
    nodes = [node("a", available=False, unavailable_reason="fan"), node("b", blocked={1: "LOST"}), node("c", 4)]
    busy = [running("r", {"b": (0,)}, NOW + 60)]
    snap = with_reservations(
        snapshot(nodes, [pending("j", **more)], busy, backfill="easy"),
        reservation("m", ["a", "c"], -60, 9000, maintenance=True),
    )
    found = decide(snap).reasons["j"]
    assert (found.code, found.message.partition("; can start")[0]) == (code, said)
