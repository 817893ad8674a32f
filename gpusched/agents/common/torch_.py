"""The way to torch: present or one clear line, and set up so that the same seed gives the same bits."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

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


def optimizer_arrays(optimizer: Any) -> Arrays:
    """What an optimiser keeps of each parameter, for a checkpoint: ``adam.<parameter>.<name>``."""
    return {
        f"adam.{i}.{name}": value.cpu().numpy()
        for i, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }


def restore_optimizer(optimizer: Any, arrays: Arrays) -> None:
    """The other way; rates and the like stay as they are."""
    torch: Any = need("torch")
    moments: dict[int, dict[str, Any]] = {}
    for name, value in arrays.items():
        if name.startswith("adam."):
            _, index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = torch.from_numpy(value.copy())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
