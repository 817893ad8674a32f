"""A reading without figures in between loses no joules: NVML's counters went on counting."""

from __future__ import annotations

import pytest

from gpusched.accounting.usage import Counters, GpuHolding, usage_between
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node, RuntimeName

NODE = Node(name="n", partition="p", address="n", gpus=1, cores=1, memory_mib=1, runtime=RuntimeName.PODMAN)


def reading(time: float, energy_j: float | None, boot: str = "a") -> NodeReading:
    gpu = Gpu(index=0, error="unknown error") if energy_j is None else Gpu(index=0, uuid="u", energy_j=energy_j)
    return NodeReading(node="n", time=time, source="nvml", boot_id=boot, gpus=(gpu,))


def joules(*readings: NodeReading) -> float:
    counters, total, before = Counters(), 0.0, None
    for after in readings:
        earlier = counters.bridged("n", before, after)
        rows = usage_between(NODE, earlier, after, {0: [GpuHolding("job", "ann", 1e9)]})
        assert all(row.job_id == "job" for row in rows)
        total += sum(row.energy_j for row in rows)
        before = after
    return total


def test_a_gap_is_bridged() -> None:
    assert joules(reading(1, 100.0), reading(2, 150.0), reading(3, None), reading(4, None), reading(5, 400.0)) == 300.0


def test_a_gap_that_is_counted_by_power_is_not_counted_again() -> None:
    """100 W throughout; the counter is missing at two readings, power at none."""

    def seen(time: float, energy_j: float | None) -> NodeReading:
        gpu = Gpu(index=0, uuid="u", power_w=100.0, energy_j=energy_j)
        return NodeReading(node="n", time=time, source="nvml", boot_id="a", gpus=(gpu,))

    found = joules(seen(1, 100.0), seen(2, None), seen(3, None), seen(4, 400.0), seen(5, 500.0))
    assert found == pytest.approx(400.0)


def test_a_reboot_is_not() -> None:
    assert joules(reading(1, 100.0), reading(2, None, "b"), reading(3, 400.0, "b")) == 0.0


@pytest.mark.parametrize("energy_j", [0.0, 7.5])
def test_without_a_gap_nothing_changes(energy_j: float) -> None:
    assert joules(reading(1, 100.0), reading(2, 100.0 + energy_j)) == pytest.approx(energy_j)


def test_unknown_counters_fill_no_gap() -> None:
    counters = Counters()
    nameless = NodeReading(node="n", time=1, gpus=(Gpu(index=0),))  # of no known boot either
    assert counters.bridged("n", nameless, reading(2, 5.0)) == nameless
    assert counters.bridged("n", None, reading(3, 6.0)) is None
    assert counters.bridged("n", reading(2, 5.0), reading(3, 6.0)) == reading(2, 5.0)
