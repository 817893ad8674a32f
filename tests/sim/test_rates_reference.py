"""Every start, end and node of jobs that go at rates and share GPUs, against the reference."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.sim.replay import replay
from tests.sim.paced import inputs, paced_worlds
from tests.sim.reference_rates import PacedJob, PacedNode, PacedReference, Speeds

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


def test_a_gpu_that_parts_share_is_held_until_the_last_of_them_ends():
    """Job 5 would be beside job 1 for longer than job 4 has the other GPU, and job 2 waits for both."""
    jobs = [
        PacedJob(at, lasts, limit, gpus, cores, memory, after, model=model, milli=milli)
        for at, lasts, limit, gpus, cores, memory, after, model, milli in (
            (2.5, 5.0, 10.0, 1, 5, 31, -1, 1, 400), (2.5, 5.0, 5.0, 1, 5, 23, -1, 1, 1000),
            (5.0, 2.0, 1.0, 2, 6, 10, -1, 0, 1000), (5.0, 8.0, 32.0, 1, 2, 33, -1, 0, 500),
            (9.5, 3.0, 6.0, 1, 2, 13, -1, 1, 500), (9.5, 8.0, 8.0, 1, 1, 26, 3, 2, 1000),
        )
    ]  # fmt: skip
    beside = {(0, 1, 0): 0.25, (0, 1, 1): 0.5, (0, 1, 2): 1.0, (0, 2, 1): 0.25}
    speeds = Speeds([[1.0, 1.0, 1.0]] * 2, 1.0, beside)
    result = compare((jobs, [PacedNode(2, 8, 64)], [], speeds), "fifo", "skip", "worst-fit", False, "pairs")
    assert result.start.tolist() == [2.5, 14.0, 24.5, 5.0, 13.0, 16.5]
