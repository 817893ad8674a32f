"""Held but idle: who holds GPUs without using them, and since when."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.accounting.held_idle import held_idle
from gpusched.accounting.usage import BUCKET_S
from gpusched.model.jobs import JobRecord
from gpusched.queue.store import UsageRow
from tests import builders

NOW = 30_000.0


def job(gpus: int = 4, start: float = 0.0) -> JobRecord:
    on = {"dgx1": tuple(range(gpus))}
    return builders.job("j", nodes=on, user="ann", start_time=start, spec=builders.spec(gpus_per_node=gpus))


def bucket(ago: int, idle_gpus: float, gpus: int = 4, **fields: Any) -> UsageRow:
    begin = int(NOW // BUCKET_S - ago) * BUCKET_S
    return UsageRow(
        bucket=begin, node="dgx1", job_id="j", user="ann", partition="A100", gpu_s=gpus * BUCKET_S,
        util_known_s=gpus * BUCKET_S, idle_s=idle_gpus * BUCKET_S, **fields,
    )  # fmt: skip


def test_idle_since_the_last_busy_bucket() -> None:
    (found,) = held_idle([job()], [bucket(5, 0), *(bucket(n, 4) for n in (4, 3, 2, 1))], NOW)
    assert (found.job, found.user, found.gpus, found.idle_gpus) == ("j", "ann", 4, 4)
    assert found.idle_s == 4 * BUCKET_S


def test_one_idle_gpu_of_four_is_enough() -> None:
    (found,) = held_idle([job()], [bucket(n, 1) for n in (4, 3, 2, 1)], NOW)
    assert (found.gpus, found.idle_gpus) == (4, 1)


def test_for_ten_minutes_and_read_within_ten() -> None:
    """Exactly 600 s of idling count, and a last bucket that began exactly two buckets ago still does."""
    last = [bucket(n, 4) for n in (4, 3, 2)]
    assert [found.idle_s for found in held_idle([job()], last, NOW)] == [1200.0]
    assert held_idle([job()], last, NOW + 1) == ()
    assert [f.idle_s for f in held_idle([job(start=NOW - 600)], [bucket(n, 4) for n in (3, 2, 1)], NOW)] == [600.0]
    assert held_idle([job(start=NOW - 599)], [bucket(n, 4) for n in (3, 2, 1)], NOW) == ()


def test_a_gap_ends_it_and_the_longest_comes_first() -> None:
    assert [f.idle_s for f in held_idle([job()], [bucket(n, 4) for n in (5, 4, 2, 1)], NOW)] == [600.0]
    other = msgspec.structs.replace(job(), id="i")
    rows = [bucket(n, 4) for n in (3, 2, 1)]
    longer = [msgspec.structs.replace(bucket(n, 2), job_id="i") for n in (6, 5, 4, 3, 2, 1)]
    found = held_idle([job(), other], rows + longer, NOW)
    assert [(f.job, f.idle_s, f.idle_gpus) for f in found] == [("i", 1800.0, 2), ("j", 900.0, 4)]


def test_busy_short_unknown_or_old_is_not_listed() -> None:
    assert held_idle([job()], [bucket(n, 0.5) for n in (4, 3, 2, 1)], NOW) == ()
    assert held_idle([job()], [bucket(1, 4)], NOW) == ()
    assert held_idle([job()], [bucket(n, 0) for n in (4, 3, 2, 1)], NOW) == ()
    assert held_idle([job()], [bucket(n, 4) for n in (9, 8, 7, 6)], NOW) == ()
    assert held_idle([job(start=NOW - 500)], [bucket(n, 4) for n in (2, 1)], NOW) == ()
    assert held_idle([], [bucket(n, 4) for n in (4, 3, 2, 1)], NOW) == ()


def test_a_job_of_one_gpu_is_idle_from_nine_tenths_on() -> None:
    (found,) = held_idle([job(gpus=1)], [bucket(n, 0.9, gpus=1) for n in (3, 2, 1)], NOW)
    assert (found.gpus, found.idle_gpus, found.idle_s) == (1, 1, 900.0)
    assert held_idle([job(gpus=1)], [bucket(n, 0.899, gpus=1) for n in (3, 2, 1)], NOW) == ()


def test_a_row_without_gpu_time_and_a_job_that_has_not_begun_say_nothing() -> None:
    empty = msgspec.structs.replace(bucket(4, 0), gpu_s=0.0)
    assert [f.idle_s for f in held_idle([job()], [empty, *(bucket(n, 4) for n in (3, 2, 1))], NOW)] == [900.0]
    waits = msgspec.structs.replace(job(), start_time=None)
    assert held_idle([waits], [bucket(n, 4) for n in (3, 2, 1)], NOW) == ()


def test_a_bucket_of_several_nodes_is_one() -> None:
    """3 of 4 GPUs idle on one node, none of 4 on the other: 3 of the 8."""
    rows = [row for n in (3, 2, 1) for row in (bucket(n, 3), bucket(n, 0))]
    (found,) = held_idle([job(gpus=8)], rows, NOW)
    assert (found.gpus, found.idle_gpus, found.nodes) == (8, 3, ("dgx1",))
