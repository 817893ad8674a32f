"""The state folder is on FUSE, which answers with input/output errors, also for pages that are written back later."""

from __future__ import annotations

from tests.campaign.faults.base import Fault
from tests.testbed.fuse import READS, SYNCS, WRITES


class _Broken(Fault):
    """A few operations fail, from the nth on."""

    what, most, times = READS | WRITES | SYNCS, 80, 5

    def inject(self) -> None:
        assert self.site.fuse is not None
        self.site.fuse.fail(self.what, self.pick(self.most), self.times)

    def heal(self) -> None:
        assert self.site.fuse is not None
        self.site.fuse.heal()


class Broken(_Broken):
    """Reads, writes and syncs."""


class ReadBroken(_Broken):
    """Reads."""

    what = READS


class WriteBroken(_Broken):
    """Writes."""

    what = WRITES


class SyncBroken(_Broken):
    """Syncs, as at COMMIT."""

    what, most = SYNCS, 12


class Dead(_Broken):
    """All."""

    most, times = 1, 1 << 30
