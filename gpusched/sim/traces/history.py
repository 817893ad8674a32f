"""gpusched's own history: the jobs of its store, as they were submitted and as long as they really ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, DependencyKind, Job
from gpusched.queue.store import DATABASE, Reader
from gpusched.sim.trace import Ints, Trace
from gpusched.sim.traces.draft import assemble, intern, moved, sorted_order


def read(path: Path, *, strict: bool) -> Trace:
    """The trace of a state folder (or of its database): the groups are partitions, the epoch is the first submission.

    A job's run time is the sum over its attempts. One with a begin time counts as submitted then. Jobs that never ran,
    and those that have not ended, are left out.

    Args:
        path: The state folder, or gpusched.db in it.
        strict: Changes nothing here: the store has no bad rows.

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
    """The trace of an open store.

    Args:
        reader: The store.
        name: For people.
        since: Only jobs submitted at or after it, Unix seconds.
        until: Only jobs submitted before it.

    Raises:
        GpuschedError: No such job.
    """
    ran, first_start = _runs(reader)
    jobs = [j for j in reader.jobs(states=ENDED) if (since is None or _submit(j) >= since)
            and (until is None or _submit(j) < until)]  # fmt: skip
    kept = [j for j in jobs if ran.get(j.id, 0.0) > 0]
    if not kept:
        raise GpuschedError(f"{name}: no job in it has run and ended")
    submits = np.array([_submit(job) for job in kept])
    order = sorted_order(submits, [job.id for job in kept])
    depends_on, notes = _dependencies(kept)
    kept = [kept[i] for i in order.tolist()]
    submit = submits[order]
    if left_out := len(jobs) - len(kept):
        notes.append(f"{left_out} jobs ended without having run and are left out")

    def whole(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    places = moved(depends_on, order)
    return assemble(
        name=name,
        epoch=float(submit[0]),
        ids=tuple(job.id for job in kept),
        submit=submit - submit[0],
        duration=np.array([ran[job.id] for job in kept]),
        gpus=whole([job.spec.gpus for job in kept]),
        names={
            "user": intern([job.user for job in kept]),
            "group": intern([job.spec.partition for job in kept]),
            "status": intern([str(job.state) for job in kept]),
        },
        columns={
            "limit": np.array([float(job.spec.time_limit_s) for job in kept]),
            "nodes": whole([job.spec.nodes for job in kept]),
            "cores": whole([job.spec.nodes * job.spec.cores_per_node for job in kept]),
            "memory_mib": whole([job.spec.nodes * job.spec.memory_mib_per_node for job in kept]),
            "depends_on": np.where(places < np.arange(len(places)), places, -1),
            "wait": np.maximum(0.0, np.array([first_start[job.id] for job in kept]) - submit),
        },
        notes=tuple(notes),
    )


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
