"""DL2's weights in files; the shipped ones were trained in its public setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.agents.common.nets import check_shapes
from gpusched.agents.dl2.decide import INPUTS, SHARED, Actor
from gpusched.config.weights import Arrays, TrainedModel, load_file
from gpusched.errors import UsageError

AGENT = "dl2"
STAGES = ("untrained", "warm", "trained")
SHIPPED = Path(__file__).parents[2] / "data" / "dl2.safetensors"


def arrays_of(stages: dict[str, Actor]) -> Arrays:
    """Convert the stages to the arrays of a weights file, ``STAGE.PART``."""
    return {f"{stage}.{part}": array for stage, actor in stages.items() for part, array in actor._asdict().items()}


def actor_of(model: TrainedModel, stage: str = STAGES[-1]) -> Actor:
    """Check the weights of one stage and return them.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    bias = model.arrays.get(f"{stage}.bias")
    hidden = len(bias) if bias is not None and bias.ndim == 1 else 1
    shapes = {"linear": (INPUTS,), "done": (SHARED,), "own": (INPUTS, hidden), "shared": (SHARED, hidden),
              "bias": (hidden,), "out": (hidden,)}  # fmt: skip
    check_shapes(model.arrays, {f"{stage}.{part}": shape for part, shape in shapes.items()})
    return Actor(*(np.ascontiguousarray(model.arrays[f"{stage}.{part}"], np.float32) for part in Actor._fields))


def read_actors(path: Path | None) -> dict[str, Actor]:
    """Read all stages of a file; None: of the shipped one.

    Raises:
        ModelError: The file cannot be read.
        UsageError: A stage is missing.
    """
    model = load_file(path or SHIPPED, AGENT)
    try:
        return {stage: actor_of(model, stage) for stage in STAGES}
    except ValueError as error:
        raise UsageError(f"{model.path}: {error}", "make one: gpusched reproduce dl2 --out FILE") from None
