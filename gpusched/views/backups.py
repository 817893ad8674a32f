"""Backups, as a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpusched.model.backups import Backup
from gpusched.model.units import format_memory, iso_utc
from gpusched.views import common


def backups_json(backups: Sequence[Backup]) -> list[dict[str, Any]]:
    """Return one object per backup; ``error`` is empty where none is known."""
    return [
        {
            "path": str(one.path), "made": iso_utc(one.manifest.made) if one.manifest else None, "error": one.error,
            "size_bytes": one.manifest.size_bytes if one.manifest else None,
            "jobs": one.manifest.rows.get("jobs") if one.manifest else None,
        }
        for one in backups
    ]  # fmt: skip


def backups_screen(backups: Sequence[Backup], now: float) -> RenderableType:
    """Return a table, oldest first."""
    if not backups:
        return Text("no backups")
    table = common.plain_table("BACKUP", "AGE", "DATABASE", "ERROR", right=("AGE", "DATABASE"), wrap=("ERROR",))
    for one in backups:
        found = one.manifest
        age, size = (common.age(now - found.made), _size(one)) if found else (common.UNKNOWN, common.UNKNOWN)
        table.add_row(one.name, age, size, common.clean(one.error))
    return table


def made_line(made: Backup) -> str:
    """Return what to say of a new backup."""
    return f"{made.path}: {_size(made)}, checked"


def _size(backup: Backup) -> str:
    return format_memory(max(1, backup.manifest.size_bytes >> 20)) if backup.manifest else common.UNKNOWN
