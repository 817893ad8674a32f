"""The login node's wall clock is set."""

from __future__ import annotations

from tests.campaign.faults.base import Fault


class Jump(Fault):
    """By an hour, forwards or back, for controller and clients; later it is right again."""

    def inject(self) -> None:
        self.site.set_clock(3600 if self.amount < 0.5 else -3600)

    def heal(self) -> None:
        self.site.set_clock(0)
