"""Copies the progress that jobs report about themselves from the nodes' readings into the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.model.jobs import JobRecord, parse_container_name
from gpusched.model.progress import JobProgress
from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.queue.store import Store


def record_progress(store: Store, active: Iterable[JobRecord], observations: Mapping[str, NodeObservation]) -> None:
    """Record new progress of current attempts; only rank 0's node is read."""
    reports = [
        (container, reading)
        for observation in observations.values()
        if (reading := observation.complete_reading) is not None
        for container in reading.containers or ()
        if container.progress or container.saved or container.job_file_error
    ]
    jobs = {(job.id, job.attempt, job.allocation.parts[0].node): job for job in active if job.allocation}
    known = {job_id: attempts[-1] for job_id, attempts in store.progress_of_unended().items()} if reports else {}
    changed = []
    for container, reading in reports:
        name = parse_container_name(container.name)
        job = jobs.get((name[0], name[1], reading.node)) if name is not None and name[2] == 0 else None
        if job is None:
            continue
        before, gpus = known.get(job.id), job.spec.gpus
        nodes = container.progress.nodes if container.progress is not None else None
        if job.forming_from is not None and nodes != job.spec.nodes:
            gpus = job.forming_from  # until the ranks have formed their new group
        if before is None or before.attempt != job.attempt:
            before = JobProgress(job_id=job.id, attempt=job.attempt, gpus=gpus)
        if before.gpus != gpus and job.spec.is_hot:
            before = before.resized(gpus)
        after = with_reading(before, container, reading, job.start_time)
        if after != before:
            changed.append(after)
    store.put_progress(changed)
    store.close_progress()  # after the update: a job's last report may come in the cycle in which it ends


def with_reading(
    before: JobProgress, container: ContainerReading, reading: NodeReading, since: float | None
) -> JobProgress:
    """Return an attempt's progress after a reading; files older than its start belong to an earlier attempt."""
    after = msgspec.structs.replace(before, trouble=container.job_file_error or "")
    progress = container.progress
    if progress is not None and since is not None and (at := reading.time - progress.age_s) >= since:
        after = after.with_step(progress.step, progress.of, progress.samples_per_s, at)
    if (saved := container.saved) is not None and saved.step != before.saved_step:
        after = msgspec.structs.replace(after, saved_step=saved.step, saved_at=reading.time - saved.age_s)
    return after
