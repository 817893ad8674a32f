"""The changes that mode advise made to Slurm's order, and the order without them."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from gpusched.model.slurm import SlurmJob
from gpusched.queue.store import Reader
from gpusched.slurm import lease

ORDERED = "slurm_ordered"
"""Meta: Slurm's ids of jobs whose priority we changed, by partition, as JSON."""


def advised_jobs(reader: Reader) -> dict[str, list[str]]:
    """Return partition -> Slurm's ids of jobs whose priority we changed."""
    return msgspec.json.decode(reader.meta(ORDERED) or "{}", type=dict[str, list[str]])


def all_advised_jobs(reader: Reader) -> set[str]:
    """Return Slurm's ids of jobs whose priority we changed."""
    return {job for jobs in advised_jobs(reader).values() for job in jobs}


def without_advice(waiting: Mapping[str, SlurmJob], changed: Set[str], basic: bool) -> dict[str, int]:
    """Return Slurm's id -> priority without our change, of pending jobs that we changed (``changed``).

    ``basic``: Slurm orders by submission alone.
    """
    if basic:
        return lease.fifo_priorities({job.id: job.priority for job in waiting.values() if job.priority > 0}, changed)
    jobs = [waiting[name] for name in changed]
    # Slurm shows 1 for every lower priority. An addition that did not suffice is doubled next time.
    return {j.id: j.priority - j.site_factor if j.priority > 1 else -2 * j.site_factor for j in jobs}
