"""Replays whose nodes a component chooses, against the compiled ones with the same rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import UsageError
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.stepper import Stepper
from tests.plugin.building import registered
from tests.sim.worlds import engine_inputs, trace_of, workloads

POOL = Pool.of([NodeSpec(2)])
RULES = {"first-fit": "first_fit", "best-fit": "best_fit", "spread": "spread"}


@pytest.fixture(autouse=True, scope="module")
def _others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    points = {f"acme-{name}": f"gpusched.sched.placement:{function}" for name, function in RULES.items()}
    with registered(tmp_path_factory.mktemp("acme"), {"placements": points}):
        yield


@given(
    workloads(), st.sampled_from(sorted(RULES)), st.sampled_from(["fifo", "sjf-skip", "ljf+easy", "fairshare+easy"]),
    st.sampled_from([0.0, 2.0]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_component_places_as_the_compiled_replay(world, rule, policy, every_s):
    jobs, nodes, outages = world
    trace, pool = engine_inputs(jobs, nodes)
    failures = [Outage(o.node, o.start, o.end, o.drain) for o in outages]
    found = [
        replay(trace, pool, policy, placement=name, failures=failures, limits=True, backfill_every_s=every_s)
        for name in (rule, f"acme-{rule}")
    ]
    assert found[0].events.tobytes() == found[1].events.tobytes()
    assert np.array_equal(found[0].part_nodes, found[1].part_nodes)


def test_a_mapping_goes_by_the_speeds_and_the_floor_in_the_policy_s_file(tmp_path: Path) -> None:
    """As live: the second job waits for the GPU type on which it is fast, without measured speeds, too."""
    file = tmp_path / "mixed.yaml"
    file.write_text('place: fastest\nbackfill: skip\nmapping: {floor: 0.5, speeds: {"n*": {A: 1.0, B: 0.4}}}\n')
    trace = replace(trace_of([0, 0], [5, 5], [1, 1]), model=np.zeros(2, np.int64), models=("net",))
    pool = Pool.of([NodeSpec(1, gpu_type="B"), NodeSpec(1, gpu_type="A")])
    result = replay(trace, pool, str(file))
    assert result.start.tolist() == [0.0, 5.0]
    assert result.part_nodes.tolist() == [1, 1]


@pytest.mark.parametrize("policy", ["srtf", "fifo+conservative"])
def test_a_policy_with_its_own_placement_refuses_another(policy):
    jobs = trace_of([0, 1], [5, 5], [1, 1])
    with pytest.raises(UsageError, match="cannot be combined with placement acme-spread"):
        replay(jobs, POOL, policy, placement="acme-spread")
    with pytest.raises(UsageError, match="cannot be combined with placement acme-spread"):
        Stepper(jobs, POOL, ReplayOptions(placement="acme-spread"))
    with pytest.raises(UsageError, match=r"no placement named 'acme'; one of .*, acme-spread"):
        replay(jobs, POOL, "fifo", placement="acme")
