"""Jobs that people work in end when nobody has been attached for so long. Pure.

Only what a node says in this cycle counts, by its own boot clock: neither a controller that was away nor a node that
cannot be asked ends anybody's work.
"""

from __future__ import annotations

from gpusched.controller.ranks import RankStatus, ReconcileInput
from gpusched.model.jobs import JobRecord

REASON = "InactiveLimit"
"""Slurm's word for an allocation whose command is gone."""


def is_awaited(job: JobRecord, seen: list[RankStatus]) -> bool:
    """Whether all is made ready, and the first who attaches will start it."""
    return job.spec.session is not None and any(s.rank.rank == 0 and s.phase == "ready" for s in seen)


def given_up(job: JobRecord, seen: list[RankStatus], world: ReconcileInput) -> str:
    """Why it is to be ended, as nobody is attached; "" where it is not."""
    kept = job.spec.session
    if kept is None:
        return ""
    first = next((s for s in seen if s.rank.rank == 0 and s.container is not None), None)
    alone = _alone_s(first, world) if first is not None and first.phase in ("ready", "running") else None
    if alone is None or alone < kept:
        return ""
    return f"nobody attached for {kept} s (settings.session_keep)"


def _alone_s(first: RankStatus, world: ReconcileInput) -> float | None:
    """Seconds since somebody was attached, else since there was something to attach to; None: not known."""
    container = first.container
    assert container is not None
    if container.attached_s is not None:
        return container.attached_s
    if container.ran_s is not None:
        return container.ran_s
    return world.now - first.rank.launched_at if first.rank.launched_at is not None else None
