"""A forecast's assumptions, and why a job may have no forecast, in sentences. Plain Python, from the snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.forecast.component import component_of, uses_components
from gpusched.model.jobs import DependencyKind
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import count_of, format_duration
from gpusched.sched.limits import Rooms
from gpusched.sched.state import PLACES
from gpusched.sched.text import listed

_NEVER = {
    ReasonCode.PARTITION_UNKNOWN: "never",
    ReasonCode.BAD_CONSTRAINTS: "never",
    ReasonCode.DEPENDENCY_NEVER_SATISFIED: "never",
    ReasonCode.RESERVATION: "never",
    ReasonCode.REQ_NODE_NOT_AVAIL: "never unless nodes become available",
}
_OUTCOME = {
    DependencyKind.AFTEROK: "ends (assumed successful)",
    DependencyKind.AFTERNOTOK: "ends (assumed to fail)",
    DependencyKind.AFTERANY: "ends",
    DependencyKind.AFTER: "starts",
    DependencyKind.AFTERCORR: "ends (assumed successful)",
}


def why_never(snapshot: Snapshot, job: PendingView, reason: Reason) -> str:
    """Return why no run starts the job, as far as its ``reason`` does not say it."""
    if job.held_by:
        return "never while it is held"
    if reason.code in _NEVER:
        return _NEVER[reason.code]
    pending = {j.id: j for j in snapshot.pending}
    for dependency in job.spec.dependencies if job.dependency else ():
        other = pending.get(dependency.job_id)
        if other is not None and other.held_by:
            return f"never while job {other.id}, on which it depends, is held"
    if job.dependency:
        return "never unless its dependency starts"
    if job.spec.elastic is None and (limit := Rooms(snapshot).beyond(job)):
        return "never" if limit == reason else f"never: {limit.message}"
    return "too far ahead to predict"


def assumptions(snapshot: Snapshot, job: PendingView, past_runs: int) -> tuple[str, ...]:
    """Return the assumptions of the runs, the most specific first.

    ``past_runs``: how many the draws are made from.
    """
    return (
        *_of_job(snapshot, job),
        *_of_nodes(snapshot, job),
        *_of_policy(snapshot, job),
        *_of_arrays(snapshot),
        *_of_progress(snapshot),
        _of_times(past_runs),
        "no job with higher priority is submitted",
    )


def _of_job(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    for dependency in job.spec.dependencies if job.dependency == "waiting" else ():
        if dependency.kind is DependencyKind.SINGLETON:
            yield "not before all earlier jobs of its user with its name end"
        elif dependency.kind is DependencyKind.CHAIN:
            yield "not before the previous link ends (assumed successful)"
        else:
            yield f"not before job {dependency.job_id} {_OUTCOME[dependency.kind]}"
    if job.eligible_time is not None and job.eligible_time > snapshot.now and not job.awaits:
        yield f"not before its begin time, in {format_duration(job.eligible_time - snapshot.now)}"
    if job.array_room is not None:
        yield "its array stays within its limit of running tasks"
    held = sum(1 for j in snapshot.pending if j.held_by and j.spec.partition == job.spec.partition and j.id != job.id)
    if held:
        yield f"{count_of(held, 'held job')} of {job.spec.partition} stay{'s' if held == 1 else ''} held"


def _of_nodes(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    own = [n for n in snapshot.nodes if n.partition == job.spec.partition]
    away = [f"{n.name} ({n.unavailable_reason or 'not available'})" for n in own if not n.available]
    away += [f"GPU {g} of {n.name} ({why})" for n in own if n.available for g, why in sorted(n.blocked.items())]
    coming = {one.name: one for n in own for one in n.reservations}
    if coming:
        yield f"reservations stay as they are: {listed([one.what for one in coming.values()])}"
    if away:
        yield f"unavailable now and later: {listed(away)}"


def _of_policy(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    policy = snapshot.policies.get(job.spec.partition)
    if policy is not None and policy.agent:
        by = policy.fallback.name if policy.fallback else "its stages"
        yield f"the trained policy {policy.name} is approximated by {by}"
    component = component_of(snapshot, job.spec.partition)
    if component is not None and not uses_components(snapshot):
        yield f"the placement {component} is approximated by best-fit in long queues"
    elif component is None and policy is not None and policy.place not in PLACES:
        yield f"the placement {policy.place} is approximated by best-fit"
    if policy is not None and policy.place == "contention" and snapshot.beliefs:
        yield "jobs are placed, and wait for better places, by placement costs; run times do not depend on places"
    if policy is not None and policy.place == "naive":
        yield "the naive placement picks nodes at random"


def _of_arrays(snapshot: Snapshot) -> Iterator[str]:
    if any(job.behind for job in snapshot.pending):
        yield "tasks of large arrays are projected in groups"


def _of_progress(snapshot: Snapshot) -> Iterator[str]:
    reporting = sum(1 for job in snapshot.running if job.own_end is not None)
    if reporting:
        end, their = ("ends", "its") if reporting == 1 else ("end", "their")
        yield f"{count_of(reporting, 'running job')} {end} at {their} reported pace"


def _of_times(past_runs: int) -> str:
    if not past_runs:
        return "no past runs yet: every job is assumed to use its whole time limit"
    return f"jobs run as long as past runs of jobs like them did ({count_of(past_runs, 'past run')} known)"
