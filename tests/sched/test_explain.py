"""The answers of `why`."""

from __future__ import annotations

import pytest

from gpusched.model.jobs import Dependency, DependencyKind
from gpusched.model.plan import ReasonCode
from gpusched.model.snapshot import NodeView, PendingView, RunningView
from gpusched.sched.advice import next_steps, refuted
from gpusched.sched.alone import SingleJobView
from gpusched.sched.decide import ask, decide
from gpusched.sched.explain import explain
from gpusched.sched.tally import shortfall_of
from gpusched.sched.text import jobs_ahead
from tests.sched.reserved import of, reservation, with_reservations
from tests.sched.worlds import NOW, node, pending, running, snapshot

HOUR = 3600


def test_the_issue_example() -> None:
    blocked = {3: "BUSY: pid 4711 of alice", 4: "BUSY: pid 4711 of alice", 5: "LOST: fell off the bus"}
    nodes = [
        node("dgx001", blocked=blocked),
        node("dgx002", available=False, unavailable_reason="DRAINED: fan"),
        node("v1", gpus=8, partition="V100"),
    ]
    busy = [running("x", {"dgx001": (0, 1, 2)}, NOW + 3 * HOUR + 20 * 60)]
    why = explain(snapshot(nodes, [pending("j", 4)], busy), "j")
    assert why.reason.code == ReasonCode.RESOURCES
    assert why.reason.message == (
        "waits for 4 GPUs on one node; most free on one node: 2 (dgx001); can start within 3:20:00, by time limits"
    )
    assert (why.position, why.queue_length) == (1, 1)
    assert [(v.node, v.fits, v.dimension, v.text) for v in why.nodes] == [
        (
            "dgx001",
            False,
            "gpus",
            "2 of 8 GPUs free, needs 4 (3 held by jobs, 2 foreign: pid 4711 of alice, 1 LOST)",
        ),
        ("dgx002", False, "unavailable", "not available (DRAINED: fan)"),
    ]
    assert why.next_steps == (
        "wait: at most 3:20:00 (job x on dgx001 frees 3 GPUs)",
        "request at most 2 GPUs per node (--gpus-per-node 2)",
        "partition V100 could run it now",
        "resume dgx002 (drained: fan)",
    )


def test_broken_nodes_come_first_where_only_they_would_do() -> None:
    nodes = [
        node("a", blocked={3: "BUSY: pid 4711 of alice", 4: "LOST: fell off the bus"}),
        node("b", available=False, unavailable_reason="DOWN: no answer for 0:05:00"),
    ]
    why = explain(snapshot(nodes, [pending("j", 8)]), "j")
    assert why.reason.code == ReasonCode.REQ_NODE_NOT_AVAIL
    assert why.next_steps == (
        "end the foreign process on GPU 3 of a (BUSY: pid 4711 of alice)",
        "repair GPU 4 of a (LOST: fell off the bus)",
        "bring back b (down: no answer for 0:05:00)",
        "request at most 6 GPUs per node (--gpus-per-node 6)",
    )
    assert why.position is None


@pytest.mark.parametrize(
    ("fields", "code", "step"),
    [
        ({"held_by": "user"}, ReasonCode.JOB_HELD_USER, "release the hold: gpusched release j"),
        (
            {"held_by": "admin"},
            ReasonCode.JOB_HELD_ADMIN,
            "ask an administrator to release the hold: gpusched release j",
        ),
        ({"eligible_time": NOW + 60}, ReasonCode.BEGIN_TIME, "wait 0:01:00"),
        ({"dependency": "never"}, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "cancel it: gpusched cancel j"),
        (
            {"dependency": "waiting", "dependencies": (Dependency(DependencyKind.AFTEROK, "y"),)},
            ReasonCode.DEPENDENCY,
            "wait for job y (afterok)",
        ),
        ({"array_id": "j", "array_room": 0}, ReasonCode.ARRAY_TASK_LIMIT, "wait for a task of its array to end"),
        (
            {"partition": "zz"},
            ReasonCode.PARTITION_UNKNOWN,
            "cancel it (gpusched cancel j) and submit it to one of: p",
        ),
        (
            {"exclude": ("a",)},
            ReasonCode.BAD_CONSTRAINTS,
            "allow more nodes: its nodelist or exclude leaves too few",
        ),
    ],
)
def test_single_causes(fields: dict, code: ReasonCode, step: str) -> None:
    why = explain(snapshot([node("a")], [pending("j", 1, **fields)]), "j")
    assert why.reason.code == code
    assert why.next_steps == (step,)


def test_a_job_too_large_for_a_node_can_be_spread() -> None:
    why = explain(snapshot([node("a"), node("b")], [pending("j", 16)]), "j")
    assert why.reason.code == ReasonCode.BAD_CONSTRAINTS
    assert why.next_steps == (
        "request at most 8 GPUs per node (--gpus-per-node 8)",
        "spread it over 2 nodes, if it supports that (-N 2 --gpus-per-node 8)",
    )


def test_a_job_is_spread_only_where_every_part_of_it_fits() -> None:
    """The parts are rounded up: 161 cores are 81 on each of two nodes, which have 80."""
    for field, most in (("cores_per_node", 160), ("memory_mib_per_node", 1 << 20)):
        for amount in (most, most + 1):
            job = pending("j", 16, **{field: amount})
            steps = explain(snapshot([node("a"), node("b")], [job]), "j").next_steps
            assert ("spread it over 2 nodes, if it supports that (-N 2 --gpus-per-node 8)" in steps) == (amount == most)


def test_steps_that_say_now_are_refuted_by_what_starts_now() -> None:
    there = "partition V100 could run it now"
    limit = "a time limit of at most 1:00:00 would let it start now (-t 1:00:00)"
    assert [refuted(there, starts) for starts in (set(), {"in V100"}, {"in A100"})] == [True, False, True]
    assert [refuted(limit, starts) for starts in (set(), {"with a time limit of 1:00:00"})] == [True, False]
    assert not refuted("partition V100 could run it", set()), "it does not say when"
    assert not refuted("wait 0:01:00", set())


def test_position_and_the_head() -> None:
    jobs = [pending("head", 8), *(pending(f"j{i}", 8, submit=1.0 + i) for i in range(3))]
    why = explain(snapshot([node("a")], jobs, [running("r", {"a": (0,)}, NOW + HOUR)]), "j2")
    assert why.reason.message == "3 jobs of equal or higher priority are ahead of it"
    assert (why.position, why.queue_length) == (4, 4)
    assert why.next_steps == (
        "wait for job head, first in the queue; it can start in 1:00:00 (job r on a frees 1 GPU)",
    )


@pytest.mark.parametrize("place", ["first-fit", "contention"])
def test_backfill_names_the_limit_that_would_do(place: str) -> None:
    jobs = [pending("head", 8), pending("j", 4, limit=2 * HOUR, submit=1.0)]
    busy = [running("r", {"a": (0,)}, NOW + HOUR)]
    why = explain(snapshot([node("a")], jobs, busy, place=place, backfill="easy"), "j")
    assert why.reason.code == ReasonCode.BACKFILL
    assert why.reason.message == "fits now, but would delay job head, which can start in 1:00:00"
    assert why.next_steps == ("a time limit of at most 1:00:00 would let it start now (-t 1:00:00)",)


def test_nodes_say_cores_memory_and_what_bars_them() -> None:
    nodes = [node("a"), node("b"), node("c"), node("d", memory_mib=65536), node("e")]
    busy = [running("r", {"a": (0,)}, NOW + HOUR, cores=64)]
    job = pending("j", 4, cores_per_node=20, memory_mib_per_node=128 << 10, exclude=("b",), excluded_nodes=("c",))
    texts = {v.node: v.text for v in explain(snapshot(nodes, [job], busy), "j").nodes}
    assert texts == {
        "a": "16 of 80 cores free, needs 20 (64 held by jobs)",
        "b": "excluded by the job",
        "c": "an earlier attempt failed here",
        "d": "64G of 64G memory free, needs 128G",
        "e": "fits: 8 of 8 GPUs and 80 of 80 cores free",
    }


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"gpus": 1, "nodelist": ("z",)}, "needs 1 node it may use; 0 exist"),
        ({"gpus": 1, "nodes": 2, "nodelist": ("a",)}, "needs 2 nodes it may use; 1 exists"),
        ({"gpus": 1, "nodes": 3, "exclude": ("b",)}, "needs 3 nodes it may use; 2 exist"),
        ({"gpus": 9}, "needs 9 GPUs on one node; most on one node: 8 (a)"),
        ({"gpus": 9, "exclude": ("a",)}, "needs 9 GPUs on one node; most on one node: 8 (b)"),
        ({"gpus": 5, "nodes": 3}, "needs 5 GPUs on each of 3 nodes; 2 nodes have enough"),
        ({"gpus": 9, "nodes": 2}, "needs 9 GPUs on each of 2 nodes; no nodes have enough"),
        (
            {"gpus": 8, "cores_per_node": 81, "nodes": 2},
            "needs 81 cores with 8 GPUs on each of 2 nodes; 1 node has enough",
        ),
        ({"gpus": 4, "cores_per_node": 91}, "needs 91 cores with 4 GPUs on one node; most on one node: 90 (b)"),
        (
            {"gpus": 0, "cores_per_node": 91, "memory_mib_per_node": 9},
            "needs 91 cores on one node; most on one node: 90 (b)",
        ),
        (
            {"gpus": 1, "cores_per_node": 1, "memory_mib_per_node": 65 << 10},
            "needs 65G of memory with 1 GPU on one node; most on one node: 64G (a)",
        ),
        (
            {"gpus": 1, "cores_per_node": 90, "memory_mib_per_node": 33 << 10},
            "needs 33G of memory with 1 GPU on one node; most on one node: 32G (b)",
        ),
        ({"gpus": 7, "cores_per_node": 1}, "waits for 7 GPUs on one node; most free on one node: 6 (b)"),
        (
            {"gpus": 6, "cores_per_node": 87},
            "waits for 87 cores with 6 GPUs on one node; most free on one node: 86 (b)",
        ),
        (
            {"gpus": 0, "nodes": 3, "cores_per_node": 37},
            "waits for 37 cores on each of 3 nodes; 2 nodes have enough free",
        ),
        ({"gpus": 6, "nodes": 2, "cores_per_node": 1}, "waits for 6 GPUs on each of 2 nodes; 1 node has enough free"),
    ],
)  # fmt: skip
def test_missing_resources_are_the_same_in_every_message(job: dict, said: str) -> None:
    nodes = [
        node("a", memory_mib=64 << 10), node("b", cores=90, memory_mib=32 << 10),
        node("c", gpus=4, cores=40, memory_mib=16 << 10),
    ]  # fmt: skip
    busy = [running("r", {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3)}, 1e9, cores=4)]
    snap = snapshot(nodes, [pending("j", **{"memory_mib_per_node": 1} | job)], busy, backfill="skip")
    assert explain(snap, "j").reason.message == said
    assert decide(snap).reasons["j"].message == said


def test_nodes_that_are_not_available_are_named_and_do_not_count() -> None:
    nodes = [
        node("a", blocked={5: "LOST: fell off", 1: "BUSY: pid 7"}),
        node("b", available=False, unavailable_reason="DOWN: no answer"),
        node("c", available=False),
        node("d", gpus=2),
    ]
    why = explain(snapshot(nodes, [pending("j", 7)]), "j").reason
    assert why.message == (
        "needs 7 GPUs on one node; most usable on one node: 6 (a); not available: GPU 1 of a (BUSY: pid 7), "
        "GPU 5 of a (LOST: fell off), b (DOWN: no answer) and 1 more"
    )
    why = explain(snapshot(nodes, [pending("j", 2, nodes=3)]), "j").reason
    assert why.message.startswith("needs 3 nodes it may use; 2 usable; not available: GPU 1 of a")
    only = explain(snapshot(nodes[1:3], [pending("j", 7)]), "j").reason
    assert only.message == ("needs 1 node it may use; 0 usable; not available: b (DOWN: no answer), c (not available)")


def test_an_unknown_job_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        explain(snapshot([node("a")], []), "j")


def test_total_healthy_and_free_resources_of_a_node_and_their_holders() -> None:
    broken = {1: "LOST", 2: "BUSY: pid 4 of al", 3: "BUSY: pid 4 of al", 9: "OLD"}
    nodes = [node("n", blocked=broken), node("m", available=False)]
    busy = [running("r", {"n": (0, 1)}, NOW + 1, cores=77), running("s", {"m": ()}, NOW + 1, cores=2)]
    alone = SingleJobView(snapshot(nodes, [], busy))
    whole, left = (80, 512 << 10), 511 << 10
    assert [has for _, has in alone.nodes("total")] == [(8, *whole), (8, *whole)]
    assert [has for _, has in alone.nodes("usable")] == [(5, *whole), (-1, *whole)]
    assert [has for _, has in alone.nodes("free")] == [(4, 3, left), (-1, 78, left)]
    count = (nodes[0], (4, 3, 2048))
    assert shortfall_of(*count, (5, 1, 1)) == (
        "gpus", "4 of 8 GPUs free, needs 5 (1 held by jobs, 1 LOST, 2 foreign: pid 4 of al)",
    )  # fmt: skip
    assert shortfall_of(*count, (4, 4, 1)) == ("cores", "3 of 80 cores free, needs 4 (77 held by jobs)")
    assert shortfall_of(*count, (4, 3, 4096)) == ("memory", "2G of 512G memory free, needs 4G (510G held by jobs)")
    unusable = node("n", blocked={0: "UNUSABLE: Xid 79 (gone); repair it"})
    assert shortfall_of(unusable, (7, 80, 512 << 10), (8, 1, 1))[1] == (
        "7 of 8 GPUs free, needs 8 (1 UNUSABLE: Xid 79 (gone))"
    )  # fmt: skip
    over = (node("n"), (8, -2, -1024))
    assert shortfall_of(*over, (8, 1, 1)) == ("cores", "0 of 80 cores free, needs 1 (82 held by jobs)")
    assert shortfall_of(*over, (0, -2, 1024)) == ("memory", "0G of 512G memory free, needs 1G (513G held by jobs)")
    empty = (node("n"), (8, *whole))
    assert shortfall_of(*empty, (9, 1, 1)) == ("gpus", "8 of 8 GPUs free, needs 9")
    assert shortfall_of(*empty, (8, 81, 1)) == ("cores", "80 of 80 cores free, needs 81")
    assert shortfall_of(*empty, (8, 80, 513 << 10)) == ("memory", "512G of 512G memory free, needs 513G")


def test_when_a_job_alone_would_fit_and_thanks_to_whom() -> None:
    busy = [
        running("late", {"n": (0, 1)}, NOW + 100, cores=2),
        running("soon", {"n": (2, 3, 4), "m": (0,)}, NOW + 50, cores=40),
        running("over", {"m": (1, 2, 3, 4, 5, 6, 7)}, NOW - 5),
        running("gone", {"left": (0,)}, NOW + 1),
    ]
    nodes = [node("n", blocked={0: "LOST"}), node("m"), node("x", available=False), node("q", partition="q")]
    snap = snapshot(nodes, [], busy)

    def found(gpus: int, **more: object) -> tuple[float, str] | None:
        return SingleJobView(snap).earliest(pending("j", gpus, **more))  # type: ignore[arg-type]

    assert found(3) is None, "it fits now"
    assert found(4) == (NOW, "job over on m frees 7 GPUs")
    assert found(4, nodelist=("n",)) == (NOW + 50, "job soon on n frees 3 GPUs")
    assert found(7, nodelist=("n",)) == (NOW + 100, "job late on n frees 1 GPU")
    assert found(8, nodelist=("n",)) is None
    assert found(4, nodes=2) == (NOW + 50, "job soon on n frees 3 GPUs")
    assert found(1, cores_per_node=79, nodelist=("n",)) == (NOW + 100, "job late on n frees 1 GPU")
    assert found(1, memory_mib_per_node=511 << 10, nodelist=("n",)) == (NOW + 50, "job soon on n frees 3 GPUs")
    assert found(1, memory_mib_per_node=512 << 10, nodelist=("n",)) == (NOW + 100, "job late on n frees 1 GPU")
    assert found(1, nodelist=("x",)) is None


def test_which_jobs_count_in_queue_positions() -> None:
    jobs = [
        pending("none", 9),
        pending("full", 1, array_id="a", array_room=0),
        pending("room", 1, array_id="b", array_room=1),
        pending("plain", 8, submit=2.0),
        pending("held", 1, held_by="user"),
        pending("two", 8, nodes=2),
        pending("other", 1, partition="q"),
    ]
    snap = snapshot([node("n"), node("q", partition="q")], jobs)
    found = {job.id: explain(snap, job.id) for job in jobs}
    assert {name: why.position for name, why in found.items() if why.position is not None} == {
        "room": 1, "plain": 2, "other": 1,
    }  # fmt: skip
    assert [found[name].queue_length for name in ("none", "other")] == [2, 1]


def test_steps_are_exact_where_one_figure_is_in_the_way() -> None:
    def steps(code: ReasonCode, job: PendingView, *nodes: NodeView, busy: tuple[RunningView, ...] = (),
              ahead: tuple[PendingView, ...] = ()) -> list[str]:  # fmt: skip
        snap = snapshot(list(nodes), [*ahead, job], list(busy))
        answer = ask(snap, job.id, "p")._replace(queue=[*ahead, job])
        return next_steps(SingleJobView(snap), job, code, answer)

    small = node("n", cores=10, memory_mib=64 << 10)
    bad = ReasonCode.BAD_CONSTRAINTS
    assert steps(bad, pending("j", 1, cores_per_node=11), small) == ["request at most 10 cores per node"]
    assert steps(bad, pending("j", 1, memory_mib_per_node=65 << 10), small) == [
        "request at most 64G of memory per node"
    ]
    assert steps(bad, pending("j", 9, cores_per_node=10), small) == [
        "request at most 8 GPUs per node (--gpus-per-node 8)"
    ]
    assert steps(bad, pending("j", 9, cores_per_node=11), small) == [], "two figures: neither alone would help"
    assert steps(bad, pending("j", 9, nodes=2), node("n"), node("m", gpus=4)) == [
        "request at most 4 GPUs per node (--gpus-per-node 4)"
    ]
    assert steps(bad, pending("j", 12), node("n", gpus=4), node("m", gpus=4), node("o", gpus=4)) == [
        "request at most 4 GPUs per node (--gpus-per-node 4)", "spread it over 3 nodes, if it supports that (-N 3 "
        "--gpus-per-node 4)",
    ]  # fmt: skip
    q = [node(name, partition="q") for name in "ab"]
    assert steps(bad, pending("j", 8, nodes=2), *q) == ["partition q could run it"]
    assert steps(bad, pending("j", 8, nodes=3), *q) == []
    barred = pending("j", 8, nodelist=("z",), gpu_types=("A",), excluded_nodes=("y",))
    assert [s.partition(" ")[0] for s in steps(bad, barred, node("n"))] == ["allow", "accept", "see"]
    hour = (running("r", {"n": tuple(range(8))}, NOW + 3600),)
    assert steps(ReasonCode.RESOURCES, pending("j", 2), node("n"), busy=hour) == [
        "wait: at most 1:00:00 (job r on n frees 8 GPUs)"
    ]
    first = (pending("i", 3),)
    assert steps(ReasonCode.RESOURCES, pending("j", 2), node("n"), busy=hour, ahead=first)[0].startswith(
        "wait: at most 1:00:00 unless jobs ahead of it take the space"
    )
    assert steps(ReasonCode.PRIORITY, pending("j", 2), node("n"), busy=hour, ahead=first) == [
        "wait for job i, first in the queue; it can start in 1:00:00 (job r on n frees 8 GPUs)"
    ]
    assert steps(ReasonCode.PRIORITY, pending("j", 2), node("n"), ahead=first) == ["wait for job i, first in the queue"]
    assert steps(ReasonCode.BACKFILL, pending("j", 2), node("n"), busy=hour, ahead=first) == [
        "a time limit of at most 1:00:00 would let it start now (-t 1:00:00)"
    ]
    over = (running("r", {"n": tuple(range(8))}, NOW - 1),)
    assert steps(ReasonCode.BACKFILL, pending("j", 2), node("n"), busy=over, ahead=first) == []


def test_next_steps_name_only_effective_actions() -> None:
    def steps(*nodes: NodeView, gpus: int = 4) -> list[str]:
        snap = snapshot(list(nodes), [job := pending("j", gpus)])
        return next_steps(SingleJobView(snap), job, ReasonCode.REQ_NODE_NOT_AVAIL, ask(snap, "j", "p"))

    assert steps(node("n", available=False, unavailable_reason="DOWN: no answer")) == ["bring back n (down: no answer)"]
    assert steps(node("n", available=False)) == ["bring back n (not available)"]
    assert steps(node("n", available=False, unavailable_reason="drained")) == ["resume n (drained)"]
    assert steps(node("n", gpus=3, available=False)) == []
    foreign = {0: "BUSY: pid 7", 2: "LOST"}
    assert steps(node("n", gpus=4, blocked=foreign))[:2] == [
        "end the foreign process on GPU 0 of n (BUSY: pid 7)", "repair GPU 2 of n (LOST)",
    ]  # fmt: skip
    assert steps(node("n", gpus=6, blocked=foreign)) == [], "4 of 6 are well"
    assert len(steps(*(node(f"n{i}", available=False) for i in range(9)))) == 5


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (1, "1 job of equal or higher priority is ahead of it"), (2, "2 jobs of"), (99, "99 jobs of"),
        (100, "at least 100 jobs of"), (109, "at least 100 jobs of"), (999, "at least 990 jobs of"),
        (1000, "at least 1000 jobs of"), (12345, "at least 12000 jobs of"),
    ],
)  # fmt: skip
def test_the_number_of_jobs_ahead_is_rounded(ahead: int, said: str) -> None:
    """So that many jobs share few sentences, which do not change with every job that ends."""
    assert jobs_ahead(ahead).startswith(said)


def test_a_limit_is_advised_that_ends_before_a_reservation_where_that_alone_is_in_the_way() -> None:
    """The longest that would do: of two reservations the later one's begin."""

    def steps(*begins: float, taken: int = 0, own: bool = False, limit: int = 7200) -> list[str]:
        ones = [reservation(f"m{i}", [f"n{i}"], begin, begin + 600) for i, begin in enumerate(begins)]
        busy = [running("r", {f"n{i}": tuple(range(taken)) for i in range(len(begins))}, NOW + 60)] if taken else []
        job = pending("j", 8, limit=limit)
        job = of("m0", job) if own else job
        snap = with_reservations(snapshot([node(f"n{i}") for i in range(len(begins))], [job], busy), *ones)
        (job,) = snap.pending
        found = next_steps(SingleJobView(snap), job, ReasonCode.REQ_NODE_NOT_AVAIL, ask(snap, "j", "p"))
        return [step for step in found if "time limit" in step]

    assert steps(1800) == ["a time limit of at most 0:30:00 would let it start now (-t 0:30:00)"]
    assert steps(1800, 3600) == ["a time limit of at most 1:00:00 would let it start now (-t 1:00:00)"]
    assert steps(1.9) == ["a time limit of at most 0:00:01 would let it start now (-t 0:00:01)"]
    assert steps(0.9) == [], "no limit is so short"
    assert steps(1800, taken=1) == [], "its nodes are not free"
    assert steps(1800, own=True) == [], "it waits for the reservation itself"
    assert steps(-60) == []
    assert steps(7200) == []
