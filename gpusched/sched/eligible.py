"""Which jobs may start at all, which may be preempted, and which partition's policy decides; no arrays."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.jobs import JobSpec, JobState
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import PolicySpec, PreemptionSettings, Resizing
from gpusched.model.snapshot import PendingView, RunningView
from gpusched.model.units import format_duration, local_clock
from gpusched.sched.reservations.rules import waits_for_own
from gpusched.sched.topology.spread import supports_racks

HELD_BY_USER = Reason(code=ReasonCode.JOB_HELD_USER, message="held by its user")
HELD_BY_ADMIN = Reason(code=ReasonCode.JOB_HELD_ADMIN, message="held by an administrator")
ARRAY_FULL = Reason(code=ReasonCode.ARRAY_TASK_LIMIT, message="its array is at its limit of running tasks")


def ineligible(job: PendingView, now: float, policies: Mapping[str, PolicySpec]) -> Reason | None:
    """Return why ``job`` may not start regardless of free resources, or None if it may.

    A job whose dependency can never be met stays in the queue with that reason, as in Slurm: its user must cancel it.
    ``spec.hold`` and ``spec.begin_time`` are what was asked at submission; what counts is ``held_by`` and
    ``eligible_time``.
    """
    if job.held_by:
        return HELD_BY_ADMIN if job.held_by == "admin" else HELD_BY_USER
    policy = policies.get(job.spec.partition)
    if policy is None:
        return Reason(code=ReasonCode.PARTITION_UNKNOWN, message=f"there is no partition {job.spec.partition}")
    if out_of_reach(job.spec, policy):
        return Reason(code=ReasonCode.POLICY, message=no_racks(policy.name))
    if job.barred:
        return Reason(code=ReasonCode.NOT_ELIGIBLE, message=f"Slurm does not allow it to start: {job.barred}")
    if job.unreserved:
        return Reason(code=ReasonCode.RESERVATION, message=job.unreserved)
    if job.dependency:
        if job.dependency == "never":
            message = job.dependency_message or "its dependency can never be met"
            return Reason(code=ReasonCode.DEPENDENCY_NEVER_SATISFIED, message=message)
        return Reason(code=ReasonCode.DEPENDENCY, message=job.dependency_message or "waits for another job")
    if job.eligible_time is not None and job.eligible_time > now:
        if job.awaits:
            return Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=job.awaits)
        begin = local_clock(job.eligible_time, now)
        return Reason(code=ReasonCode.BEGIN_TIME, message=f"not before {begin} (begin time)")
    if job.reserved is not None and (why := waits_for_own(job, now)):
        return Reason(code=ReasonCode.RESERVATION, message=why)
    return None


def no_racks(policy: str) -> str:
    """Return why jobs that run in one rack only do not start under a policy (`out_of_reach`)."""
    return f"--max-spread rack needs a policy that knows racks; {policy} does not"


def out_of_reach(spec: JobSpec, policy: PolicySpec) -> bool:
    """Return whether the job requires one rack and its policy is not rack-aware."""
    return spec.max_spread == "rack" and (spec.nodes > 1 or spec.max_nodes is not None) and not supports_racks(policy)


def may_stop(job: RunningView, rules: PreemptionSettings, now: float) -> str | None:
    """Return why a job must not be preempted now; None if it may be."""
    if job.spec is None or not job.spec.preemptible:
        return f"job {job.id} is not preemptible (--preemptible)"
    if job.state is not JobState.RUNNING:
        return f"job {job.id} is {job.state}"
    if now < job.start_time + rules.min_run_s:
        return f"job {job.id} has run for less than {format_duration(rules.min_run_s)}"
    if job.preemptions is not None and job.preemptions.too_soon(now, rules.per_hour):
        return f"job {job.id} has been preempted {rules.per_hour} times within an hour"
    return None


def may_resize(job: RunningView, rules: Resizing, now: float) -> str | None:
    """Return why a job must not be resized now; None if it may be."""
    if job.spec is None or job.spec.elastic is None:
        return f"job {job.id} is not resizable (--resizable)"
    if job.state is not JobState.RUNNING:
        return f"job {job.id} is {job.state}"
    if job.resizes is not None and job.resizes.frozen:
        return f"job {job.id} is no longer resized: {job.resizes.frozen}"
    if job.resizes is not None and job.resizes.before is not None:
        waits = "formed its new group" if job.spec.is_hot else "restarted"
        return f"job {job.id} has not {waits} yet since it was resized"
    if job.tied:
        return f"job {job.id} might not restart in time: {job.tied}"
    least = max(rules.min_run_s, job.spec.elastic.cooldown_s)
    since = max([job.start_time, *(job.resizes.times[-1:] if job.spec.is_hot and job.resizes is not None else ())])
    if now < since + least:
        return f"job {job.id} has run for less than {format_duration(least)}"
    if job.resizes is not None and job.resizes.too_soon(now, rules.per_hour):
        return f"job {job.id} has been resized {rules.per_hour} times within an hour"
    return None
