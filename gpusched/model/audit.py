"""The audit log's entries."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gpusched.model.units import iso_utc

_meta = msgspec.Meta
MAX_SUBJECTS, MAX_REASON = 20, 1000
"""How many subjects an entry names, and characters of its reason: one command may name thousands of jobs."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One command: who sent it, from where, and what came of it. As a line of the log, one JSON object."""

    seq: Annotated[int, _meta(description="Number of the entry, ascending, never given twice.")] = 0
    time: Annotated[str, _meta(description="When it was applied or refused: UTC, ISO 8601.")]
    unix_s: Annotated[float, _meta(description="The same in Unix seconds.")]
    host: Annotated[str, _meta(description="The controller's machine.")]
    user: Annotated[str, _meta(description="Login name of the sender.")]
    uid: Annotated[int, _meta(description="User id of the sender, as the kernel reports it; -1: unknown.")]
    via: Annotated[str, _meta(description="inbox, relay, page, command (local), or job ID (from inside a job).")]
    origin: Annotated[str, _meta(description="Where it was typed, as the client claims; unverified. Empty: unknown.")]
    command: Annotated[str, _meta(description="The command; malformed: not a command.")]
    subject: Annotated[tuple[str, ...], _meta(description="Jobs, nodes, partition, reservation or file; at most 20.")]
    result: Annotated[Literal["applied", "refused"], _meta(description="What came of it.")]
    reason: Annotated[str, _meta(description="Why it was refused, or failed in part.")] = ""
    data: Annotated[dict[str, Any], _meta(description="Of a policy's change: policy, version, digest, forced.")] = {}


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
