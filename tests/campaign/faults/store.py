"""The database is locked by a stranger, or damaged while no controller runs."""

from __future__ import annotations

import contextlib
import os
import sqlite3

from tests.campaign.faults.base import Fault


class Locked(Fault):
    """A stranger holds a write transaction open."""

    def inject(self) -> None:
        self._db = sqlite3.connect(self.site.database, timeout=0.2, isolation_level=None)
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # the controller is amid its own, or the disk is full
            self._db.close()
            self.had_effect = False

    def heal(self) -> None:
        self._db.close()


class _Damaged(Fault):
    """Found by a controller that starts: one line, and it ends; a person puts the copy back."""

    lasts = False

    def inject(self) -> None:
        if self.site.is_disturbed():
            self.had_effect = False
            return
        self.site.kill()
        self.site.shim.clear()
        with contextlib.closing(sqlite3.connect(self.site.database)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else the log's pages hide the damage until later
        kept = self.site.copy_database()
        self.damage()
        done = self.site.cli("tick", check=False, timeout=120)
        self.site.expect(done.returncode in (1, 2) and done.stderr.count("\n") == 1, f"on a damaged database: {done}")
        self.site.restore_database(kept)
        self.site.begin()

    def damage(self) -> None:
        """Do it."""
        raise NotImplementedError


class Page(_Damaged):
    """The first page is overwritten."""

    def damage(self) -> None:
        with self.site.database.open("r+b") as file:
            file.write(os.urandom(4096))


class Truncated(_Damaged):
    """It is cut off, within its first page."""

    def damage(self) -> None:
        os.truncate(self.site.database, self.pick(4096))  # what is cut off later may only be found amid a cycle


class Backup(Fault):
    """A backup is made, if it can be; a failed one is one line and changes nothing in earlier ones."""

    lasts = False

    def inject(self) -> None:
        self.had_effect = self.site.back_up()


class Lost(Fault):
    """The state folder is lost, with its machine; `recover` rebuilds it from the last backup and the nodes."""

    lasts = False

    def inject(self) -> None:
        self.had_effect = not self.site.is_disturbed() and self.site.lose_state()
