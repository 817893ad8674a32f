"""Calibration of quantiles: conformalized quantile regression on the later jobs of the training data.

After Romano, Patterson, Candes (Conformalized Quantile Regression, NeurIPS 2019), each side separately (theorem 2) and
in order of time: a forest predicts only jobs later than those it was trained on, as in use.
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

EDGES = (0.25, 0.5, 0.75, 1.0)  # fractions of the submitted jobs: trained up to one, predicted up to the next
MIN_JOBS = 100  # predicted, so that ten lie beyond each quantile
_ROUNDING = 1e-9

Bools = npt.NDArray[np.bool_]
Fit = Callable[[float], Forest | None]


class Calibration(NamedTuple):
    """The shift of each quantile, in log seconds, and the number of jobs it is based on (0: no shift)."""

    shifts: tuple[float, ...]
    jobs: int


def calibrate(trace: Trace, until: float, quantiles: tuple[float, ...], fit: Fit) -> Calibration:
    """Return the shifts with which the expected fraction of later jobs is below each quantile.

    The median is not shifted: policies use it, and over a few hundred jobs its shift would follow the last large burst.

    Nothing after ``until`` (the trace's clock) is used. ``fit``: trains a forest on the jobs ended by a time; None: too
    few jobs.
    """
    seen = trace.submit[trace.submit < until]
    edges = [float(seen[int(part * len(seen))]) if part < 1 else until for part in EDGES] if len(seen) else []
    rests, ends = [np.zeros((0, len(quantiles)))], [np.zeros(0, np.bool_)]
    for begin, end in pairwise(edges):
        forest = fit(begin)
        if forest is not None:
            residual, ended = _residuals(forest, trace, begin, end, until)
            rests.append(residual)
            ends.append(ended)
    residual, ended = np.concatenate(rests), np.concatenate(ends)
    if int(ended.sum()) < MIN_JOBS:
        return Calibration((0.0,) * len(quantiles), 0)
    shifts = (0.0 if level == 0.5 else shift_of(level, residual[:, i], ended) for i, level in enumerate(quantiles))
    return Calibration(tuple(shifts), len(residual))


def _residuals(forest: Forest, trace: Trace, begin: float, end: float, until: float) -> tuple[Floats, Bools]:
    """Return the run time minus each quantile of jobs submitted between, ``float64[jobs, quantiles]`` (logarithms).

    Return also which had ended by ``until``; the others count with the time since their submission.
    """
    chosen = np.flatnonzero((trace.submit >= begin) & (trace.submit < end))
    predicted = np.zeros((len(chosen), len(forest.roots)))
    predict_all(forest, features_of(trace, float(forest.typical[0]))[chosen], predicted)
    ended = ends_of(trace)[chosen] <= until
    ran = np.where(ended, trace.duration[chosen], until - trace.submit[chosen])
    return np.log(np.maximum(ran, 1.0))[:, None] - np.maximum(predicted, 0.0), ended


def shift_of(level: float, residual: Floats, ended: Bools) -> float:
    """Return the shift of a quantile such that a fraction ``level`` of ``rest: float64[jobs]`` is at most the shift.

    Jobs still running (not ``ended: bool[jobs]``) are censored: excluding them would bias against long jobs, so this is
    the estimator of Kaplan and Meier (J. American Statistical Association 53, 1958). Between two jobs the outer one is
    taken, since the job to predict counts as one more.
    """
    order = np.argsort(residual, kind="stable")
    left = np.arange(len(residual), 0, -1) + (level > 0.5)
    below = 1.0 - np.cumprod(np.where(ended[order], 1.0 - 1.0 / left, 1.0))
    if level > 0.5:
        place = np.searchsorted(below, level - _ROUNDING)
    else:
        place = np.searchsorted(below, level + _ROUNDING, side="right") - 1
    return float(residual[order][np.clip(place, 0, len(residual) - 1)])
