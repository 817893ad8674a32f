"""Conversion between the parameter vector of a search and the named arrays of a weights file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import gpusched
from gpusched.config.weights import Arrays, ModelError, load_file
from gpusched.sched.state import Floats

SHIPPED = Path(gpusched.__file__).parent / "data"
Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of each learned array, in the vector's order."""


def vector_size(shapes: Shapes) -> int:
    """Return the number of learned parameters."""
    return sum(int(np.prod(shape)) for shape in shapes.values())


def split_vector(vector: Floats, shapes: Shapes) -> list[Floats]:
    """Split ``float64[vector_size(shapes)]`` into arrays, one for each name."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    split = np.split(np.asarray(vector, np.float64), ends[:-1])
    return [np.ascontiguousarray(part.reshape(shape)) for part, shape in zip(split, shapes.values(), strict=True)]


def to_arrays(vector: Floats, shapes: Shapes) -> Arrays:
    """Convert the vector to the arrays of a weights file."""
    return {name: part.astype(np.float32) for name, part in zip(shapes, split_vector(vector, shapes), strict=True)}


def to_vector(arrays: Arrays, shapes: Shapes) -> Floats:
    """Convert the arrays of a weights file to the vector.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"{name} is missing or not of shape {shape}")
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name in shapes])


def round_to_float32(vector: Floats) -> Floats:
    """Round to float32, as in a weights file."""
    return vector.astype(np.float32).astype(np.float64)


def read_vector(agent: str, shapes: Shapes, file: str | None = None) -> Floats:
    """Load an agent's vector from a weights file; None: the one that ships with gpusched.

    Raises:
        ModelError: The file is not a weights file of this agent.
    """
    model = load_file(Path(file) if file else SHIPPED / f"{agent}.safetensors", agent)
    try:
        return to_vector(model.arrays, shapes)
    except ValueError as error:
        raise ModelError(f"{model.path}: {error}") from None
