"""Quantiles that keep what they say: conformalized quantile regression on the later jobs of what is learned from.

After Romano, Patterson, Candes (Conformalized Quantile Regression, NeurIPS 2019), each side by itself (their theorem 2)
and in time's order: what is predicted is always later than what that forest has learned from, as it will be in use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.estimation.features import Forest, predict_all
from gpusched.estimation.predictor import ends_of, features_of
from gpusched.sched.state import Floats
from gpusched.traces.trace import Trace

EDGES = (0.25, 0.5, 0.75, 1.0)  # of the jobs submitted: learned up to one, predicted up to the next
MIN_JOBS = 100  # of those predicted, so that ten lie beyond each quantile
_ROUNDING = 1e-9

Bools = npt.NDArray[np.bool_]
Fit = Callable[[float], Forest | None]


class Calibration(NamedTuple):
    """What to add to each quantile's logarithm of seconds, and on how many jobs that was found (0: nothing to add)."""

    shifts: tuple[float, ...]
    jobs: int


def calibrated(trace: Trace, until: float, quantiles: tuple[float, ...], fit: Fit) -> Calibration:
    """The shifts with which as many of the later jobs stayed below each quantile as it says.

    The median stays as it is: policies go by it, and in a few hundred jobs it moves with the last large burst.

    Nothing counts that happened after ``until`` (the trace's clock). ``fit``: a forest that has learned from what had
    ended at a time; None: that was too little.
    """
    seen = trace.submit[trace.submit < until]
    edges = [float(seen[int(part * len(seen))]) if part < 1 else until for part in EDGES] if len(seen) else []
    rests, ends = [np.zeros((0, len(quantiles)))], [np.zeros(0, np.bool_)]
    for begin, end in pairwise(edges):
        forest = fit(begin)
        if forest is not None:
            rest, ended = _rest(forest, trace, begin, end, until)
            rests.append(rest)
            ends.append(ended)
    rest, ended = np.concatenate(rests), np.concatenate(ends)
    if int(ended.sum()) < MIN_JOBS:
        return Calibration((0.0,) * len(quantiles), 0)
    shifts = (0.0 if level == 0.5 else shift_of(level, rest[:, i], ended) for i, level in enumerate(quantiles))
    return Calibration(tuple(shifts), len(rest))


def _rest(forest: Forest, trace: Trace, begin: float, end: float, until: float) -> tuple[Floats, Bools]:
    """Of the jobs submitted in between: run time less each quantile, ``float64[jobs, quantiles]`` (logarithms).

    And which had ended at ``until``: of the others the run time is what they can have run by then, at least.
    """
    chosen = np.flatnonzero((trace.submit >= begin) & (trace.submit < end))
    predicted = np.zeros((len(chosen), len(forest.roots)))
    predict_all(forest, features_of(trace, float(forest.typical[0]))[chosen], predicted)
    ended = ends_of(trace)[chosen] <= until
    ran = np.where(ended, trace.duration[chosen], until - trace.submit[chosen])
    return np.log(np.maximum(ran, 1.0))[:, None] - np.maximum(predicted, 0.0), ended


def shift_of(level: float, rest: Floats, ended: Bools) -> float:
    """What to add to a quantile, so that the part ``level`` of ``rest: float64[jobs]`` is at most that.

    Jobs that still run (not ``ended: bool[jobs]``) are known to have at least theirs; leaving them out would make long
    jobs rare. They count as Kaplan and Meier have it (J. American Statistical Association 53, 1958). Where it falls
    between two jobs, the one farther out is taken: the job to come is one more of them.
    """
    order = np.argsort(rest, kind="stable")
    left = np.arange(len(rest), 0, -1) + (level > 0.5)
    below = 1.0 - np.cumprod(np.where(ended[order], 1.0 - 1.0 / left, 1.0))
    if level > 0.5:
        place = np.searchsorted(below, level - _ROUNDING)
    else:
        place = np.searchsorted(below, level + _ROUNDING, side="right") - 1
    return float(rest[order][np.clip(place, 0, len(rest) - 1)])
