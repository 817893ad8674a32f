"""Lazy access to what a command needs: state folder, inbox, store and inventory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpusched.config.paths import state_folder
from gpusched.queue.inbox import Inbox

if TYPE_CHECKING:
    from gpusched.model.resources import Inventory
    from gpusched.queue.store import Reader

HEARTBEATS_MISSED = 3
RECENT_WRITE_S = 15.0


class Client:
    """One command's access to the installation.

    Args:
        state: The state folder; None: the default (`gpusched.config.paths`).
        inventory: The inventory file; None: the default.
    """

    def __init__(self, state: Path | None = None, inventory: Path | None = None) -> None:
        self._reader: Reader | None = None
        self._inventory_path = inventory
        if state is not None:
            self.state = state

    def another(self) -> Client:
        """Return a client for another thread, with its own SQLite connection."""
        return Client(self.__dict__.get("state"), self._inventory_path)

    @cached_property
    def state(self) -> Path:
        """Return the state folder."""
        return state_folder()

    @cached_property
    def inbox(self) -> Inbox:
        """Return the inbox; its folder need not exist."""
        return Inbox(self.state)

    @cached_property
    def inventory(self) -> Inventory:
        """Return the inventory in force; like the controller, fall back to the last valid one if the file is invalid.

        Raises:
            GpuschedError: The file is missing or invalid, and no valid one is known.
        """
        from gpusched.queue.lastgood import inventory_or_kept

        return inventory_or_kept(self._inventory_path, self.state)

    @property
    def is_shared(self) -> bool:
        """Return whether the installation is for all users of this machine."""
        from gpusched.config.paths import SHARED_STATE

        return self.state == SHARED_STATE or self.inventory.settings.shared

    @property
    def reader(self) -> Reader | None:
        """Return the store, or None if there is none yet."""
        if self._reader is None and os.path.exists(self.state / "gpusched.db"):
            from gpusched.queue.store import Reader

            self._reader = Reader.open(self.state)
        return self._reader

    def reopen(self) -> None:
        """Close the store; the next use opens it again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def deliverable_inbox(self) -> Inbox:
        """Return the inbox; create it first if this user's own state folder has none.

        A shared inbox is created by the controller with the right modes. Submitting must work before its first cycle.
        """
        from gpusched.config.paths import SHARED_STATE

        if not os.path.isdir(self.inbox.new) and self.state != SHARED_STATE:
            with suppress(OSError):  # delivering then reports the error
                self.inbox.create()
        return self.inbox

    def _written_lately(self) -> bool:
        """Return whether the store's files changed within three default ticks, without importing sqlite3."""
        newest = 0.0
        for name in ("gpusched.db-wal", "gpusched.db"):
            try:
                status = os.stat(self.state / name)
            except OSError:
                continue
            if status.st_size:  # a reader alone makes an empty WAL file
                newest = max(newest, status.st_mtime)
        return 0 <= time.time() - newest < RECENT_WRITE_S

    def controller_warning(self) -> str:
        """Return one line if the controller is not running, not started yet or busy; else ""."""
        from gpusched.queue.clock import ANCHOR, now_by
        from gpusched.queue.presence import controller_of

        process = controller_of(self.state)
        if self._reader is None and self._written_lately() and not (process and process.doing):
            return ""
        reader = self.reader
        heartbeat = reader.number("heartbeat", 0.0) if reader else 0.0
        if reader is None or not heartbeat:
            if process is not None:
                return process.line("is running its first cycle")
            return "the controller has not run yet; start it with 'gpusched controller'"
        age = max(0.0, now_by(reader.meta(ANCHOR)) - heartbeat)
        tick_s = reader.number("tick_s", 5.0)
        if age <= max(HEARTBEATS_MISSED * tick_s, 5.0) + reader.lag_s():
            return ""
        from gpusched.views import common

        if process is not None:
            return process.line(f"is busy: its last cycle was {common.age(age)} ago")
        return f"the controller is not running (last seen {common.age(age)} ago); start it with 'gpusched controller'"

    def warning(self) -> str:
        """Return one line if the controller is not running, or Slurm, which holds the queue, is silent; else ""."""
        found = self.controller_warning()
        trouble = self.reader.slurm_trouble() if self.reader is not None and not found else None
        return trouble.line(time.time()) if trouble is not None else found

    def standby_line(self) -> str:
        """Return which controller is active and which standby watches it; "" where none does, which `notes` reports."""
        return "" if self.reader is None or self.reader.misses_standby() else self.reader.standbys()

    def notes(self) -> tuple[str, ...]:
        """Return other problems: an inventory that is not in force, nodes removed from it that still run jobs."""
        from gpusched.model.backups import BACKUP_META, backup_result, backup_trouble
        from gpusched.model.slurm import LEASE_TROUBLE
        from gpusched.queue.store import INVENTORY_TROUBLE

        if self.reader is None:
            return ()
        trouble, slurm_trouble = self.reader.meta(INVENTORY_TROUBLE), self.reader.slurm_trouble()
        found = [f"the controller still uses the last valid inventory: {trouble}"] if trouble else []
        found += [slurm_trouble.line(time.time())] if slurm_trouble is not None else []
        lease = self.reader.meta(LEASE_TROUBLE)
        found += [lease] if lease else []
        backup = backup_trouble(backup_result(self.reader.meta(BACKUP_META)), time.time())
        found += [backup] if backup else []
        found += [self.reader.standbys()] if self.reader.misses_standby() else []
        return (*found, *(f"node {r.name} is {r.reason}" for r in self.reader.left_nodes()))


def check_admin(client: Client) -> None:
    """Raise unless the caller is an admin: the controller would refuse the command later without telling the user."""
    from gpusched.config.users import user_name
    from gpusched.errors import GpuschedError

    uid = os.getuid()
    try:
        owner = client.state.stat().st_uid
    except OSError:
        return
    if uid not in (0, owner) and user_name(uid) not in client.inventory.settings.admins:
        raise GpuschedError(
            f"{user_name(uid)} is not an admin", "admins are listed in settings.admins of inventory.yaml"
        )
