"""Snapshots with MIG slices: nodes whose GPUs are cut, and jobs that ask for slices or have some."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gpusched.model.jobs import JobSpec
from gpusched.model.slices import slice_index
from gpusched.model.snapshot import NodeView, PendingView, RunningView, SliceView
from tests.sched import worlds
from tests.sched.worlds import NOW

SEVEN = {"1g.10gb": tuple(range(7))}
MIXED = {"3g.40gb": (0,), "1g.10gb": (4, 5, 6)}


def cut(view: NodeView, geometry: dict[int, dict[str, tuple[int, ...]]]) -> NodeView:
    """The node with these GPUs cut: GPU -> profile -> where slices start."""
    slices = tuple(
        SliceView(slice_index(gpu, start), profile)
        for gpu, profiles in geometry.items()
        for profile, starts in profiles.items()
        for start in starts
    )
    return replace(view, slices=slices)


def pending(job_id: str, count: int, profile: str = "", **more: Any) -> PendingView:
    view = worlds.pending(job_id, count, **{"cores_per_node": 1, "memory_mib_per_node": 1024, **more})
    return replace(view, spec=replace(view.spec, profile=profile))


def running(job_id: str, where: dict[str, tuple[int, ...]], profile: str = "", cores: int = 1) -> RunningView:
    view = worlds.running(job_id, where, NOW + 600, cores=cores)
    (gpus, *_) = where.values()
    spec = JobSpec(name="r", partition="p", nodes=len(where), gpus_per_node=len(gpus), cores_per_node=cores,
                   memory_mib_per_node=1024, time_limit_s=600, profile=profile)  # fmt: skip
    return replace(view, spec=spec)
