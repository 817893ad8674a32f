"""GPUs and their driver."""

from __future__ import annotations

from tests.campaign.faults.base import NODES, Fault


class Lost(Fault):
    """NVML says that a GPU is lost, under a job or not."""

    nodes, ends_attempts = NODES, True

    def inject(self) -> None:
        self.node.nvml_set({f"gpu{self.pick(8)}.error": 15})

    def heal(self) -> None:
        self.node.nvml_reset()


class Gone(Fault):
    """libnvidia-ml.so.1 is not there."""

    nodes, ends_attempts = NODES, True

    def inject(self) -> None:
        self.node.hide_nvml()

    def heal(self) -> None:
        self.node.show_nvml()


class Driver(Fault):
    """The driver is not loaded."""

    nodes, ends_attempts = NODES, True

    def inject(self) -> None:
        self.node.nvml_set(init_error=9)

    def heal(self) -> None:
        self.node.nvml_reset()


class Slow(Fault):
    """Every question about a GPU takes half a second."""

    nodes, ends_attempts = NODES, True

    def inject(self) -> None:
        self.node.nvml_set({f"gpu{self.pick(8)}.delay_ms": 500})

    def heal(self) -> None:
        self.node.nvml_reset()
