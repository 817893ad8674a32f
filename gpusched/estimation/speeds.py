"""Speeds of kinds of jobs by their resources, learned from jobs' reports: a store, and a learner.

The logarithm of a kind's speed at a point (a size; GPUs, cores and memory) is a sum of normal variables, its terms.
Their similarity is their covariance: a report at one point informs all others (a Kalman filter without motion). At
points with reports their mean is used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints

NO_SPEED = float(np.log(1e-9))  # reported where a job makes no progress
_NOISE = 0.05  # standard deviation of a report
_OFTEN = 4.0  # with so many reports the mean is good enough
_LEVEL_CHANGE = 0.25  # a speed further from the mean means that the whole kind became faster or slower
_SAME = 1e-9
_BY_KIND = ("total", "times", "mean", "cov")
_COMPLETE = 0.9  # of the points: a kind with so many reports informs new kinds


class SpeedPrior(NamedTuple):
    """The beliefs about a kind without reports.

    Attributes:
        mean: ``float64[terms]``; the first is the kind's level, a term of every point. cov: ``float64[terms, terms]``.
        term: ``int64[points, n]``: the terms that a point is the sum of.
    """

    mean: Floats
    cov: Floats
    term: Ints


class SpeedStore(NamedTuple):
    """The speeds reported for each kind, in logarithms, and the resulting beliefs.

    Attributes:
        total: ``float64[kinds, points]``: the sum of reports. times: ``float64[kinds, points]``: how many.
        mean: ``float64[kinds, terms]``. cov: ``float64[kinds, terms, terms]``. term: As in `SpeedPrior`.
    """

    total: Floats
    times: Floats
    mean: Floats
    cov: Floats
    term: Ints


def new_speeds(prior: SpeedPrior, kinds: int) -> SpeedStore:
    """Return a store of so many kinds without reports."""
    total, times = np.zeros((2, kinds, len(prior.term)))
    return SpeedStore(total, times, np.tile(prior.mean, (kinds, 1)), np.tile(prior.cov, (kinds, 1, 1)), prior.term)


def correct(mean: Floats, cov: Floats, gain: Floats, off: float, variance: float) -> tuple[Floats, Floats]:
    """Return mean and covariance of normal variables after a measurement of a sum of them: a Kalman filter's step.

    Args:
        mean: ``float64[n]``, before it.
        cov: ``float64[n, n]``, before it.
        gain: ``float64[n]``: the covariance of each with what was measured.
        off: How far the measurement is from what was expected.
        variance: Of what was measured.
    """
    return mean + gain * off / variance, cov - np.outer(gain, gain) / variance


_correct = jit(correct)


@jit
def learn(speeds: SpeedStore, kind: int, point: int, value: float, latest: float) -> bool:
    """Add the logarithm of a reported speed; return whether any belief changed.

    ``latest``: the least weight of the latest report at a point; 0: all count alike.
    """
    total, times = speeds.total[kind], speeds.times[kind]
    if times[point] > 0.0:
        known = total[point] / times[point]
        if min(value, known) > NO_SPEED and abs(value - known) > _LEVEL_CHANGE:
            total += (value - known) * times
            speeds.mean[kind, 0] += value - known
            return True
        if min(value, known) <= NO_SPEED:
            times[point] = total[point] = 0.0
        elif latest * times[point] > 1.0 - latest:
            times[point] = (1.0 - latest) / latest
            total[point] = known * times[point]
    total[point] += value
    times[point] += 1.0
    if value <= NO_SPEED or times[point] > _OFTEN:
        return bool(value <= NO_SPEED)
    mean, cov, term = speeds.mean[kind], speeds.cov[kind], speeds.term[point]
    gain, off, variance = np.zeros(len(mean)), value, _NOISE**2
    for t in term:
        off -= mean[t]
        for d in range(len(mean)):
            gain[d] += cov[d, t]
    for t in term:
        variance += gain[t]
    speeds.mean[kind], speeds.cov[kind] = _correct(mean, cov, gain, off, variance)
    return True


@jit
def believed(speeds: SpeedStore, kind: int, point: int) -> tuple[float, float]:
    """Return the logarithm of a kind's speed at a point, and its deviation apart from the kind's level."""
    if speeds.times[kind, point] > 0.0:
        return speeds.total[kind, point] / speeds.times[kind, point], 0.0
    value, variance, term = 0.0, 0.0, speeds.term[point]
    for t in range(len(term)):
        value += speeds.mean[kind, term[t]]
        for u in range(len(term)):
            if t > 0 and u > 0:
                variance += speeds.cov[kind, term[t], term[u]]
    return value, np.sqrt(max(variance, 0.0))


@jit
def _all_believed(speeds: SpeedStore, kind: int, found: Floats) -> None:
    for point in range(len(found)):
        found[point] = math.exp(believed(speeds, kind, point)[0])


class SpeedLearner:
    """A store of named kinds, and its learner; other learners have the same methods.

    Args:
        prior: Of any kind.
        shape: Of the points.
        latest: See `learn`.
        names: Kinds that there are already. speeds: What is known of them; None: nothing.
    """

    def __init__(
        self, prior: SpeedPrior, shape: tuple[int, ...], latest: float = 0.0, names: tuple[str, ...] = (),
        speeds: SpeedStore | None = None,
    ) -> None:  # fmt: skip
        self.prior, self.shape, self._latest, self.names = prior, shape, latest, list(names)
        self.speeds = new_speeds(prior, len(names)) if speeds is None else speeds

    def copy(self) -> SpeedLearner:
        """Return an independent copy."""
        speeds = self.speeds._replace(**{name: getattr(self.speeds, name).copy() for name in _BY_KIND})
        return SpeedLearner(self.prior, self.shape, self._latest, tuple(self.names), speeds)

    def join(self, other: SpeedLearner) -> None:
        """Add another learner's reports at points where this one has none."""
        for its, name in enumerate(other.names):
            row, (total, times) = self.row(name), (array[its] for array in other.speeds[:2])
            for point in np.flatnonzero((self.speeds.times[row] == 0.0) & (times > 0.0)).tolist():
                learn(self.speeds, row, point, total[point] / times[point], self._latest)

    def row(self, name: str) -> int:
        """Return the number of a kind; one without reports starts like those of which nearly all is known."""
        if name not in self.names:
            both = self.speeds, new_speeds(self.prior, 1)
            arrays = {name: np.concatenate([getattr(one, name) for one in both]) for name in _BY_KIND}
            self.speeds = self.speeds._replace(**arrays)
            self.names.append(name)
        row, reported = self.names.index(name), self.speeds.times > 0.0
        complete = self.speeds.mean[reported.mean(1) > _COMPLETE]
        if not reported[row].any() and len(complete):
            mean = complete.mean(0)
            mean[0] -= mean[self.prior.term].sum(1).max()  # its level: 1 at its best
            self.speeds.mean[row] = mean
        return row

    def add_report(self, row: int, at: tuple[int, ...], speed: float) -> bool:
        """Add the speed that a job of a kind reported; return whether any belief changed."""
        point, log = int(np.ravel_multi_index(at, self.shape)), float(np.log(max(speed, np.exp(NO_SPEED))))
        times = self.speeds.times[row, point]
        if times > 0.0 and abs(log - self.speeds.total[row, point] / times) < _SAME:
            return False
        return learn(self.speeds, row, point, log, self._latest)

    def expected(self, row: int) -> Floats:
        """Return a kind's expected speed at every point."""
        found = np.zeros(len(self.prior.term))
        _all_believed(self.speeds, row, found)
        return found.reshape(self.shape)
