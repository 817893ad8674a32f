"""Charges of MIG slices: their share of their GPU's time and energy."""

from __future__ import annotations

import pytest

from gpusched.accounting.usage import holdings, usage_between
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node
from tests import builders

NODE = Node(name="n", partition="p", address="n", gpus=2, cores=8, memory_mib=1024, runtime="process")


def reading(at: float, joules: float) -> NodeReading:
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{i}", energy_j=joules) for i in range(2))
    return NodeReading(node="n", time=at, boot_id="b", source="nvml", gpus=gpus)


def job(job_id: str, numbers: tuple[int, ...], profile: str = "", end: float | None = None) -> JobRecord:
    part = NodeAllocation(rank=0, node="n", gpus=numbers, cores=1, memory_mib=1)
    spec = builders.spec(profile=profile, gpus_per_node=len(numbers))
    return builders.job(job_id, JobState.RUNNING, spec=spec, allocation=Allocation(job_id, (part,)), end_time=end)


def charged(*jobs: JobRecord) -> dict[str, tuple[float, float]]:
    rows = usage_between(NODE, reading(0.0, 0.0), reading(70.0, 700.0), holdings("n", jobs, 70.0))
    return {row.job_id: (pytest.approx(row.gpu_s), pytest.approx(row.energy_j)) for row in rows}


def test_a_slice_has_its_share_of_its_gpu_and_the_rest_is_unallocated() -> None:
    found = charged(job("a", (1000, 1001), "1g.10gb"), job("b", (1004,), "3g.40gb"), job("c", (1,)))
    assert found["a"] == (20.0, 200.0)
    assert found["b"] == (35.0, 350.0)
    assert found["c"] == (70.0, 700.0)
    assert found[""] == (15.0, 150.0)


def test_one_job_after_the_other_on_a_slice_are_not_charged_twice() -> None:
    found = charged(job("a", (1000,), "1g.10gb", end=28.0), job("b", (1000,), "1g.10gb"), job("c", (0,), end=0.0))
    assert found["a"] == (4.0, 40.0)
    assert found["b"] == (6.0, 60.0)


def test_a_job_that_released_its_slice_has_no_share_of_the_gpu_when_whole_or_cut_again() -> None:
    before = job("a", (1000,), "3g.40gb", end=-5.0)
    assert charged(before, job("c", (0,)))["c"] == (70.0, 700.0)
    found = charged(before, job("b", (1000,), "1g.10gb"))
    assert (found["b"], found[""]) == ((10.0, 100.0), (130.0, 1300.0))
