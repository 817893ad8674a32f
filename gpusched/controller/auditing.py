"""Entries of the audit log about command files, written in the transaction that applies them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusched.config.paths import sync_folder
from gpusched.controller.eventstream import EventFile, EventStream
from gpusched.model import commands
from gpusched.model.audit import AuditEntry, audit_entry
from gpusched.model.policy import PolicySpec
from gpusched.queue import audit
from gpusched.queue.store import Reader, Store

MAX_FILE_BYTES, KEPT_FILES = 16 * 1024 * 1024, 20
MAX_REFUSALS = 20  # entries about one user's refused commands in a cycle; further ones are counted in one entry
HOST = os.uname().nodename


class AuditTrail:
    """The entries of one cycle's command files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._refusals: Counter[tuple[int, str]] = Counter()

    def add(self, entry: AuditEntry) -> None:
        """Store an entry, inside the caller's transaction."""
        if entry.result == "refused":
            self._refusals[entry.uid, entry.user] += 1
            if self._refusals[entry.uid, entry.user] > MAX_REFUSALS:
                return
        self._store.add_audit(entry)

    def finish(self, now: float) -> None:
        """Store the numbers of refusals that have no entry of their own, inside the caller's transaction."""
        for sender, count in self._refusals.items():
            if (more := count - MAX_REFUSALS) > 0:
                self._store.add_audit(audit_entry(now, HOST, sender, "commands", refused=f"{more} more were refused"))
        self.forget()

    def forget(self) -> None:
        """Forget the refusals so far, as after a rollback."""
        self._refusals.clear()


def entry_of(
    command: commands.AnyCommand, sender: tuple[int, str], job: tuple[int, str] | None, refused: str, store: Store,
    now: float,
) -> AuditEntry:  # fmt: skip
    """Return the entry about a command.

    Args:
        command: It; its changes are in the store.
        sender: User id and name of its file's owner.
        job: The same of the job that sent it from inside; None: none did.
        refused: Why it was refused; "": it was applied.
        store: What is new is read from it.
        now: The time (Unix seconds).
    """
    name, via, origin = type(command).__struct_config__.tag, "inbox", command.origin
    if isinstance(command, commands.RecordAudit) and not refused:
        if command.uid is not None or command.user:
            sender = (-1 if command.uid is None else command.uid, command.user)
        return audit_entry(
            now, HOST, sender, command.action, command.subject, refused=command.refused, via=command.via, origin=origin
        )
    if job is not None:
        sender, via, origin = job, origin, ""
    if isinstance(command, commands.RelayedCommand):
        name = command.act
    data = {} if refused else _policy_data(command, store)
    return audit_entry(
        now, HOST, sender, str(name), _subject(command), refused=refused, via=via, origin=origin, data=data
    )


def _subject(command: commands.AnyCommand) -> tuple[str, ...]:
    match command:
        case commands.Submit():
            return (command.id,)
        case commands.Drain() | commands.Resume():
            return command.nodes
        case commands.Reserve():
            return (command.reservation.name,)
        case commands.ChangeReservation() | commands.CancelReservation():
            return (command.name,)
        case commands.Promote() | commands.ShadowOn():
            return (command.partition, command.path)
        case commands.Rollback() | commands.ShadowOff():
            return (command.partition,)
        case commands.RecordAudit():
            return (command.action, *command.subject)
        case _:
            return command.job_ids


def _policy_data(command: commands.AnyCommand, store: Store) -> dict[str, Any]:
    """Return what a change of a policy has made active, or a shadow."""

    def of(spec: PolicySpec, digest: str) -> dict[str, Any]:
        return {"policy": spec.name, "version": spec.version, "digest": digest}

    match command:
        case commands.Promote() | commands.Rollback():
            change = store.live_changes()[command.partition]
            return of(change.spec, change.digest) | {
                "from": change.from_name, "from_version": change.from_version, "forced": change.forced,
                "change": change.seq,
            }  # fmt: skip
        case commands.ShadowOn():
            shadow = store.shadows()[command.partition]
            return of(shadow.spec, shadow.digest)
        case _:
            return {}


class AuditFile(EventFile):
    """The log's latest file; one that is full is renamed, and the oldest are removed."""

    def __init__(self, state: Path) -> None:
        self._folder = state / audit.FOLDER
        super().__init__(str(self._folder / audit.CURRENT), mode=0o640)
        self._state, self._last = state, 0

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines and sync them to the disk, in a new file where the latest is full."""
        self._folder.mkdir(mode=0o750, exist_ok=True)
        current = self._folder / audit.CURRENT
        with contextlib.suppress(FileNotFoundError):
            if current.stat().st_size >= MAX_FILE_BYTES:
                self.close()
                current.rename(self._folder / f"audit-{audit.last_number(self._state):015d}.jsonl")
                for path in audit.old_files(self._state)[:-KEPT_FILES]:
                    path.unlink(missing_ok=True)
        is_new = not current.exists()
        super().write(lines)
        if is_new:
            sync_folder(self._folder)


def audit_stream(store: Store, state: Path) -> EventStream:
    """Return the stream that writes the log, from where the log ends.

    Raises:
        OSError: The log cannot be read.
    """
    last = audit.last_number(state)
    store.number_audit_from(last)
    return EventStream(state, "audit log", AuditFile(state), last, Reader.audit_entries)
