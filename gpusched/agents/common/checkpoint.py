"""Checkpoints of a training, to resume after a kill: arrays and plain values in one file, written atomically."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.config.paths import write_atomic
from gpusched.config.weights import Arrays

EVERY_S = 5.0


def with_prefix(prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Return the arrays whose names have this prefix, by their names without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class Checkpoint:
    """The checkpoint file of one training, in safetensors format; a file with another ``key`` is ignored.

    Args:
        path: Of the file.
        key: Digest of all inputs of the training: data, hyper-parameters, seed, code.
        every_s: Seconds between saves; `due` is true at first.
    """

    def __init__(self, path: Path, key: str, every_s: float = EVERY_S) -> None:
        self.path, self.key = path, key
        self._every_s, self._last = every_s, float("-inf")

    def load(self) -> tuple[Arrays, dict[str, Any]] | None:
        """Return the arrays and values saved last; None: there is no checkpoint to resume from."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="numpy") as file:
                about = dict(file.metadata() or {})
                if about.get("key") != self.key:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}, json.loads(about["state"])
        except (OSError, SafetensorError, ValueError, RecursionError):
            return None

    def due(self) -> bool:
        """Return whether it is time to save."""
        return time.monotonic() - self._last >= self._every_s

    def save(self, arrays: Arrays, state: dict[str, Any]) -> None:
        """Replace the checkpoint atomically: a kill leaves the old file or the new one.

        ``state``: JSON values; integers may have any size (the state of random generators has 128 bits).
        """
        from safetensors.numpy import save

        self.path.parent.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_atomic(self.path, save(contiguous, {"key": self.key, "state": json.dumps(state)}))
        self._last = time.monotonic()

    def remove(self) -> None:
        """Remove the file after the training."""
        self.path.unlink(missing_ok=True)
