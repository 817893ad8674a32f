"""Which jobs may start at all, and which partition's policy decides: plain Python, no arrays."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView
from gpusched.model.units import format_duration

HELD_BY_USER = Reason(code=ReasonCode.JOB_HELD_USER, message="held by its user")
HELD_BY_ADMIN = Reason(code=ReasonCode.JOB_HELD_ADMIN, message="held by an administrator")
ARRAY_FULL = Reason(
    code=ReasonCode.ARRAY_TASK_LIMIT, message="as many tasks of its array are running as its limit allows"
)


def ineligible(job: PendingView, now: float, policies: Mapping[str, PolicySpec]) -> Reason | None:
    """Why ``job`` may not start whatever is free, or None if it may.

    A job whose dependency can never be met stays in the queue and says so, as in Slurm: ending it is its user's affair.
    ``spec.hold`` and ``spec.begin_time`` are what was asked at submission; what counts is ``held_by`` and
    ``eligible_time``.
    """
    if job.held_by:
        return HELD_BY_ADMIN if job.held_by == "admin" else HELD_BY_USER
    if job.spec.partition not in policies:
        return Reason(code=ReasonCode.PARTITION_UNKNOWN, message=f"there is no partition {job.spec.partition}")
    if job.dependency == "never":
        message = job.dependency_message or "its dependency can never be met"
        return Reason(code=ReasonCode.DEPENDENCY_NEVER_SATISFIED, message=message)
    if job.dependency:
        return Reason(code=ReasonCode.DEPENDENCY, message=job.dependency_message or "waits for another job")
    if job.eligible_time is not None and job.eligible_time > now:
        wait = format_duration(job.eligible_time - now)
        return Reason(code=ReasonCode.BEGIN_TIME, message=f"may not start before a time set for it, in {wait}")
    return None


def id_key(job_id: str) -> tuple[str, int]:
    """Orders ids as they were minted, the tasks of an array by number."""
    base, _, index = job_id.partition("_")
    return base, int(index) if index.isdigit() else -1
