"""Small neural networks as arrays, for compiled passes: a trained policy decides without torch, live and in replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import jit
from gpusched.config.weights import Arrays
from gpusched.sched.state import Ints

Reals = npt.NDArray[np.float32]


class Net(NamedTuple):
    """A multilayer perceptron with ReLU between its layers and nothing after the last.

    Attributes:
        weights: ``float32[...]``: layer after layer its matrix, row by row as ``[inputs, outputs]``, then its bias.
        sizes: ``int64[layers + 1]``: inputs, hidden widths, outputs.
    """

    weights: Reals
    sizes: Ints


def check_shapes(arrays: Arrays, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that all of these arrays exist.

    Raises:
        ValueError: One is missing or has another shape.
    """
    for name, shape in wanted.items():
        if name not in arrays or arrays[name].shape != shape:
            found = "missing" if name not in arrays else f"{arrays[name].shape}"
            raise ValueError(f"{name} is {found}, expected {shape}")


def net_of(arrays: Arrays, name: str, inputs: int, outputs: int) -> Net:
    """Load the network stored in a weights file as ``NAME.0.weight [out, in]``, ``NAME.0.bias [out]``, and so on.

    The layout of the matrices is that of torch's `nn.Linear`.

    Raises:
        ValueError: A layer is missing, or its shape does not match its neighbours, the inputs or the outputs.
    """
    layers: list[Reals] = []
    sizes = [inputs]
    while f"{name}.{len(layers) // 2}.weight" in arrays:
        at = len(layers) // 2
        weight = np.asarray(arrays[f"{name}.{at}.weight"], np.float32)
        bias = arrays.get(f"{name}.{at}.bias")
        if weight.ndim != 2 or weight.shape[1] != sizes[-1] or bias is None or bias.shape != weight.shape[:1]:
            found = "x".join(str(n) for n in weight.shape)
            raise ValueError(f"layer {at} of {name} is {found}, and takes {sizes[-1]} inputs here")
        layers += [np.ascontiguousarray(weight.T).ravel(), np.asarray(bias, np.float32)]
        sizes.append(len(bias))
    if not layers or sizes[-1] != outputs:
        raise ValueError(f"{name} has {sizes[-1] if layers else 'no'} outputs, not {outputs}")
    return Net(np.concatenate(layers), np.array(sizes, np.int64))


def arrays_of(layers: Sequence[tuple[Reals, Reals]], name: str) -> dict[str, Reals]:
    """Convert layers (``[out, in]``, ``[out]``) to the arrays of a weights file."""
    return {
        f"{name}.{i}.{kind}": np.ascontiguousarray(array, np.float32)
        for i, layer in enumerate(layers)
        for kind, array in zip(("weight", "bias"), layer, strict=True)
    }


@jit
def new_buffers(net: Net) -> Reals:
    """Return buffers for `forward`, ``float32[2, widest layer]``."""
    return np.zeros((2, net.sizes.max()), np.float32)


@jit
def forward(net: Net, inputs: Reals, outputs: Reals, work: Reals) -> None:
    """Apply the network to one row: ``inputs: float32[sizes[0]]`` to ``outputs: float32[sizes[-1]]``.

    The inner loop runs over a layer's outputs, which the compiler vectorizes without reordering sums: the same bits on
    every machine with the same float arithmetic.
    """
    sizes, weights = net.sizes, net.weights
    layers = sizes.size - 1
    at = 0
    for i in range(sizes[0]):
        work[0, i] = inputs[i]
    for layer in range(layers):
        before, after = sizes[layer], sizes[layer + 1]
        source, target = work[layer & 1], work[1 - (layer & 1)]
        bias = at + before * after
        for o in range(after):
            target[o] = weights[bias + o]
        for i in range(before):
            value = source[i]
            if value != 0.0:
                row = at + i * after
                for o in range(after):
                    target[o] += value * weights[row + o]
        if layer < layers - 1:
            for o in range(after):
                # not max(): a NaN must propagate, so that the fallback decides
                if target[o] < 0.0:
                    target[o] = 0.0
        at = bias + after
    for o in range(sizes[layers]):
        outputs[o] = work[layers & 1, o]
