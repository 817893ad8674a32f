"""What clients ask of the controller: one small file each, in the inbox.

The user who asks is not written in the file: the kernel's owner of the file says who it was.
"""

from __future__ import annotations

import msgspec

from gpusched.model.jobs import JobSpec


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", forbid_unknown_fields=True):
    """Base of all commands. ``time``: Unix seconds at the client."""

    time: float


class Submit(Command, frozen=True, kw_only=True, tag="submit"):
    """A new job, or an array of them (one task per index).

    ``secrets`` holds the values of the spec's ``secret_names``; they never reach the database.
    ``max_running`` bounds how many tasks of the array run at once (``--array 0-9%2``).
    """

    id: str
    spec: JobSpec
    array: tuple[int, ...] | None = None
    max_running: int | None = None
    secrets: dict[str, str] = {}


class Cancel(Command, frozen=True, kw_only=True, tag="cancel"):
    """End jobs; a running one gets its signal and the grace first, unless ``now``."""

    job_ids: tuple[str, ...]
    now: bool = False


class Hold(Command, frozen=True, kw_only=True, tag="hold"):
    """Keep pending jobs from starting."""

    job_ids: tuple[str, ...]


class Release(Command, frozen=True, kw_only=True, tag="release"):
    """Undo a hold."""

    job_ids: tuple[str, ...]


class Requeue(Command, frozen=True, kw_only=True, tag="requeue"):
    """Stop running jobs, or take ended ones, and queue them again."""

    job_ids: tuple[str, ...]


class SetPriority(Command, frozen=True, kw_only=True, tag="priority"):
    """Set the priority of pending jobs (lowering one's own is free, raising needs an admin)."""

    job_ids: tuple[str, ...]
    priority: int


class Drain(Command, frozen=True, kw_only=True, tag="drain"):
    """No new jobs on these nodes; the running ones end in their own time."""

    nodes: tuple[str, ...]
    reason: str


class Resume(Command, frozen=True, kw_only=True, tag="resume"):
    """Back into service."""

    nodes: tuple[str, ...]


AnyCommand = Submit | Cancel | Hold | Release | Requeue | SetPriority | Drain | Resume
