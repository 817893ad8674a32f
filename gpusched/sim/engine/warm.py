"""What compiling ahead of a replay needs: a trace to do it with."""

from __future__ import annotations

import numpy as np

from gpusched.traces.trace import Trace


def one_job() -> Trace:
    """A trace of one job with one GPU for one second."""
    none, one = np.full(1, -1, np.int64), np.ones(1, np.int64)
    return Trace(
        name="one job",
        epoch=None,
        ids=("1",),
        submit=np.zeros(1),
        duration=np.ones(1),
        limit=np.ones(1),
        gpus=one,
        gpu_milli=1000 * one,
        nodes=0 * one,
        cores=none,
        memory_mib=none,
        user=none,
        group=none,
        model=none,
        gpu_type=none,
        depends_on=none,
        status=none,
        wait=np.zeros(1),
    )
