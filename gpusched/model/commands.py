"""Commands of clients to the controller: one small file each, in the inbox.

The file does not contain the user: the file's owner is the user.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gpusched.model.jobs import JobSpec
from gpusched.model.reservations import Reservation
from gpusched.model.slurm import SlurmMode

MAX_JOB_IDS = 10_000
"""Ids that one command about jobs may name: each is looked up within one cycle."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", forbid_unknown_fields=True):
    """Base of all commands. ``time``: Unix seconds at the client. ``origin``: where it was typed, as claimed."""

    time: float
    origin: Annotated[str, msgspec.Meta(max_length=120, pattern=r"\A[ -~]*\Z")] = ""


class Submit(Command, frozen=True, kw_only=True, tag="submit"):
    """A new job, or an array of them (one task per index).

    ``secrets`` holds the values of the spec's ``secret_names``; they never reach the database.
    ``max_running`` bounds how many tasks of the array run at once (``--array 0-9%2``). ``program`` is the text of a job
    with a ``function``; of an array, ``task_programs`` is what follows it for each task, in order of their indices.
    Neither reaches the database: they may be confidential. ``asked_by``: the job that submits it from inside;
    that job's user owns it; only the controller may set it.
    """

    id: str
    spec: JobSpec
    array: tuple[int, ...] | None = None
    max_running: int | None = None
    secrets: dict[str, str] = {}
    program: str = ""
    task_programs: tuple[str, ...] = ()
    asked_by: str = ""


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


class RelayedCommand(Command, frozen=True, kw_only=True, tag="asked"):
    """A request from inside a job; only the controller passes it on, in its own name."""

    job_id: str
    attempt: int
    act: Literal["cancel", "requeue"]
    job_ids: tuple[str, ...]


class SetPriority(Command, frozen=True, kw_only=True, tag="priority"):
    """Set the priority of pending jobs (lowering one's own is free, raising needs an admin)."""

    job_ids: tuple[str, ...]
    priority: int


class Drain(Command, frozen=True, kw_only=True, tag="drain"):
    """Take nodes out of service: no new jobs; running ones continue."""

    nodes: tuple[str, ...]
    reason: str


class Resume(Command, frozen=True, kw_only=True, tag="resume"):
    """Return nodes to service."""

    nodes: tuple[str, ...]


class Reserve(Command, frozen=True, kw_only=True, tag="reserve"):
    """Reserve nodes; the controller fills in the user and the time."""

    reservation: Reservation


class ChangeReservation(Command, frozen=True, kw_only=True, tag="change_reservation"):
    """Change a reservation that has not ended; None keeps a value."""

    name: str
    nodes: tuple[str, ...] | None = None
    begin: float | None = None
    end: float | None = None
    users: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    reason: str | None = None


class CancelReservation(Command, frozen=True, kw_only=True, tag="cancel_reservation"):
    """Release the nodes of a reservation; one that has begun ends now."""

    name: str


class Promote(Command, frozen=True, kw_only=True, tag="promote"):
    """Make a policy the active one of a partition.

    Attributes:
        path: Its file or folder, absolute.
        version: What the client saw there; with another one nothing is done.
        reason: In one line. forced: Without proof. evidence: The replay that proved it.
        mode: Of a partition of Slurm, what gpusched does there from then on; None: as before.
    """

    partition: str
    path: str
    version: str
    reason: str
    forced: bool = False
    evidence: dict[str, Any] | None = None
    mode: SlurmMode | None = None


class Rollback(Command, frozen=True, kw_only=True, tag="rollback"):
    """Make the previous policy of a partition active again."""

    partition: str
    reason: str


class ShadowOn(Command, frozen=True, kw_only=True, tag="shadow"):
    """Evaluate a policy beside the active one, without acting on it; ``path`` and ``version`` as in `Promote`."""

    partition: str
    path: str
    version: str


class ShadowOff(Command, frozen=True, kw_only=True, tag="shadow_off"):
    """Stop evaluating the shadow."""

    partition: str


class RecordAudit(Command, frozen=True, kw_only=True, tag="audit"):
    """An entry for the audit log about what does not go through the inbox.

    Attributes:
        action, subject, via: As `AuditEntry` has them. refused: Why; "": it was done.
        uid: The user who did it; None: the sender. user: The same where only a name is known (of a page's viewer).
    """

    action: Annotated[str, msgspec.Meta(max_length=60)]
    subject: tuple[str, ...] = ()
    refused: str = ""
    via: Literal["relay", "page", "command"] = "command"
    uid: int | None = None
    user: str = ""


JobCommand = Cancel | Hold | Release | Requeue | SetPriority
ReservationCommand = Reserve | ChangeReservation | CancelReservation
AnyCommand = (
    Submit
    | JobCommand
    | RelayedCommand
    | Drain
    | Resume
    | ReservationCommand
    | Promote
    | Rollback
    | ShadowOn
    | ShadowOff
    | RecordAudit
)
