"""A job's needs in plain Python: sizes over more nodes, nodes that are excluded, what is short, and usage."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import ceil
from random import Random

import pytest
from msgspec.structs import replace

from gpusched.model.jobs import Elastic, JobSpec
from gpusched.model.snapshot import RunningView
from gpusched.sched.tally import (
    Amounts,
    at_size,
    barred,
    closed_reason,
    covers,
    excluded_by,
    held_gpus,
    need,
    over_more_nodes,
    shortfall_of,
    usage_of,
    with_held,
)
from tests.sched.reserved import of, reservation
from tests.sched.worlds import NOW, node, pending, running, snapshot


def spec_of(gpus: int, nodes: int, cores: int, memory: int, **more: object) -> JobSpec:
    job = pending("j", gpus, nodes, cores_per_node=cores, memory_mib_per_node=memory)
    return replace(job.spec, **more)


@pytest.mark.parametrize(("gpus", "nodes"), [(8, 1), (6, 2), (4, 3), (1, 4), (3, 1), (0, 1)])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 6, 12, 13])
def test_a_job_over_more_nodes_has_as_many_gpus_and_no_less_of_all_else(gpus: int, nodes: int, most: int) -> None:
    spec = spec_of(gpus, nodes, 5, 7)
    found = list(over_more_nodes(spec, most))
    expected = [n for n in range(1, most + 1) if n > nodes and gpus and nodes * gpus % n == 0 and n <= nodes * gpus]
    assert [one.nodes for one in found] == expected
    for one in found:
        whole = [amount * nodes for amount in (gpus, 5, 7)]
        assert need(one) == tuple(ceil(amount / one.nodes) for amount in whole)
        assert all(isinstance(amount, int) for amount in need(one))


def test_a_resizable_job_has_the_most_cores_that_so_many_nodes_have_then_the_most_memory() -> None:
    """Against all amounts there are, tried one by one."""
    rng = Random(5)
    elastic = Elastic(sizes=(2, 4), base_gpus=2, base_cores=6, base_memory_mib=6, cores=(2, 12), memory_mib=(4, 12))
    spec = spec_of(1, 2, 3, 3, elastic=elastic)
    fitted = Counter[bool]()
    for _ in range(150):
        rooms = {
            (rng.randint(1, 2), rng.randint(0, 6), rng.randint(0, 6)): rng.randint(1, 2)
            for _ in range(rng.randint(1, 4))
        }
        gpus, nodes = rng.choice([(2, 1), (2, 2), (4, 2), (4, 4)])
        found = at_size(spec, gpus, nodes, rooms)
        assert (found and need(found)) == fit_by_trial(spec, gpus, nodes, rooms)
        fitted[found is not None] += 1
    assert min(fitted.values()) > 20


def fit_by_trial(spec: JobSpec, gpus: int, nodes: int, rooms: dict[Amounts, int]) -> Amounts | None:
    most, least = need(spec.at_size(gpus, nodes)), need(spec.at_size(gpus, nodes, (0, 0)))

    def enough(*asked: int) -> bool:
        return (
            sum(count for room, count in rooms.items() if all(h >= n for h, n in zip(room, asked, strict=True)))
            >= nodes
        )

    ranges = (range(high, low - 1, -1) for low, high in zip(least[1:], most[1:], strict=True))
    for cores, memory in product(*ranges):
        if enough(most[0], cores, memory):
            return most[0], cores, memory
    return None


def test_amounts_cover_needs_if_each_is_enough() -> None:
    assert covers((4, 5, 6), (4, 5, 6))
    assert covers((5, 6, 7), (4, 5, 6))
    assert not any(covers(has, (4, 5, 6)) for has in ((3, 9, 9), (9, 4, 9), (9, 9, 5)))


@pytest.mark.parametrize(
    ("asked", "where", "why"),
    [
        ({}, {}, ""),
        ({}, {"partition": "q"}, "is in partition q"),
        ({"nodelist": ("a", "n")}, {}, ""),
        ({"nodelist": ("a",)}, {}, "not in its nodelist"),
        ({"exclude": ("a", "n")}, {}, "excluded by the job"),
        ({"exclude": ("a",)}, {}, ""),
        ({"gpu_types": ("A100", "V100")}, {"gpu_type": "V100"}, ""),
        ({"gpu_types": ("A100", "H100")}, {"gpu_type": "V100"}, "has V100 GPUs, not A100 or H100"),
        ({"gpu_types": ("A100",)}, {}, "has GPUs of a type the inventory does not name, not A100"),
        ({"exclusive": True}, {}, ""),
        ({"exclusive": False}, {"cores": 79}, ""),
        *(
            ({"exclusive": True}, {key: size + more}, "differs in size from the whole nodes it requests")
            for key, size in (("gpus", 8), ("cores", 80), ("memory_mib", 512 << 10))
            for more in (-1, 1)
        ),
    ],
)
def test_why_a_node_is_not_for_a_job(asked: dict[str, object], where: dict[str, object], why: str) -> None:
    job = pending("j", 8, cores_per_node=80, memory_mib_per_node=512 << 10)
    spec = replace(job.spec, **asked)
    assert excluded_by(spec, node("n", **where)) == why  # type: ignore[arg-type]
    assert barred(replace(job, spec=spec, excluded_nodes=("n",)), node("n", **where)) == (  # type: ignore[arg-type]
        why or "an earlier attempt failed here"
    )


def test_a_job_of_a_reservation_may_use_the_nodes_of_that_one() -> None:
    one, other = reservation("one", ["n"], 0, 60), reservation("other", ["n"], 100, 160)
    job = replace(of("one", pending("j", 1)), reserved=one)
    assert [barred(job, node("n", reservations=those)) for those in ((other, one), (one,), (other,), ())] == [
        "", "", "is not in reservation one", "is not in reservation one",
    ]  # fmt: skip
    assert closed_reason(job, node("n", reservations=(one,)), NOW) == (
        "is reserved (reservation one) for another 0:01:00"
    ), "it lasts too long"
    assert closed_reason(job, node("n", partition="q", reservations=(one,)), NOW) == "is in partition q"
    assert closed_reason(pending("j", 1), node("n"), NOW) == ""
    closed = closed_reason(pending("j", 1), node("n", reservations=(other,)), NOW)
    assert closed == "is reserved (reservation other) in 0:01:40, for 0:01:00"


BLOCKED = {0: "BUSY: pid 4 of alice", 1: "BUSY: pid 4 of alice", 2: "LOST: fell off", 3: "UNUSABLE: no driver; reboot"}


@pytest.mark.parametrize(
    ("free", "needs", "found"),
    [
        ((3, 9, 99), (4, 1, 1), ("gpus", "3 of 8 GPUs free, needs 4 (5 held by jobs)")),
        ((0, 0, 0), (1, 1, 1), ("gpus", "0 of 8 GPUs free, needs 1 (8 held by jobs)")),
        ((4, 9, 99), (4, 10, 100), ("cores", "9 of 80 cores free, needs 10 (71 held by jobs)")),
        ((4, -1, 99), (4, 1, 100), ("cores", "0 of 80 cores free, needs 1 (81 held by jobs)")),
        ((4, 80, 99), (4, 81, 100), ("cores", "80 of 80 cores free, needs 81")),
        ((4, 9, 1024), (4, 9, 2048), ("memory", "1G of 512G memory free, needs 2G (511G held by jobs)")),
        ((4, 9, -1024), (4, 9, 2048), ("memory", "0G of 512G memory free, needs 2G (513G held by jobs)")),
        ((4, 9, 512 << 10), (4, 9, 513 << 10), ("memory", "512G of 512G memory free, needs 513G")),
    ],
)
def test_what_a_node_is_short_of(free: Amounts, needs: Amounts, found: tuple[str, str]) -> None:
    assert shortfall_of(node("n"), free, needs) == found


@pytest.mark.parametrize(
    ("free", "gone"),
    [
        (4, "2 foreign: pid 4 of alice, 1 LOST, 1 UNUSABLE: no driver"),
        (3, "1 held by jobs, 2 foreign: pid 4 of alice, 1 LOST, 1 UNUSABLE: no driver"),
    ],
)
def test_blocked_gpus_are_told_from_those_of_jobs(free: int, gone: str) -> None:
    where = node("n", blocked=BLOCKED | {8: "LOST"})
    assert shortfall_of(where, (free, 9, 9), (8, 1, 1)) == ("gpus", f"{free} of 8 GPUs free, needs 8 ({gone})")


def shared(job: RunningView, partner: str, shares: tuple[int, ...]) -> RunningView:
    return replace(job, partner=partner, shares=shares)


def test_a_gpu_that_two_jobs_share_is_half_of_each() -> None:
    """Only where both are running, and only the GPUs that both have."""
    a, b = (running(name, {"n": (0, 1, 2)}, NOW + 60, user=name) for name in "ab")
    one, two = shared(a, "b", (0, 1, 2)), shared(b, "a", (0, 1, 3))
    assert [gpus for _, gpus in held_gpus([one, two])] == [2, 2]
    assert [gpus for _, gpus in held_gpus([one])] == [3]
    assert [gpus for _, gpus in held_gpus([one, shared(b, "a", ())])] == [3, 3]
    assert [gpus for _, gpus in held_gpus([a, b])] == [3, 3]
    assert with_held({"a": 1.5, "c": 2.0}, [("a", 2), ("b", 0.5), ("a", 1)]) == {"a": 4.5, "b": 0.5, "c": 2.0}
    assert usage_of(snapshot([node("n")], [], [one, two], usage={"a": 1.0, "c": 4.0})) == {"a": 3.0, "b": 2.0, "c": 4.0}
