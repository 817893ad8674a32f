"""Guesses GPUs for jobs whose GPUs Slurm does not name, since a plan must count them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpusched.controller.slurm.requests import SlurmContext
from gpusched.model.jobs import ACTIVE, Allocation, JobRecord


def with_guesses(active: Iterable[JobRecord], site: SlurmContext) -> list[JobRecord]:
    """Return active jobs whose GPUs Slurm does not name, with the lowest free indices; only those that change.

    Most of them are pinned jobs: a plan must count what they will hold.
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
    """Return whether a job holds GPUs, or will, that Slurm does not name."""
    return (
        job.slurm is not None
        and not job.slurm.gpus
        and job.spec.gpus_per_node > 0
        and job.state in ACTIVE
        and job.allocation is not None
    )
