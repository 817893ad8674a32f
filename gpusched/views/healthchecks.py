"""Results of the site's own checks, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpusched.model.healthchecks import CheckRecord
from gpusched.model.units import iso_utc
from gpusched.views import common

_COLUMNS = ("NODE", "CHECK", "STATE", "FOR", "LAST RUN", "VALUE", "MEDIAN", "RESULT")
_STYLES = {"ok": "green", "failed": "bold red", "hung": "bold red"}


def checks_json(records: Sequence[CheckRecord]) -> list[dict[str, Any]]:
    """Return one object per check and node."""
    return [
        {
            "node": r.node, "check": r.check, "state": r.state or None, "running": bool(r.run),
            "since": iso_utc(r.since), "began": iso_utc(r.began), "ended": iso_utc(r.ended),
            "exit_code": r.exit_code, "line": r.line, "value": r.value, "unit": r.unit, "median": r.median,
            "slow_since": iso_utc(r.slow_since), "values": list(r.values),
        }
        for r in records
    ]  # fmt: skip


def checks_screen(records: Sequence[CheckRecord], now: float) -> RenderableType:
    """Return the table."""
    if not records:
        return Text("no node has health_checks in inventory.yaml")
    table = common.plain_table(
        *_COLUMNS, right=("FOR", "LAST RUN", "VALUE", "MEDIAN"), wrap=("RESULT",), drop=("MEDIAN", "FOR", "LAST RUN")
    )
    for record in records:
        style = "yellow" if record.slow_since is not None and not record.is_bad else _STYLES.get(record.state, "dim")
        state = ("slow" if style == "yellow" else record.state) or ("running" if record.run else "never ran")
        value = common.UNKNOWN if not record.values else f"{record.values[-1]:.6g} {record.unit}".rstrip()
        table.add_row(
            Text(record.node, "bold"), record.check, Text(state, style), _ago(record.since, now),
            _ago(record.ended, now), common.clean(value), common.UNKNOWN if record.median is None else
            f"{record.median:.6g}", Text(common.clean(_result(record))),
        )  # fmt: skip
    return table


def _ago(time: float | None, now: float) -> str:
    return common.age(None if time is None else max(0.0, now - time))


def _result(record: CheckRecord) -> str:
    code = f" (exit code {record.exit_code})" if record.exit_code else ""
    return f"{record.line}{code}"
