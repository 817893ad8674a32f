"""Jobs that a replay begins with: they hold nodes, and are taken out of the result before anything is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpusched.sim.result import END, KILLED, NODE_FAIL, PAIRED, PREEMPTED, RESIZED, START, CutRuns, Events, Result
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

_OF_JOBS = (START, END, KILLED, PREEMPTED, NODE_FAIL, PAIRED, RESIZED)


def trace_without(trace: Trace, first: int) -> Trace:
    """The trace without its ``first`` jobs."""
    return select(trace, np.arange(first, len(trace), dtype=np.int64)) if first else trace


def result_without(result: Result, first: int) -> Result:
    """The result without the ``first`` jobs of its trace."""
    if not first:
        return result
    offset = int(result.part_offsets[first])
    infeasible = result.infeasible >= first
    kept = np.isin(result.events.kind, _OF_JOBS, invert=True) | (result.events.subject >= first)
    subject = result.events.subject - np.where(np.isin(result.events.kind, _OF_JOBS), first, 0)
    per_job = {
        name: getattr(result, name)[first:]
        for name in ("start", "last_start", "end", "part_gpus", "killed", "restarts")
    }
    return replace(
        result,
        trace=trace_without(result.trace, first),
        part_offsets=result.part_offsets[first:] - offset,
        part_nodes=result.part_nodes[offset:],
        infeasible=result.infeasible[infeasible] - first,
        infeasible_why=tuple(w for w, own in zip(result.infeasible_why, infeasible, strict=True) if own),
        cut=_cuts_without(result.cut, first),
        events=Events(time=result.events.time[kept], kind=result.events.kind[kept], subject=subject[kept]),
        **per_job,
    )


def _cuts_without(cut: CutRuns, first: int) -> CutRuns:
    own = np.flatnonzero(cut.job >= first)
    spans = [cut.part_nodes[cut.part_offsets[i] : cut.part_offsets[i + 1]] for i in own.tolist()]
    return CutRuns(
        job=cut.job[own] - first,
        start=cut.start[own],
        end=cut.end[own],
        part_offsets=np.concatenate(([0], np.cumsum([len(s) for s in spans]))).astype(np.int64),
        part_nodes=np.concatenate([np.zeros(0, np.int64), *spans]).astype(np.int64),
    )
