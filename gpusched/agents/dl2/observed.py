"""Speeds of kinds of jobs at their sizes, as reported by running jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.estimation.speeds import NO_SPEED, SpeedLearner, SpeedPrior
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import Floats, Ints

_LEVEL, _CORRELATION_LENGTH = 10.0, 4.0  # standard deviation of a kind's log speed; of sizes, in doublings
_LATEST_WEIGHT = 0.5  # of the latest report


class ObservedClasses(NamedTuple):
    """Kinds of jobs as observed; a size is (servers, workers), or (0, index of the size) in real clusters.

    Attributes:
        relative: ``float64[kinds, servers + 1, workers + 1]``: expected speed relative to the best; 0: none.
        best: ``float64[kinds]``: best expected speed, in work per slot.
        need: ``int64[kinds, servers + 1, workers + 1, 2]``: CPU and GPU slots.
        front: ``int64[kinds, points, 2]``: the Pareto front: sizes faster than all smaller ones, by dominant need.
        points: ``int64[kinds]``: number of sizes in the front.
    """

    relative: Floats
    best: Floats
    need: Ints
    front: Ints
    points: Ints


@cache
def _prior(most: int) -> SpeedPrior:
    """Return the prior: log speed is a kind's level plus a term of the size, correlated between near sizes."""
    at = np.log2(np.stack(np.divmod(np.arange(most * most), most), 1) + 1.0)
    apart = np.sqrt(((at[:, None] - at) ** 2).sum(-1))
    cov = np.zeros((len(at) + 1, len(at) + 1))
    cov[0, 0], cov[1:, 1:] = _LEVEL**2, np.exp(-apart / _CORRELATION_LENGTH)
    term = np.arange(1, len(cov))
    return SpeedPrior(np.zeros(len(cov)), cov, np.stack((0 * term, term), 1))


def new_observed(most: int) -> SpeedLearner:
    """Return a learner of speeds without observations, for one to ``most`` servers and workers."""
    return SpeedLearner(_prior(most), (most, most), _LATEST_WEIGHT)


def fully_observed(names: Sequence[str], speeds: Floats) -> SpeedLearner:
    """Return a learner with every speed observed: ``float64[kinds, most + 1, most + 1]``."""
    most = speeds.shape[1] - 1
    found = SpeedLearner(_prior(most), (most, most), _LATEST_WEIGHT, tuple(names))
    found.speeds.total[:] = np.log(np.maximum(speeds[:, 1:, 1:].reshape(len(names), -1), np.exp(NO_SPEED)))
    found.speeds.times[:] = 1.0
    return found


@jit
def kinds_of(speeds: Floats, need: Ints) -> ObservedClasses:
    """Build kinds from expected speeds ``float64[kinds, ...]`` (work per slot) and needs ``int64[kinds, ..., 2]``."""
    kinds, rows, columns = speeds.shape
    best, dominant = np.full(kinds, 1e-300), np.zeros((kinds, rows, columns), np.int64)
    relative = np.zeros((kinds, rows, columns))
    for k in range(kinds):
        for a in range(rows):
            for b in range(columns):
                best[k] = max(best[k], speeds[k, a, b])
                dominant[k, a, b] = max(need[k, a, b, 0], need[k, a, b, 1])
        relative[k] = speeds[k] / best[k]
    front, points = np.zeros((kinds, rows * columns, 2), np.int64), np.zeros(kinds, np.int64)
    _frontier(speeds, dominant, front, points)
    return ObservedClasses(relative, best, need, front, points)


@jit
def _frontier(speeds: Floats, dominant: Ints, front: Ints, points: Ints) -> None:
    columns = speeds.shape[2]
    for k in range(len(speeds)):
        order = stable_order(dominant[k].ravel())
        fastest, i = 0.0, 0
        while i < order.size:
            j, best, which = i, fastest, -1
            while j < order.size and dominant[k].ravel()[order[j]] == dominant[k].ravel()[order[i]]:
                speed = speeds[k, order[j] // columns, order[j] % columns]
                if speed > best:
                    best, which = speed, order[j]
                j += 1
            if which >= 0:
                front[k, points[k], 0], front[k, points[k], 1] = which // columns, which % columns
                points[k] += 1
                fastest = best
            i = j
