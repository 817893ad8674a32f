"""Pairs of jobs with known slowdowns."""

from __future__ import annotations

from math import log

import numpy as np

from gpusched.model.interference import (
    AttemptSpeed,
    JobShape,
)


def shape(nodes: int = 2, racks: int = 1, gpus: int = 8, **more: str) -> JobShape:
    of = {"gpu_type": "A100", "unit": "samples"} | more
    return JobShape(gpus=gpus, max_gpus_per_node=gpus // nodes, nodes=nodes, racks=racks, **of)


def paces_on(
    seed: int, slow: dict[tuple[str, int], float], *, jobs: int = 300, noise: float = 0.1
) -> list[AttemptSpeed]:
    """Jobs of three kinds on 1, 2 or 8 of the GPUs of 8 nodes with 8; each goes as its slowest GPU does."""
    rng = np.random.default_rng(seed)
    found = []
    for job in range(jobs):
        kind, node = int(rng.integers(3)), f"n{rng.integers(8)}"
        size = int(rng.choice([1, 2, 8]))
        gpus = tuple((node, int(i)) for i in sorted(rng.permutation(8)[:size]))
        worst = max(slow.get(gpu, 0.0) for gpu in gpus)
        log_pace = 5.0 + kind - log(1 + worst) + rng.normal(0, noise)
        found.append(
            AttemptSpeed(job_id=f"j{job}", kind=f"u/k{kind}", shape=shape(1, 1, size), log_pace=log_pace, gpus=gpus)
        )
    return found
