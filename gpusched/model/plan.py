"""Decisions: actions, and a typed reason for each job that stays pending."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gpusched.model.jobs import Allocation, NodeAllocation


class ReasonCode(StrEnum):
    """Why a job is pending, in Slurm's words where it has one; earlier codes take precedence."""

    JOB_HELD_ADMIN = "JobHeldAdmin"
    JOB_HELD_USER = "JobHeldUser"
    PARTITION_UNKNOWN = "PartitionUnknown"
    BAD_CONSTRAINTS = "BadConstraints"  # could not run even on the empty partition
    NOT_ELIGIBLE = "NotEligible"  # Slurm, which has it, does not let it start
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    DEPENDENCY = "Dependency"
    BEGIN_TIME = "BeginTime"
    RESERVATION = "Reservation"  # waits for the reservation that it asks for
    ARRAY_TASK_LIMIT = "JobArrayTaskLimit"
    ASSOC_GRP_GRES = "AssocGrpGRES"  # GPUs at once, of a user or a group
    ASSOC_MAX_JOBS = "AssocMaxJobsLimit"  # jobs at once of a user
    ASSOC_GRP_JOBS = "AssocGrpJobsLimit"  # of a group
    ASSOC_GRP_GRES_MINUTES = "AssocGrpGRESMinutes"  # GPU hours in seven days, of a user or a group
    QOS_GRP_GRES = "QOSGrpGRES"  # likewise of a class of service,
    QOS_GRP_JOBS = "QOSGrpJobsLimit"
    QOS_GRP_GRES_MINUTES = "QOSGrpGRESMinutes"
    QOS_MAX_GRES_PER_USER = "QOSMaxGRESPerUser"  # and of a user in it
    QOS_MAX_JOBS_PER_USER = "QOSMaxJobsPerUserLimit"
    QOS_MAX_GRES_MINUTES_PER_USER = "QOSMaxGRESMinutesPerUser"
    REQ_NODE_NOT_AVAIL = "ReqNodeNotAvail"  # would fit if DOWN, DRAINED, LOST, BUSY or reserved parts came back
    RESOURCES = "Resources"  # does not fit now; under backfill none and easy only the head of the queue has this reason
    PRIORITY = "Priority"  # others are before it
    BACKFILL = "Backfill"  # fits now, but would delay the head of the queue
    POLICY = "Policy"  # fits now, but the policy did not choose it
    REJECTED = "Rejected"  # the plan's check refused what the policy wanted


LIMITS = frozenset(code for code in ReasonCode if code.startswith(("Assoc", "QOS")))
"""Reasons of jobs that a limit of their user, group or class holds."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why one job was not started. ``message`` is one sentence for a person."""

    code: ReasonCode
    message: str = ""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a pending job on these nodes and GPUs."""

    job_id: str
    allocation: Allocation


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Stop a running job and requeue it; ``for_job``: the job that gets its resources, or ""."""

    job_id: str
    for_job: str = ""


class CancelJob(msgspec.Struct, frozen=True, tag=True):
    """End a job for good. No included policy does; a job whose dependency cannot be met stays queued."""

    job_id: str
    reason: Reason


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Stop a running resizable job, once it has saved its work, to restart with ``gpus``; ``why``: for people.

    Of a hot job, nothing stops: ranks join on ``joins`` (they get numbers later), or the last ones leave.
    """

    job_id: str
    gpus: int
    why: str = ""
    joins: tuple[NodeAllocation, ...] = ()


Action = Start | Preempt | CancelJob | Resize


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a snapshot: actions in order, and a reason for every job that stays pending.

    ``troubles``: partition -> why its agent's fallback decided, in one line. ``remarks``: partition -> of its mapping:
    how many jobs, how near the best (place: milp). ``waits``: job that waits for a better place -> when to decide
    about it again at the latest (Unix seconds).
    """

    actions: tuple[Action, ...] = ()
    reasons: dict[str, Reason] = {}
    troubles: dict[str, str] = {}
    remarks: dict[str, str] = {}
    waits: dict[str, float] = {}


class Rejection(msgspec.Struct, frozen=True):
    """An action that ``check`` rejected, and why."""

    action: Action
    why: str
