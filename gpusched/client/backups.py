"""Make backups on demand, and list them."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from gpusched.client.context import Client
from gpusched.errors import UsageError
from gpusched.model.backups import Backup
from gpusched.model.resources import BackupSettings
from gpusched.queue.backup import backups, check_backup, make_backup


def make_now(client: Client, to: Path | None) -> Backup:
    """Make a backup; ``to``: instead of ``settings.backup.to``.

    Raises:
        GpuschedError: It could not be made.
    """
    return make_backup(client.state, _settings(client, to), time.time(), Path(client.inventory.path))


def listed_backups(client: Client, to: Path | None, check: bool) -> list[Backup]:
    """Return the backups, oldest first; with ``check`` their databases are read.

    Raises:
        UsageError: ``to`` is no folder.
    """
    if to is not None and not to.is_dir():
        raise UsageError(f"--to {to}: there is no such folder")
    found = backups(Path(_settings(client, to).to))
    if check:
        found = [msgspec.structs.replace(one, error=check_backup(one.path)) for one in found]
    return [one for one in found if not one.error or one.path.exists()]  # else it was rotated away meanwhile


def _settings(client: Client, to: Path | None) -> BackupSettings:
    settings = client.inventory.settings.backup
    if to is None and not settings.to:
        raise UsageError("no folder for backups", "name one with --to, or in settings.backup of inventory.yaml")
    return settings if to is None else msgspec.structs.replace(settings, to=str(to.absolute()))
