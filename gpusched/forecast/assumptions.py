"""What a forecast takes for granted, and why a job may have none, in sentences. Plain Python, from the snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.model.jobs import DependencyKind
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import MAPPED
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import format_duration
from gpusched.sched.text import count_of, listed

_NEVER = {
    ReasonCode.PARTITION_UNKNOWN: "never",
    ReasonCode.BAD_CONSTRAINTS: "never",
    ReasonCode.DEPENDENCY_NEVER_SATISFIED: "never",
    ReasonCode.REQ_NODE_NOT_AVAIL: "never as long as nothing comes back",
}
_OUTCOME = {
    DependencyKind.AFTEROK: "ends, and taken to end well",
    DependencyKind.AFTERNOTOK: "ends, and taken to fail",
    DependencyKind.AFTERANY: "ends",
    DependencyKind.AFTER: "starts",
    DependencyKind.AFTERCORR: "ends, and taken to end well",
}


def why_never(snapshot: Snapshot, job: PendingView, reason: Reason) -> str:
    """Why no run starts the job."""
    if job.held_by:
        return "never while it is held"
    if reason.code in _NEVER:
        return f"{_NEVER[reason.code]}: {reason.message}"
    pending = {j.id: j for j in snapshot.pending}
    for dependency in job.spec.dependencies if job.dependency else ():
        other = pending.get(dependency.job_id)
        if other is not None and other.held_by:
            return f"never while job {other.id} is held, for which it waits"
    if job.dependency:
        return "never as long as what it waits for does not start"
    return "not within the time that can be predicted"


def assumptions(snapshot: Snapshot, job: PendingView, past_runs: int, known: bool) -> tuple[str, ...]:
    """What the runs take for granted, the most particular first.

    ``past_runs``: how many the draws are made from. ``known``: whether the job's user has enough of them.
    """
    return (
        *_of_job(snapshot, job),
        *_of_nodes(snapshot, job),
        *_of_policy(snapshot, job),
        *_of_arrays(snapshot),
        *_of_progress(snapshot),
        _of_times(past_runs, known),
        "nobody submits a job that goes before it",
    )


def _of_job(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    for dependency in job.spec.dependencies if job.dependency == "waiting" else ():
        if dependency.kind is DependencyKind.SINGLETON:
            yield "not before all earlier jobs of its user with its name end"
        elif dependency.kind is DependencyKind.CHAIN:
            yield "not before the link before it ends, and taken not to fail"
        else:
            yield f"not before job {dependency.job_id} {_OUTCOME[dependency.kind]}"
    if job.eligible_time is not None and job.eligible_time > snapshot.now:
        yield f"not before the time set for it, in {format_duration(job.eligible_time - snapshot.now)}"
    if job.array_room is not None:
        yield "never more tasks of its array at once than its bound allows"
    held = sum(1 for j in snapshot.pending if j.held_by and j.spec.partition == job.spec.partition and j.id != job.id)
    if held:
        yield f"{count_of(held, 'held job')} of {job.spec.partition} stay{'s' if held == 1 else ''} held"


def _of_nodes(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    own = [n for n in snapshot.nodes if n.partition == job.spec.partition]
    away = [f"{n.name} ({n.unavailable_reason or 'not available'})" for n in own if not n.available]
    away += [f"GPU {g} of {n.name} ({why})" for n in own if n.available for g, why in sorted(n.blocked.items())]
    if away:
        yield f"what is not available now stays so: {listed(away)}"


def _of_policy(snapshot: Snapshot, job: PendingView) -> Iterator[str]:
    policy = snapshot.policies.get(job.spec.partition)
    if policy is not None and policy.agent:
        by = policy.fallback.name if policy.fallback else "its stages"
        yield f"the trained policy {policy.name} is not run ahead; {by} stands in for it"
    if policy is not None and policy.place in MAPPED:
        yield f"the placement {policy.place} is not run ahead; best-fit stands in for it"
    if policy is not None and policy.place == "contention" and snapshot.beliefs:
        yield "who waits for a better place waits for one rack, or as long as it may; costs are not run ahead"
    if policy is not None and policy.place == "naive":
        yield "the naive placement draws nodes by chance"


def _of_arrays(snapshot: Snapshot) -> Iterator[str]:
    if any(job.behind for job in snapshot.pending):
        yield "of large arrays many tasks at a time are run ahead as one"


def _of_progress(snapshot: Snapshot) -> Iterator[str]:
    telling = sum(1 for job in snapshot.running if job.own_end is not None)
    if telling:
        end, they = ("ends", "it tells") if telling == 1 else ("end", "they tell")
        yield f"{count_of(telling, 'running job')} {end} at the pace that {they} of"


def _of_times(past_runs: int, known: bool) -> str:
    if not past_runs:
        return "no past runs are known yet, so every job is taken to use its whole time limit"
    whose = "their users' past runs" if known else "past runs (of all users where one has few)"
    return f"jobs use as much of their limits as {whose} did ({past_runs} known)"
