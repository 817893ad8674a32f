"""What decides in trained weights, in words that are read off the weights: a linear rule, or a neural network too."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpusched.agents.gist.networks import QUESTIONS
from gpusched.agents.gist.starts import STARTS, start
from gpusched.config.weights import Model
from gpusched.sched.agent import PREEMPT

NO_NETWORK = "no neural network"
_Arrays = Mapping[str, npt.NDArray[np.generic]]
_Layer = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic] | None]


def what_decides(model: Model) -> str:
    """One phrase, such as ``a linear rule of 21 weights (job 6, server 8, hold 7), no neural network``."""
    return _rltune(model) if model.agent == "rltune" else _gist(model)


def _gist(model: Model) -> str:
    arrays = model.arrays
    if model.about.get("variant", "scale") != "scale":
        return f"a {_network(_layers(arrays, 'q'))} in the paper's own setting; it decides nothing live"
    used = {name: _used(arrays.get(f"{name}.base")) for name in QUESTIONS}
    layers = [_layers(arrays, name) for name in QUESTIONS]
    speaking = next((found for found in layers if _speaks(found)), None)
    parts = ", ".join(f"{name} {number}" for name, number in used.items())
    rule = f"a linear rule of {sum(used.values())} weights ({parts})"
    if speaking is not None:
        return f"{rule}, and a {_network(speaking)}"
    return f"{_untrained(arrays)}{rule}, {NO_NETWORK}"


def _untrained(arrays: _Arrays) -> str:
    """Says so if these are the linear parts of one of the starts, unchanged."""
    for name in STARTS:
        begun = start(name, width=0)
        if all(np.array_equal(begun[f"{q}.base"], arrays.get(f"{q}.base", np.empty(0))) for q in QUESTIONS):
            return f"untrained, its start '{name}': "
    return ""


def _rltune(model: Model) -> str:
    arrays = model.arrays
    odds = ", by odds of run times" if _used(arrays.get("prior")) else ""
    if model.about.get(PREEMPT) == "yes":
        return f"a rank of {_used(arrays.get('weights'))} weights chosen by replays{odds}, {NO_NETWORK}"
    name = f" '{model.about['base']}'" if model.about.get("base") else ""
    rule = f"a linear rule{name} of {_used(arrays.get('linear'))} weights chosen by replays{odds}"
    layers = _layers(arrays, "net")
    strength = float(np.abs(np.asarray(arrays.get("strength", np.zeros(1)), np.float64)).max())
    if strength == 0.0 or not _speaks(layers):
        return f"{rule}, {NO_NETWORK}"
    attention = " with attention" if any(key.startswith("attention.") for key in arrays) else ""
    return f"{rule}, and a {_network(layers)}{attention} at strength {strength:g}"


def _used(array: npt.NDArray[np.generic] | None) -> int:
    """How many of its numbers are not 0."""
    return 0 if array is None else int(np.count_nonzero(array))


def _layers(arrays: _Arrays, name: str) -> list[_Layer]:
    """Matrix and bias of each layer, in order."""
    found: list[_Layer] = []
    while (weight := arrays.get(f"{name}.{len(found)}.weight")) is not None:
        found.append((weight, arrays.get(f"{name}.{len(found)}.bias")))
    return found


def _speaks(layers: list[_Layer]) -> bool:
    """Whether it can answer anything but 0: its last layer is not all 0."""
    return bool(layers) and any(_used(array) for array in layers[-1])


def _network(layers: list[_Layer]) -> str:
    widths = [str(weight.shape[0]) for weight, _ in layers[:-1]]
    return f"neural network of width {' and '.join(widths)}" if widths else "further linear layer"
