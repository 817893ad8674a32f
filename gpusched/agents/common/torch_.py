"""Import and set-up of torch: one clear error where it is missing, and the same bits for the same seed.

Nothing here imports torch's compiler, which takes as long as torch itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusched.config.weights import Arrays
from gpusched.errors import GpuschedError, UsageError

if TYPE_CHECKING:
    from torch import device as Device

EXTRA = "pip install 'gpusched-cluster[learn]'"
_BETAS = (0.9, 0.999)


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
        seed: Of torch's own generators; trainers use generators of their own besides.
        device: ``cpu`` or ``cuda``.

    Raises:
        GpuschedError: Torch is not installed, or no such device exists.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode
    torch: Any = require("torch")
    check_device(device)
    torch.set_num_threads(1)  # more would change the order of sums with the machine
    torch.set_deterministic_debug_mode("error")
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed_all(seed)
    torch_device: Device = torch.device(device)
    return torch_device


class Adam:
    """Adam (Kingma and Ba, 2015), with the arithmetic of `torch.optim.Adam`; on a CPU its steps equal to the bit.

    Attributes:
        rates: The learning rate of each group.
    """

    def __init__(self, *groups: tuple[Iterable[Any], float], eps: float = 1e-8) -> None:
        """Begin. ``groups``: parameters, and their learning rate."""
        self.rates = [rate for _, rate in groups]
        self._torch, self._eps = require("torch"), eps
        zeros = self._torch.zeros_like
        self._groups = [[_Moments(part, zeros(part), zeros(part)) for part in parts] for parts, _ in groups]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self._groups:
            for one in group:
                one.of.grad = None

    def step(self) -> None:
        """Make one step of all parameters that have a gradient."""
        with self._torch.no_grad():
            for rate, group in zip(self.rates, self._groups, strict=True):
                for one in group:
                    if one.of.grad is not None:
                        one.step(rate, self._eps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        moments = [(one.mean, one.square, one.steps) for group in self._groups for one in group]
        return {"rates": self.rates, "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.rates = list(state["rates"])
        all_of = (one for group in self._groups for one in group)
        for one, (mean, square, steps) in zip(all_of, state["moments"], strict=True):
            one.mean.copy_(mean)
            one.square.copy_(square)
            one.steps = steps


@dataclass
class _Moments:
    """A parameter, the moving averages of its gradient and of that squared, and how often it was changed."""

    of: Any
    mean: Any
    square: Any
    steps: int = 0

    def step(self, rate: float, eps: float) -> None:
        self.steps += 1
        self.mean.lerp_(self.of.grad, 1 - _BETAS[0])
        self.square.mul_(_BETAS[1]).addcmul_(self.of.grad, self.of.grad, value=1 - _BETAS[1])
        unbiased, unbiased_square = (1 - beta**self.steps for beta in _BETAS)
        scale = (self.square.sqrt() / unbiased_square**0.5).add_(eps)
        self.of.addcdiv_(self.mean, scale, value=-(rate / unbiased))


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
