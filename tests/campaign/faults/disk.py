"""Disks without room, read-only, or broken: the state folder's and the nodes'."""

from __future__ import annotations

import errno

from tests.campaign.faults.base import NODES, Fault
from tests.campaign.shim import CREATE, NAME, SYNC, WRITE

KIB = 1024


class StateFull(Fault):
    """The state folder's file system has 0 to 96 KiB left: which write is the first to fail is drawn."""

    def inject(self) -> None:
        self.site.resize_state(self.pick(25) * 4)

    def heal(self) -> None:
        self.site.resize_state(None)


class _Operation(Fault):
    """A few disk operations of the controller fail, from the nth on."""

    mask, error, most, times = WRITE | SYNC | NAME | CREATE, errno.ENOSPC, 120, 3

    def inject(self) -> None:
        self.site.shim.fail(self.mask, self.pick(self.most), self.error, self.times)

    def heal(self) -> None:
        self.had_effect = self.site.shim.failed > 0
        self.site.shim.clear()


class WriteFull(_Operation):
    """ENOSPC at a write."""

    mask, most = WRITE, 80


class WriteBroken(_Operation):
    """EIO at a write."""

    mask, error, most = WRITE, errno.EIO, 80


class SyncBroken(_Operation):
    """EIO at an fsync, as at COMMIT."""

    mask, error, most = SYNC, errno.EIO, 24


class SyncFull(_Operation):
    """ENOSPC at an fsync."""

    mask, most = SYNC, 24


class NameFull(_Operation):
    """ENOSPC at a link, rename or removal."""

    mask, most = NAME, 16


class CreateFull(_Operation):
    """ENOSPC where a file is made."""

    mask, most = CREATE, 16


class ReadOnly(_Operation):
    """Nothing can be written in the state folder."""

    error, times = errno.EROFS, 1 << 30

    def inject(self) -> None:
        self.site.shim.fail(self.mask, 0, self.error, self.times)


class Dead(ReadOnly):
    """Every write in the state folder is an input/output error."""

    error = errno.EIO


class BackupFull(Fault):
    """The backups' file system has 0 to 96 KiB left, and a backup is made."""

    def inject(self) -> None:
        self.site.resize_backups(self.pick(25) * 4)
        self.site.back_up()

    def heal(self) -> None:
        self.site.resize_backups(None)


class TempFull(Fault):
    """The temporary folder of controller and clients has no room."""

    def inject(self) -> None:
        self.site.resize_temp(0)

    def heal(self) -> None:
        self.site.resize_temp(None)


class NodeFull(Fault):
    """A node's home has 0 to 48 KiB left."""

    nodes, ends_attempts, costs_exit_codes = NODES, True, True

    def inject(self) -> None:
        self.site.resize_home(self.node, self.pick(13) * 4)

    def heal(self) -> None:
        self.site.resize_home(self.node, None)
