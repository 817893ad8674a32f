"""Jobs as Slurm lists them."""

from __future__ import annotations

from typing import Any

from gpusched.model.slurm import SlurmJob

T = 1_800_000_000.0


def job(**more: Any) -> SlurmJob:
    fields: dict[str, Any] = {
        "id": "7", "raw_id": "7", "user": "ann", "uid": 1000, "partitions": ("a",), "name": "x", "state": "PENDING",
        "reason": "Priority", "priority": 5, "submit_time": T, "time_limit_s": 600, "nodes": 1, "cpus": 8,
        "memory_mib": 1000, "gpus": {"": 2},
    }  # fmt: skip
    return SlurmJob(**(fields | more))
