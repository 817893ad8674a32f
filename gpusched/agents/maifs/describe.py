"""What decides in trained weights of MAIFS, in words."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.describe import NO_NETWORK
from gpusched.agents.maifs.network import HIDDEN, JOB
from gpusched.config.weights import Model


def what_decides(model: Model) -> str:
    """One phrase: a linear rule, and its hidden layer where that speaks."""
    out = model.arrays.get("job.out")
    rule = f"a linear rule of {JOB} inputs of a job"
    if out is None or not np.any(out):
        return f"{rule}, {NO_NETWORK}"
    return f"{rule}, and a network of {JOB}-{HIDDEN}-2 beside it"
