"""The way to torch: present or one clear line, and set up so that the same seed gives the same bits."""

from __future__ import annotations

import importlib
import os
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusched.config.weights import Arrays
from gpusched.errors import GpuschedError, UsageError

if TYPE_CHECKING:
    from torch import device as Device

EXTRA = "pip install 'gpusched-cluster[learn]'"


def need(name: str) -> Any:
    """The module, imported.

    Raises:
        GpuschedError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise GpuschedError(f"training needs {name}, which is not installed", EXTRA) from None


def begin(seed: int, device: str = "cpu") -> Device:
    """Torch's own generators seeded, one thread, only deterministic kernels.

    Args:
        seed: Of `torch.manual_seed`; the trainer's own draws have generators of their own.
        device: ``cpu`` or ``cuda``.

    Raises:
        GpuschedError: Torch is not installed, or there is no such device.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode
    torch: Any = need("torch")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} is neither cpu nor cuda")
    if device == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a driver that is too old warns where False says enough
            available = torch.cuda.is_available()
        if not available:
            raise GpuschedError("--device cuda: torch finds no GPU here", "omit it to train on the CPU")
    torch.set_num_threads(1)  # more would change the order of sums with the machine
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    found: Device = torch.device(device)
    return found


def packed(**state: Any) -> Arrays:
    """Return what networks, optimisers and generators keep, for a checkpoint."""
    data = BytesIO()
    need("torch").save(state, data)
    return {"torch": np.frombuffer(data.getvalue(), np.uint8)}


def unpacked(arrays: Arrays) -> dict[str, Any]:
    """The other way."""
    data = BytesIO(arrays["torch"].tobytes())
    found: dict[str, Any] = need("torch").load(data, map_location="cpu", weights_only=True)
    return found
