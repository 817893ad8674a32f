"""The network in torch: layers for each job alone and, where asked for, attention over the window before the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.attention import PARTS

if TYPE_CHECKING:
    import torch


class Network:
    """What `agents.common.nets` and `agents.common.attention` compute from the same weights, to be learned.

    It answers 0 before it has learned anything.

    Args:
        inputs: Of a job. hidden: Width of both hidden layers. outputs: Of a job.
        attention: Whether jobs of a window see each other.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, attention: bool) -> None:
        import torch

        self._torch = torch
        linears = [torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, outputs)]
        with torch.no_grad():
            linears[-1].weight.zero_()
            linears[-1].bias.zero_()
        self._parts = {f"net.{i}": layer for i, layer in enumerate(linears)}
        self.attends = attention
        if attention:
            self._parts |= {f"attention.{part}": torch.nn.Linear(hidden, hidden, bias=False) for part in PARTS}

    def __call__(self, rows: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Answers ``[..., outputs]``.

        Args:
            rows: ``[..., window, inputs]``; without attention any rows.
            present: ``bool[..., window]``: rows that are jobs. What comes out for others means nothing.
        """
        parts = self._parts
        hidden = parts["net.1"](parts["net.0"](rows).relu()).relu()
        if self.attends:
            query, key, value = (parts[f"attention.{part}"](hidden) for part in PARTS)
            likeness = query @ key.transpose(-1, -2) / math.sqrt(hidden.shape[-1])
            likeness = likeness.masked_fill(~present[..., None, :], -1e9)
            hidden = hidden + likeness.softmax(dim=-1) @ value
        answers: torch.Tensor = parts["net.2"](hidden)
        return answers

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of all layers."""
        for part in self._parts.values():
            yield from part.parameters()

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The weights as a file holds them."""
        return {name: array.detach().numpy().copy() for name, array in self._named()}

    def load(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """Takes the weights of `arrays`."""
        with self._torch.no_grad():
            for name, array in self._named():
                array.copy_(self._torch.as_tensor(arrays[name]))

    def _named(self) -> Iterator[tuple[str, Any]]:
        for name, part in self._parts.items():
            kinds = [("", part.weight)] if part.bias is None else [(".weight", part.weight), (".bias", part.bias)]
            yield from ((name + kind, array) for kind, array in kinds)
