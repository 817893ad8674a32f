"""Replays of own jobs at the speeds that their classes reported on each GPU type."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpusched.model.interference import JobClassEstimate, JobShape, SpeedSamples
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.study.study import PlannedReplay, Scenario, run_all
from tests.sim.worlds import trace_of

POOL = Pool.of([NodeSpec(4, gpu_type="V100", name="v"), NodeSpec(4, gpu_type="A100", name="a")])


def reported(**steps_per_s: float) -> dict[str, JobClassEstimate]:
    """Of ann's jobs named train: so many steps on each GPU type."""
    shapes = [
        SpeedSamples(shape=JobShape(gpu_type=kind, unit="steps", gpus=4, max_gpus_per_node=4, nodes=1, racks=1),
                     logs=((float(np.log(speed)), 1.0),), count=1, best=float(np.log(speed)))
        for kind, speed in steps_per_s.items()
    ]  # fmt: skip
    return {"ann/train": JobClassEstimate(kind="ann/train", shapes=tuple(shapes))}


def history(*nodes: str):
    """Jobs of 4 GPUs and 100 s, submitted at once, that ran on these nodes."""
    n = len(nodes)
    names = tuple(dict.fromkeys(nodes))
    trace = replace(trace_of([0] * n, [100.0] * n, [4] * n), user=np.zeros(n, np.int64), users=("ann",))
    ran_on = np.array([names.index(name) for name in nodes])
    return replace(trace, model=np.zeros(n, np.int64), models=("train",), ran_on=ran_on, node_lists=names)


def test_a_job_on_another_type_than_it_ran_on_takes_as_long_as_reported() -> None:
    """The first goes to v, the second to a; the third waits for a, which is free first."""
    trace = history("a", "v", "a|v")
    found = replay(trace, POOL, "fifo", learned=reported(V100=1.0, A100=4.0))
    assert found.start.tolist() == [0.0, 0.0, 25.0]
    assert found.end.tolist() == pytest.approx([400.0, 25.0, 125.0]), "nodes of two types: as recorded"
    assert found.notes == ("2 jobs run on each GPU type as fast as jobs of their classes reported",)


@pytest.mark.parametrize("known", [reported(V100=1.0), reported(V100=2.0, A100=2.0), {}])
def test_without_two_types_jobs_run_as_recorded(known: dict[str, JobClassEstimate]) -> None:
    found = replay(history("a", "v", "gone"), POOL, "fifo", learned=known)
    assert found.end.tolist() == [100.0, 100.0, 200.0]
    assert found.notes == ()


def test_bounds_are_those_of_the_fastest_type() -> None:
    trace, known = history("a", "v"), reported(V100=1.0, A100=4.0)
    scenario = Scenario(trace, POOL, power_model(POOL), learned=known)
    (outcome,) = run_all([PlannedReplay(scenario, policy_by_name("fifo"))])
    assert outcome.metrics.mean_jct_s == pytest.approx((400.0 + 25.0) / 2)
    assert outcome.bounds.mean_jct_s == pytest.approx((100.0 + 25.0) / 2)

