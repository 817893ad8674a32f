"""Jobs with idle GPUs, from recent usage rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpusched.accounting.usage import BUCKET_S
from gpusched.model.jobs import JobRecord
from gpusched.model.reports import HeldIdle
from gpusched.queue.store import UsageRow

HELD_IDLE_AFTER_S = 600.0
"""Shorter pauses are usually data loading, not waste."""

_ALMOST = 0.9  # of one GPU: readings and bucket borders are never quite whole


def held_idle(active: Iterable[JobRecord], usage: Iterable[UsageRow], now: float) -> tuple[HeldIdle, ...]:
    """Return jobs with at least one GPU idle for `HELD_IDLE_AFTER_S` or longer, longest first.

    Buckets are read from now backwards while, on average, at least one of the job's GPUs was idle in each.
    Time of unknown utilization is not called idle.
    """
    jobs = {job.id: job for job in active if job.spec.gpus > 0 and job.start_time is not None}
    sums: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for row in usage:
        if row.job_id in jobs and row.gpu_s > 0:
            gpu_s, idle_s = sums[row.job_id].get(row.bucket, (0.0, 0.0))
            sums[row.job_id][row.bucket] = (gpu_s + row.gpu_s, idle_s + row.idle_s)
    found = [idle for job_id, buckets in sums.items() if (idle := _one(jobs[job_id], buckets, now)) is not None]
    return tuple(sorted(found, key=lambda idle: (-idle.idle_s, idle.job)))


def _one(job: JobRecord, buckets: dict[int, tuple[float, float]], now: float) -> HeldIdle | None:
    bucket = max(buckets)
    if now - bucket > 2 * BUCKET_S:
        return None  # not probed recently
    total_s = idle_s = 0.0
    first = None
    while bucket in buckets:
        gpu_s, idle = buckets[bucket]
        if idle / gpu_s * job.spec.gpus < _ALMOST:
            break
        total_s, idle_s, first = total_s + gpu_s, idle_s + idle, bucket
        bucket -= BUCKET_S
    if first is None:
        return None
    span = now - max(float(first), job.start_time or 0.0)
    if span < HELD_IDLE_AFTER_S:
        return None
    return HeldIdle(
        job=job.id,
        name=job.spec.name,
        user=job.user,
        partition=job.spec.partition,
        nodes=tuple(part.node for part in job.allocation.parts) if job.allocation else (),
        gpus=job.spec.gpus,
        idle_gpus=max(1, round(idle_s / total_s * job.spec.gpus)),
        idle_s=span,
    )
