"""Backups of the state folder, and the outcome of the controller's latest one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from gpusched.model.units import format_duration

OVERDUE = 3  # times the interval
BACKUP_META = "backup"
"""Meta of the store: the `BackupResult` as JSON; "": the controller makes none."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds, written last.

    Attributes:
        made: Unix seconds, when the copied state was read.
        cluster_id: The installation's.
        schema: The database's version. rows: Table -> number of its rows.
        size_bytes: The database's.
        latest_event: Number of the store's latest event; 0: made before manifests had it.
    """

    made: float
    cluster_id: str
    schema: int
    rows: dict[str, int]
    size_bytes: int
    version: str = ""
    host: str = ""
    latest_event: int = 0


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished backup; ``manifest`` is None, with the reason in ``error``, where it cannot be used."""

    path: Path
    manifest: BackupManifest | None
    error: str = ""

    @property
    def name(self) -> str:
        """Return its name: when it was made, by the controller's clock."""
        return self.path.name

    @property
    def order(self) -> tuple[int, str]:
        """Return what sorts backups by age of their store: a clock that was set has no say in the numbers of events."""
        return self.manifest.latest_event if self.manifest is not None else -1, self.name


class BackupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the latest attempt of the controller, as kept in the store.

    Attributes:
        made: When the last good one was made (Unix seconds); None: never.
        tried: When this was. name, size_bytes, seconds: Of the last good one.
        to, every_s: Of `BackupSettings` at that time.
        error: Why the latest attempt failed; "": it did not.
    """

    tried: float
    every_s: int
    to: str = ""
    made: float | None = None
    name: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


def backup_result(kept: str | None) -> BackupResult | None:
    """Return what the store keeps of the controller's latest backup; None: it makes none."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(kept or "null", type=BackupResult | None)
    return None


def backup_trouble(result: BackupResult | None, now: float) -> str:
    """Return one line if the latest backup failed or is overdue, else ""."""
    if result is None:
        return ""
    age = f"the newest is {format_duration(now - result.made)} old" if result.made is not None else "there is none yet"
    if result.error:
        return f"the last backup failed ({age}): {result.error}"
    overdue = result.made is not None and now - result.made > OVERDUE * result.every_s
    return f"backups are overdue: {age}" if overdue else ""
