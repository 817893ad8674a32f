"""What decides in trained weights of DL2, in words."""

from __future__ import annotations

from gpusched.agents.common.describe import NO_NETWORK
from gpusched.agents.dl2.decide import INPUTS, SHARED
from gpusched.config.weights import Model


def what_decides(model: Model) -> str:
    """One phrase, such as ``a linear score of 20 inputs, and a network of 27-32-1 beside it``."""
    out = model.arrays.get("trained.out")
    score = f"a linear score of {INPUTS} inputs"
    if out is None or not out.any():
        return f"{score}, {NO_NETWORK}"
    return f"{score}, and a network of {INPUTS + SHARED}-{len(out)}-1 beside it"
