"""Backups and the report of a recovery, as screens and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.backups import Backup
from gpusched.model.recovery import RecoveryReport
from gpusched.model.units import count_of, format_memory, iso_utc
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


# The report of a recovery, as a screen and JSON


def recovery_json(report: RecoveryReport, committed: bool) -> dict[str, Any]:
    """Return the report as one object."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    fields["strays"] = [{"node": node, "attempt": name} for node, name in report.strays]
    return fields | {"made": iso_utc(report.made), "committed": committed}


def recovery_screen(report: RecoveryReport, now: float) -> RenderableType:
    """Return the jobs in a table, and below it the sums and what cannot be known."""
    parts: list[RenderableType] = []
    if report.jobs:
        table = common.plain_table("JOB", "USER", "RECOVERY", "STATE", "EXIT", "NODES", "NOTE", wrap=("NOTE",))
        for job in report.jobs:
            code = common.UNKNOWN if job.exit_code is None else str(job.exit_code)
            words = (job.id, job.user, job.outcome, str(job.state), code, ",".join(job.nodes), job.note)
            table.add_row(*map(common.clean, words))
        parts += [table, Text()]
    counts = Counter(job.outcome for job in report.jobs)
    sums = ", ".join(f"{counts[word]} {word}" for word in ("recovered", "settled", "running", "unknown"))
    backup = f"backup {report.backup}, {common.age(now - report.made)} old" if report.made is not None else "no backup"
    lines = [f"{backup}; jobs: {sums}, {report.pending} pending"]
    lines += [f"{name} does not answer: {why}; it is settled when it does" for name, why in report.silent.items()]
    lines += [f"{node}: {name} has no usable record; the controller will end it" for node, name in report.strays]
    if report.commands:
        lines.append(f"{count_of(report.commands, 'command')} in the inbox will be applied")
    since = "since the backup" if report.made is not None else "so far"
    lines.append(
        f"not known: jobs submitted {since} that have not started; cancellations, holds, priorities and other changes "
        f"{since}; output collected {since}"
    )
    return Group(*parts, *(Text(common.clean(line)) for line in lines))
