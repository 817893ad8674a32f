"""Requests to change jobs and nodes: check what can be checked now, then write one command file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from gpusched.client.context import Client, check_admin
from gpusched.client.inbox import IN_INBOX
from gpusched.client.jobs import Query, queried
from gpusched.client.resolve import ResolvedJobs, Resolver
from gpusched.config.validate import MAX_PRIORITY, check_nodes, check_text
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.commands import MAX_JOB_IDS, AnyCommand, Cancel, Drain, Hold, Release, Requeue, Resume, SetPriority
from gpusched.model.indices import text_of
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, JobState

Check = Callable[[Client, JobRecord], str]  # why the request would not affect a job, or ""


class ControlResult(msgspec.Struct, frozen=True):
    """A request that was sent: ids of jobs and arrays, or names of nodes; ``notes``: which it skips, and why."""

    what: str
    ids: tuple[str, ...]
    notes: tuple[str, ...] = ()


def cancel(client: Client, texts: Iterable[str], *, now: bool, named: bool = True) -> ControlResult:
    """Cancel jobs; those that have ended are skipped.

    ``named``: the user named the jobs, so each that has ended gets a note. Jobs that were `selected` may all have ended
    meanwhile, without a note.
    """
    targets = Resolver(client).targets(texts)
    ended = {target.id: why for target in targets if (why := _unaffected_reason(client, target, _not_ended))}
    live = [target for target in targets if target.id not in ended]
    if not live and not named:
        return ControlResult("cancel", ())
    result = _on_targets(client, "cancel", live or targets, _not_ended, Cancel, now=now)
    return msgspec.structs.replace(result, notes=(*result.notes, *ended.values())) if named else result


def selected(client: Client, user: str | None, states: frozenset[JobState] | None) -> tuple[list[str], int]:
    """Return the ids of a user's unended jobs in these states (None: in any), and their number; array tasks count."""
    unended = (states or frozenset(JobState)) - ENDED
    jobs = queried(client, Query(user=user, states=unended)) if unended else []
    ids = [f"{j.array_id}_[{text_of(j.tasks)}]" if j.tasks else j.id for j in jobs]
    return ids, sum(j.count for j in jobs)


def hold(client: Client, texts: Iterable[str]) -> ControlResult:
    """Keep pending jobs from starting."""
    return _on_jobs(client, "hold", texts, _to_hold, Hold)


def release(client: Client, texts: Iterable[str]) -> ControlResult:
    """Release held jobs."""
    return _on_jobs(client, "release", texts, _to_release, Release)


def requeue(client: Client, texts: Iterable[str]) -> ControlResult:
    """Requeue jobs: running ones are stopped first, ended ones start anew."""
    return _on_jobs(client, "requeue", texts, _to_requeue, Requeue)


def set_priority(client: Client, texts: Iterable[str], priority: int) -> ControlResult:
    """Set the priority of pending jobs."""
    if abs(priority) > MAX_PRIORITY:
        raise UsageError(f"a priority is between -{MAX_PRIORITY} and {MAX_PRIORITY}, found {priority}")

    def to_set(client: Client, job: JobRecord) -> str:
        if not _pending(job) and priority > job.priority and not _is_admin(client):
            return f"has priority {job.priority}; only an admin can raise it"
        return _pending(job)

    return _on_jobs(client, "priority", texts, to_set, SetPriority, priority=priority)


def drain(client: Client, nodes: Iterable[str], reason: str) -> ControlResult:
    """Start no new jobs on these nodes."""
    names = _nodes(client, nodes)
    check_reason("--reason", reason)
    client.deliverable_inbox().deliver(Drain(time=time.time(), nodes=names, reason=reason))
    return ControlResult("drain", names)


def resume(client: Client, nodes: Iterable[str]) -> ControlResult:
    """Return nodes to service."""
    names = _nodes(client, nodes)
    client.deliverable_inbox().deliver(Resume(time=time.time(), nodes=names))
    return ControlResult("resume", names)


def _nodes(client: Client, nodes: Iterable[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(nodes))
    check_nodes(client.inventory, None, names)
    check_admin(client)
    return names


def check_reason(option: str, reason: str) -> None:
    """Raise UsageError unless the reason is one line of text."""
    check_text(option, reason, 4000)
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"{option} must be one line of text", f"found {reason[:80]!r}")


def _on_jobs(
    client: Client, what: str, texts: Iterable[str], check: Check, command: Callable[..., AnyCommand], **fields: Any
) -> ControlResult:
    return _on_targets(client, what, Resolver(client).targets(texts), check, command, **fields)


def _on_targets(
    client: Client,
    what: str,
    targets: Sequence[ResolvedJobs],
    check: Check,
    command: Callable[..., AnyCommand],
    **fields: Any,
) -> ControlResult:
    notes = tuple(note for target in targets if (note := _check_target(client, what, target, check)))
    ids = tuple(t.id for t in targets)
    inbox = client.deliverable_inbox()
    for begin in range(0, len(ids), MAX_JOB_IDS):
        inbox.deliver(command(time=time.time(), job_ids=ids[begin : begin + MAX_JOB_IDS], **fields))
    return ControlResult(what, ids, notes)


def _check_target(client: Client, what: str, target: ResolvedJobs, check: Check) -> str:
    """Check a target; return a note on jobs that the request skips, or "".

    Raises:
        GpuschedError: The request would affect none of its jobs, or they are another user's.
    """
    if why := _unaffected_reason(client, target, check):
        raise GpuschedError(f"{what}: {why}")
    problems = [check(client, job) for job in target.jobs]
    task_count, job = sum(job.count for job in target.jobs), target.jobs[0]
    if job.uid != os.getuid():
        try:
            check_admin(client)
        except GpuschedError as error:
            raise GpuschedError(f"job {job.id} belongs to {job.user}, and {error.message}") from None
    unaffected = [(job, problem) for job, problem in zip(target.jobs, problems, strict=True) if problem]
    if not unaffected:
        return ""
    first, why = unaffected[0]
    return f"skipped {sum(job.count for job, _ in unaffected)} of {task_count} tasks: job {first.id} {why}"


def _unaffected_reason(client: Client, target: ResolvedJobs, check: Check) -> str:
    """Return why the request would affect no job of the target, or ""."""
    problems = [check(client, job) for job in target.jobs]
    if not all(problems):
        return ""
    task_count = sum(job.count for job in target.jobs)
    others = f" (the same for all {task_count} tasks)" if task_count > 1 else ""
    return f"job {target.jobs[0].id} {problems[0]}{others}"


def _not_ended(client: Client, job: JobRecord) -> str:
    return f"has ended: {job.state}" if job.state in ENDED else ""


def _pending(job: JobRecord) -> str:
    return "" if job.state is JobState.PENDING else f"is {job.state}, not PENDING"


def _is_admin(client: Client) -> bool:
    try:
        check_admin(client)
    except GpuschedError:
        return False
    return True


def _to_hold(client: Client, job: JobRecord) -> str:
    if job.held_by == "admin" and not _is_admin(client):
        return "is already held by an admin"
    return _pending(job)


def _to_release(client: Client, job: JobRecord) -> str:
    if job.held_by == "admin" and not _is_admin(client):
        return "is held by an admin"
    return _pending(job) or ("" if job.held_by or job.reason == IN_INBOX else "is not held")


def _to_requeue(client: Client, job: JobRecord) -> str:
    if job.state is JobState.PENDING:
        return "is already PENDING"
    if job.state in ACTIVE and job.ending is not None and job.ending.outcome is JobState.PENDING:
        return "is already being requeued"
    if job.state in ENDED and (job.spec.secret_names or job.spec.function) and not _has_secrets(client, job):
        what = "secrets are" if job.spec.secret_names else "function is"
        return f"has ended, and its {what} no longer stored; submit it again"
    return ""


def _has_secrets(client: Client, job: JobRecord) -> bool:
    """Return whether the controller still has the job's secrets or program: it keeps them until all its tasks end."""
    return client.reader is not None and client.reader.has_unended(job.array_id or job.id)
