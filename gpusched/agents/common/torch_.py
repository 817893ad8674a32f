"""Import and set-up of torch: one clear error where it is missing, and the same bits for the same seed."""

from __future__ import annotations

import importlib
import importlib.util
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


def require(name: str) -> Any:
    """Import a module and return it.

    Raises:
        GpuschedError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise _missing(name) from None


def check_installed(name: str) -> None:
    """Raise the same where a module is not installed, without importing it: torch takes seconds."""
    if importlib.util.find_spec(name) is None:
        raise _missing(name)


def _missing(name: str) -> GpuschedError:
    return GpuschedError(f"training needs {name}, which is not installed", EXTRA)


def check_device(device: str) -> None:
    """Refuse a device that is none, or that this machine does not have.

    Raises:
        UsageError: It is neither ``cpu`` nor ``cuda``.
        GpuschedError: Torch is not installed, or finds no GPU.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} is neither cpu nor cuda")
    if device == "cuda":
        torch: Any = require("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of an old driver; False is enough here
            available = torch.cuda.is_available()
        if not available:
            raise GpuschedError("--device cuda: torch finds no GPU here", "omit it to train on the CPU")


def set_up(seed: int, device: str = "cpu") -> Device:
    """Seed torch's generators, with one thread and deterministic kernels only; return the device.

    Args:
        seed: Of `torch.manual_seed`; trainers use generators of their own besides.
        device: ``cpu`` or ``cuda``.

    Raises:
        GpuschedError: Torch is not installed, or no such device exists.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode
    torch: Any = require("torch")
    check_device(device)
    torch.set_num_threads(1)  # more would change the order of sums with the machine
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    torch_device: Device = torch.device(device)
    return torch_device


def pack_state(**state: Any) -> Arrays:
    """Pack the state of networks, optimisers and generators, for a checkpoint."""
    data = BytesIO()
    require("torch").save(state, data)
    return {"torch": np.frombuffer(data.getvalue(), np.uint8)}


def unpack_state(arrays: Arrays) -> dict[str, Any]:
    """Unpack the state packed by `pack_state`."""
    data = BytesIO(arrays["torch"].tobytes())
    state: dict[str, Any] = require("torch").load(data, map_location="cpu", weights_only=True)
    return state
