"""Self-attention over a window of jobs, as arrays for compiled passes: an optional layer of the RLTune network."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.nets import Net, Reals, check_shapes, forward, new_buffers
from gpusched.compiled import jit
from gpusched.config.weights import Arrays

PARTS = ("query", "key", "value")
NONE: Reals = np.zeros((3, 0, 0), np.float32)


def attention_of(arrays: Arrays, net: Net) -> Reals:
    """Return the matrices of a weights file, ``float32[3, in, out]``: query, key, value; size 0 if it has none.

    The file has ``attention.query [out, in]`` and so on, in the layout of torch's `nn.Linear`.

    Raises:
        ValueError: One is missing, or its width is not that of the network's last hidden layer.
    """
    names = [f"attention.{part}" for part in PARTS]
    if not any(name.startswith("attention.") for name in arrays):
        return NONE
    if len(net.sizes) < 3:
        raise ValueError("attention needs a hidden layer, and net has none")
    check_shapes(arrays, dict.fromkeys(names, (int(net.sizes[-2]),) * 2))
    return np.array(
        [arrays[name].T for name in names], np.float32, order="C"
    )  # the layout of `NONE`: one compiled variant


def arrays_of(attention: Reals) -> dict[str, Reals]:
    """Convert the matrices to the arrays of a weights file."""
    if not attention.size:
        return {}
    return {f"attention.{part}": matrix.T.copy() for part, matrix in zip(PARTS, attention, strict=True)}


@jit
def apply_attention(net: Net, attention: Reals, rows: Reals, outputs: Reals) -> None:
    """Apply the network to all jobs of a window, with attention between the jobs before the last layer.

    With H the last hidden vectors: ``H + softmax(Q K' / sqrt(width)) V``, with one head (Vaswani et al., 2017).
    ``attention: float32[3, width, width]``, ``rows: float32[jobs, inputs]`` to ``outputs: float32[jobs, outputs]``.
    """
    jobs, width, sizes = rows.shape[0], attention.shape[1], net.sizes
    at = net.weights.size - (width + 1) * sizes[-1]
    body, last, work = Net(net.weights[:at], sizes[:-1]), Net(net.weights[at:], sizes[-2:]), new_buffers(net)
    hidden = np.empty((jobs, width), np.float32)
    for i in range(jobs):
        forward(body, rows[i], hidden[i], work)
        for d in range(width):
            if hidden[i, d] < 0.0:  # not max(), as in `forward`
                hidden[i, d] = 0.0
    query, value = np.zeros((jobs, width), np.float32), np.zeros((jobs, width), np.float32)
    key = np.zeros((width, jobs), np.float32)  # transposed: the inner loop runs over jobs
    scale = np.float32(1.0 / np.sqrt(width))
    for i in range(jobs):
        for s in range(width):
            for d in range(width):
                query[i, d] += hidden[i, s] * attention[0, s, d]
                key[d, i] += hidden[i, s] * attention[1, s, d]
                value[i, d] += hidden[i, s] * attention[2, s, d]
    weight, mixed = np.empty(jobs, np.float32), np.empty(width, np.float32)
    for i in range(jobs):
        for j in range(jobs):
            weight[j] = 0.0
        for d in range(width):
            scaled = query[i, d] * scale
            for j in range(jobs):
                weight[j] += scaled * key[d, j]
        largest, total = weight[0], np.float32(0.0)
        for j in range(jobs):
            largest = max(largest, weight[j])
        for j in range(jobs):
            weight[j] = np.exp(weight[j] - largest)
            total += weight[j]
        for d in range(width):
            mixed[d] = hidden[i, d]
        for j in range(jobs):
            for d in range(width):
                mixed[d] += weight[j] / total * value[j, d]
        forward(last, mixed, outputs[i], work)
