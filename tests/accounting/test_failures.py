"""Failures by GPU: the exact test against a reference, and what it names in drawn histories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gpusched.accounting.failures import failure_rows
from gpusched.model.reports import FailureRow
from gpusched.queue.attempts import EndedAttempt

NODES, GPUS = 4, 8


def attempt(
    number: int, gpus: dict[str, tuple[int, ...]], outcome: str = "COMPLETED", *, user: str = "ann",
    name: str = "train", array_id: str | None = None,
) -> EndedAttempt:  # fmt: skip
    return EndedAttempt(
        job_id=f"j{number:06d}", attempt=1, user=user, name=name, array_id=array_id, start_time=float(number),
        outcome=outcome, gpus=gpus,
    )  # fmt: skip


def history(
    rng: np.random.Generator, jobs: int, rates: Sequence[float], bad: dict[tuple[str, int], float]
) -> list[EndedAttempt]:
    """Jobs of as many names as there are failure rates, of 1 or 2 GPUs; ``bad``: GPU -> by how much more they fail."""
    most = (len(rates), NODES, 2, GPUS, GPUS)
    drawn = rng.integers(0, most, (jobs, len(most))).tolist()
    found = []
    for number, ((kind, at, two, *gpus), luck) in enumerate(zip(drawn, rng.random(jobs).tolist(), strict=True)):
        node, gpus = f"n{at}", tuple(sorted({*gpus[: 1 + two]}))
        rate = rates[kind] * max(bad.get((node, gpu), 1.0) for gpu in gpus)
        outcome = "FAILED" if luck < rate else "COMPLETED"
        found.append(attempt(number, {node: gpus}, outcome, user=f"u{kind % 5}", name=f"k{kind}"))
    return found


def with_broken_script(rng: np.random.Generator, jobs: list[EndedAttempt]) -> list[EndedAttempt]:
    """Add one that fails forty times at once, each time on the GPU that the time before freed, then works elsewhere."""
    start = int(rng.integers(len(jobs)))
    broken = [attempt(start, {"n1": (3,)}, "FAILED", name="k1", user="u1") for _ in range(40)]
    return jobs[:start] + broken + jobs[start:]


def row_of(rows: Sequence[FailureRow], node: str, gpu: int | None) -> FailureRow:
    return next(row for row in rows if (row.node, row.gpu) == (node, gpu))


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_that_of_permutations_within_strata(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, here, failed = rng.integers(4, size=300), rng.random(300) < 0.15, rng.random(300) < 0.1
    failed |= here & (rng.random(300) < 0.1)
    # A success before each failure, on a GPU of its own, so that none follows another.
    jobs = [
        attempt(2 * i, {"a" if here[i] else "b": (0,)}, "FAILED" if failed[i] else "COMPLETED", name=str(names[i]))
        for i in range(300)
    ]  # fmt: skip
    jobs = [j for j in jobs for j in (attempt(int(j.start_time) - 1, {"c": (0,)}, name=j.name), j)]
    here, failed, names = np.repeat(here, 2) & (np.arange(600) % 2 == 1), np.repeat(failed, 2), np.repeat(names, 2)
    failed &= np.arange(600) % 2 == 1
    rounds, seen, as_many = 20_000, int((here & failed).sum()), 0
    drawn = np.zeros(rounds, dtype=int)
    for name in range(4):
        of_name = np.flatnonzero(names == name)
        order = rng.permuted(np.tile(failed[of_name], (rounds, 1)), axis=1)
        drawn += (order & here[of_name]).sum(axis=1)
    as_many = float((drawn >= seen).mean())
    row = row_of(failure_rows(jobs), "a", 0)
    assert (row.attempts, row.failed) == (int(here.sum()), seen)
    if seen > drawn.mean():
        assert row.p_value == pytest.approx(as_many, abs=4 * np.sqrt(as_many * (1 - as_many) / rounds) + 1e-4)
    else:
        assert row.p_value == 1.0


def test_a_gpu_with_three_times_the_failures_is_named_first() -> None:
    named = []
    for seed in range(10):
        jobs = history(np.random.default_rng(seed), 5000, [0.02, 0.1, 0.1, 0.2], {("n2", 5): 3.0})
        rows = failure_rows(jobs)
        named.append((rows[0].node, rows[0].gpu, rows[0].named))
    assert named.count(("n2", 5, True)) == 10


@pytest.mark.parametrize("broken", [False, True])
def test_at_most_one_history_in_twenty_without_a_bad_gpu_names_one(broken: bool) -> None:
    false_alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(1000 + seed)
        jobs = history(rng, 1000, [0.02, 0.1, 0.3, 0.9], {})
        false_alarms += any(row.named for row in failure_rows(with_broken_script(rng, jobs) if broken else jobs))
    assert false_alarms <= 10


def test_one_bad_script_blames_no_gpu() -> None:
    jobs = [attempt(i, {"a": (i % 2,)}, name="good") for i in range(200)]
    jobs += [attempt(1000 + 2 * i, {"a": (0,)}, "FAILED", name="bad") for i in range(50)]
    jobs += [attempt(1001 + 2 * i, {"a": (1,)}, "FAILED", name="bad") for i in range(50)]
    assert [row.p_value for row in failure_rows(jobs)] == [1.0] * 3
    # Tasks of an array are compared with one another, not with other jobs of the same name.
    arrays = [attempt(i, {"a": (0,)}, "FAILED" if i % 2 else "COMPLETED", array_id="x") for i in range(100)]
    arrays += [attempt(i, {"a": (1,)}) for i in range(100)]
    assert row_of(failure_rows(arrays), "a", 0).p_value == 1.0


def test_out_of_memory_cancelled_and_timed_out_are_no_failures() -> None:
    outcomes = ["OUT_OF_MEMORY", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETED", "FAILED"]
    rows = failure_rows(attempt(i, {"a": (0,), "b": (1,)}, outcome) for i, outcome in enumerate(outcomes))
    for unit in (("a", None), ("a", 0), ("b", None), ("b", 1)):
        row = row_of(rows, *unit)
        assert (row.attempts, row.failed, row.out_of_memory) == (6, 2, 1)


def test_series_of_failures_on_the_same_gpu_count_once() -> None:
    order = "FAILED FAILED FAILED COMPLETED FAILED FAILED".split()
    rows = failure_rows(attempt(i, {"a": (0,)}, outcome) for i, outcome in enumerate(order))
    assert (row_of(rows, "a", 0).attempts, row_of(rows, "a", 0).failed) == (3, 2)


def test_a_slices_failure_is_its_gpus() -> None:
    rows = failure_rows([attempt(0, {"a": (1000, 1004)}, "FAILED"), attempt(1, {"a": (0,)})])
    assert [(row.gpu, row.attempts, row.failed) for row in rows] == [(None, 2, 1), (0, 2, 1)]
