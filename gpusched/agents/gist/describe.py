"""What decides in trained weights of GIST, in words."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.describe import NO_NETWORK, count_used, layers_of, network_text, speaks
from gpusched.agents.gist.networks import QUESTIONS, STARTS, start
from gpusched.config.weights import Arrays, Model


def what_decides(model: Model) -> str:
    """One phrase, such as ``a linear rule of 21 weights (job 6, server 8, hold 7), no neural network``."""
    arrays = model.arrays
    if model.about.get("variant", "scale") != "scale":
        return f"a {network_text(layers_of(arrays, 'q'))} in the paper's own setting; it decides nothing live"
    used = {name: count_used(arrays.get(f"{name}.base")) for name in QUESTIONS}
    layers = [layers_of(arrays, name) for name in QUESTIONS]
    speaking = next((found for found in layers if speaks(found)), None)
    parts = ", ".join(f"{name} {number}" for name, number in used.items())
    rule = f"a linear rule of {sum(used.values())} weights ({parts})"
    if speaking is not None:
        return f"{rule}, and a {network_text(speaking)}"
    return f"{_untrained(arrays)}{rule}, {NO_NETWORK}"


def _untrained(arrays: Arrays) -> str:
    """Says so if these are the linear parts of one of the starts, unchanged."""
    for name in STARTS:
        begun = start(name, width=0)
        if all(np.array_equal(begun[f"{q}.base"], arrays.get(f"{q}.base", np.empty(0))) for q in QUESTIONS):
            return f"untrained, its start '{name}': "
    return ""
