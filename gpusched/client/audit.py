"""Read the audit log, as far as this user may: own entries; operators all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.audit import AuditEntry
from gpusched.model.commands import RecordAudit
from gpusched.model.relay import AuditQuery
from gpusched.model.reports import PolicyDecisions, PolicyStart
from gpusched.queue.audit import FOLDER, AuditReporter, entries

_ENTRY = msgspec.json.Decoder(AuditEntry)


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The entries to show; times in Unix seconds."""

    since: float = 0.0
    until: float = float("inf")
    user: str | None = None
    command: str | None = None
    refused: bool = False

    def keeps(self, entry: AuditEntry) -> bool:
        """Return whether to show an entry."""
        return (
            self.since <= entry.unix_s < self.until
            and self.user in (None, entry.user, str(entry.uid))
            and self.command in (None, entry.command)
            and (entry.result == "refused" or not self.refused)
        )


def audit_entries(client: Client, wanted: AuditFilter) -> list[AuditEntry]:
    """Return the wanted entries that this user may see, oldest first.

    Raises:
        GpuschedError: The log cannot be read.
    """
    return [entry for entry in _entries(client, wanted.since) if wanted.keeps(entry)]


def _entries(client: Client, since: float) -> Iterable[AuditEntry]:
    folder = client.state / FOLDER
    if relay.is_needed(client) and not os.access(folder, os.R_OK | os.X_OK):
        try:
            return [_ENTRY.decode(line) for line in _lines(relay.stream(client, AuditQuery(since=since)))]
        except relay.NotListening:
            raise GpuschedError(
                "the audit log is read through the controller, which is not listening", "start 'gpusched controller'"
            ) from None
    try:
        return list(entries(client.state, client.reader, since))
    except OSError as error:
        raise GpuschedError(f"{folder}: {error.strerror}", "the controller's user may read it") from None


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def policy_decisions(client: Client, policy: str, since: float, until: float) -> list[PolicyDecisions]:
    """Return each period in which the policy was active in a partition, and the starts it decided then, oldest first.

    Raises:
        GpuschedError: The policy was never active.
    """
    reader, found, known = client.reader, list[PolicyDecisions](), False
    changes = reader.policy_changes() if reader is not None else []
    for number, change in enumerate(changes):
        if policy not in (change.spec.name, change.spec.version, change.digest or None):
            continue
        known = True
        end = next((later.time for later in changes[number + 1 :] if later.partition == change.partition), None)
        begin, before = max(since, change.time), min(until, float("inf") if end is None else end)
        if reader is None or begin >= before:
            continue
        starts = reader.starts_by(change.spec.name, change.partition, begin, before)
        found.append(
            PolicyDecisions(
                partition=change.partition, policy=change.spec.name, version=change.spec.version, digest=change.digest,
                act=change.act, user=change.user, since=change.time, until=end, forced=change.forced,
                starts=tuple(PolicyStart(job=job, time=at, nodes=nodes) for job, at, nodes in starts),
            )
        )  # fmt: skip
    if not known:
        names = ", ".join(sorted({change.spec.name for change in changes})) or "none"
        raise GpuschedError(f"policy {policy[:60]!r} was never active here", f"policies that were: {names}")
    return found


@contextmanager
def recorded_failure(state: Path, command: str) -> Iterator[None]:
    """Record that a command which does not go through the inbox failed or was refused, but for a wrong usage."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        why = error.line() if isinstance(error, GpuschedError) else type(error).__name__
        record_command(state, command, refused=why)
        raise


def record_command(state: Path, command: str, subject: tuple[str, ...] = (), refused: str = "") -> None:
    """Record what was done without the controller; not recorded where there is no inbox to write to."""
    with suppress(GpuschedError, OSError):
        AuditReporter(state).done(RecordAudit(time=time.time(), action=command, subject=subject, refused=refused))
