"""Traces for the engine's tests, and hypothesis strategies for random ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gpusched.sim.pool import NodeSpec, Pool
from gpusched.traces.trace import Trace
from tests.sim.reference import Away, Job, Node
from tests.strategies import among


def trace_of(submit, duration, gpus, limit=None, cores=None, memory=None, depends_on=None, user=None) -> Trace:
    jobs = len(submit)

    def ints(values, default):
        return np.full(jobs, default, np.int64) if values is None else np.array(values, np.int64)

    return Trace(
        name="test",
        epoch=None,
        ids=tuple(f"{i:06}" for i in range(jobs)),
        submit=np.array(submit, np.float64),
        duration=np.array(duration, np.float64),
        limit=np.array(duration if limit is None else limit, np.float64),
        gpus=ints(gpus, 1),
        gpu_milli=ints(None, 1000),
        nodes=ints(None, 0),
        cores=ints(cores, -1),
        memory_mib=ints(memory, -1),
        user=ints(user, -1),
        group=ints(None, -1),
        model=ints(None, -1),
        gpu_type=ints(None, -1),
        depends_on=ints(depends_on, -1),
        status=ints(None, -1),
        wait=np.full(jobs, np.nan),
    )


@st.composite
def workloads(draw, failing=True):
    """(jobs, nodes, outages) of the reference: gangs, cores and memory, ties, dependencies, failures and drains."""
    binding = draw(st.booleans())
    nodes = [
        Node(draw(among(2, 4, 8)), *((draw(among(8, 16)), 64) if binding else ()))
        for _ in range(draw(st.integers(1, 5)))
    ]
    count, jobs, at = draw(st.integers(1, 25)), [], 0.0
    for i in range(count):
        at += draw(among(0.0, 0.0, 1.0, 2.5, 7.0))
        duration = draw(among(1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 0.5))
        limit = duration * draw(among(0.5, 1.0, 1.0, 2.0, 4.0))
        cores, memory = (draw(st.integers(0, 20)), draw(st.integers(0, 80))) if binding else (0, 0)
        gpus = draw(among(1, 1, 2, 3, 4, 8, 16))
        after = draw(st.integers(0, i - 1)) if i and draw(st.integers(0, 5)) == 0 else -1
        jobs.append(Job(at, duration, limit, gpus, cores, memory, after))
    outages = []
    if failing:
        for node in draw(st.sets(st.integers(0, len(nodes) - 1), max_size=2)):
            begin = draw(among(0.0, 2.0, 3.5, 9.0))
            outages.append(Away(node, begin, begin + draw(among(1.0, 6.0, np.inf)), draw(st.booleans())))
    return jobs, nodes, outages


def engine_inputs(jobs, nodes) -> tuple[Trace, Pool]:
    """The same for the engine."""
    binding = any(n.cores < 10**6 for n in nodes)
    pool = Pool.of([NodeSpec(n.gpus, *((n.cores, n.memory) if binding else ())) for n in nodes])
    columns = {
        "submit": [j.submit for j in jobs],
        "duration": [j.duration for j in jobs],
        "limit": [j.limit for j in jobs],
        "gpus": [j.gpus for j in jobs],
        "depends_on": [j.after for j in jobs],
    }
    if binding:
        columns |= {"cores": [j.cores for j in jobs], "memory": [j.memory for j in jobs]}
    return trace_of(**columns), pool


def assert_as_reference(result, reference):
    """Compare which jobs never ran, every start and end to the bit, and the nodes of ended jobs."""
    assert result.infeasible.tolist() == reference.never
    np.testing.assert_array_equal(result.start, [j.start for j in reference.jobs])
    np.testing.assert_array_equal(result.end, [j.end for j in reference.jobs])
    for i, job in enumerate(reference.jobs):
        if not np.isnan(job.end):
            assert result.nodes_of(i).tolist() == job.runs_on
