"""Submissions that still lie in the inbox, as the jobs they will be."""

from __future__ import annotations

from functools import lru_cache

from gpusched.client.context import Client
from gpusched.model.commands import Submit
from gpusched.model.jobs import Job, JobState
from gpusched.queue.inbox import Received

IN_INBOX = "InInbox"
_MESSAGE = "submitted; the controller has not taken it from the inbox yet"


def inbox_jobs(client: Client) -> list[Job]:
    """Jobs of the submissions in the inbox that this user may read, oldest first; tasks of arrays one by one."""
    jobs: list[Job] = []
    for received in client.inbox.waiting():
        if isinstance(received, Received) and isinstance(received.command, Submit):
            jobs += _jobs_of(received.command, received.uid)
    return jobs


def _jobs_of(submit: Submit, uid: int) -> list[Job]:
    if submit.array is None:
        return [_job(submit, submit.id, uid, None)]
    return [_job(submit, f"{submit.id}_{index}", uid, index) for index in submit.array]


def _job(submit: Submit, job_id: str, uid: int, index: int | None) -> Job:
    return Job(
        id=job_id,
        array_id=None if index is None else submit.id,
        array_index=index,
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


@lru_cache
def user_name(uid: int) -> str:
    """The login name of a uid, or the number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
