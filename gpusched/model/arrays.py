"""Rows that stand for several tasks of an array: a `JobRecord` whose ``tasks`` are their indices; the rest is shared.

Tasks share a row as long as they differ in nothing. One that starts, or that is held, cancelled or given another
priority apart from the others, gets a row of its own, or a smaller one with those it was changed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gpusched.model import ids
from gpusched.model.indices import Spans, both, each, parse, text_of
from gpusched.model.jobs import JobRecord

_LONGEST_TEXT = 60
_MOST_TOLD = 100


def part_of(job: JobRecord, spans: Spans) -> JobRecord:
    """The same row for these tasks only; of a single one, it as a job of its own."""
    assert job.array_id is not None
    assert spans
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return task_of(job, spans[0][0])
    text = text_of(spans)
    if len(text) > _LONGEST_TEXT:  # rows of an array have no task in common, so the first says which it is
        text = f"{spans[0][0]},...,{spans[-1][1]}"
    return msgspec.structs.replace(job, id=f"{job.array_id}_[{text}]", array_index=None, tasks=spans)


def task_of(job: JobRecord, index: int) -> JobRecord:
    """One task of a row as a job of its own."""
    return msgspec.structs.replace(job, id=f"{job.array_id}_{index}", array_index=index, tasks=())


def first_of(job: JobRecord) -> JobRecord:
    """The job, or the first task of a row that stands for several."""
    return task_of(job, job.tasks[0][0]) if job.tasks else job


def tasks_of(jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
    """Each job, and each task of those rows that stand for several."""
    for job in jobs:
        if job.tasks:
            yield from (task_of(job, index) for index in each(job.tasks))
        else:
            yield job


def indices_of(job: JobRecord) -> Spans:
    """Of a task or of a row of several; none where it is no task."""
    if job.tasks:
        return job.tasks
    return () if job.array_id is None or job.array_index is None else ((job.array_index, job.array_index),)


def chosen(jobs: Iterable[JobRecord], spans: Spans) -> list[JobRecord]:
    """What of these rows is about the tasks in ``spans``."""
    found = ((job, both(indices_of(job), spans)) for job in jobs)
    return [job if mine == indices_of(job) else part_of(job, mine) for job, mine in found if mine]


def wanted(job_id: str) -> tuple[str, Spans]:
    """The array and the indices that ``ID_7`` or ``ID_[3-9,12]`` name; of any other id itself and none."""
    base, _, rest = job_id.partition("_")
    if not rest or ids.is_slurms(job_id):
        return job_id, ()
    try:
        return base, parse(rest[1:-1] if rest[0] == "[" and rest[-1] == "]" else rest)
    except ValueError:
        return job_id, ()


def event_log_id(job: JobRecord) -> str:
    """Under which id its events are kept: what several tasks do at once is told once, of their array."""
    return job.array_id or job.id if job.tasks else job.id


def which(job: JobRecord) -> dict[str, Any]:
    """Of which tasks an event of their array is true; empty where it is a job's own.

    Of many that lie scattered the first and the last: an event is small.
    """
    if not job.tasks:
        return {}
    return {"tasks": text_of(job.tasks if len(job.tasks) <= _MOST_TOLD else ((job.tasks[0][0], job.tasks[-1][1]),))}
