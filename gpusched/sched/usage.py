"""Fair share's figure per user."""

from __future__ import annotations

from gpusched.model.snapshot import Snapshot


def usage_of(snapshot: Snapshot) -> dict[str, float]:
    """User -> recent GPU hours (``snapshot.usage``, decayed) plus one hour for every GPU the user holds now.

    Without the second part, a user whose jobs have just begun would look idle until usage has accrued.
    """
    usage = dict(snapshot.usage)
    for job in snapshot.running:
        usage[job.user] = usage.get(job.user, 0.0) + sum(len(part.gpus) for part in job.allocation.parts)
    return usage
