"""What decides in trained weights of the topology agents, in words."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.describe import NO_NETWORK
from gpusched.agents.topology.network import HIDDEN, WIDTH
from gpusched.config.weights import Model

_RULE = "the rule of contention: what a place costs against how long the job has waited"


def what_decides(model: Model) -> str:
    """One phrase: the rule, and what is beside it: a linear rule, and a graph network where that speaks."""
    linear, hidden = (_speaks(model, part) for part in ("skip", "out"))
    if not linear and not hidden:
        return f"untrained: {_RULE}, {NO_NETWORK}"
    beside = "a linear rule" if linear else ""
    network = f"a graph network (4 layers of {WIDTH}, {HIDDEN} hidden)" if hidden else ""
    return f"{_RULE}, and {' and '.join(filter(None, (beside, network)))} beside it"


def _speaks(model: Model, part: str) -> bool:
    return any(np.any(array) for name, array in model.arrays.items() if name.endswith(f".{part}"))
