"""SRTF, conservative backfill and changing orders against the reference, at recorded speeds and at rates."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.sim.replay import replay
from tests.sim.paced import MODELS, inputs, paced_worlds
from tests.sim.reference_orders import Changing, Conservative, Srtf
from tests.sim.reference_rates import Speeds
from tests.sim.worlds import assert_as_reference

PLACES = st.sampled_from(["first-fit", "best-fit", "worst-fit"])


def compare(kind, world, name, at_rates, place, replayed=None, **reference_options):
    trace, pool, rates, failures = inputs(world)
    jobs, nodes, outages, speeds = copy.deepcopy(world)
    if not at_rates:
        speeds = Speeds([[1.0] * 3] * 2, 1.0, {})
    reference = kind(jobs, nodes, speeds, place=place, away=outages, **reference_options).run()
    options = {"placement": place, "failures": failures, "rates": rates if at_rates else None, **(replayed or {})}
    result = replay(trace, pool, name, **options)
    assert_as_reference(result, reference)
    return result, reference


@pytest.mark.parametrize("share", ["no", "fractions"])
@pytest.mark.parametrize("at_rates", [False, True])
@given(paced_worlds(), PLACES, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([{}, {0: 1.0, 2: 0.25}]))
@settings(max_examples=25, deadline=None)
def test_srtf_stops_and_resumes_as_the_reference(at_rates, share, world, place, restart_s, by_model):
    costs = {MODELS[m]: cost for m, cost in by_model.items()}
    replayed = {"restart_s": restart_s, "restart_costs": costs, "share": share}
    options = {"restart_s": restart_s, "by_model": by_model, "share": share}
    result, reference = compare(Srtf, world, "srtf", at_rates, place, replayed, **options)
    assert result.restarts.tolist() == [j.restarts for j in reference.jobs]


@pytest.mark.parametrize("at_rates", [False, True])
@given(paced_worlds(failing=False), PLACES)
@settings(max_examples=25, deadline=None)
def test_conservative_backfill_plans_as_the_reference(at_rates, world, place):
    compare(Conservative, world, "fifo+conservative", at_rates, place)


@pytest.mark.parametrize("at_rates", [False, True])
@pytest.mark.parametrize("order", ["wfp3", "unicef"])
@pytest.mark.parametrize("mode", ["none", "skip", "easy"])
@given(paced_worlds(), PLACES)
@settings(max_examples=10, deadline=None)
def test_changing_orders_go_as_the_reference(mode, order, at_rates, world, place):
    name = order + {"none": "", "skip": "-skip", "easy": "+easy"}[mode]
    compare(Changing, world, name, at_rates, place, order=order, mode=mode)
