"""A client dies, or finds no room, amid a submission."""

from __future__ import annotations

import errno

from tests.campaign.faults.base import Fault
from tests.campaign.shim import CREATE, DIE, NAME, SYNC, TEAR, WRITE


class _Submission(Fault):
    lasts = False
    mask, error = WRITE | SYNC | NAME | CREATE, DIE

    def inject(self) -> None:
        self.site.client_shim.fail(self.mask, self.pick(9), self.error)
        self.site.submit_anyhow()
        self.had_effect = self.site.client_shim.failed > 0
        self.site.client_shim.clear()


class Kill(_Submission):
    """``kill -9`` before its nth disk operation."""


class Tear(_Submission):
    """It dies half-way through its write."""

    mask, error = WRITE, TEAR


class Full(_Submission):
    """No space left, at its nth operation."""

    error = errno.ENOSPC


class Broken(_Submission):
    """Input/output error, at its nth operation."""

    error = errno.EIO
