"""Detection of GPUs slower than their peers, from the paces of similar jobs on them.

A job over several GPUs goes at the pace of the slowest, so a slow GPU makes innocent ones look slow that ran with it:
the surest is taken first, and what it explains counts against no other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from math import exp, sqrt
from statistics import NormalDist, median
from typing import NamedTuple

from gpusched.model.interference import AttemptSpeed, JobShape, SlowGpu

FALSE_ALARMS = 0.01  # the chance that any of a cluster's equal GPUs is called slow
MIN_JOBS = 5
MIN_SLOWDOWN = 0.05  # less is not reported
_MIN_ATTEMPTS = 4  # attempts of a kind and shape, with fewer there is nothing to compare
_MIDDLE_HALF = 1.349  # how far apart the quarters of a normal distribution are
_FOR_MEDIAN = 1.2533  # the error of a median by that of a mean
_CONFIDENT_Z = 1.96

_Gpu = tuple[str, int]


def slow_gpus(paces: Sequence[AttemptSpeed]) -> tuple[SlowGpu, ...]:
    """Return the slow GPUs, the surest first. ``paces``: of attempts, as if they had run alone."""
    groups: dict[tuple[str, JobShape], list[int]] = {}
    for row, pace in enumerate(paces):
        groups.setdefault((pace.kind, pace.shape), []).append(row)
    alike = [
        rows for rows in groups.values() if len(rows) >= _MIN_ATTEMPTS and len({paces[row].gpus for row in rows}) > 1
    ]
    jobs: dict[_Gpu, set[int]] = {}
    for row in (row for rows in alike for row in rows):
        for gpu in paces[row].gpus:
            jobs.setdefault(gpu, set()).add(row)
    sure = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(len(jobs), 1))
    found: list[tuple[tuple[_Gpu, ...], set[int]]] = []
    explained: set[int] = set()
    while True:
        off = _deviations(paces, alike, explained)
        suspects = []
        for gpu, all_rows in jobs.items():
            rows = all_rows - explained
            if len(rows) >= MIN_JOBS and (by := _rank_z_score(off, rows)) > sure:
                suspects += [(by, len(rows), gpu)] if exp(_median_slowdown(off, rows)[0]) - 1 >= MIN_SLOWDOWN else []
        if not suspects:
            break
        *_, gpu = max(suspects)
        rows = jobs[gpu] - explained
        found.append(
            ((gpu, *sorted(other for other in jobs if other != gpu and jobs[other] - explained == rows)), rows)
        )
        explained |= rows
    slow = []
    for together, rows in found:
        mean, error = _median_slowdown(off, rows)
        low, high = (exp(mean + by * _CONFIDENT_Z * error) - 1 for by in (-1, 1))
        for node, index in together:
            among = tuple(other for other in together if other != (node, index))
            slow.append(SlowGpu(node=node, index=index, slower=exp(mean) - 1, low=low, high=high, jobs=len(rows),
                                among=among))  # fmt: skip
    return tuple(slow)


class _Deviation(NamedTuple):
    """One attempt compared with its peers.

    Attributes:
        slower: Logarithm of how much longer its steps took than the median's.
        rank: 0 (the fastest) to 1 less 1/2. variance: Of the ranks of its like.
        spread: Standard deviation of ``slower`` of its like, by the middle half.
    """

    slower: float
    rank: float
    variance: float
    spread: float


def _deviations(
    paces: Sequence[AttemptSpeed], alike: Sequence[Sequence[int]], without: set[int]
) -> dict[int, _Deviation]:
    """Compare each attempt with those that no slow GPU explains yet."""
    off: dict[int, _Deviation] = {}
    for rows in alike:
        rest = [row for row in rows if row not in without]
        rest = rest if len(rest) >= _MIN_ATTEMPTS else list(rows)
        ordered, n = sorted(-paces[row].log_pace for row in rest), len(rest)
        middle = median(ordered)
        spread = max((ordered[(3 * n) // 4] - ordered[n // 4]) / _MIDDLE_HALF, 1e-3)
        for row in rows:
            value = -paces[row].log_pace
            rank = (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * n)
            off[row] = _Deviation(value - middle, rank - 0.5, (1 - 1 / n**2) / 12, spread)
    return off


def _rank_z_score(off: Mapping[int, _Deviation], rows: set[int]) -> float:
    """Return by how many standard deviations these rank above chance (van Elteren's rank sum).

    It holds for paces of any distribution: where one kind mixes two programs, no GPU looks slow for that.
    """
    return sum(off[row].rank for row in rows) / sqrt(sum(off[row].variance for row in rows))


def _median_slowdown(off: Mapping[int, _Deviation], rows: set[int]) -> tuple[float, float]:
    """Return how much slower the median is (logarithm), and its margin of error."""
    error = _FOR_MEDIAN * sqrt(sum(off[row].spread ** 2 for row in rows)) / len(rows)
    return median(off[row].slower for row in rows), error
