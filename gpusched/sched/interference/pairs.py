"""Remaining speed beside another job: 1 / (1 + sensitivity x pressure), one of each for every kind of job.

That is the step time's formula seen by one link: sensitivity is how much of its own step a job exchanges over it,
pressure how much of its step a neighbour does. Both are kept as logarithms with their covariance. A kind that was never
measured begins as all others are on average, and what is measured of it moves it (`observed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.estimation.speeds import correct
from gpusched.sched.state import Floats

NOISE = 0.08  # standard deviation of a ratio's logarithm about the formula, as public tables have it
USUAL = 1.2816  # standard deviations about the mean within which four in five lie
LOW, HIGH = np.log(1e-6), np.log(20.0)  # of a product of sensitivity and pressure: below nothing is to be seen


class ClassEffect(NamedTuple):
    """The belief about one kind: ``mean: float64[2]``, logarithms of sensitivity and pressure, and ``cov``."""

    mean: Floats
    cov: Floats


class RemainingSpeed(NamedTuple):
    """A job's remaining speed: the median and its interval."""

    ratio: float
    low: float
    high: float


def expected(job: ClassEffect, others: Sequence[ClassEffect], *, noise: float = NOISE) -> RemainingSpeed:
    """Predict a job's remaining speed beside these kinds; the interval holds four times in five."""
    products = [float(np.exp(np.clip(job.mean[0] + other.mean[1], LOW, HIGH))) for other in others]
    total = 1 + sum(products)
    variance = noise**2 * bool(products) + job.cov[0, 0] * (sum(products) / total) ** 2
    variance += sum(other.cov[1, 1] * (product / total) ** 2 for other, product in zip(others, products, strict=True))
    by = float(np.exp(USUAL * np.sqrt(variance)))
    return RemainingSpeed(1 / total, 1 / (total * by), min(1.0, by / total))


def observed(
    kinds: Sequence[ClassEffect], beside: Sequence[tuple[int, int]], shares: Sequence[float], log_ratio: float,
    noise: float = NOISE,
) -> tuple[ClassEffect, ...]:  # fmt: skip
    """Update the kinds by one measurement: a step of an iterated extended Kalman filter (Jazwinski, 1970).

    Args:
        kinds: That of the measured job, and its neighbours', each once; on several links, each for
            every link.
        beside: Of each neighbour the places in ``kinds`` of the job's sensitivity and the neighbour's pressure.
        shares: For which part of the time each was there, 0 to 1.
        log_ratio: The logarithm of what was left of the job's speed.
        noise: The standard deviation of that.

    A surprise beyond three standard deviations counts as three: one odd measurement moves nothing far.
    """
    places = np.array(beside, np.int64).reshape(-1, 2)
    sensitivity, pressure = 2 * places[:, 0], 2 * places[:, 1] + 1
    before = np.concatenate([known.mean for known in kinds])
    cov = np.zeros((len(before), len(before)))
    for place, known in enumerate(kinds):
        cov[2 * place : 2 * place + 2, 2 * place : 2 * place + 2] = known.cov
    x, after, part = before, cov, np.array(shares, np.float64)
    for _ in range(4):
        products = part * np.exp(np.clip(x[sensitivity] + x[pressure], LOW, HIGH))
        total = 1 + products.sum()
        slope = np.zeros(len(x))
        np.add.at(slope, sensitivity, -products / total)
        np.add.at(slope, pressure, -products / total)
        variance = float(slope @ cov @ slope) + noise**2
        most = 3 * variance**0.5
        surprise = np.clip(log_ratio + np.log(total) - slope @ (before - x), -most, most)
        x, after = correct(before, cov, cov @ slope, surprise, variance)
    return tuple(ClassEffect(x[i : i + 2], after[i : i + 2, i : i + 2]) for i in range(0, len(x), 2))
