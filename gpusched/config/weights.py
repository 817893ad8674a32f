"""Trained weights: safetensors files, read without torch and never by pickle.

A trained policy is a folder: ``policy.yaml``, and for each partition ``NAME.safetensors`` (weights, and what they are
of) with its training card ``NAME.card.yaml``. Weights of the name ``default`` serve partitions without their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpusched.config.openers import open_input
from gpusched.config.paths import write_atomic
from gpusched.config.weightfiles import CARD as CARD
from gpusched.config.weightfiles import DEFAULT as DEFAULT
from gpusched.config.weightfiles import weights_file as weights_file
from gpusched.errors import GpuschedError

Arrays = dict[str, npt.NDArray[np.generic]]
PREEMPTS = {"preempt": "yes"}  # what weights say of themselves that stop running jobs


class ModelError(GpuschedError):
    """Unusable weights; the policy's fallback decides."""


@dataclass(frozen=True)
class TrainedModel:
    """One partition's trained weights.

    Attributes:
        agent: Kind of agent they are for.
        arrays: Name -> array.
        about: What else the file says, text by name.
        digest: Of the file, 12 hexadecimal digits.
        path: The file.
    """

    agent: str
    arrays: Arrays
    about: dict[str, str]
    digest: str
    path: str

    @cached_property
    def preempts(self) -> bool:
        """Return whether the agent preempts running jobs."""
        return PREEMPTS.items() <= self.about.items()

    @property
    def knows(self) -> str:
        """See `run_time_source`."""
        return run_time_source(self.about)


def run_time_source(about: Mapping[str, str]) -> str:
    """Return the run time information that weights use: time limits by default."""
    return about.get("knows", "limit")


def load_model(folder: Path, partition: str, agent: str) -> TrainedModel:
    """Load a partition's weights.

    Raises:
        ModelError: There are none, they cannot be read, are another agent's, or hold what is not a finite number.
    """
    path = weights_file(folder, partition)
    if not path.is_file():
        raise ModelError(f"{path}: no weights for {partition}", "train them: gpusched train")
    return load_file(path, agent)


def load_file(path: Path, agent: str) -> TrainedModel:
    """Load the weights of one file.

    Raises:
        ModelError: It is not there, cannot be read, is another agent's, or holds what is not a finite number.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError:
        raise ModelError(
            f"{path}: reading weights needs safetensors, which is not installed", "pip install safetensors"
        ) from None
    try:
        with open_input(path) as file:
            content = file.read()  # read once: the file may be replaced, and the digest is of these arrays
        arrays = load(content)
        about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a type of numbers that numpy does not have
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"{path}: these weights cannot be read: {why}", "train them again") from None
    if about.get("agent") != agent:
        raise ModelError(f"{path}: these weights belong to {about.get('agent', 'something else')}, not to {agent}")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ModelError(f"{path}: {name} contains non-finite numbers", "train them again")
    return TrainedModel(agent, arrays, about, digest_of(content), str(path))


def digest_of(content: bytes) -> str:
    """Return the digest that identifies weights: 12 hexadecimal digits of their file's."""
    return hashlib.sha256(content).hexdigest()[:12]


def save_model(
    path: Path, agent: str, arrays: dict[str, npt.NDArray[np.generic]], about: dict[str, str] | None = None
) -> None:
    """Write weights atomically: a crash leaves the old file or the new one."""
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomic(path, _sorted_header(save(contiguous, {"agent": agent, **(about or {})})))


def make_writable(folder: Path, hint: str = "") -> None:
    """Make a folder for weights, and see that files can be written there: before hours of training, not after them.

    Raises:
        GpuschedError: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise GpuschedError(f"{folder}: weights cannot be written there: {error.strerror or error}", hint) from None


def _sorted_header(content: bytes) -> bytes:
    """Return the same safetensors with its header's keys sorted.

    The library writes them in an order of its own in every process; the same weights must have the same digest.
    Layout: the header's length (8 bytes, little endian), the header (JSON, padded with blanks to 8), the data.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]
