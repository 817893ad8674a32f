"""The order of a queue against Python's sort of tuples, and components that do not work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from gpusched.errors import Warnings
from gpusched.model.ids import id_key
from gpusched.sched.order import Keys, columns_of, queue_order
from tests.plugin.building import registered

OWN: dict[str, Callable[[dict[str, Any]], tuple[float, ...]]] = {
    "fifo": lambda job: (),
    "sjf": lambda job: (job["limit"],),
    "lpt-limit": lambda job: (-job["limit"],),
    "sjf-estimate": lambda job: (job["expected"],),
    "ljf": lambda job: (-job["gpus"], -job["cores"], -job["memory"]),
    "smallest": lambda job: (job["gpus"],),
    "fairshare": lambda job: (job["usage"],),
}
FLOATS = {"submit", "limit", "expected", "usage"}


def keys_of(jobs: list[dict[str, Any]]) -> Keys:
    return Keys(**{f: np.array([job[f] for job in jobs], float if f in FLOATS else int) for f in Keys._fields})


def by_tuples(order: str, jobs: list[dict[str, Any]], ids: list[str], ties: str) -> list[int]:
    def key(job: int) -> tuple[Any, ...]:
        one = jobs[job]
        last = (-one["submit"],) if ties == "last" else ()
        return (-one["priority"], *OWN[order](one), *last, -one["standing"], one["submit"], id_key(ids[job]))

    return sorted(range(len(jobs)), key=key)


@pytest.mark.parametrize("ties", ["first", "last"])
@pytest.mark.parametrize("order", OWN)
def test_jobs_go_by_priority_then_the_orders_keys_then_slurms_priority_submit_time_and_id(
    order: str, ties: str
) -> None:
    """Few values, so that many jobs are equal in all but their ids; also queues of no job, one and two."""
    rng = Random(3)
    for count in (0, 1, 2, 2, 2, 3, 40, 80):
        most = rng.choice([0, 1, 1])  # 0: all are equal
        jobs = [{field: rng.randint(0, most) for field in Keys._fields} for _ in range(count)]
        ids = [f"{number}{rng.choice(['', '_10', '_9'])}" for number in rng.sample(range(8, 200), count)]
        assert queue_order(order, keys_of(jobs), ids, ties).tolist() == by_tuples(order, jobs, ids, ties)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_jobs_that_are_equal_go_by_number_wherever_the_run_of_them_stands(count: int) -> None:
    """At the front, in the middle, at the end."""
    ids = [str(number) for number in range(count + 10, 10, -1)]
    for own in range(3):
        jobs = [dict.fromkeys(Keys._fields, 0) | {"submit": own} for _ in ids]
        jobs += [dict.fromkeys(Keys._fields, 0) | {"submit": at} for at in {0, 1, 2} - {own}]
        found = queue_order("fifo", keys_of(jobs), [*ids, "1", "2"]).tolist()
        assert [job for job in found if job < count] == list(range(count))[::-1]
        assert [jobs[job]["submit"] for job in found] == sorted(job["submit"] for job in jobs)


def fails(keys: Keys) -> list[np.ndarray]:
    raise ValueError("no such column")


def of_one(keys: Keys) -> list[np.ndarray]:
    return [keys.gpus[:1]]


def of_more(keys: Keys) -> list[np.ndarray]:
    return [np.arange(keys.gpus.size + 1)[::-1]]


def unknown_numbers(keys: Keys) -> list[np.ndarray]:
    return [keys.gpus, np.where(keys.gpus == 1, np.nan, 0.0)]


def words(keys: Keys) -> list[list[str]]:
    return [["a"] * keys.gpus.size]


def by_cores_as_list(keys: Keys) -> list[list[int]]:
    return [(keys.cores % 3).tolist(), (-keys.cores).tolist()]


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    names = ("fails", "of_one", "of_more", "unknown_numbers", "words", "by_cores_as_list", "missing")
    points = {f"acme-{name.replace('_', '-')}": f"{__name__}:{name}" for name in names}
    with registered(tmp_path_factory.mktemp("acme"), {"orders": points}):
        yield


def jobs_of(count: int) -> tuple[Keys, list[str]]:
    jobs = [{field: job for field in Keys._fields} | {"priority": 0, "standing": 0} for job in range(count)]
    return keys_of(jobs), [str(job) for job in range(count)]


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "no such column"),
        ("of-one", "it did not return one number for each job"),
        ("of-more", "it did not return one number for each job"),
        ("unknown-numbers", "it did not return one number for each job"),
        ("words", "could not convert"),
        ("missing", "missing"),
        ("not-there", "not-there"),
    ],
)
def test_a_queue_with_an_order_that_does_not_work_is_fifo_with_a_warning(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Warnings, "show", lines.append)
    monkeypatch.setattr(Warnings, "given", set())
    assert queue_order(f"acme-{name}", *jobs_of(4)).tolist() == [0, 1, 2, 3]
    (line,) = lines
    assert why in line
    assert line.endswith("; fifo is used")


@pytest.mark.usefixtures("acme")
def test_the_columns_of_another_package_may_be_lists() -> None:
    keys, ids = jobs_of(7)
    assert queue_order("acme-by-cores-as-list", keys, ids).tolist() == [6, 3, 0, 4, 1, 5, 2]
    assert [column.tolist() for column in columns_of("acme-by-cores-as-list", keys)] == [
        [0, 1, 2, 0, 1, 2, 0],
        [0, -1, -2, -3, -4, -5, -6],
    ]
