"""GPUs of jobs of which Slurm does not say which they have: a plan must count them all the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpusched.controller.slurm.requests import SlurmContext
from gpusched.model.jobs import ACTIVE, Allocation, JobRecord


def with_guesses(active: Iterable[JobRecord], site: SlurmContext) -> list[JobRecord]:
    """Of the jobs that hold something those whose GPUs Slurm does not name, with the lowest that nobody else has.

    Jobs that we have pinned, mostly: a plan must count what they will take. Only those that change are given back.
    """
    active = list(active)
    taken: dict[str, set[int]] = {}
    for job in active:
        if not is_guess(job) and job.allocation is not None:
            for part in job.allocation.parts:
                taken.setdefault(part.node, set()).update(part.gpus)
    changed = []
    for job in (job for job in active if is_guess(job)):
        assert job.allocation is not None
        parts = []
        for part in job.allocation.parts:
            node = site.inventory.node(part.node)
            held = taken.setdefault(part.node, set())
            free = [gpu for gpu in (node.indices() if node is not None else ()) if gpu not in held]
            keep = len(part.gpus) == job.spec.gpus_per_node and held.isdisjoint(part.gpus)
            gpus = part.gpus if keep else tuple(free[: job.spec.gpus_per_node])
            held.update(gpus)
            parts.append(msgspec.structs.replace(part, gpus=gpus))
        if tuple(parts) != job.allocation.parts:
            changed.append(msgspec.structs.replace(job, allocation=Allocation(job.id, tuple(parts))))
    return changed


def is_guess(job: JobRecord) -> bool:
    """Whether a job holds GPUs, or will, of which Slurm does not say which they are."""
    return (
        job.slurm is not None
        and not job.slurm.gpus
        and job.spec.gpus_per_node > 0
        and job.state in ACTIVE
        and job.allocation is not None
    )
