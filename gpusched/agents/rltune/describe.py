"""What decides in trained weights of RLTune, in words."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.describe import NO_NETWORK, count_used, layers_of, network_text, speaks
from gpusched.config.weights import Model


def what_decides(model: Model) -> str:
    """One phrase, such as ``a linear rule 'wait' of 9 weights chosen by replays, no neural network``."""
    arrays = model.arrays
    odds = ", by odds of run times" if count_used(arrays.get("prior")) else ""
    if model.preempts:
        return f"a rank of {count_used(arrays.get('weights'))} weights chosen by replays{odds}, {NO_NETWORK}"
    name = f" '{model.about['base']}'" if model.about.get("base") else ""
    rule = f"a linear rule{name} of {count_used(arrays.get('linear'))} weights chosen by replays{odds}"
    layers = layers_of(arrays, "net")
    strength = float(np.abs(np.asarray(arrays.get("strength", np.zeros(1)), np.float64)).max())
    if strength == 0.0 or not speaks(layers):
        return f"{rule}, {NO_NETWORK}"
    attention = " with attention" if any(key.startswith("attention.") for key in arrays) else ""
    return f"{rule}, and a {network_text(layers)}{attention} at strength {strength:g}"
