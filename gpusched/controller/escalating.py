"""Escalation for ranks that do not end: signal, kill, remove, and finally keep their GPUs out of use. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpusched.model.events import Event
from gpusched.model.slices import gpu_label
from gpusched.queue.store import RankRecord

TRIES_BEFORE_REMOVING = 3
"""After this many kills without effect the container is removed, which loses its output."""

TRIES_BEFORE_GIVING_UP = 5
"""After this many tries without effect (31 s or more) a rank is stuck. A process in the GPU driver may take as long."""

_MAX_BACKOFF_S = 60


def with_try(rank: RankRecord, now: float) -> RankRecord:
    """Return the record after a try to start, kill or remove; the next probe shows its effect."""
    return msgspec.structs.replace(rank, tries=rank.tries + 1, tried_at=now)


def is_due(rank: RankRecord, now: float) -> bool:
    """Return whether the next try is due: at once, then after 1, 2, 4 ... 60 s."""
    # A clock that was set back must not delay the next try.
    if rank.tried_at is None or rank.tries < 1 or now < rank.tried_at:
        return True
    return now >= rank.tried_at + min(_MAX_BACKOFF_S, float(1 << min(rank.tries - 1, 10)))


def is_exhausted(rank: RankRecord, now: float) -> bool:
    """Return whether the tries are used up, so that the rank becomes stuck."""
    return not rank.stuck and rank.tries >= TRIES_BEFORE_GIVING_UP and is_due(rank, now)


def stuck_event(rank: RankRecord, now: float) -> Event:
    """Return the event for a rank that has become stuck."""
    data = {"attempt": rank.attempt, "rank": rank.rank, "gpus": list(rank.gpus), "error": rank.trouble}
    return Event(time=now, kind="stuck", job_id=rank.job_id, node=rank.node, data=data)


def stuck_message(node: str, ranks: Iterable[RankRecord]) -> str:
    """Return one sentence about what is stuck on a node; "" if nothing is."""
    stuck = [rank for rank in ranks if rank.node == node and rank.stuck and not rank.gone]
    if not stuck:
        return ""
    gpus = sorted({gpu for rank in stuck for gpu in rank.gpus})
    held = f"GPU {', '.join(map(gpu_label, gpus))} not allocated: " if gpus else ""
    more = f", and {len(stuck) - 1} more" if len(stuck) > 1 else ""
    trouble = f" ({stuck[0].trouble})" if stuck[0].trouble else ""
    return f"{held}attempt {stuck[0].attempt} of job {stuck[0].job_id} cannot be killed{trouble}{more}"
