"""What was known of a log's jobs at a time: which had begun, and how long they had run by then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gpusched.forecast.predictor import ends_of
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

Bools = npt.NDArray[np.bool_]


def known_by(trace: Trace, until: float) -> tuple[Trace, Bools]:
    """The jobs that had begun by ``until``, as they were known then, and which of them had ended: ``bool[jobs]``.

    A job that still ran has the run time that it had had: more than that nobody could know. One that waited is not
    there. Where the log has no waiting times a job counts as begun when it was submitted.

    Args:
        trace: A log, with all that became known later.
        until: Seconds of the trace's time.
    """
    end = ends_of(trace)
    begin, ended = end - trace.duration, end <= until
    there = np.flatnonzero((trace.submit <= until) & (ended | (begin < until)))
    ran = np.where(ended, trace.duration, until - begin)
    return replace(select(trace, there), duration=ran[there]), ended[there]
