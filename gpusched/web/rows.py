"""Jobs and nodes as the page gets them: keys as in ``status --json``, empty values omitted; `page/data.js` reads them.

Times are Unix seconds, and the page counts elapsed time itself: a row changes only when something has happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpusched.model.arrays import first_task_of, indices_of
from gpusched.model.indices import text_of, union
from gpusched.model.jobs import ACTIVE, JobRecord, JobState
from gpusched.model.progress import JobProgress
from gpusched.model.readings import GpuState
from gpusched.model.reports import GpuRow, NodeRow
from gpusched.model.slices import gpu_of
from gpusched.model.slicetables import gpus_counted
from gpusched.queue.snapshots import expected_end
from gpusched.views import common

_LETTER = {
    GpuState.FREE: "F",
    GpuState.ALLOCATED: "A",
    GpuState.BUSY: "B",
    GpuState.LOST: "L",
    GpuState.UNUSABLE: "X",
    GpuState.UNKNOWN: "U",
}
_ZEROS = ("exit_code", "step")  # 0 is a value here
_HEALTHY = (GpuState.FREE, GpuState.ALLOCATED, GpuState.SLICED)


def job_rows(
    jobs: Iterable[JobRecord],
    energies: Mapping[str, float],
    progress: Mapping[str, JobProgress],
    partners: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return key -> row, in order; tasks of an array that wait for the same reason, or share a row, are one."""
    rows: dict[str, dict[str, Any]] = {}
    tasks: dict[str, list[JobRecord]] = {}
    for job in jobs:
        if job.array_id is not None and (job.tasks or job.state is JobState.PENDING):
            tasks.setdefault(f"{job.array_id}[{job.state}/{job.reason}/{job.held_by}]", []).append(job)
        else:
            rows[job.id] = job_row(job, energies.get(job.id), progress.get(job.id), partners.get(job.id))
    for key, group in tasks.items():
        row = job_row(first_task_of(group[0]))
        if (count := sum(job.count for job in group)) > 1:
            spans = union(span for job in group for span in indices_of(job))
            row |= {"key": key, "array_tasks": common.shorten(text_of(spans), 60), "array_count": count}
        rows[row.get("key", row["id"])] = row
    return rows


def job_row(
    job: JobRecord, energy_j: float | None = None, progress: JobProgress | None = None, partner: str | None = None
) -> dict[str, Any]:
    """Return what ``status`` shows of a job. ``limit_end``: when its limit ends, ``progress_end``: by its progress."""
    spec, active = job.spec, job.state in ACTIVE
    parts = job.allocation.parts if job.allocation else ()
    row = {
        **common.fields_of(job, "id", "user", "message", "exit_code", "array_id", "priority", "held_by"),
        **common.fields_of(spec, "name", "partition", "gpus", "profile", "flavor", "time_limit_s", "group", "qos"),
        "state": str(job.state),
        "reason": (job.slurm.reason if job.slurm is not None and job.state is JobState.PENDING else "") or job.reason,
        "gpu_share": round(gpus_counted(spec.gpus, spec.profile), 2) if spec.profile else None,
        "node_count": spec.nodes if spec.nodes > 1 else None,
        "submit_time": _whole(job.submit_time),
        "start_time": _whole(job.start_time),
        "end_time": _whole(job.end_time),
        "limit_end": _whole(expected_end(job, job.start_time)) if active and job.start_time is not None else None,
        "allocation": [[part.node, *dict.fromkeys(map(gpu_of, part.gpus))] for part in parts],
        "attempt": job.attempt if job.attempt > 1 else None,
        "energy_j": _whole(energy_j if energy_j is not None else job.energy_j),
        "shared_with": partner,
        "reservation": spec.reservation,
    }
    if progress is not None and progress.step is not None:
        row |= {"step": progress.step, "of": progress.of, "progress_end": _whole(progress.end())}
    return {
        key: value for key, value in row.items() if value not in (None, "", 0, []) or (key in _ZEROS and value == 0)
    }


def node_row(row: NodeRow) -> dict[str, Any]:
    """Return what ``nodes`` shows of a node: one letter per GPU for its state, and lists of values in GPU order."""
    gpus = row.gpus
    found: dict[str, Any] = {
        "name": row.name,
        "partition": row.partition,
        "state": str(row.state),
        "reason": row.reason,
        "gpus": "".join(map(_letter, gpus)),
        "index": [gpu.index for gpu in gpus] if [g.index for g in gpus] != list(range(len(gpus))) else None,
        "free": row.gpus_free,
        "slices": {
            str(gpu.index): [[s.label.partition(":")[2], _LETTER[s.state], s.job, s.reason] for s in gpu.slices]
            for gpu in gpus
            if gpu.slices
        },
        "type": next((gpu.name for gpu in gpus if gpu.name), None),
        "util": _column(gpus, "utilization_pct"),
        "watt": _column(gpus, "power_w"),
        "max_watt": _whole(row.power_limit_w),
        "mem": _column(gpus, "memory_used_mib"),
        "max_mem": next((gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib), None),
        "temp": _column(gpus, "temperature_c"),
        "why": {str(gpu.index): gpu.reason for gpu in gpus if gpu.reason or gpu.state not in _HEALTHY},
        "conditions": [[c.gpu, c.detail, _whole(c.since), c.advice, str(c.action)] for c in row.conditions],
        "cores": [row.cores_total - row.cores_free, row.cores_total],
        "ram": [row.memory_total_mib - row.memory_free_mib, row.memory_total_mib],
        "load": None if row.load1 is None else round(row.load1, 1),
        "trouble": row.runtime_error,
        "stale": row.stale or None,
        "seen": _whole(row.last_seen) if row.stale or row.reason else None,
        "simulated": row.simulated or None,
    }
    return {key: value for key, value in found.items() if value not in (None, "", [], {})}


def _letter(gpu: GpuRow) -> str:
    """Return the letter of a GPU's state; one that is cut is as its slices are: S, no job has any."""
    if gpu.state is not GpuState.SLICED:
        return _LETTER[gpu.state]
    return "A" if any(one.job for one in gpu.slices) else "S"


def _column(gpus: Iterable[GpuRow], name: str) -> list[int | None] | None:
    """Return the rounded values of all GPUs; None if none is known."""
    values = [_whole(getattr(gpu, name)) for gpu in gpus]
    return values if any(v is not None for v in values) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
