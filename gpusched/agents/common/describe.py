"""Trained weights in words read off the weights: how many numbers, which layers, and whether they say anything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusched.config.weights import Arrays

NO_NETWORK = "no neural network"
Layer = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic] | None]


def count_used(array: npt.NDArray[np.generic] | None) -> int:
    """How many of its numbers are not 0."""
    return 0 if array is None else int(np.count_nonzero(array))


def layers_of(arrays: Arrays, name: str) -> list[Layer]:
    """Matrix and bias of each layer, in order."""
    found: list[Layer] = []
    while (weight := arrays.get(f"{name}.{len(found)}.weight")) is not None:
        found.append((weight, arrays.get(f"{name}.{len(found)}.bias")))
    return found


def speaks(layers: list[Layer]) -> bool:
    """Whether it can answer anything but 0: its last layer is not all 0."""
    return bool(layers) and any(count_used(array) for array in layers[-1])


def network_text(layers: list[Layer]) -> str:
    """Such as ``neural network of width 16 and 16``."""
    widths = [str(weight.shape[0]) for weight, _ in layers[:-1]]
    return f"neural network of width {' and '.join(widths)}" if widths else "further linear layer"
