"""The messages of waiting jobs, word for word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpusched.model.limits import Bound, LimitRule
from gpusched.sched.limits import frees_at, hours, limit_message, releases_of_bounds
from gpusched.sched.text import (
    ALLOWED,
    CORES,
    GPUS,
    MEMORY,
    called,
    listed,
    not_available,
    rounded,
    scattered,
    shortage,
    starts_in,
    would_delay,
)
from tests.sched.worlds import NOW, node, running, snapshot

NEEDS = (4, 16, 65536)


@pytest.mark.parametrize(
    ("free", "dimension", "parts", "count", "nearest", "has", "said"),
    [
        ("free", ALLOWED, 1, 0, "", 0, "needs 1 node it may use; 0 free"),
        ("usable", ALLOWED, 3, 1, "", 0, "needs 3 nodes it may use; 1 usable"),
        ("there", ALLOWED, 2, 0, "", 0, "needs 2 nodes it may use; 0 exist"),
        ("there", ALLOWED, 2, 1, "", 0, "needs 2 nodes it may use; 1 exists"),
        ("free", GPUS, 1, 0, "n1", 2, "needs 4 GPUs on one node; most free on one node: 2 (n1)"),
        ("there", GPUS, 1, 0, "n1", 2, "needs 4 GPUs on one node; most on one node: 2 (n1)"),
        ("free", GPUS, 1, 0, "", 0, "needs 4 GPUs on one node; most free on one node: none"),
        ("free", CORES, 1, 0, "n1", -3, "needs 16 cores with 4 GPUs on one node; most free on one node: 0 (n1)"),
        ("free", CORES, 1, 0, "n1", 1, "needs 16 cores with 4 GPUs on one node; most free on one node: 1 (n1)"),
        ("usable", MEMORY, 1, 0, "n1", 2048,
         "needs 64G of memory with 4 GPUs on one node; most usable on one node: 2G (n1)"),
        ("free", MEMORY, 1, 0, "n1", -2048,
         "needs 64G of memory with 4 GPUs on one node; most free on one node: 0G (n1)"),
        ("free", GPUS, 2, 0, "n1", 2, "needs 4 GPUs on each of 2 nodes; no nodes have enough free"),
        ("free", GPUS, 2, 1, "n1", 2, "needs 4 GPUs on each of 2 nodes; 1 node has enough free"),
        ("there", CORES, 3, 2, "n1", 2, "needs 16 cores with 4 GPUs on each of 3 nodes; 2 nodes have enough"),
    ],
)  # fmt: skip
def test_what_is_short(free: str, dimension: int, parts: int, count: int, nearest: str, has: int, said: str) -> None:
    assert shortage("needs", free, dimension, parts, NEEDS, count, nearest, has) == said


def test_what_is_short_of_jobs_without_gpus_and_of_slices() -> None:
    said = shortage("waits for", "free", CORES, 1, (0, 1, 2), 0, "n", 0)
    assert said == "waits for 1 core on one node; most free on one node: 0 (n)"
    said = shortage("waits for", "free", CORES, 1, (1, 2, 2), 0, "n", 0, "1g.10gb")
    assert said == "waits for 2 cores with 1 slice of 1g.10gb on one node; most free on one node: 0 (n)"
    said = shortage("waits for", "free", GPUS, 1, (2, 2, 2), 0, "n", 1, "1g.10gb")
    assert said == "waits for 2 slices of 1g.10gb on one node; most free on one node: 1 (n)"


@pytest.mark.parametrize(
    ("free", "needs", "profile", "said"),
    [
        ("free", NEEDS, "", "needs 2 nodes in one rack, each with 4 GPUs; most free in one rack: 1"),
        ("there", (0, 16, 9), "", "needs 2 nodes in one rack, each with 16 cores; most in one rack: 1"),
        ("usable", (1, 1, 1), "1g.10gb",
         "needs 2 nodes in one rack, each with 1 slice of 1g.10gb; most usable in one rack: 1"),
    ],
)  # fmt: skip
def test_what_is_short_in_one_rack(free: str, needs: tuple[int, int, int], profile: str, said: str) -> None:
    assert scattered("needs", free, 2, needs, 1, profile) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more"), (6, "a, b, c and 3 more")]
)
def test_lists_name_the_first_three(count: int, said: str) -> None:
    assert listed(list("abcdef")[:count]) == said
    assert listed(list("abcdef"), 5) == "a, b, c, d, e and 1 more"


def test_unavailable_nodes_and_gpus_are_named() -> None:
    nodes = [
        node("a", available=False, unavailable_reason="DRAINED: fan", blocked={0: "LOST"}),
        node("b"),
        node("c", blocked={5: "LOST", 1: "BUSY: pid 4", 8: "not of it"}),
        node("d", available=False),
    ]
    assert not_available(nodes) == ("a (DRAINED: fan), GPU 1 of c (BUSY: pid 4), GPU 5 of c (LOST) and 1 more")
    assert not_available(nodes[3:]) == "d (not available)"
    assert called(0, "a") == "GPU 0 of a"


@pytest.mark.parametrize("ahead", [0, 1, 10, 99, 100, 101, 119, 999, 1000, 1099, 10000, 12345, 99999])
def test_numbers_of_jobs_have_two_digits_from_100_on(ahead: int) -> None:
    text = str(ahead)
    assert rounded(ahead) == (ahead if ahead < 100 else int(text[:2] + "0" * (len(text) - 2)))


def test_when_a_job_can_start() -> None:
    assert starts_in(float("inf")) == ""
    assert starts_in(61) == "; can start within 0:01:01, by time limits"
    assert would_delay("7", 61) == "fits now, but would delay job 7, which can start in 0:01:01"


@pytest.mark.parametrize(
    ("unit", "limit", "cost", "used", "said"),
    [
        ("jobs", 1, 1, 1, "1 of 1 job running"),
        ("jobs", 3, 1, 4, "4 of 3 jobs running"),
        ("gpus", 4, 4, 2.5, "2.5 of 4 GPUs in use; this job needs 4"),
        ("gpus", 4, 5, 0, "at most 4 GPUs at once; this job needs 5"),
        ("gpus", 1, 1 / 7, 6 / 7, "0.86 of 1 GPU in use; this job needs 0.14"),
        ("gpu_s", 36000, 36000, 1800, "0.5 of 10 GPU hours in seven days used or running; this job may use 10"),
        ("gpu_s", 36000, 36360, 1800, "10 GPU hours in seven days; this job may use 10.1"),
    ],
)
def test_which_limit_a_job_waits_for(unit: str, limit: int, cost: float, used: float, said: str) -> None:
    bound = Bound(LimitRule(("a", "", ""), "user a", unit, limit, "r"), used)  # type: ignore[arg-type]
    assert limit_message(bound, cost, used) == f"limit of user a: {said}"


def test_when_so_much_of_a_limit_has_freed() -> None:
    releases = [(10.0, 1.0), (20.0, 2.0), (30.0, 0.1), (40.0, 0.2)]
    amounts = (1.0, 1.0000005, 1.00001, 3.0, 3.05, 3.3, 3.4)
    assert [frees_at(releases, needs) for needs in amounts] == [10, 10, 20, 20, 30, 40, None]
    assert frees_at([(10.0, 0.1), (20.0, 0.1), (30.0, 0.1)], 0.1 + 0.2) == 30, "sums of fractions"
    assert [hours(gpu_s) for gpu_s in (0, 3600, 5400, 180, 36e6)] == ["0", "1", "1.5", "0.1", "10000"]


@pytest.mark.parametrize(
    ("unit", "found"),
    [
        ("jobs", [(NOW, 1), (NOW + 60, 1), (NOW + 99, 7)]),
        ("gpus", [(NOW, 1), (NOW + 60, 2), (NOW + 99, 7)]),
        ("gpu_s", [(NOW + 99, 7), (NOW - 5 + 604800, 0), (NOW + 60 + 604800, 120)]),
    ],
)
def test_what_running_jobs_take_of_a_limit_frees_at_their_ends_and_gpu_hours_a_week_later(
    unit: str, found: list[tuple[float, float]]
) -> None:
    """One job is overdue; the third is not of this limit; what was used before frees when it frees."""
    rule = LimitRule(("a", "", ""), "user a", unit, 9, "r")  # type: ignore[arg-type]
    ends = {"a": ((0, 1), 60), "b": ((2,), -5), "c": ((3,), 30)}
    busy = [replace(running(name, {"n": gpus}, NOW + end), bounds=(0,)) for name, (gpus, end) in ends.items()]
    busy[2] = replace(busy[2], bounds=())
    snap = replace(snapshot([node("n")], [], busy), bounds=(Bound(rule, 9, ((NOW + 99, 7),)),))
    assert releases_of_bounds(snap) == [found]
