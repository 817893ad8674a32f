"""The audit log's entries."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpusched.model.units import iso_utc

MAX_SUBJECTS, MAX_REASON = 20, 1000
"""How many subjects an entry names, and characters of its reason: one command may name thousands of jobs."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One command: its sender, origin and result. As a line of the log, one JSON object.

    Attributes:
        seq: Its number, ascending, never given twice; 0 before it is stored.
        time: When it was applied or refused, ISO 8601 UTC; unix_s the same in Unix seconds.
        host: The controller's machine.
        user, uid: The sender, as the kernel reports it; uid -1: unknown.
        via: inbox, relay, page, command (of an operator) or ``job ID`` (from inside a job).
        origin: Where it was typed, as the client claims; "": unknown.
        subject: Jobs, nodes, partition, reservation or file.
        reason: Why it was refused.
        data: Of a change of a policy: policy, version, digest ...
    """

    seq: int = 0
    time: str
    unix_s: float
    host: str
    user: str
    uid: int
    via: str
    origin: str
    command: str
    subject: tuple[str, ...]
    result: Literal["applied", "refused"]
    reason: str = ""
    data: dict[str, Any] = {}


def audit_entry(
    now: float,
    host: str,
    sender: tuple[int, str],
    command: str,
    subject: tuple[str, ...] = (),
    *,
    refused: str = "",
    via: str = "inbox",
    origin: str = "",
    data: dict[str, Any] | None = None,
) -> AuditEntry:
    """Return an entry without its number; ``sender``: user id and name; ``refused``: why, "" if it was applied."""
    more = {"subjects": len(subject)} if len(subject) > MAX_SUBJECTS else {}
    return AuditEntry(
        time=iso_utc(now) or "", unix_s=now, host=host, uid=sender[0], user=sender[1], via=via, origin=origin,
        command=command, subject=tuple(name[:200] for name in subject[:MAX_SUBJECTS]),
        result="refused" if refused else "applied", reason=refused[:MAX_REASON], data=more | (data or {}),
    )  # fmt: skip
