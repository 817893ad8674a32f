"""Results of ``gpusched check`` and ``gpusched init``, as lines and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from gpusched.model.units import count_of, format_memory
from gpusched.views import common

if TYPE_CHECKING:
    from gpusched.doctor.findings import Finding

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "bold yellow"), "fail": ("FAIL", "bold red")}


def findings_screen(findings: Sequence[Finding]) -> RenderableType:
    """Return the findings of one subject, each with what to do."""
    table = common.plain_table("STATUS", "SUBJECT", "CHECK", "MESSAGE", wrap=("MESSAGE",), header=False)
    for finding in findings:
        mark, style = _MARKS[finding.status]
        message = Text(common.clean(finding.message))
        if finding.hint:
            message.append(f"\n→ {common.clean(finding.hint)}", "italic")
        # subjects come one by one; at least so wide, their tables line up
        subject, check = f"{common.clean(finding.subject):8}", f"{common.clean(finding.check):11}"
        table.add_row(Text(mark, style), Text(subject, "bold"), Text(check), message)
    return table


def summary(findings: Sequence[Finding]) -> RenderableType:
    """Return the number of findings by status."""
    counts = {status: sum(f.status == status for f in findings) for status in _MARKS}
    fails, warns = counts["fail"], counts["warn"]
    line = Text(f"{counts['ok']} ok")
    line.append(f", {count_of(warns, 'warning')}", "yellow" if warns else "")
    line.append(f", {count_of(fails, 'failure')}", "bold red" if fails else "")
    return Group(Text(), line)


def host_json(outcome: msgspec.Struct) -> dict[str, Any]:
    """Return what ``init`` found out about a host: its fields, with ``host`` as it was typed."""
    fields: dict[str, Any] = msgspec.to_builtins(outcome)
    return fields | {"host": fields["host"]["typed"]}


def host_line(outcome: msgspec.Struct) -> str:
    """Return what ``init`` found out about a host, as a line."""
    host = host_json(outcome)
    if "reason" in host:
        reason = host["reason"].removeprefix(f"{msgspec.to_builtins(outcome)['host']['address']}: ")
        return f"{host['host']}: {reason}{'; ' + host['hint'] if host['hint'] else ''}"
    gpus = f"{host['gpus']} x {host['gpu_type'] or 'GPU'}" if host["gpus"] else "no GPUs"
    about = "about " if host["rated_power_is_estimate"] else ""
    power = "" if host["rated_power_w"] is None else f", {about}{host['rated_power_w']:.0f} W"
    cores = count_of(host["cores"], "core")
    line = f"{host['host']}: {gpus}, {cores}, {format_memory(host['memory_mib'])}{power}, {host['runtime']}"
    return "; ".join([line, *host["notes"]])
