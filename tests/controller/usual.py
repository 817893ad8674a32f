"""Jobs with usual run times."""

from __future__ import annotations

import numpy as np

from gpusched.estimation.features import Forest
from gpusched.estimation.predictor import Predictor


def usual(typical_s: float = 3600.0, times: float = 1.0) -> Predictor:
    """One leaf: a job runs ``times`` as long as its like did lately, ``typical_s`` where there was none."""
    leaf, zero = np.zeros(1, np.int64), np.zeros(1)
    forest = Forest(
        feature=leaf - 1, threshold=zero, missing_left=leaf, left=leaf, right=leaf, value=zero,
        roots=np.zeros((3, 1), np.int64), base=np.full(3, np.log(times)), typical=np.array([np.log(typical_s)]),
    )  # fmt: skip
    return Predictor(
        forest=forest, quantiles=(0.1, 0.5, 0.9), shifts=(-1.0, 0.0, 1.0), learned_until=0.0, calendar=True, about={}
    )
