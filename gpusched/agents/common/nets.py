"""Small neural networks as arrays: a trained policy decides in compiled passes, without torch, live and in replays.

`net_of` reads a network from a weights file, `arrays_of` is the inverse, `forward` applies it.
"""

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
        weights: All layers in one row, ``float32[...]``: of each its matrix ``[inputs, outputs]``, row by row, then its
            bias ``[outputs]``. (Files have the matrix as ``[outputs, inputs]``.)
        sizes: ``int64[layers + 1]``: inputs, hidden widths, outputs.
    """

    weights: Reals
    sizes: Ints


def check_shapes(arrays: Arrays, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that all of these arrays exist, with these shapes (name -> shape).

    Raises:
        ValueError: One is missing or has another shape.
    """
    for name, shape in wanted.items():
        if name not in arrays or arrays[name].shape != shape:
            found = "missing" if name not in arrays else f"{arrays[name].shape}"
            raise ValueError(f"{name} is {found}, expected {shape}")


def net_of(arrays: Arrays, name: str, inputs: int, outputs: int) -> Net:
    """Load the network stored in a weights file as ``NAME.0.weight [out, in]``, ``NAME.0.bias [out]``, and so on.

    The layout of the matrices is that of torch's `nn.Linear`. Layers are counted without a gap, unlike the modules of a
    torch `Sequential`, which counts the ReLUs too.

    Raises:
        ValueError: A layer is missing, or its shape does not match its neighbours, the inputs or the outputs.
    """
    parts: list[Reals] = []  # matrix and bias in turn
    sizes = [inputs]
    while (found := arrays.get(f"{name}.{len(sizes) - 1}.weight")) is not None:
        layer = len(sizes) - 1
        weight, bias = np.asarray(found, np.float32), arrays.get(f"{name}.{layer}.bias")
        if weight.ndim != 2 or weight.shape[1] != sizes[-1] or bias is None or bias.shape != weight.shape[:1]:
            shape = "x".join(str(n) for n in weight.shape)
            raise ValueError(f"layer {layer} of {name} is {shape}, and takes {sizes[-1]} inputs here")
        parts += [np.ascontiguousarray(weight.T).ravel(), np.asarray(bias, np.float32)]
        sizes.append(len(bias))
    if not parts or sizes[-1] != outputs:
        raise ValueError(f"{name} has {sizes[-1] if parts else 'no'} outputs, not {outputs}")
    return Net(np.concatenate(parts), np.array(sizes, np.int64))


def arrays_of(layers: Sequence[tuple[Reals, Reals]], name: str) -> dict[str, Reals]:
    """Return the arrays of a weights file from a network's layers: (matrix ``[out, in]``, bias ``[out]``) of each."""
    return {
        f"{name}.{i}.{kind}": np.ascontiguousarray(array, np.float32)
        for i, layer in enumerate(layers)
        for kind, array in zip(("weight", "bias"), layer, strict=True)
    }


@jit
def new_buffers(net: Net) -> Reals:
    """Return the ``work`` of `forward`, ``float32[2, widest layer]``: one layer's inputs, and its outputs."""
    return np.zeros((2, net.sizes.max()), np.float32)


@jit
def forward(net: Net, inputs: Reals, outputs: Reals, work: Reals) -> None:
    """Apply the network to one row: ``inputs: float32[sizes[0]]`` to ``outputs: float32[sizes[-1]]``.

    Keep the order of the loops: the inner one runs over a layer's outputs, so that the compiler vectorizes it without
    reordering sums, and the result has the same bits on every machine.

    Args:
        net: The network.
        inputs: One row.
        outputs: Is overwritten.
        work: `new_buffers`; may be reused for the next row.
    """
    sizes, weights = net.sizes, net.weights
    layers = sizes.size - 1
    at = 0  # where the layer's matrix begins in `weights`
    for i in range(sizes[0]):
        work[0, i] = inputs[i]
    for layer in range(layers):
        before, after = sizes[layer], sizes[layer + 1]
        source, target = work[layer & 1], work[1 - (layer & 1)]  # they change places with each layer
        bias = at + before * after
        for o in range(after):
            target[o] = weights[bias + o]
        for i in range(before):
            value = source[i]
            if value != 0.0:  # many are 0 after a ReLU; NaN is not
                row = at + i * after
                for o in range(after):
                    target[o] += value * weights[row + o]
        if layer < layers - 1:
            for o in range(after):
                # Not max(): a NaN must reach the outputs, where the agent notices it and leaves it to the fallback.
                if target[o] < 0.0:
                    target[o] = 0.0
        at = bias + after
    for o in range(sizes[layers]):
        outputs[o] = work[layers & 1, o]
