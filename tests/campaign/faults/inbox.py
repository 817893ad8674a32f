"""Files in the inbox that no client of ours wrote."""

from __future__ import annotations

import os
from pathlib import Path

from tests.campaign.faults.base import Fault


class _File(Fault):
    lasts = False
    name_of_file = "stranger.cancel"

    @property
    def path(self) -> Path:
        """Where it is put."""
        return self.site.state / "inbox" / "new" / self.name_of_file


class Half(_File):
    """Half of a command."""

    name_of_file = "0123456789a.submit"

    def inject(self) -> None:
        self.site.write_file(self.path, b'{"type": "submit", "time": 1.0, "id": "01234567')


class Random(_File):
    """Random bytes, of a foreign owner."""

    def inject(self) -> None:
        self.site.write_file(self.path, os.urandom(1000))
        self.site.attempt(lambda: os.chown(self.path, 65534, 65534, follow_symlinks=False))


class Link(_File):
    """A symbolic link to a file outside of the state folder."""

    name_of_file = "link.cancel"

    def inject(self) -> None:
        self.path.unlink(missing_ok=True)
        self.site.attempt(lambda: self.path.symlink_to(self.site.stranger))


class Folder(_File):
    """A folder with something in it."""

    name_of_file = "folder.cancel"

    def inject(self) -> None:
        self.site.attempt(lambda: self.path.mkdir(exist_ok=True))
        self.site.write_file(self.path / "inside", b"x")


class Pipe(_File):
    """A named pipe that nobody writes to."""

    name_of_file = "pipe.cancel"

    def inject(self) -> None:
        self.path.unlink(missing_ok=True)
        self.site.attempt(lambda: os.mkfifo(self.path))


class Giant(_File):
    """1 GB, sparse."""

    def inject(self) -> None:
        self.site.write_file(self.path, b"", 1 << 30)


class Many(_File):
    """200 to 2,000 of them (`--flood` for more)."""

    def inject(self) -> None:
        for number in range(200 + self.pick(self.site.flood)):
            self.site.write_file(self.path.with_name(f"many{number}.hold"), b"{}")
