"""Hazard rates of run times: of jobs that reached a level of run time, how many ended in it.

Run times are cut into levels: 15 s, then each twice the one before. Counted are the jobs of a burst, of a kind, and of
a partition and class of sizes; a running job counts for the levels that it has passed, so that counts of a burst grow
while its first jobs run. The narrower group's rate weighs more the more jobs it has counted; without counts the
training trace's rates apply.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints

LEVELS = 20
CLASSES = 5  # of sizes: 1, 2, 3 to 4, 5 to 8 GPUs, and more
SLACK_S = 1e-3

Tallies = npt.NDArray[np.float32]


class History(NamedTuple):
    """Counts of ended and continued jobs.

    Attributes:
        seen: ``float32[groups, LEVELS, 2]``: jobs that ended in a level, and that outran it.
        group: ``int64[jobs, 3]``: a job's groups, the widest first: a partition and class of sizes, a kind, a burst.
        passed: ``int64[jobs]``: the level up to which a job has been counted.
    """

    seen: Tallies
    group: Ints
    passed: Ints


class HazardRates(NamedTuple):
    """The rates used before many jobs are counted.

    Attributes:
        prior: ``float64[CLASSES, LEVELS]``: how likely an end is within a level, before anything has been seen.
        few: ``float64[3]``: as how many jobs the prior counts for a partition's odds, those for a kind's, and those
            for a burst's.
    """

    prior: Floats
    few: Floats


def new_history(gpus: Floats, *groups: Ints) -> History:
    """Return empty counts. ``groups``: a job's partition, kind and burst, ``int64[jobs]`` each."""
    counts, of = np.unique(gpus, return_inverse=True)
    size = np.array([class_of(count) for count in counts.tolist()], np.int64)[of.reshape(-1)]
    columns, first = [], 0
    for numbers in (groups[0] * CLASSES + size, *groups[1:]):
        columns.append(numbers + first)
        first += int(numbers.max(initial=-1)) + 1
    return History(np.zeros((first, LEVELS, 2), np.float32), np.column_stack(columns), np.zeros(len(gpus), np.int64))


@jit
def level_of(had_s: float) -> float:
    """Return the level of an attained run time, in factors of two from 15 s on, so that it rarely changes: 0, 1, ..."""
    return float(np.floor(math.log2(max(had_s, 7.5) / 7.5) + 1e-9))


@jit
def next_level_s(had_s: float) -> float:
    """Return the attained run time at which `level_of` next rises."""
    return float(7.5 * 2.0 ** (level_of(had_s) + 1.0))


@jit
def class_of(gpus: float) -> int:
    """Return the class of sizes."""
    return int(min(np.ceil(math.log2(max(gpus, 1.0))), CLASSES - 1.0))


@jit
def level_at(had_s: float) -> int:
    """Return the current level of a job that has run for so long."""
    return int(min(level_of(had_s + SLACK_S), LEVELS - 1.0))


@jit
def note_passed(history: History, job: int, had_s: float, over: bool) -> None:
    """Record that the job has run for so long; ``over``: it has ended."""
    level = level_at(had_s)
    for group in history.group[job]:
        for below in range(history.passed[job], level):
            history.seen[group, below, 1] += 1
        if over:
            history.seen[group, level, 0] += 1
    history.passed[job] = max(level, history.passed[job])


@jit
def forget(history: History, job: int) -> None:
    """Take an ended job out of the counts."""
    level = history.passed[job]
    for group in history.group[job]:
        for below in range(level):
            history.seen[group, below, 1] -= 1
        history.seen[group, level, 0] -= 1


@jit
def end_within(history: History, odds: HazardRates, job: int, level: int) -> float:
    """Return the probability that a job that reached the level ends in it."""
    groups, few = history.group[job], odds.few
    ends = odds.prior[groups[0] % CLASSES, level]
    # Each narrower group corrects the rate of the wider one, the more the more jobs it counted.
    for i in range(groups.size):
        ended = history.seen[groups[i], level, 0]
        ends = (few[i] * ends + ended) / (few[i] + ended + history.seen[groups[i], level, 1])
    return float(ends)
