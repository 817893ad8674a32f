"""The report of a recovery, and the nodes that it left unsettled."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpusched.model.jobs import JobState

RecoveryOutcome = Literal["recovered", "settled", "running", "unknown"]
"""``recovered``: not in the backup, known by nodes; ``settled``: changed since; ``running``: as in the backup."""


UNSETTLED = "unsettled"
"""Meta: `Unsettled` as JSON; "": all nodes are settled."""


class Unsettled(msgspec.Struct, frozen=True):
    """Nodes that did not answer when the store was recovered, ``since``; ``made``: its backup (Unix seconds)."""

    nodes: frozenset[str]
    since: float
    made: float


class RecoveredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that had started before the backup, or of which nodes know more. ``note``: one line, or ""."""

    id: str
    name: str
    user: str
    outcome: RecoveryOutcome
    state: JobState
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    note: str = ""


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery found.

    Attributes:
        backup: The path of the backup; "": there was none.
        made: When it was made (Unix seconds).
        pending: Jobs that are PENDING as in the backup.
        commands: Command files in the inbox.
        silent: Node -> why it did not answer; its jobs are settled when it does.
        strays: (node, attempt) without a usable record: the controller will end them.
    """

    backup: str
    made: float | None
    jobs: tuple[RecoveredJob, ...]
    pending: int
    commands: int
    silent: dict[str, str]
    strays: tuple[tuple[str, str], ...]
