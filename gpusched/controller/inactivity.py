"""Ends interactive jobs to which no client has been attached for too long. Pure.

Only what a node reports in this cycle counts, by its own boot clock: neither a controller's downtime nor an unreachable
node ends a job.
"""

from __future__ import annotations

from gpusched.controller.ranks import RankStatus, ReconcileInput
from gpusched.model.jobs import JobRecord

REASON = "InactiveLimit"
"""Slurm's reason for an allocation whose command is gone."""


def awaits_client(job: JobRecord, ranks: list[RankStatus]) -> bool:
    """Return whether the job is ready and will start when the first client attaches."""
    return job.spec.session is not None and any(s.rank.rank == 0 and s.phase == "ready" for s in ranks)


def timeout_message(job: JobRecord, ranks: list[RankStatus], inputs: ReconcileInput) -> str:
    """Return why the job is to be ended for lack of a client; "" if it is not."""
    limit_s = job.spec.session
    if limit_s is None:
        return ""
    first = next((s for s in ranks if s.rank.rank == 0 and s.container is not None), None)
    unattended_s = _unattended_s(first, inputs) if first is not None and first.phase in ("ready", "running") else None
    if unattended_s is None or unattended_s < limit_s:
        return ""
    return f"nobody attached for {limit_s} s (settings.session_keep)"


def _unattended_s(first: RankStatus, inputs: ReconcileInput) -> float | None:
    """Return the seconds since a client was attached, or since one could attach; None: unknown."""
    container = first.container
    assert container is not None
    if container.attached_s is not None:
        return container.attached_s
    if container.ran_s is not None:
        return container.ran_s
    return inputs.now - first.rank.launched_at if first.rank.launched_at is not None else None
