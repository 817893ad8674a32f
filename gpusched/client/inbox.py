"""Submissions that are still in the inbox, as the jobs they will become."""

from __future__ import annotations

import msgspec

from gpusched.client.context import Client
from gpusched.config.users import user_name
from gpusched.model.arrays import restricted_row
from gpusched.model.commands import Submit
from gpusched.model.indices import spans_of
from gpusched.model.jobs import JobRecord, JobState
from gpusched.queue.inbox import ReceivedCommand

IN_INBOX = "InInbox"
_MESSAGE = "submitted; not yet queued by the controller"


def inbox_jobs(client: Client) -> list[JobRecord]:
    """Return the inbox's submissions that this user may read, oldest first; an array is one row."""
    found = (received for received in client.inbox.waiting() if isinstance(received, ReceivedCommand))
    return [job for received in found for job in _jobs_of(received)]


def inbox_submission(client: Client, job_id: str) -> list[JobRecord]:
    """Return the jobs of one submission by its whole id: users cannot list a shared inbox."""
    received = client.inbox.submission(job_id)
    return _jobs_of(received) if received else []


def _jobs_of(received: ReceivedCommand) -> list[JobRecord]:
    submit, uid = received.command, received.uid
    if not isinstance(submit, Submit):
        return []
    job = _job(submit, uid)
    if submit.array is None:
        return [job]
    spans = spans_of(submit.array)
    return [restricted_row(msgspec.structs.replace(job, array_id=submit.id), spans)] if spans else []


def _job(submit: Submit, uid: int) -> JobRecord:
    return JobRecord(
        id=submit.id,
        user=user_name(uid),
        uid=uid,
        spec=submit.spec,
        state=JobState.PENDING,
        reason=IN_INBOX,
        message=_MESSAGE,
        priority=submit.spec.priority,
        submit_time=submit.time,
        held_by="user" if submit.spec.hold else "",
    )
