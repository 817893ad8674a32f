"""Every start, end and node of jobs that go at rates and share GPUs, against the reference."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.sim.replay import replay
from tests.sim.paced import inputs, paced_worlds
from tests.sim.reference_rates import PacedReference

MODES = {"none": "", "skip": "-skip", "easy": "+easy"}


NAMES = {"fifo": "fifo", "sjf": "sjf-oracle", "smallest": "smallest"}  # the reference knows real run times


def compare(world, order, mode, place, kill, share):
    trace, pool, rates, failures = inputs(world)
    jobs, nodes, outages, speeds = copy.deepcopy(world)
    reference = PacedReference(jobs, nodes, speeds, order, mode, place, outages, kill, share).run()
    result = replay(
        trace,
        pool,
        NAMES[order] + MODES[mode],
        placement=place,
        limits=kill,
        failures=failures,
        rates=rates,
        share=share,
    )
    assert result.infeasible.tolist() == reference.never
    np.testing.assert_array_equal(result.start, [j.start for j in reference.jobs])
    np.testing.assert_array_equal(result.end, [j.end for j in reference.jobs])
    assert result.killed.tolist() == [j.killed for j in reference.jobs]
    for i, job in enumerate(reference.jobs):
        if not np.isnan(job.end):
            assert result.nodes_of(i).tolist() == job.runs_on
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["fifo", "sjf"])
@given(paced_worlds(), st.sampled_from(["first-fit", "best-fit", "worst-fit"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_jobs_at_rates_start_and_end_as_in_the_reference(order, mode, world, place, kill):
    compare(world, order, mode, place, kill, "no")


@pytest.mark.parametrize("share", ["fractions", "pairs"])
@pytest.mark.parametrize("mode", MODES)
@given(paced_worlds(), st.sampled_from(["first-fit", "best-fit", "worst-fit"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_jobs_that_share_gpus_start_and_end_as_in_the_reference(mode, share, world, place, kill):
    compare(world, "fifo", mode, place, kill, share)
