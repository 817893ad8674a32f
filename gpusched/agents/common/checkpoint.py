"""What a training needs to go on after a kill: arrays and plain values in one file, written whole or not at all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.config.paths import write_atomic
from gpusched.config.weights import Arrays

EVERY_S = 5.0


def below(prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class Checkpoint:
    """One training's file, a safetensors; a file of another training (another ``key``) counts as none.

    Args:
        path: Where.
        key: Digest of all that the training depends on: data, hyper-parameters, seed, code.
        every_s: How often `due` says yes; the first time it always does.
    """

    def __init__(self, path: Path, key: str, every_s: float = EVERY_S) -> None:
        self.path, self.key = path, key
        self._every_s, self._last = every_s, float("-inf")

    def load(self) -> tuple[Arrays, dict[str, Any]] | None:
        """Arrays and values as saved last; None where there is nothing to go on from."""
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
        """Whether it is time to save."""
        return time.monotonic() - self._last >= self._every_s

    def save(self, arrays: Arrays, state: dict[str, Any]) -> None:
        """Replaces what was saved; a kill at any moment leaves the old file or the new one.

        ``state``: whatever JSON can hold; whole numbers may be of any size (random generators have 128 bits).
        """
        from safetensors.numpy import save

        self.path.parent.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_atomic(self.path, save(contiguous, {"key": self.key, "state": json.dumps(state)}))
        self._last = time.monotonic()

    def remove(self) -> None:
        """The training is done."""
        self.path.unlink(missing_ok=True)
