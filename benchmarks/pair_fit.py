"""Sensitivities and pressures fitted to a whole table of measured pairs: what the package's formula is judged by.

The package itself fits no tables: it begins with figures that were fitted so (`beliefs.PRIORS`), and learns from jobs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.sched.interference.pairs import HIGH, LOW, NOISE, USUAL, ClassEffect
from gpusched.sched.interference.placement import Bools, PlacementFit, quantiles
from gpusched.sched.state import Floats, Ints

FOLDS = 5  # of the pairs, for the interval
LEAST_NOISE = 0.02
NEAR = 0.06  # errors of the ratio far below it count by their squares, far above by their size
BETWEEN = 1.0  # standard deviation between kinds, in logarithms, until something is known of it
ROUNDS = 25
FAMILY = 2.0  # a family counts as much as that many pairs where its own formula is off


class InterferenceTable(NamedTuple):
    """Measured pairs.

    Attributes:
        kinds, families: Of the jobs, by number: what they are, and what is much the same (a model at several batch
            sizes).
        job, beside: ``int64[n]``: kinds. ratio: ``float64[n]``: speed of ``job`` beside it by its speed alone.
    """

    kinds: tuple[str, ...]
    families: tuple[str, ...]
    job: Ints
    beside: Ints
    ratio: Floats

    def only(self, rows: Ints) -> InterferenceTable:
        """Those of these rows; the kinds keep their numbers."""
        return self._replace(job=self.job[rows], beside=self.beside[rows], ratio=self.ratio[rows])


class PairFit(NamedTuple):
    """The result of a fit.

    Attributes:
        kinds: By number, as in the pairs. prior: A kind of which nothing was measured.
        offsets: ``float64[families, families]``: what the ratio of one beside the other is off by.
        family: ``int64[kinds]``.
        errors: ``float64[n]``, ascending: measured less predicted ratio of pairs left out in turn.
        noise: Standard deviation of their ratios' logarithms about the formula.
        measured: ``float64[kinds, kinds]``: the mean ratio of a kind (row) beside another; NaN: not measured.
    """

    kinds: tuple[ClassEffect, ...]
    prior: ClassEffect
    offsets: Floats
    family: Ints
    errors: Floats
    noise: float
    measured: Floats

    def ratio(self, job: Ints, beside: Ints) -> Floats:
        """``float64[n]``: what is left of the speed, 0 to 1, by numbers of kinds: as measured, else by the formula."""
        means = np.array([kind.mean for kind in self.kinds])
        found = left(means[job, 0] + means[beside, 1]) + self.offsets[self.family[job], self.family[beside]]
        table = self.measured[job, beside]
        return np.where(np.isnan(table), np.clip(found, 0.0, 1.0), table)

    def below_least(self, ratio: Floats, job: Ints) -> Bools:
        """``bool[n]``: predicted to be slowed more than anything that was measured of the job's kind."""
        least = np.fmin.reduce(self.measured, axis=1, initial=1.0)
        return np.asarray(ratio < least[job])

    def interval(self, ratio: Floats, cover: float = 0.8) -> tuple[Floats, Floats]:
        """Return the bounds of the central fraction of errors, for predicted ratios."""
        low, high = quantiles(self.errors, cover)
        return np.clip(ratio + low, 0.0, 1.0), np.clip(ratio + high, 0.0, 1.0)


def left(log_product: Floats) -> Floats:
    """1 / (1 + sensitivity x pressure), by the logarithm of the product."""
    return 1 / (1 + np.exp(np.clip(log_product, LOW, HIGH)))


def fit(pairs: InterferenceTable) -> PairFit:
    """Fit the kinds' sensitivities and pressures, robust against outliers and shrunk to the mean of all kinds.

    The errors are those of fits without one part in `FOLDS` of the pairs, a pair being left out in both directions.
    """
    found = _solved(pairs)
    numbers = np.minimum(pairs.job, pairs.beside) * len(pairs.kinds) + np.maximum(pairs.job, pairs.beside)
    _, pair = np.unique(numbers, return_inverse=True)
    fold = pair.reshape(-1) * 2654435761 % 2**32 * FOLDS // 2**32  # scattered by Fibonacci hashing: nothing is drawn
    errors, logs = [np.zeros(0)], [np.zeros(0)]
    for one in range(FOLDS):
        rest, out = np.flatnonzero(fold != one), np.flatnonzero(fold == one)
        if len(rest) and len(out):
            fitted, job, beside = _solved(pairs.only(rest)), pairs.job[out], pairs.beside[out]
            errors.append(pairs.ratio[out] - fitted.ratio(job, beside))
            means = np.array([kind.mean for kind in fitted.kinds])
            logs.append(np.abs(np.log(pairs.ratio[out] / left(means[job, 0] + means[beside, 1]))))
    off = np.concatenate(logs)
    noise = max(float(np.quantile(off, 0.8)) / USUAL, LEAST_NOISE) if len(off) >= 2 * FOLDS else NOISE
    return found._replace(errors=np.sort(np.concatenate(errors)), noise=noise)


def _solved(pairs: InterferenceTable) -> PairFit:
    """As `fit`, without the errors: Gauss-Newton steps on the ratio, reweighted towards its absolute error."""
    n, rows = len(pairs.kinds), np.arange(len(pairs.ratio))
    mean = min(max(float(pairs.ratio.mean()) if len(rows) else 0.9, 0.05), 0.99)
    x = np.full(2 * n, np.log(1 / mean - 1) / 2)
    weights, table = np.ones(len(rows)), np.zeros((len(rows), 2 * n))
    curve = np.eye(2 * n)
    for _ in range(ROUNDS):
        ratio = left(x[pairs.job] + x[n + pairs.beside])
        off, slope = pairs.ratio - ratio, -ratio * (1 - ratio)
        weights = 1 / np.sqrt(1 + (off / NEAR) ** 2) / NEAR**2
        table[:] = 0.0
        table[rows, pairs.job] = slope
        table[rows, n + pairs.beside] = slope
        centre = np.repeat([x[:n].mean(), x[n:].mean()], n)
        curve = table.T @ (table * weights[:, None]) + np.eye(2 * n) / BETWEEN**2
        step = np.linalg.solve(curve, table.T @ (weights * off) + (centre - x) / BETWEEN**2)
        x = x + np.clip(step, -0.7, 0.7)
    cov = np.asarray(np.linalg.inv(curve), np.float64)
    both = np.arange(n)[:, None] + np.array([0, n])
    kinds = tuple(ClassEffect(x[of], cov[np.ix_(of, of)]) for of in both)
    seen = np.flatnonzero(np.bincount(pairs.job, minlength=n) + np.bincount(pairs.beside, minlength=n))
    means: Floats = x[both[seen]] if len(seen) else x[both]
    between = np.asarray(np.cov(means.T), np.float64) if len(means) > 2 else np.eye(2) * BETWEEN**2
    prior = ClassEffect(means.mean(axis=0), between + 0.05 * np.eye(2))  # never surer of a new one than that
    names = sorted(set(pairs.families))
    family = np.array([names.index(name) for name in pairs.families], np.int64)
    offsets, count = np.zeros((len(names), len(names))), np.full((len(names), len(names)), FAMILY)
    of_pair = family[pairs.job], family[pairs.beside]
    np.add.at(offsets, of_pair, pairs.ratio - left(x[pairs.job] + x[n + pairs.beside]))
    np.add.at(count, of_pair, 1.0)
    measured, times = np.zeros((n, n)), np.zeros((n, n))
    np.add.at(measured, (pairs.job, pairs.beside), pairs.ratio)
    np.add.at(times, (pairs.job, pairs.beside), 1.0)
    measured = np.where(times > 0, measured / np.maximum(times, 1.0), np.nan)
    return PairFit(kinds, prior, offsets / count, family, np.zeros(0), NOISE, measured)


def steps_between(fit: PlacementFit, step_s: Floats, cover: float = 0.8) -> tuple[Floats, Floats]:
    """Return the bounds of the central fraction of a placement fit's errors, for predicted steps."""
    low, high = quantiles(fit.errors, cover)
    high_s = step_s * (1 + high) if np.isfinite(high) else np.full_like(step_s, np.inf)
    return step_s * max(1 + low, 0.0), high_s
