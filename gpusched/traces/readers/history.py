"""gpusched's own history: the jobs of its store, as they were submitted and as long as they really ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gpusched.errors import GpuschedError, NoHistory
from gpusched.model.jobs import ENDED, DependencyKind, Job
from gpusched.queue.store import DATABASE, Reader
from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.trace import Ints, Trace


def read(path: Path, *, strict: bool) -> Trace:
    """The trace of a state folder (or of its database): the groups are partitions, the epoch is the first submission.

    A job's run time is the sum over its attempts. One with a begin time counts as submitted then. Jobs that never ran,
    and those that have not ended, are left out. ``strict`` changes nothing: the store has no bad rows.

    Raises:
        GpuschedError: There is no store, or it has no such job.
    """
    folder = path if path.is_dir() else path.parent
    reader = Reader.open(folder)
    if reader is None:
        raise GpuschedError(f"{folder}: there is no {DATABASE}", "name a state folder of gpusched")
    try:
        return trace_of(reader, name=f"history of {folder}")
    finally:
        reader.close()


def trace_of(reader: Reader, *, name: str, since: float | None = None, until: float | None = None) -> Trace:
    """The trace of an open store: jobs submitted at ``since`` or after, and before ``until``, both Unix seconds.

    Raises:
        NoHistory: No such job.
    """
    ran, first_start = _runs(reader)
    jobs = [j for j in reader.jobs(states=ENDED) if (since is None or _submit(j) >= since)
            and (until is None or _submit(j) < until)]  # fmt: skip
    kept = [j for j in jobs if ran.get(j.id, 0.0) > 0]
    if not kept:
        raise NoHistory(f"{name}: no job in it has run and ended")
    kept.sort(key=lambda job: (_submit(job), job.id))
    notes = []
    if left_out := len(jobs) - len(kept):
        notes.append(f"{left_out} {LEFT_OUT}")
    return _assembled(name, kept, [_submit(job) for job in kept], [ran[job.id] for job in kept], first_start, notes)


def window_of(reader: Reader, *, name: str, since: float, until: float) -> tuple[Trace, int]:
    """As `trace_of`, with the jobs before it that ran or waited when the window began; how many these are.

    They are the trace's first rows, in the order in which they began, all submitted when the window begins, with what
    was left of their run times then. One that has not ended is taken to end with the window. Jobs that have waited ever
    since are left out, since nobody knows how long they would run.

    Raises:
        NoHistory: No job was submitted in the window and has run and ended.
    """
    new = trace_of(reader, name=name, since=since, until=until)
    left: dict[str, float] = {}
    for run in reader.runs(since, until):
        end = until if run.end_time is None else min(run.end_time, until)
        left[run.job_id] = left.get(run.job_id, 0.0) + max(0.0, end - max(run.start_time, since))
    ran, first_start = _runs(reader)
    before = [job for job in reader.jobs(since=since) if _submit(job) < since and left.get(job.id, 0.0) > 0]
    before.sort(key=lambda job: (first_start[job.id], job.id))
    known = set(new.ids)
    after = {job.id: job for job in reader.jobs(states=ENDED) if job.id in known}
    jobs = [*before, *(after[job_id] for job_id in new.ids)]
    submits = [since] * len(before) + [_submit(after[job_id]) for job_id in new.ids]
    durations = [left[job.id] for job in before] + [ran[job_id] for job_id in new.ids]
    notes = [note for note in new.notes if note.endswith(LEFT_OUT)]
    trace = _assembled(name, jobs, submits, durations, first_start, notes)
    limit = trace.limit.copy()  # of the limit, too, what was left when the window began
    limit[: len(before)] -= [max(0.0, since - job.start_time) if job.start_time else 0.0 for job in before]
    return replace(trace, limit=np.maximum(limit, 1.0)), len(before)


LEFT_OUT = "jobs ended without having run and are left out"


def _assembled(
    name: str, jobs: list[Job], submits: list[float], durations: list[float], first_start: dict[str, float],
    notes: list[str],
) -> Trace:  # fmt: skip
    """The trace of these jobs, in this order."""
    submit = np.array(submits)
    depends_on, more = _dependencies(jobs)

    def whole(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    trace = assemble(
        name=name,
        epoch=float(submit[0]),
        ids=tuple(job.id for job in jobs),
        submit=submit - submit[0],
        duration=np.array(durations),
        gpus=whole([job.spec.gpus for job in jobs]),
        names={
            "user": intern([job.user for job in jobs]),
            "group": intern([job.spec.partition for job in jobs]),
            "model": intern([job.spec.name for job in jobs]),
            "status": intern([str(job.state) for job in jobs]),
        },
        columns={
            "limit": np.array([float(job.spec.time_limit_s) for job in jobs]),
            "nodes": whole([job.spec.nodes for job in jobs]),
            "cores": whole([job.spec.nodes * job.spec.cores_per_node for job in jobs]),
            "memory_mib": whole([job.spec.nodes * job.spec.memory_mib_per_node for job in jobs]),
            "depends_on": np.where(depends_on < np.arange(len(depends_on)), depends_on, -1),
            "wait": np.maximum(0.0, np.array([first_start[job.id] for job in jobs]) - submit),
        },
        notes=(*more, *notes),
    )
    return replace(trace, preemptible=np.array([job.spec.preemptible for job in jobs], np.bool_))


def as_submitted(jobs: list[Job]) -> Trace:
    """At least one job at its submission: those that ended ran as long as their last attempt did, others never end."""
    jobs = sorted(jobs, key=lambda job: (_submit(job), job.id))
    start, ran = dict.fromkeys((job.id for job in jobs), np.inf), dict.fromkeys((job.id for job in jobs), 1.0)
    for job in jobs:
        if job.state in ENDED and job.start_time is not None and job.end_time is not None:
            start[job.id], ran[job.id] = job.start_time, max(job.end_time - job.start_time, 1e-3)
    return _assembled("queue", jobs, [_submit(job) for job in jobs], list(ran.values()), start, [])


def _submit(job: Job) -> float:
    return max(job.submit_time, job.spec.begin_time or 0.0)


def _runs(reader: Reader) -> tuple[dict[str, float], dict[str, float]]:
    """Run time summed over ended attempts, and the first start, by job."""
    ran: dict[str, float] = {}
    first: dict[str, float] = {}
    for run in reader.runs(0.0, np.inf):
        first.setdefault(run.job_id, run.start_time)
        if run.end_time is not None:
            ran[run.job_id] = ran.get(run.job_id, 0.0) + run.end_time - run.start_time
    return ran, first


def _dependencies(jobs: list[Job]) -> tuple[Ints, list[str]]:
    """Of each job, the row of the job it waited for that ended last; ``after`` (started) is not kept."""
    rows = {job.id: row for row, job in enumerate(jobs)}
    arrays: dict[str, list[int]] = {}
    for row, job in enumerate(jobs):
        if job.array_id is not None:
            arrays.setdefault(job.array_id, []).append(row)
    found = np.full(len(jobs), -1, np.int64)
    simplified = 0
    for row, job in enumerate(jobs):
        others = [
            other
            for d in job.spec.dependencies
            if d.kind != DependencyKind.AFTER
            for other in ([rows[d.job_id]] if d.job_id in rows else arrays.get(d.job_id, []))
        ]
        simplified += len(job.spec.dependencies) != len(others) or len(others) > 1
        if others:
            found[row] = max(others, key=lambda r: jobs[r].end_time or 0.0)
    note = f"{simplified} jobs have dependencies of which only the last to end is kept, or none"
    return found, [note] if simplified else []
