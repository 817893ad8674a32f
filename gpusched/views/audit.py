"""The audit log as tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.audit import AuditEntry
from gpusched.model.reports import PolicyDecisions
from gpusched.model.units import iso_utc, local_time
from gpusched.views import common

MAX_STARTS = 20  # on the screen, of each period


def audit_screen(entries: Sequence[AuditEntry]) -> RenderableType:
    """Return one line per entry; what came from outside is escaped."""
    if not entries:
        return Text("no entries")
    table = common.plain_table(
        "TIME", "USER", "VIA", "ORIGIN (CLAIMED)", "COMMAND", "SUBJECT", "RESULT", wrap=("SUBJECT", "RESULT"),
        drop=("VIA", "ORIGIN (CLAIMED)"),
    )  # fmt: skip
    for entry in entries:
        is_refused = entry.result == "refused"
        result = Text(common.clean(f"refused: {entry.reason}"), "red") if is_refused else Text("applied")
        what = entry.data.get("digest") or entry.data.get("version")
        policy = f" -> {entry.data['policy']} {what}" if what else ""
        table.add_row(
            local_time(entry.unix_s), common.clean(entry.user or str(entry.uid)), common.clean(entry.via),
            common.clean(entry.origin), common.clean(entry.command),
            common.clean(" ".join(entry.subject) + policy), result,
        )  # fmt: skip
    return table


def decisions_json(periods: Sequence[PolicyDecisions]) -> list[dict[str, Any]]:
    """Return one object per period, with its starts."""
    return [
        msgspec.to_builtins(period)
        | {"since": iso_utc(period.since), "until": iso_utc(period.until), "count": len(period.starts)}
        | {"starts": [msgspec.to_builtins(start) | {"time": iso_utc(start.time)} for start in period.starts]}
        for period in periods
    ]


def decisions_screen(periods: Sequence[PolicyDecisions]) -> RenderableType:
    """Return the periods, and the last starts of each."""
    table = common.plain_table(
        "PARTITION", "VERSION", "DIGEST", "BY", "CHANGE", "FROM", "TO", "STARTS", right=("STARTS",), drop=("DIGEST",)
    )
    parts: list[RenderableType] = [table]
    for period in periods:
        until = "active" if period.until is None else local_time(period.until)
        table.add_row(
            common.clean(period.partition), period.version, period.digest or common.UNKNOWN,
            common.clean(period.user) or "a file", period.act + (" (forced)" if period.forced else ""),
            local_time(period.since), until, str(len(period.starts)),
        )  # fmt: skip
        if period.starts:
            starts = common.plain_table("START", "JOB", "NODES", wrap=("NODES",))
            for start in period.starts[-MAX_STARTS:]:
                starts.add_row(local_time(start.time), start.job, common.compress_names(start.nodes))
            parts += [Text(), starts]
    return Group(*parts)
