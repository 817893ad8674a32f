"""Replays under limits of users, groups and classes, against the reference in plain Python."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.quotas import QuotaSet, Use
from gpusched.sim.replay import Outage, replay
from tests.sim.reference_quotas import HOUR, Bound, BoundedConservative, BoundedReference, BoundedSrtf
from tests.sim.reference_rates import PacedJob, PacedNode, Speeds
from tests.sim.worlds import assert_as_reference, engine_inputs, trace_of, workloads

MODES = {"none": "", "skip": "-skip", "easy": "+easy"}
USERS, GROUPS, CLASSES = ("ann", "bob", "cat"), ("physics", "lasers"), ("rush",)
PLACES = st.sampled_from(["first-fit", "best-fit", "worst-fit"])


@st.composite
def amounts(draw):
    """Limits; most have none of a kind."""
    gpus = draw(st.sampled_from([None, None, None, 2, 4, 8, 12]))
    hours = draw(st.sampled_from([None, None, None, 8.0, 20.0, 60.0]))
    return Limits(gpus=gpus, jobs=draw(st.sampled_from([None, None, 1, 2])), gpu_hours=hours)


@st.composite
def quotas(draw):
    """Of all, of ann, of a group and one below it, of a class."""
    physics = Group(name="physics", members={"bob": 1}, limits=draw(amounts()))
    lasers = Group(name="lasers", parent="physics", members={"bob": 1, "cat": 1}, limits=draw(amounts()))
    rush = Qos(name="rush", limits=draw(amounts()), per_user=draw(amounts()), exempt=draw(st.booleans()))
    users = {"ann": draw(amounts())} if draw(st.booleans()) else {}
    return Quotas(each=draw(amounts()), users=users, groups=Groups(groups=(physics, lasers)), qos=(rush,))


@st.composite
def bounded(draw):
    """(jobs, nodes, outages, quotas); jobs of users, some for groups and in a class, over minutes or over weeks."""
    jobs, nodes, outages = draw(workloads())
    scale, later = draw(st.sampled_from([(1.0, 0.0), (3600.0, 0.0), (1800.0, 500_000.0)])), 0.0
    for job in jobs:
        later += scale[1] * draw(st.sampled_from([0, 0, 0, 1]))
        job.submit = job.submit * scale[0] + later
        job.duration, job.limit = job.duration * scale[0], job.limit * scale[0]
        job.user, job.group = draw(st.integers(0, 2)), draw(st.sampled_from([-1, -1, 0, 1]))
        job.qos = draw(st.sampled_from([-1, -1, 0]))
        if job.user == 0:
            job.group = -1
    for away in outages:
        away.start, away.end = away.start * scale[0], away.end * scale[0]
    return jobs, nodes, outages, draw(quotas())


def bounds_of(of: Quotas):
    """Who counts for what, said once more."""
    members = {"ann": "", "bob": "physics", "cat": "lasers"}
    rush = of.qos[0]

    def counts_outside(job):
        return job.qos < 0 or not rush.exempt

    def group_of(job):
        return GROUPS[job.group] if job.group >= 0 else members[USERS[job.user]]

    found = []

    def add(limits, counts):
        found.extend(
            Bound(unit, int(most * (HOUR if unit == "gpu_s" else 1)), counts)
            for unit, most in (("gpus", limits.gpus), ("jobs", limits.jobs), ("gpu_s", limits.gpu_hours))
            if most is not None
        )

    for at, name in enumerate(USERS):
        add(of.users.get(name, of.each), lambda job, at=at: job.user == at and counts_outside(job))
        add(rush.per_user, lambda job, at=at: job.user == at and job.qos == 0)
    physics, lasers = of.groups.groups
    add(physics.limits, lambda job: group_of(job) in GROUPS and counts_outside(job))
    add(lasers.limits, lambda job: group_of(job) == "lasers" and counts_outside(job))
    add(rush.limits, lambda job: job.qos == 0)
    return found


def inputs(jobs, nodes, outages):
    trace, pool = engine_inputs(jobs, nodes)
    user, account, qos = (np.array([getattr(j, n) for j in jobs], np.int64) for n in ("user", "group", "qos"))
    trace = replace(
        trace, epoch=7200.0, user=user, users=USERS, account=account, accounts=GROUPS, qos=qos, classes=CLASSES
    )
    return trace, pool, [Outage(o.node, o.start, o.end, o.drain) for o in outages]


@pytest.mark.parametrize("mode", ["none", "skip", "easy"])
@pytest.mark.parametrize(("order", "name"), [("fifo", "fifo"), ("sjf", "sjf-oracle"), ("smallest", "smallest")])
@given(bounded(), PLACES)
@settings(max_examples=40, deadline=None)
def test_orders_go_as_the_reference(order, name, mode, world, place):
    jobs, nodes, outages, of = world
    trace, pool, failures = inputs(jobs, nodes, outages)
    reference = BoundedReference(copy.deepcopy(jobs), nodes, order, mode, place, outages, bounds=bounds_of(of))
    if order == "sjf":  # limits of GPU hours count time limits all the same
        trace = replace(trace, limit=trace.duration)
        for job in reference.jobs:
            job.limit = job.duration
        reference.never = [j for j, job in enumerate(reference.jobs) if reference.hopeless(job)]
    result = replay(
        trace, pool, name + MODES[mode], placement=place, failures=failures, quotas=QuotaSet(of)
    )  # fmt: skip
    assert_as_reference(result, reference.run())


@pytest.mark.parametrize(("kind", "name"), [(BoundedConservative, "fifo+conservative"), (BoundedSrtf, "srtf")])
@given(bounded(), PLACES)
@settings(max_examples=40, deadline=None)
def test_conservative_backfill_and_srtf_go_as_the_reference(kind, name, world, place):
    jobs, nodes, outages, of = world
    outages = [] if kind is BoundedConservative else outages
    trace, pool, failures = inputs(jobs, nodes, outages)
    paced = [PacedJob(j.submit, j.duration, j.limit, j.gpus, j.cores, j.memory, j.after) for j in jobs]
    for job, old in zip(paced, jobs, strict=True):
        job.user, job.group, job.qos = old.user, old.group, old.qos
    places = [PacedNode(n.gpus, n.cores, n.memory) for n in nodes]
    speeds = Speeds([[1.0] * 3], 1.0, {})
    reference = kind(paced, places, speeds, place=place, away=outages, bounds=bounds_of(of)).run()
    result = replay(trace, pool, name, placement=place, failures=failures, quotas=QuotaSet(of))
    assert_as_reference(result, reference)
