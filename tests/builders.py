"""Jobs for tests: a spec or a record with everything that must be there, and the fields that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation

ID = "0123456789a"


def spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": "j", "partition": "p", "nodes": 1, "gpus_per_node": 1, "cores_per_node": 1,
        "memory_mib_per_node": 1024, "time_limit_s": 600, "image": "i", "command": ("true",),
    }  # fmt: skip
    return JobSpec(**fields | changes)


def allocation(
    job_id: str, nodes: Mapping[str, tuple[int, ...]], cores: int = 1, memory_mib: int = 1024
) -> Allocation | None:
    """One rank per node, with these GPUs; None without nodes."""
    parts = tuple(
        NodeAllocation(rank=rank, node=name, gpus=gpus, cores=cores, memory_mib=memory_mib)
        for rank, (name, gpus) in enumerate(nodes.items())
    )
    return Allocation(job_id, parts) if parts else None


def job(
    job_id: str = ID, state: JobState = JobState.RUNNING, nodes: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> JobRecord:  # fmt: skip
    """A job, with an allocation where nodes are given (node -> GPUs)."""
    fields: dict[str, Any] = {
        "id": job_id, "user": "alice", "uid": 1, "spec": spec(), "state": state, "submit_time": 0.0, "attempt": 1,
        "allocation": allocation(job_id, nodes or {}),
    }  # fmt: skip
    return JobRecord(**fields | changes)
