"""Slurm's jobs, nodes and partitions as read, and gpusched's modes there."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gpusched.model.units import local_clock

LEASE = "gpusched"
"""Name of the reservation through which jobs are started; when it ends, Slurm takes over."""


class SlurmMode(StrEnum):
    """gpusched's role in a Slurm partition: read only; order jobs by SiteFactor; decide starts and placements."""

    OBSERVE = "observe"
    ADVISE = "advise"
    DECIDE = "decide"


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A failure to reach Slurm: since when (Unix seconds), and why."""

    since: float
    why: str

    def line(self, now: float) -> str:
        """Return it as a sentence for people."""
        return f"Slurm has not responded since {local_clock(self.since, now)}; no decisions are made: {self.why}"


LEASE_TROUBLE = "slurm_lease_trouble"
"""Meta: why there is no lease though a partition's mode is decide, as a sentence; "": there is, or none is wanted."""

TROUBLE = "slurm_trouble"
"""Meta of the store: a `Trouble` as JSON; "": it answers."""


class SlurmFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that only a mirrored Slurm job has.

    Attributes:
        state, reason: In Slurm's words, as last read.
        account, qos: Of its association.
        partitions: That it may run in, as asked for.
        priority: As Slurm computes it. site_factor: What was added to it by us, or by a site's own plugin.
        standing: Its priority without what mode advise adds: the site's own order.
        restarts: How often Slurm has requeued it. requeue: It may be.
        reservation: That it names, or is given; ours is `LEASE`.
        leased: We have put it into ours, or were about to, and what Slurm did to it there is not undone yet.
        nodelist: Nodes that its user named (``-w``).
        pinned: Nodes on which we asked Slurm to start it, also once it runs; empty: we did not. pinned_at: When, Unix
            seconds.
        gpus: Node -> positions in gres.conf (IDX) of the GPUs that it has; empty: Slurm does not say.
        submit_time: As Slurm has it: of the last requeue. By it, and its id, a job is known again.
    """

    state: str = ""
    reason: str = ""
    account: str = ""
    qos: str = ""
    partitions: tuple[str, ...] = ()
    priority: int = 0
    site_factor: int = 0
    standing: int = 0
    restarts: int = 0
    requeue: bool = True
    reservation: str = ""
    leased: bool = False
    nodelist: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    pinned_at: float | None = None
    gpus: dict[str, tuple[int, ...]] = {}
    submit_time: float = 0.0


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or a task of an array, as in squeue. Times in Unix seconds.

    Attributes:
        id: As scontrol takes it: ``1234``, or ``1234_5`` for a task, whether Slurm has split it off already or not.
        raw_id: JobId of its record; tasks that wait together have that of their array.
        array_id, array_index: Of a task; else "" and None. array_limit: So many of its tasks may run at once.
        nodes: How many it asks for, or has. node_names: That it has, or had last.
        cpus, memory_mib, gpus: Of the whole job; GPUs by type ("": not said). memory_mib None: not known.
        time_limit_s: None: unlimited.
        restarts: Times that it was requeued.
        exit_code: Of one that has ended, 128 and more: by that signal; None: not known.
    """

    id: str
    raw_id: str
    array_id: str = ""
    array_index: int | None = None
    array_limit: int | None = None
    user: str
    uid: int
    account: str = ""
    qos: str = ""
    partitions: tuple[str, ...]
    name: str
    state: str
    reason: str
    priority: int
    site_factor: int = 0
    submit_time: float
    eligible_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    time_limit_s: int | None
    nodes: int
    node_names: tuple[str, ...] = ()
    cpus: int
    memory_mib: int | None = None
    gpus: dict[str, int] = {}
    req_nodes: tuple[str, ...] = ()
    exc_nodes: tuple[str, ...] = ()
    features: str = ""
    reservation: str = ""
    dependency: str = ""
    exclusive: bool = False
    requeue: bool = True
    restarts: int = 0
    exit_code: int | None = None


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as in scontrol.

    ``states``: Slurm's words, the base state first (``IDLE``, ``DRAIN``...). ``gpus``: type -> how many, as configured.
    """

    name: str
    address: str
    states: tuple[str, ...]
    reason: str = ""
    cpus: int
    memory_mib: int
    gpus: dict[str, int] = {}
    gpus_used: int = 0
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    version: str = ""


class SlurmPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as in scontrol. ``max_time_s``, ``default_time_s``: None: unlimited, or none."""

    name: str
    nodes: tuple[str, ...]
    is_default: bool = False
    max_time_s: int | None = None
    default_time_s: int | None = None
    state: str = "UP"
    priority_tier: int = 1
    preempt_mode: str = "OFF"


class SlurmReservation(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation as in scontrol. Times in Unix seconds."""

    name: str
    nodes: tuple[str, ...]
    start_time: float
    end_time: float
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    state: str = ""


_BY_RESERVATION = ("BadConstraints", "ReservationDeleted")
_BY_SLURM = (*_BY_RESERVATION, "JobHoldMaxRequeue", "BurstBuffer")


def is_held_by_slurm(job: SlurmJob) -> bool:
    """Return whether Slurm itself, not a user or admin, holds a pending job."""
    return job.priority == 0 and job.reason.startswith(_BY_SLURM)


def is_held_in_reservation(job: SlurmJob) -> bool:
    """Return whether Slurm holds a job because its reservation lacks the nodes; Slurm never releases it itself."""
    return is_held_by_slurm(job) and job.reason.startswith(_BY_RESERVATION)


_NOT_BLOCKING = (
    "None",
    "Priority",
    "Resources",
    "ReqNodeNotAvail",
    "Reservation",
    "Nodes_required",
    "NodeDown",
    "Prolog",
)
_OWN_STAGE = ("JobHeldUser", "JobHeldAdmin", "BeginTime")  # a job's own fields say these


def blocking_reason(reason: str) -> str:
    """Return Slurm's reason if it blocks the job regardless of free resources, else ""."""
    return "" if not reason or reason.startswith((*_NOT_BLOCKING, *_OWN_STAGE)) else reason


def slurm_block_reason(job: SlurmFacts) -> str:
    """Return why Slurm blocks a pending job regardless of free resources; "": it does not."""
    if job.reservation not in ("", LEASE):
        return f"Reservation {job.reservation}"
    return blocking_reason(job.reason)
