"""What mode advise has changed in Slurm's order, and the order that would be without that."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from gpusched.model.slurm import SlurmJob
from gpusched.queue.store import Reader
from gpusched.slurm import lease

ORDERED = "slurm_ordered"
"""Meta: Slurm's ids of the jobs whose priority we changed, as JSON, by partition."""


def ordered(reader: Reader) -> dict[str, list[str]]:
    """Partition -> Slurm's ids of the jobs whose priority we changed."""
    return msgspec.json.decode(reader.meta(ORDERED) or "{}", type=dict[str, list[str]])


def ordered_jobs(reader: Reader) -> set[str]:
    """Slurm's ids of the jobs whose priority we changed."""
    return {job for jobs in ordered(reader).values() for job in jobs}


def without_advice(waiting: Mapping[str, SlurmJob], changed: Set[str], basic: bool) -> dict[str, int]:
    """Slurm's id -> the priority that a job would have without us, of waiting jobs that we changed (``changed``).

    ``basic``: Slurm orders by submission alone.
    """
    if basic:
        return lease.fifo_priorities({job.id: job.priority for job in waiting.values() if job.priority > 0}, changed)
    jobs = [waiting[name] for name in changed]
    # Slurm shows 1 for whatever is less; what did not help is tried once more with twice as much.
    return {j.id: j.priority - j.site_factor if j.priority > 1 else -2 * j.site_factor for j in jobs}
