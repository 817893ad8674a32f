"""Worlds whose jobs have paces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import Outage
from tests.sim.reference import Away
from tests.sim.reference_rates import PacedJob, PacedNode, Speeds
from tests.sim.worlds import trace_of
from tests.strategies import among

KINDS, MODELS = ("FAST", "SLOW"), ("a", "b", "c")


POWERS = [0.25, 0.5, 1.0, 2.0]  # of two, so that both simulators compute every time without rounding


COUNTS = (1, 2, 3, 4, 8, 16)


@st.composite
def paced_worlds(draw, failing=True):
    """(jobs, nodes, outages, speeds): mixed GPU types, models with and without figures, fractions of GPUs."""
    binding = draw(st.booleans())
    nodes = [
        PacedNode(draw(among(1, 2, 4)), *((8, 64) if binding else ()), kind=draw(st.integers(0, 1)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    jobs, at = [], 0.0
    for i in range(draw(st.integers(1, 22))):
        at += draw(among(0.0, 0.0, 1.0, 2.5))
        duration = draw(among(1.0, 2.0, 3.0, 5.0, 8.0, 13.0))
        gpus = draw(among(1, 1, 1, 1, 2, 3, 4, 8))
        cores, memory = (draw(st.integers(0, 6)), draw(st.integers(0, 40))) if binding else (0, 0)
        after = draw(st.integers(0, i - 1)) if i and draw(st.integers(0, 7)) == 0 else -1
        milli = draw(among(1000, 1000, 250, 400, 500, 700)) if gpus == 1 else 1000
        limit = duration * draw(among(0.5, 1.0, 2.0, 4.0))
        jobs.append(
            PacedJob(at, duration, limit, gpus, cores, memory, after, model=draw(st.integers(-1, 2)), milli=milli)
        )
    outages = []
    if failing:
        for node in draw(st.sets(st.integers(0, len(nodes) - 1), max_size=1)):
            begin = draw(among(0.0, 2.0, 3.5, 9.0))
            outages.append(Away(node, begin, begin + draw(among(1.0, 6.0)), draw(st.booleans())))
    alone = [[1.0] * 3, [draw(among(*POWERS)) for _ in MODELS]]
    beside = {
        (kind, one, two): draw(among(0.25, 0.5, 1.0))
        for kind in range(2)
        for one in range(3)
        for two in range(3)
        if draw(st.integers(0, 3))
    }
    return jobs, nodes, outages, Speeds(alone, draw(among(0.5, 1.0)), beside)


def inputs(world):
    """The same for the engine."""
    jobs, nodes, outages, speeds = world
    binding = any(n.cores < 10**6 for n in nodes)
    pool = Pool.of(
        [NodeSpec(n.gpus, *((n.cores, n.memory) if binding else (-1, -1)), gpu_type=KINDS[n.kind]) for n in nodes]
    )
    columns = {name: [getattr(j, name) for j in jobs] for name in ("submit", "duration", "limit", "gpus")}
    if binding:
        columns |= {name: [getattr(j, name) for j in jobs] for name in ("cores", "memory")}
    trace = replace(
        trace_of(**columns, depends_on=[j.after for j in jobs]),
        model=np.array([j.model for j in jobs], np.int64),
        models=MODELS,
        gpu_milli=np.array([j.milli for j in jobs], np.int64),
    )
    series = {
        (model, kind): Series(
            {(g, n): speeds.alone[k][m] * (speeds.apart if n > 1 else 1.0) for g in COUNTS for n in range(1, 6)},
            "nodes",
        )
        for k, kind in enumerate(KINDS)
        for m, model in enumerate(MODELS)
    }
    beside = {(MODELS[a], KINDS[k], g, MODELS[b]): v for (k, a, b), v in speeds.beside.items() for g in COUNTS}
    profiles = Profiles(series=series, beside=beside, recorded_on=dict.fromkeys(MODELS, "FAST"))
    return trace, pool, Rates(profiles=profiles), [Outage(o.node, o.start, o.end, o.drain) for o in outages]
