"""Rows that hold several tasks of an array: a `JobRecord` whose ``tasks`` are their indices; other fields are shared.

Tasks share a row while they are alike. One that starts, or that is held, cancelled or given another
priority apart from the others, gets a row of its own, or a smaller one with those it was changed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gpusched.model import ids
from gpusched.model.indices import Spans, count, expand_spans, intersection, parse, text_of
from gpusched.model.jobs import JobRecord

_MAX_ID_TEXT = 60
_MAX_EVENT_SPANS = 100


def restricted_row(job: JobRecord, spans: Spans) -> JobRecord:
    """Return the row restricted to these tasks; for a single one, a job of its own."""
    assert job.array_id is not None
    assert spans
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return task_of(job, spans[0][0])
    text = text_of(spans)
    if len(text) > _MAX_ID_TEXT:  # rows of an array have no task in common, so the first says which it is
        text = f"{spans[0][0]},...,{spans[-1][1]}"
    return msgspec.structs.replace(job, id=f"{job.array_id}_[{text}]", array_index=None, tasks=spans)


def task_of(job: JobRecord, index: int) -> JobRecord:
    """Return one task of a row as a job of its own."""
    return msgspec.structs.replace(job, id=f"{job.array_id}_{index}", array_index=index, tasks=())


def first_task_of(job: JobRecord) -> JobRecord:
    """Return the job, or the first task of a row that holds several."""
    return task_of(job, job.tasks[0][0]) if job.tasks else job


def tasks_of(jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
    """Yield each job, and each task of rows that hold several."""
    for job in jobs:
        if job.tasks:
            yield from (task_of(job, index) for index in expand_spans(job.tasks))
        else:
            yield job


def indices_of(job: JobRecord) -> Spans:
    """Return the indices of a task or of a row of several; () for other jobs."""
    if job.tasks:
        return job.tasks
    return () if job.array_id is None or job.array_index is None else ((job.array_index, job.array_index),)


def restricted_rows(jobs: Iterable[JobRecord], spans: Spans) -> list[JobRecord]:
    """Return these rows restricted to the tasks in ``spans``."""
    found = ((job, intersection(indices_of(job), spans)) for job in jobs)
    return [job if mine == indices_of(job) else restricted_row(job, mine) for job, mine in found if mine]


def split_task_ids(job_id: str) -> tuple[str, Spans]:
    """Split ``ID_7`` or ``ID_[3-9,12]`` into array id and indices; other ids have none."""
    base, _, rest = job_id.partition("_")
    if not rest or ids.is_slurms(job_id):
        return job_id, ()
    try:
        return base, parse(rest[1:-1] if rest[0] == "[" and rest[-1] == "]" else rest)
    except ValueError:
        return job_id, ()


def jobs_named(job_ids: Iterable[str]) -> int:
    """Return how many jobs and tasks these ids name; a whole array counts as one."""
    return sum(count(split_task_ids(job_id)[1]) or 1 for job_id in job_ids)


def event_log_id(job: JobRecord) -> str:
    """Return the id under which events are logged: joint events of several tasks under their array's."""
    return job.array_id or job.id if job.tasks else job.id


def task_event_data(job: JobRecord) -> dict[str, Any]:
    """Return the tasks that an event of an array concerns, as event data; empty for other jobs.

    Of many that lie scattered the first and the last, and ``count``: an event is small.
    """
    if not job.tasks:
        return {}
    if len(job.tasks) > _MAX_EVENT_SPANS:
        return {"tasks": text_of(((job.tasks[0][0], job.tasks[-1][1]),)), "count": job.count}
    return {"tasks": text_of(job.tasks)}
