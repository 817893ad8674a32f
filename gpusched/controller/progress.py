"""What jobs write about themselves, from the nodes' readings into the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.model.jobs import JobRecord, parse_container_name
from gpusched.model.progress import JobProgress
from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.queue.store import Store


def note_progress(store: Store, active: Iterable[JobRecord], observations: Mapping[str, NodeObservation]) -> None:
    """Write down what is new of the present attempts; only the node of rank 0 is listened to."""
    news = [
        (container, reading)
        for observation in observations.values()
        if (reading := observation.whole) is not None
        for container in reading.containers or ()
        if container.progress or container.saved or container.job_file_error
    ]
    jobs = {(job.id, job.attempt, job.allocation.parts[0].node): job for job in active if job.allocation}
    known = {job_id: attempts[-1] for job_id, attempts in store.progress_of_unended().items()} if news else {}
    changed = []
    for container, reading in news:
        name = parse_container_name(container.name)
        job = jobs.get((name[0], name[1], reading.node)) if name is not None and name[2] == 0 else None
        if job is None:
            continue
        before = known.get(job.id)
        if before is None or before.attempt != job.attempt:
            before = JobProgress(job_id=job.id, attempt=job.attempt, gpus=job.spec.gpus)
        after = progressed(before, container, reading, job.start_time)
        if after != before:
            changed.append(after)
    store.put_progress(changed)
    store.close_progress()  # not before: a job's last words may come in the cycle in which it ends


def progressed(
    before: JobProgress, container: ContainerReading, reading: NodeReading, since: float | None
) -> JobProgress:
    """An attempt's progress after another look at its files; what is older than its start was an earlier one's."""
    after = msgspec.structs.replace(before, trouble=container.job_file_error or "")
    said = container.progress
    if said is not None and since is not None and (at := reading.time - said.age_s) >= since:
        after = after.with_step(said.step, said.of, said.samples_per_s, at)
    if (saved := container.saved) is not None and saved.step != before.saved_step:
        after = msgspec.structs.replace(after, saved_step=saved.step, saved_at=reading.time - saved.age_s)
    return after
