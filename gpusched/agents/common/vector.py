"""What a search moves, one long vector of numbers, and the named arrays that a weights file holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import gpusched
from gpusched.config.weights import Arrays, ModelError, load_file
from gpusched.sched.state import Floats

SHIPPED = Path(gpusched.__file__).parent / "data"
Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of what is learned, in the vector's order."""


def size_of(shapes: Shapes) -> int:
    """How many numbers are learned."""
    return sum(int(np.prod(shape)) for shape in shapes.values())


def parts_of(numbers: Floats, shapes: Shapes) -> list[Floats]:
    """``float64[size_of(shapes)]`` as arrays, one for each name."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    split = np.split(np.asarray(numbers, np.float64), ends[:-1])
    return [np.ascontiguousarray(part.reshape(shape)) for part, shape in zip(split, shapes.values(), strict=True)]


def named(numbers: Floats, shapes: Shapes) -> Arrays:
    """What a weights file holds."""
    return {name: part.astype(np.float32) for name, part in zip(shapes, parts_of(numbers, shapes), strict=True)}


def joined(arrays: Arrays, shapes: Shapes) -> Floats:
    """The other way.

    Raises:
        ValueError: An array is missing or of another shape.
    """
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"{name} is missing or not of shape {shape}")
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name in shapes])


def rounded(numbers: Floats) -> Floats:
    """As a weights file has them: in steps of float32."""
    return numbers.astype(np.float32).astype(np.float64)


def read_vector(agent: str, shapes: Shapes, file: str | None = None) -> Floats:
    """What agents have learned, from a file; None: that which comes along.

    Raises:
        ModelError: The file is not what it should be.
    """
    model = load_file(Path(file) if file else SHIPPED / f"{agent}.safetensors", agent)
    try:
        return joined(model.arrays, shapes)
    except ValueError as error:
        raise ModelError(f"{model.path}: {error}") from None
