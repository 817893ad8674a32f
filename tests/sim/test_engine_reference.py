"""Every start, end and node of the engine against the reference simulator, with and without its fast runs."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.sim.replay import Outage, replay
from tests.sim.reference import Reference
from tests.sim.worlds import assert_as_reference, engine_inputs, workloads

ORDERS = ("fifo", "sjf", "smallest")
NAMES = {"fifo": "fifo", "sjf": "sjf-oracle", "smallest": "smallest"}  # the reference knows real run times
MODES = {"none": "", "skip": "-skip", "easy": "+easy"}
PLACES = ("first-fit", "best-fit", "worst-fit")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS)
@given(workloads(), st.sampled_from(PLACES), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_start_and_end_is_the_references(order, mode, world, place, kill, generic):
    jobs, nodes, outages = world
    trace, pool = engine_inputs(jobs, nodes)
    reference = Reference(
        copy.deepcopy(jobs), nodes, order, mode, place, outages, kill, oracle=order == "sjf" and not kill
    )
    if order == "sjf" and kill:  # the oracle's run time is the real one, whatever the limit cuts
        for job, real in zip(reference.jobs, jobs, strict=True):
            job.limit, job.duration = real.duration, min(real.duration, real.limit)
            job.key = real.duration
        reference.key = lambda job: job.key
    reference.run()
    failures = [Outage(o.node, o.start, o.end, o.drain) for o in outages]
    result = replay(
        trace, pool, NAMES[order] + MODES[mode], placement=place, limits=kill, failures=failures, generic=generic
    )
    assert_as_reference(result, reference)
